"""Train the surrogates of KVzap: networks that predict a row's KVzip+ score from the hidden state of its token.

Source: the KVzap paper (arXiv 2601.07891); NVIDIA/kvpress, kvzap/data.py and kvzap/train.py. The model reads

    prefix, text, "\\n\\nRepeat the previous context exactly.", turn, text

where prefix and turn are what the chat template puts before and after a user's message. Symbols: j a token of the first
text; t the tokens of the second; g the query heads of a KV head; p the attention over everything read; v_j the value;
W_o^g the output projection; h the hidden states behind the layer's norm. The surrogate of the layer shall map h_j to

    y_j = log max over t and g of p_{g,t,j}·‖W_o^g v_j‖₂ / ‖h_t‖₂

which is the logarithm of kvpress's KVzip+ score (`method=kvzip`, `preset=plus_kvpress`), but for the request, whose
queries do not count here. Of each text some tokens are sampled.

The mlp is trained as the authors train it: all layers at once by the mean squared error, AdamW with its default weight
decay, a learning rate that falls as a cosine from epoch to epoch, gradients cut to a common norm of 1. The linear map
is a ridge regression with α = 1. kvbench's own choices: texts are cut to equal length, where the source takes those of
750 to 1250 tokens; it trains in float32, the source in bfloat16; all samples of the training texts are trained on, the
source leaves out 5 % to watch; and a score below the smallest normal number counts as that number.
"""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad
from tqdm import tqdm

from kvbench.config.catalogue import load_settings
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.networks import Network
from kvbench.interfaces.observation import Observation, PromptEncoder, State
from kvbench.interfaces.rows import Rows
from kvbench.methods.kvzap import name_surrogate
from kvbench.methods.kvzip import KVzip
from kvbench.models.chat_template import make_prompt_encoder, split_template
from kvbench.models.encoding import FastTokenizer, encode_text
from kvbench.training.delta_training import count_held_out, count_needed
from kvbench.training.recording import record_states, write_tensors
from kvbench.validation import SettingError, is_number, require_int

FULL_WIDTH = 4096  # the smallest width of hidden states for which the authors published surrogates
ROOM = 64  # tokens that the prompt has beside the two texts
LEAST = 4  # sequences without which there is no training


@dataclass(frozen=True)
class KVzapRecipe:
    """The settings of a training. `choose_recipe` gives the defaults."""

    kind: str
    """linear or mlp."""
    sequences: int
    """Number of texts that are trained on."""
    length: int
    """Tokens of a text."""
    tokens: int
    """Sampled tokens of a text."""
    inner: int
    """Inner width of an mlp."""
    epochs: int = 15
    """Passes over all samples."""
    batch: int = 512
    """Samples of a step."""
    rate: float = 5e-3
    """The first learning rate."""
    seed: int = 42
    """Seed of the sampled tokens, the first weights and the order of the samples."""
    clip: float = 1.0
    """Largest norm of the gradient of all layers."""
    ridge: float = 1.0
    """Weight of the squared weights in a ridge regression, α."""

    @property
    def total(self) -> int:
        """Number of texts, those held out included."""
        return count_needed(self.sequences)

    def check(self, longest: int) -> None:
        """Raise a SettingError, which names the option, if a model of `longest` tokens cannot be trained with this."""
        for option, least in {"sequences": 1, "length": 2, "tokens": 1, "inner": 1, "epochs": 1, "batch": 1}.items():
            require_int(f"--{option}", getattr(self, option), least)
        require_int("--seed", self.seed, 0)
        if 2 * self.length + ROOM > longest:
            raise SettingError(f"--length={self.length}: a text is read twice, and the model takes {longest} tokens")
        if self.tokens > self.length:
            raise SettingError(f"--tokens={self.tokens}: a text has {self.length}")
        if not is_number(self.rate) or self.rate <= 0:
            raise SettingError(f"--lr={self.rate}: a number above 0")


def choose_recipe(hidden: int, longest: int, given: Mapping[str, Any]) -> KVzapRecipe:
    """Return the authors' recipe, scaled if the model is smaller than theirs, with the settings that were given.

    The scaling is ours: with w = min(1, hidden / 4096), 2400·w texts and an inner width of 512·w.

    Args:
        hidden: Width of the hidden states.
        longest: How many tokens the model takes. The default of `length` is at most half of that.
        given: Settings by name; None stands for the default.

    Raises:
        SettingError: A setting cannot be used.
    """
    share = min(1.0, hidden / FULL_WIDTH)
    chosen = {
        "sequences": max(1, round(2400 * share)),
        "length": min(1000, max(2, (longest - ROOM) // 2)),
        "inner": max(1, round(512 * share)),
    } | {name: value for name, value in given.items() if value is not None}
    recipe = KVzapRecipe(**{"tokens": max(1, chosen["length"] // 2)} | chosen)
    recipe.check(longest)
    return recipe


def check_memory(recipe: KVzapRecipe, layers: int, hidden: int, dtype: torch.dtype) -> None:
    """Raise a SettingError if the sampled hidden states of all layers do not fit the machine's memory."""
    each = recipe.tokens * layers * hidden * dtype.itemsize
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 9 // 10
    if recipe.total * each > room:
        raise SettingError(
            f"--sequences={recipe.sequences}: their sampled hidden states take {recipe.total * each / 1e9:.0f} GB of "
            f"memory, and there are {room / 1e9:.0f} GB; at most {room // each} with --tokens={recipe.tokens}"
        )


@dataclass(frozen=True)
class RepeatedTexts:
    """Texts that the model reads and repeats, and the tokens around them."""

    trained: Tensor
    """Token ids, (n, length)."""
    held_out: Tensor
    """Texts that are not trained on, (n, length)."""
    prefix: list[int]
    """Tokens before a text."""
    words: PromptEncoder
    """Encodes the request, and has the tokens between it and the repetition."""


def divide_texts(sequences: Tensor, tokenizer: FastTokenizer) -> RepeatedTexts:
    """Hold out the last texts, and find the tokens around a text.

    Args:
        sequences: Token ids, (n, length).
        tokenizer: The model's tokenizer.
    """
    kept = len(sequences) - count_held_out(len(sequences))
    before = split_template(tokenizer)[0]
    prefix = tokenizer.encode(before, add_special_tokens=False) if before else encode_text(tokenizer, "")[0]
    return RepeatedTexts(sequences[:kept], sequences[kept:], prefix, make_prompt_encoder(tokenizer))


@dataclass(frozen=True)
class Samples:
    """Hidden states of tokens and what the surrogates shall return for them."""

    hidden: Tensor
    """(layers, n, hidden), in the model's dtype on the CPU."""
    targets: Tensor
    """(layers, n, KV heads), float32 on the CPU."""
    layers: tuple[int, ...]
    """The numbers of these layers in the model: those without a sliding window."""

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.hidden.shape[1]


@dataclass(frozen=True)
class TargetRecorder(KVzip):
    """KVzip+ as the training needs it. The hidden states of the prompt and its scores stay in the state of a layer."""

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        hidden = observation.normed_hidden
        assert hidden is not None  # the method wants it
        if observation.about is None:
            state.layer["hidden"] = hidden
            return {}
        start, stop = observation.about
        spoken = replace(observation, queries=observation.queries[:, :, start - stop :])  # without the request
        values, weight = rows.values[:, :, start:stop], 1 / hidden[:, start - stop :].to(rows.mass.dtype).norm(dim=-1)
        scores = self.score_weighed(spoken, weight, rows.keys, values, slice(start, stop))
        state.layer["scores"] = pad(scores, (start, 0))  # the prefix scores 0
        return {}

    def forget(self, state: State) -> None:
        pass


@torch.no_grad()
def compute_targets(model: torch.nn.Module, prompts: RepeatedTexts, ids: Tensor) -> list[tuple[Tensor, Tensor] | None]:
    """Read a text and repeat it.

    Args:
        model: A supported transformers model.
        prompts: Says what stands around the texts.
        ids: Token ids of the text, (n,).

    Returns:
        For each layer the hidden states behind its norm, (n, hidden), and the logarithms of the scores, (n, KV heads);
        None for layers with a sliding window.
    """
    args = {"preset": "plus_kvpress", "chunk": len(ids), "scope": "head"}
    settings = {k: v for k, v in load_settings("method", "kvzip", args).items() if k not in ("_target_", "preset")}
    prefix = len(prompts.prefix)
    text = torch.cat([ids.new_tensor(prompts.prefix), ids])
    targets: list[tuple[Tensor, Tensor] | None] = []
    for recorded in record_states(model, text, TargetRecorder(**settings), 0.5, prefix, prompts.words):
        if recorded is None:
            targets.append(None)
            continue
        state = recorded.layer
        scores = state["scores"][0, :, prefix:]
        logs = scores.clamp(min=torch.finfo(scores.dtype).tiny).log()
        targets.append((state["hidden"][0, prefix:], logs.mT))
    return targets


def collect_samples(model: torch.nn.Module, prompts: RepeatedTexts, sequences: Tensor, recipe: KVzapRecipe) -> Samples:
    """Sample tokens of texts, with their hidden states and targets.

    Args:
        model: A supported transformers model.
        prompts: Says what stands around the texts.
        sequences: The texts as token ids, (n, length).
        recipe: The recipe.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    hidden = targets = torch.empty(0)
    layers: tuple[int, ...] = ()
    for number, ids in enumerate(tqdm(sequences, desc="kvzap: read", unit="text", file=sys.stderr)):
        layer_pairs = compute_targets(model, prompts, ids.long())
        pairs = {layer: pair for layer, pair in enumerate(layer_pairs) if pair is not None}
        if number == 0:
            layers, (states, logs) = tuple(pairs), next(iter(pairs.values()))
            size = len(sequences) * recipe.tokens
            hidden = torch.empty(len(layers), size, states.shape[1], dtype=states.dtype)
            targets = torch.empty(len(layers), size, logs.shape[1])
        places = torch.randperm(len(ids), generator=generator)[: recipe.tokens].to(next(model.parameters()).device)
        part = slice(number * recipe.tokens, (number + 1) * recipe.tokens)
        for index, (states, logs) in enumerate(pairs.values()):
            hidden[index, part], targets[index, part] = states[places], logs[places]
    return Samples(hidden, targets, layers)


def train(samples: Samples, recipe: KVzapRecipe, device: str) -> list[Network]:
    """Train the network of each layer. Returns them in the dtype of the hidden states, on the CPU."""
    networks = (
        solve_ridge(samples, recipe.ridge, device) if recipe.kind == "linear" else train_mlp(samples, recipe, device)
    )
    return [network.to("cpu", samples.hidden.dtype) for network in networks]


def solve_ridge(samples: Samples, ridge: float, device: str) -> list[Network]:
    """Return the linear maps with the smallest sum of squared errors plus `ridge` times their squared weights.

    The bias is free. Everything is computed in float64.
    """
    networks = []
    for hidden, targets in zip(samples.hidden, samples.targets, strict=True):
        x, y = hidden.to(device, torch.float64), targets.to(device, torch.float64)
        mean, level = x.mean(0), y.mean(0)
        x, y = x - mean, y - level
        gram = x.mT @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        weight = torch.linalg.solve(gram, x.mT @ y).mT.contiguous()
        networks.append(Network("linear", (weight,), (level - weight @ mean,)))
    return networks


def train_mlp(samples: Samples, recipe: KVzapRecipe, device: str) -> list[Network]:
    """Train Linear·GELU·Linear of all layers at once, in float32."""
    layers, count, width = samples.hidden.shape
    generator = torch.Generator().manual_seed(recipe.seed)

    def draw(*shape: int, inputs: int) -> Tensor:  # as torch.nn.Linear does
        weights = torch.rand(layers, *shape, generator=generator).mul_(2).sub_(1).mul_(inputs**-0.5)
        return weights.to(device).requires_grad_()

    heads, inner = samples.targets.shape[2], recipe.inner
    first, first_bias = draw(inner, width, inputs=width), draw(inner, inputs=width)
    second, second_bias = draw(heads, inner, inputs=inner), draw(heads, inputs=inner)
    weights = [first, first_bias, second, second_bias]
    optimizer = torch.optim.AdamW(weights, lr=recipe.rate)
    bar = tqdm(range(recipe.epochs), desc="kvzap: train", unit="epoch", file=sys.stderr)
    for epoch in bar:
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * (1 + math.cos(math.pi * epoch / recipe.epochs)) / 2
        total = 0.0
        for chosen in torch.randperm(count, generator=generator).split(recipe.batch):
            x = samples.hidden[:, chosen].to(device, torch.float32)
            y = samples.targets[:, chosen].to(device)
            inside = gelu(torch.baddbmm(first_bias[:, None], x, first.mT))
            loss = (torch.baddbmm(second_bias[:, None], inside, second.mT) - y).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, recipe.clip)
            optimizer.step()
            total += loss.item() * len(chosen)
        if not math.isfinite(total):
            raise SettingError(f"--lr={recipe.rate}: the loss of epoch {epoch + 1} is not finite; give a smaller rate")
        bar.set_postfix(mse=f"{total / count:.4f}")
    return [
        Network("mlp_gelu", (first[i].detach(), second[i].detach()), (first_bias[i].detach(), second_bias[i].detach()))
        for i in range(layers)
    ]


@dataclass(frozen=True)
class HeldOut:
    """The errors on texts that were not trained on."""

    samples: int
    """Number of tokens."""
    errors: list[list[float]]
    """Mean squared error of each layer and KV head."""
    r2: list[list[float]]
    """1 - squared error / variance of the targets, of each layer and KV head."""

    @property
    def mean_error(self) -> float:
        """The mean of `errors`."""
        return sum(map(sum, self.errors)) / sum(map(len, self.errors))

    @property
    def mean_r2(self) -> float:
        """The mean of `r2`."""
        return sum(map(sum, self.r2)) / sum(map(len, self.r2))


def evaluate(networks: Sequence[Network], samples: Samples) -> HeldOut:
    """Compute the errors of the networks on samples."""
    errors, r2 = [], []
    for network, hidden, targets in zip(networks, samples.hidden, samples.targets, strict=True):
        exact, y = network.to("cpu", torch.float32), targets.double()
        squares = (exact.apply(hidden.float()).double() - y).square().mean(0)
        errors.append(squares.tolist())
        r2.append((1 - squares / y.var(0, correction=0)).tolist())
    return HeldOut(samples.count, errors, r2)


def write_surrogates(
    out: Path,
    networks: Sequence[Network],
    layers: Sequence[int],
    layout: Layout,
    about: Mapping[str, str],
    recipe: KVzapRecipe,
    held_out: HeldOut,
) -> None:
    """Write the file of the surrogates. It has networks of zeros for layers with a sliding window.

    Args:
        out: The file.
        networks: The networks.
        layers: The layers to which they belong.
        layout: The model's layout.
        about: Metadata, such as the identity of the model.
        recipe: The recipe, which becomes metadata too.
        held_out: The errors on the texts held out, likewise.
    """
    trained = dict(zip(layers, networks, strict=True))
    named: dict[str, Tensor] = {}
    for layer in range(layout.layers):
        for name, tensor in trained.get(layer, networks[0]).named(name_surrogate(layer)).items():
            named[name] = tensor if layer in trained else torch.zeros_like(tensor)
    numbers = {"recipe": json.dumps(asdict(recipe)), "held_out": json.dumps(asdict(held_out))}
    write_tensors(out, named, {**about, **numbers})
