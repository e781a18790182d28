"""Compute the losses with which the compressors of DeltaKV are trained.

Source: the DeltaKV paper, Algorithm 1; CURRENTF/Sparse-vLLM before 3652478, src/deltakv/train_compressor.py and
modeling/hf_common.py (build_cluster_training_classes). Symbols: kv_t = [K_t ‖ V_t] of a token, with K before RoPE and
before the norm of keys; centres: the first `sinks` tokens and then every `stride`-th; f_c and f_d as in
kvbench.methods.codecs.delta_compressors.

    ref_t = mean of the `neighbours` centres c ≤ t with the smallest ‖kv_t - kv_c‖
    k̂v_t  = f_d(f_c(kv_t) - f_c(ref_t)) + ref_t for t ≥ sinks, and kv_t before
    loss  = CE(next token) + Σ_layers mean((k̂v - kv of the untouched model)²)

k̂v replaces kv in every layer, so that each layer reads what the compressors of the layers before it left. References
are centres of this run, before they are replaced. A centre may choose itself.

The paper also trains without references (Table 5), k̂v_t = f_d(f_c(kv_t)), and with one of the two losses (Figure 6).
Its networks have two kinds, which are written here with their biases:

    light  f_c = W3(silu(W1 x) · W2 x), f_d = W z
    full   f_c = W2 gelu(W1 x + b1) + b2, and f_d likewise
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.hooks import RemovableHandle

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.networks import Network
from kvbench.methods.codecs.delta_compressors import Compressor
from kvbench.models.transformers_port import find_text_decoder
from kvbench.validation import SettingError, is_number, require_choice, require_int

FULL_WIDTH = 1024  # the smallest 2·d_k for which the authors published compressors
KINDS = {"light": 3072, "full": 4096}  # kind of the networks -> the authors' inner width
REMOVED = ("nothing", "reference")
LOSSES = ("both", "mse", "ntp")
ABLATIONS = ("kind", "remove", "loss")  # settings that files name only if they differ from the defaults
Replace = Callable[[int, Tensor], Tensor]  # layer, kv (B, T, 2·d_k) -> what replaces it


@dataclass(frozen=True)
class DeltaRecipe:
    """The settings of a training. `choose_recipe` gives the defaults."""

    code: int
    """Width of a code, d_c."""
    inner: int
    """Inner width of f_c, and of f_d if it has two matrices."""
    steps: int
    """Number of steps of the optimizer."""
    length: int
    """Tokens of a sequence."""
    rate: float
    """Peak of the learning rate."""
    batch: int = 1
    """Sequences of a step."""
    seed: int = 42
    """Seed of the first weights and of the order of the sequences."""
    sinks: int = 16
    """Number of first tokens that stay exact. The authors train with 16 and store 8 (`codec.sinks`)."""
    stride: int = 10
    """Distance of the centres after them, s."""
    neighbours: int = 4
    """Number of centres whose mean is a token's reference, k."""
    warmup: float = 0.02
    """Share of the steps in which the learning rate rises linearly. It then falls linearly to zero."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    kind: str = "light"
    """Kind of the networks, one of `KINDS`."""
    remove: str = "nothing"
    """What is left out: "reference" gives a code of the whole row, as `codec.remove` does, or "nothing"."""
    loss: str = "both"
    """The loss: "mse" of keys and values, "ntp" (the cross-entropy of the next token), or the sum of "both"."""

    def check(self, longest: int) -> None:
        """Raise a SettingError, which names the option, if a model of `longest` tokens cannot be trained with this."""
        for option, allowed in (("kind", KINDS), ("remove", REMOVED), ("loss", LOSSES)):
            require_choice(f"--{option}", getattr(self, option), allowed)
        for option in ("code", "inner", "steps", "batch", "stride"):
            require_int(f"--{option}", getattr(self, option), 1)
        require_int("--length", self.length, self.sinks + 2)
        require_int("--nearest", self.neighbours, 1)
        if self.neighbours > self.sinks:
            raise SettingError(f"--nearest={self.neighbours}: at most {self.sinks}, the first candidates")
        require_int("--seed", self.seed, 0)
        if self.length > longest:
            raise SettingError(f"--length={self.length}: the model takes {longest} tokens")
        if not is_number(self.rate) or self.rate <= 0:
            raise SettingError(f"--lr={self.rate}: a number above 0")

    def count_weights(self, width: int) -> int:
        """Return the number of weights of a layer's compressor for rows of `width` numbers, 2·d_k."""
        if self.kind == "light":
            return width * 2 * self.inner + self.inner * self.code + self.code * width
        return 2 * self.inner * (width + self.code) + 2 * self.inner + self.code + width

    def describe(self) -> dict[str, Any]:
        """Return the settings by name. An ablation is left out unless it is in use, as in older files."""
        unused = [name for name in ABLATIONS if getattr(self, name) == getattr(DeltaRecipe, name)]
        return {name: value for name, value in asdict(self).items() if name not in unused}

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. No step has a rate of zero."""
        rising = max(1, round(self.warmup * self.steps))
        return self.rate * min((step + 1) / rising, (self.steps - step) / max(1, self.steps - rising), 1.0)


def choose_recipe(width: int, longest: int, given: Mapping[str, Any]) -> DeltaRecipe:
    """Return the authors' recipe, scaled if the model is smaller than theirs, with the settings that were given.

    The scaling is ours: with w = min(1, 2·d_k / 1024), I = 3072·w (4096·w for the full kind), 20,000·w² steps of 8192·w
    tokens, and a learning rate of 2e-4 / w², at most 3e-3. (On the embedded model, w = 1/4, 420 steps of 512 tokens
    with 3e-3 end with a mean squared error of 0.32 on the sequences held out, with 8e-4 at 0.45.) A code has a quarter
    of 2·d_k, and 3/8 without references, as the authors'.

    Args:
        width: 2·d_k of the model.
        longest: How many tokens the model takes. The default of `length` is at most that.
        given: Settings by name; None stands for the default.

    Raises:
        SettingError: A setting cannot be used.
    """
    share = min(1.0, width / FULL_WIDTH)
    inner = KINDS.get(given.get("kind") or DeltaRecipe.kind, 1)  # `check` refuses other kinds
    chosen = {
        "code": max(1, 3 * width // 8 if given.get("remove") == "reference" else width // 4),
        "inner": max(1, round(inner * share)),
        "steps": max(1, round(20_000 * share**2)),
        "length": min(max(64, round(8192 * share)), longest),
        "rate": min(3e-3, 2e-4 / share**2),
    } | {name: value for name, value in given.items() if value is not None}
    recipe = DeltaRecipe(**chosen)
    recipe.check(longest)
    return recipe


def draw_compressors(layers: int, width: int, recipe: DeltaRecipe) -> list[Compressor]:
    """Draw the first weights, as torch.nn.Linear does, in float32 on the CPU, from the recipe's seed.

    The light kind has no biases.
    """
    generator = torch.Generator().manual_seed(recipe.seed)

    def draw_for(inputs: int, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).mul_(2).sub_(1).mul_(inputs**-0.5)

    def draw(outputs: int, inputs: int) -> Tensor:
        return draw_for(inputs, outputs, inputs)

    def draw_light() -> Compressor:
        down = Network("mlp_swiglu", (draw(2 * recipe.inner, width), draw(recipe.code, recipe.inner)), (None, None))
        return Compressor((down,), (Network("linear", (draw(width, recipe.code),), (None,)),))

    def draw_gelu(outputs: int, inputs: int) -> Network:
        weights = draw(recipe.inner, inputs), draw(outputs, recipe.inner)
        return Network("mlp_gelu", weights, tuple(draw_for(weight.shape[1], len(weight)) for weight in weights))

    def draw_full() -> Compressor:
        return Compressor((draw_gelu(recipe.code, width),), (draw_gelu(width, recipe.code),))

    draw_one = draw_light if recipe.kind == "light" else draw_full
    return [draw_one() for _ in range(layers)]


def list_centres(tokens: int, sinks: int, stride: int) -> Tensor:
    """Return the positions of the centres among so many tokens: the first `sinks`, and then every `stride`-th."""
    return torch.cat([torch.arange(min(sinks, tokens)), torch.arange(sinks, max(sinks, tokens), stride)])


def average_references(kv: Tensor, sinks: int, stride: int, neighbours: int) -> Tensor:
    """Return the mean of each token's references.

    Distances are compared in float32 at least, as 2 kv·c - ‖c‖², which has the order of -‖kv - c‖.

    Args:
        kv: The rows of a layer, (B, T, 2·d_k).
        sinks: Number of first tokens, which have no references.
        stride: Distance of the centres after them.
        neighbours: Number of references of a token, or fewer if there are fewer centres up to it.

    Returns:
        The means, (B, max(T - sinks, 0), 2·d_k).
    """
    places = list_centres(kv.shape[1], sinks, stride).to(kv.device)
    centres = kv[:, places]
    with torch.no_grad():
        exact = torch.promote_types(kv.dtype, torch.float32)
        rows, exact_centres = kv[:, sinks:].to(exact), centres.to(exact)
        scores = 2 * rows @ exact_centres.mT - exact_centres.square().sum(-1)[:, None]
        tokens = torch.arange(sinks, sinks + rows.shape[1], device=kv.device)
        scores.masked_fill_(places > tokens[:, None], -torch.inf)
        best = scores.topk(min(neighbours, len(places)), -1)
        real = (best.values > -torch.inf).to(exact)
        shares = torch.zeros_like(scores).scatter(-1, best.indices, real / real.sum(-1, keepdim=True))
    return shares.to(kv.dtype) @ centres


def rebuild(compressor: Compressor, kv: Tensor, recipe: DeltaRecipe) -> Tensor:
    """Return k̂v, (B, T, 2·d_k): what the compressor leaves of the rows of a layer."""
    rows = kv[:, recipe.sinks :]
    if recipe.remove == "reference":
        rebuilt = compressor.expand(compressor.compress(rows))
    else:
        references = average_references(kv, recipe.sinks, recipe.stride, recipe.neighbours)
        rebuilt = compressor.expand(compressor.compress(rows) - compressor.compress(references)) + references
    return torch.cat([kv[:, : recipe.sinks], rebuilt], 1)


def check_layout(layout: Layout) -> None:
    """Raise a SettingError if some layers have a sliding window or no rows."""
    if len(layout.held) < layout.layers:
        layer = min(set(range(layout.layers)) - set(layout.held))
        kind = "a sliding window" if layer in layout.sliding else "no attention"
        raise SettingError(f"--model: layer {layer} has {kind}; DeltaKV needs full attention in every layer")


@contextmanager
def replace_rows(model: torch.nn.Module, replace: Replace) -> Iterator[None]:
    """Replace [K ‖ V] of every layer while the model reads, before RoPE and before the norm of keys.

    Forward hooks on `k_proj` and `v_proj`, or on the joint `qkv_proj` of Phi-3, pass the rows on.

    Args:
        model: A supported transformers model.
        replace: Called once per layer with the layer's number and its rows (B, T, 2·d_k).
    """
    handles = []
    try:
        for number, layer in enumerate(find_text_decoder(model).layers):
            handles += hook_layer(layer.self_attn, number, replace)
        yield
    finally:
        for handle in handles:
            handle.remove()


def hook_layer(attention: Any, number: int, replace: Replace) -> list[RemovableHandle]:
    """Register the hooks of a layer and return their handles."""
    if hasattr(attention, "qkv_proj"):
        width = 2 * attention.config.num_key_value_heads * attention.head_dim

        def replace_joint(module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return torch.cat([output[..., :-width], replace(number, output[..., -width:])], -1)

        return [attention.qkv_proj.register_forward_hook(replace_joint)]
    # module -> its output, from the hook that runs first to the one that runs second
    made: dict[torch.nn.Module, Tensor] = {}

    def replace_both(module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if module not in made:
            sides = [attention.k_proj, attention.v_proj]
            rows = [output if side is module else side.forward(*args) for side in sides]  # forward calls no hook
            replaced = replace(number, torch.cat(rows, -1)).split([side_rows.shape[-1] for side_rows in rows], -1)
            made.update(zip(sides, replaced, strict=True))
        return made.pop(module)

    return [side.register_forward_hook(replace_both) for side in (attention.k_proj, attention.v_proj)]


def collect_rows(model: torch.nn.Module, ids: Tensor) -> list[Tensor]:
    """Return [K ‖ V] of each layer of the untouched model, (B, T, 2·d_k) each, without gradients."""
    rows = []

    def keep(layer: int, kv: Tensor) -> Tensor:
        rows.append(kv)
        return kv

    with torch.no_grad(), replace_rows(model, keep):
        find_text_decoder(model)(input_ids=ids, use_cache=False)
    return rows


def compute_cross_entropy(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token in nats, over all tokens (B, T) but the first."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def compute_losses(
    model: torch.nn.Module, compressors: Sequence[Compressor], ids: Tensor, recipe: DeltaRecipe
) -> tuple[Tensor, Tensor]:
    """Compute the losses of a batch. Gradients reach the compressors through all later layers.

    Args:
        model: A supported transformers model.
        compressors: One per layer, in the model's dtype and on its device.
        ids: Token ids, (B, T).
        recipe: The recipe.

    Returns:
        The cross-entropy of the next token, a scalar, and the mean squared error of each layer, (layers,). The mean is
        over the batch, all tokens and all channels.
    """
    targets, errors = collect_rows(model, ids), []

    def replace(layer: int, kv: Tensor) -> Tensor:
        rebuilt = rebuild(compressors[layer], kv, recipe)
        errors.append((rebuilt - targets[layer]).float().square().mean())
        return rebuilt

    with replace_rows(model, replace):
        entropy = compute_cross_entropy(model, ids)
    return entropy, torch.stack(errors)


def combine_losses(entropy: Tensor, errors: Tensor, loss: str) -> Tensor:
    """Return the loss that is minimised, a scalar, of what `compute_losses` returns.

    Args:
        entropy: The cross-entropy of the next token, a scalar.
        errors: The mean squared error of each layer, (layers,).
        loss: One of `LOSSES`.
    """
    if loss == "ntp":
        return entropy
    return errors.sum() if loss == "mse" else entropy + errors.sum()
