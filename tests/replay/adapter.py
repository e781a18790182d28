"""Everything that the net knows of kvbench: the only file here that a move or a renaming of its modules edits.

Both entries return plain numbers, strings and lists whose keys are the net's own (or a record's fields), so that the
stored data names no module, class or attribute of kvbench.
"""

import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import kvbench
from kvbench.cli import run as command
from kvbench.cli.command import run_command
from kvbench.config.catalogue import build, list_choices, load_settings
from kvbench.engine import shared_prefill
from kvbench.engine.compressed_cache import CompressedCache, choose_cache
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.budget import Budget
from kvbench.models.configuration import read_config_layout
from kvbench.models.embedded import REFERENCE
from kvbench.report.doc_tables import list_unwritten
from kvbench.runs.spec import RunSpec
from kvbench.store.run_folder import parse_line
from tests.support.tiny_models import BUILD, COMMON, distinct, heads, rope

GROUPS = ("method", "allocator", "codec")
DEFAULTS = {"budget": 1.0, "allocator": "uniform", "codec": "raw", "block_size": None, "budget_of": "prompt", "seed": 0}
DEFAULTS |= {"prefix": 0, "tokens": 181, "answer": 8, "question": "visible", "temperature": 0.0, "top_p": 1.0}
DEFAULTS |= {"batch": 1, "with": (), "stop": (), "least": 0}
QUESTIONS = (5, 3)  # tokens of the questions that are read, one after the other, over a context cut without them
SHOWN = (3, 57, 111, 198)  # tokens whose logits are stored


# Models and files, drawn as whole numbers: a normal draw differs in its last bits between kinds of CPUs


def dynamic(kind: str, **more: object) -> torch.nn.Module:
    """A llama whose rotary frequencies follow the longest position."""
    parameters = rope(rope_type=kind, factor=4.0, **more)
    config = COMMON | heads(4, 2) | dict(max_position_embeddings=64, rope_parameters=parameters)
    return LlamaForCausalLM(LlamaConfig(**config, num_hidden_layers=2))


FACTORS = dict(short_factor=[1.0] * 16, long_factor=[1.0 + place / 4 for place in range(16)])
FACTORS |= dict(original_max_position_embeddings=64)
MODELS = BUILD | {"dynamic": lambda: dynamic("dynamic"), "longrope": lambda: dynamic("longrope", **FACTORS)}


def draw(*shape: int, seed: int) -> torch.Tensor:
    """Float64 numbers in [-1, 1), multiples of 2^-20: exact on every machine."""
    whole = torch.randint(-(1 << 20), 1 << 20, shape, generator=torch.Generator().manual_seed(seed))
    return whole.double() / (1 << 20)


@cache
def make_model(name: str, noise: float = 0.0) -> torch.nn.Module:
    """A float64 model whose attention is far from uniform; `noise` changes every weight by that share at most."""
    return fill(MODELS[name]().double().eval(), noise)


@torch.no_grad()
def fill(model: torch.nn.Module, noise: float = 0.0) -> torch.nn.Module:
    """Draw the weights of a model."""
    for number, (name, own) in enumerate(model.named_parameters()):
        drawn = draw(*own.shape, seed=number)
        if "norm" in name:
            drawn = 1 + drawn / 2
        elif own.dim() == 2:  # the variance of a uniform draw is a third
            gain = 1.7 if "attn" in name and "o_proj" not in name else 1.0
            drawn *= gain * (3 / own.shape[1]) ** 0.5
        else:
            drawn /= 2
        own.copy_(drawn * (1 + noise * draw(*own.shape, seed=1000 + number)))
    return model


FILES = ("qfilters", "triattention", "duo_attention", "kvzap", "delta", "palu", "kvquant")
FOLDER = tempfile.TemporaryDirectory(prefix="replay")


@cache
def make_file(method: str, name: str) -> str:
    """The path of the file that a method or a codec of FILES needs for a model."""
    config = make_model(name).config
    shape = config.num_hidden_layers, config.num_key_value_heads
    path = Path(FOLDER.name) / f"{method}-{name}"
    if method == "qfilters":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        save_file({"q_filters": draw(*shape, dim, seed=3)}, str(path))
    elif method == "kvzap":
        sizes = {"weight": (shape[1], config.hidden_size), "bias": (shape[1],)}
        save_file(
            {
                f"layers.{layer}.{what}": draw(*size, seed=9 + layer) * (1 if what == "bias" else size[1] ** -0.5)
                for layer in range(shape[0])
                for what, size in sizes.items()
            },
            str(path),
        )
    elif method == "triattention":
        heads, dim = config.num_attention_heads, read_config_layout(config).dim
        mean = draw(shape[0], heads, dim, seed=3)
        sizes = 1 + draw(shape[0], heads, dim // 2, seed=4) / 2
        save_file({"q_mean": mean, "q_abs_mean": sizes}, str(path))
    elif method == "delta":
        width, code = 2 * shape[1] * read_config_layout(config).dim, 16
        sizes = {"down.w12": (2 * code, width), "down.w3": (code, code), "up": (width, code)}
        weights = {
            f"model.layers.{layer}.self_attn.compress_{part}.weight": draw(*size, seed=layer) * (3 / size[1]) ** 0.5
            for layer in range(shape[0])
            for part, size in sizes.items()
        }
        save_file(weights, str(path))
    elif method == "kvquant":
        size = *shape, read_config_layout(config).dim
        weights = {
            "key_low": draw(*size, seed=3) - 2,
            "key_high": draw(*size, seed=4) + 2,
            "outliers": torch.tensor([0.05]),
        }
        for side in ("key", "value"):
            weights[f"{side}_levels_4"] = torch.linspace(-1, 1, 16).pow(3).expand(shape[0], 16).contiguous()
            weights[f"{side}_norms_4"] = torch.ones(shape[0], 2)
        save_file(weights, str(path))
    elif method == "palu":
        width = shape[1] * read_config_layout(config).dim // 2  # two groups
        weights = {
            f"model.layers.{layer}.self_attn.{side}_proj.U.{group}.weight": draw(width, rank, seed=layer + group)
            for layer in range(shape[0])
            for side, rank in (("k", width // 4 * 3), ("v", width // 2))
            for group in range(2)
        }
        save_file(weights, str(path))
    else:
        path.mkdir()
        gates = (draw(*shape, seed=6) + 1) / 2
        for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
            if kind == "sliding_attention":
                gates[layer] = torch.nan
        rows = ["\t".join(map(str, own)) for own in gates.tolist()]
        (path / "full_attention_heads.tsv").write_text("\n".join(rows))
        (path / "config.json").write_text(json.dumps({"sink_size": 3, "recent_size": 16}))
    return str(path)


# Cells of the engine


def play(cell: Mapping[str, Any], noise: float = 0.0) -> dict[str, Any]:
    """What the engine computes for a cell: what is held after the prefill, and what it answers.

    A cell names a model, a method and what DEFAULTS has; `method.x` sets x of the method, and so for allocator and
    codec. Beside kvbench's own settings it has `tokens` and `answer` (lengths), `batch` (prompts in one context),
    `with` (methods that share the prefill, each with half of the rows), `stop` (tokens that end an answer) and `least`
    (tokens that come before).
    """
    cell = DEFAULTS | dict(cell)
    model = make_model(cell["model"], noise)
    prompts = torch.cat([distinct(cell["tokens"], seed=1 + number) for number in range(cell["batch"])])
    held = read(model, prompts, cell)
    found = {"held": hold(held), "logits": digest_logits(held.logits)}
    found |= count(held)
    more = [distinct(tokens, seed=20 + tokens) for tokens in QUESTIONS] if cell["question"] == "hidden" else [None]
    found["answers"] = [answer(held, question, cell) for question in more]
    return found


def list_names(group: str) -> list[str]:
    """The methods, allocators or codecs of which a cell is expected: those that have a section in docs/methods.md.

    One that `kvbench dev docs-tables` described, because nobody did yet, needs none.
    """
    unwritten = list_unwritten(group)
    return [name for name in list_choices(group) if name not in unwritten]


def arguments(cell: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The settings that a cell gives to its method, allocator or codec."""
    own = {key.partition(".")[2]: value for key, value in cell.items() if key.startswith(f"{group}.")}
    if cell[group] in FILES:
        own["path"] = make_file(cell[group], cell["model"])
    return own


def read(model: torch.nn.Module, prompts: torch.Tensor, cell: Mapping[str, Any]) -> CompressedCache:
    """Prompts read into a cache: through the Python interface, or into a context where several are read at once."""
    if cell["batch"] == 1 and not cell["with"]:
        return kvbench.prefill(
            model, prompts, cell["method"], cell["budget"], cell["block_size"], cell["allocator"], cell["codec"],
            arguments(cell, "method"), cell["seed"], allocator_args=arguments(cell, "allocator"),
            codec_args=arguments(cell, "codec"), budget_of=cell["budget_of"], prefix=cell["prefix"],
        )  # fmt: skip
    seeds = tuple(cell["seed"] + number for number in range(cell["batch"]))
    contexts = []
    for other in [*({**DEFAULTS, "method": name, "budget": 0.5} for name in cell["with"]), cell]:
        parts = (build(group, load_settings(group, other[group], arguments(other, group))) for group in GROUPS)
        budget = Budget(1.0 if other["method"] == "full" else other["budget"], other["budget_of"])
        contexts.append(
            GenerationContext(model, choose_cache(*parts), budget, cell["block_size"], seeds, cell["prefix"])
        )
    if cell["with"]:
        shared_prefill.prefill(contexts, prompts)
    else:
        contexts[-1].prefill(prompts)
    return CompressedCache(contexts[-1:])


def answer(held: CompressedCache, question: torch.Tensor | None, cell: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a question over the context, and what is held at its end; forgotten afterwards."""
    [context] = held.contexts
    sampling = Sampling(cell["temperature"], cell["top_p"])
    with context.branch():
        found = {}
        if question is not None:
            held.extend(question.expand(len(context.seeds), -1))
            found["asked"] = digest_logits(held.logits)
        stop, least = frozenset(cell["stop"]), cell["least"]
        steps = context.generate(cell["answer"], sampling, stop, read_last=True, min_new_tokens=least)
        tokens = torch.stack(list(steps), dim=1)
        attended = [layer.attended for layer in context.own_layers]
        return found | {
            "tokens": tokens.tolist(),
            "logits": digest_logits(held.logits),
            "attended": [sum(own) / len(own) for own in attended],
            "held": hold(held),
            **count(held),
        }


def hold(held: CompressedCache) -> list[str]:
    """Of each layer that keeps rows, and each sample: rows per head, and a digest of their positions and masses."""
    [context] = held.contexts
    found = []
    for layer in context.own_layers:
        for sample in range(len(context.seeds)):
            own = range(layer.rows.shape[1])
            places = [held.places(layer.index, head, sample).tolist() for head in own]
            masses = [held.masses(layer.index, head, sample).tolist() for head in own]
            line = f"layer {layer.index}" + f" sample {sample}" * (len(context.seeds) > 1)
            line += f": {' '.join(str(len(each)) for each in places)} rows {digest(places)}"
            weighed = context.choice.method.weighs_rows  # numbers with a fraction; the logits depend on them
            if not weighed and any(mass != 1 for each in masses for mass in each):
                line += f", tokens of the heaviest {' '.join(str(max(each)) for each in masses)}, all {digest(masses)}"
            line += f", gone {' '.join(str(held.evicted(layer.index, head, sample)) for head in own)}"
            found.append(line)
    return found


def count(held: CompressedCache) -> dict[str, Any]:
    """Bytes, and rows that were protected, given up, held and attended at most."""
    [context], bytes_ = held.contexts, held.bytes
    layers = context.own_layers
    return {
        "bytes": {
            "resident": bytes_.rows, "metadata": bytes_.metadata, "state": bytes_.state, "headroom": bytes_.headroom,
            "full": held.full_bytes, "peak": context.memory.peak,
        },
        "most": {
            "held": held.peak_rows, "attended": held.peak_rows_attended,
            "protected": max(int(layer.tally.protected) for layer in layers),
            "sinks_given_up": max(int(layer.tally.given_up["sinks"]) for layer in layers),
            "recents_given_up": max(int(layer.tally.given_up["recents"]) for layer in layers),
        },
    }  # fmt: skip


def digest_logits(logits: torch.Tensor) -> list[list[float]]:
    """Of each sample the norm of its logits, and some of them."""
    return [[own.norm().item(), *own[list(SHOWN)].tolist()] for own in logits]


def digest(value: object) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:10]


# Whole runs through the command line


@cache
def make_checkpoint(noise: float) -> Path:
    """A random model with the tokenizer of the embedded one."""
    folder = Path(FOLDER.name) / f"checkpoint-{noise}"
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with redirect_stderr(io.StringIO()):  # a bar
        fill(LlamaForCausalLM(config).double(), noise).save_pretrained(folder)
    return folder


@contextmanager
def inside(folder: str, arguments: Sequence[str]) -> Iterator[None]:
    """The process as the command line finds it: in a folder, with these arguments, float64 where it says float32."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        wide = property(lambda run: torch.float64 if run.dtype == "float32" else getattr(torch, run.dtype))
        with patch.object(sys, "argv", ["run.py", *arguments]), patch.object(RunSpec, "torch_dtype", wide):
            yield
    finally:
        os.chdir(before)


def execute(settings: str, noise: float = 0.0) -> list[dict[str, Any]]:
    """The records that `run.py` writes with these settings, each with the names of its method, allocator and codec."""
    said, base = io.StringIO(), ["model=hf", f"model.path={make_checkpoint(noise)}", "device=cpu"]
    with (
        tempfile.TemporaryDirectory(prefix="replay") as folder,
        inside(folder, [*base, *settings.split()]),
        redirect_stdout(said),
        redirect_stderr(said),
    ):
        try:
            code = run_command(command.main)
        except SystemExit as stop:
            code = stop.code
        if code:
            raise RuntimeError(f"run.py {settings}: exit code {code}: {said.getvalue()[-2000:]}")
        return [record for run in sorted(Path("results/runs").iterdir()) for record in records(run)]


def records(run: Path) -> Iterator[dict[str, Any]]:
    """The records in a run's folder, as they are written, but for what the clock says."""
    made_by = kvbench.load(run.parent.parent).runs.loc[run.name]
    for path in sorted(run.glob("records*.jsonl")):
        for own in map(parse_line, path.read_bytes().splitlines(keepends=True)):
            times = {key: type(own[key]).__name__ for key in own if key == "seconds" or key.endswith("_ms")}
            if "predictions" in own:  # rounded and packed; other records' `fidelity` is computed from them
                times["predictions"] = f"{len(own['predictions'])} characters"
            times["version"] = 3  # the record's when the net was written; a later one only adds fields
            yield {group: made_by[group] for group in GROUPS} | own | times
