"""Files that methods need, made for a model: `python -m kvbench.calibrate qfilters --model reference --out FILE`.

qfilters (NathanGodey/qfilters, make_filters.py): rotated queries at random places of some texts; per query head the
first right singular vector v of the matrix of its queries, its sign set so that most of them project on it
positively; filter = mean of -v over the query heads of a KV head. (A singular vector has no sign of its own: without
the majority, half of the filters would keep exactly the wrong rows; NathanGodey/qfilters#6.)
"""

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.allocator import Allocator
from kvbench.budget import Budget
from kvbench.catalogue import build, settings
from kvbench.engine import Context
from kvbench.layer import Choice
from kvbench.method import Method, Seen, State
from kvbench.model import REFERENCE, Checkpoint, layout
from kvbench.rows import Rows
from kvbench.settings import SettingError, whole
from kvbench.tasks.prose import words


@dataclass(frozen=True)
class Recorder(Method):
    """The full cache, and the queries at `places` in every layer's state."""

    places: Tensor  # (n,)

    def update(self, seen: Seen, rows: Rows, state: State) -> Mapping[str, Tensor]:
        state.layer["queries"] = seen.queries[0, :, self.places].float().cpu()
        return {}


def queries(model: torch.nn.Module, sequences: Sequence[Tensor], count: int, seed: int) -> list[Tensor | None]:
    """Rotated queries (query heads, about `count`, d) of every layer at random places of `sequences` (tokens,), equally
    many of each; None for layers with a sliding window.
    """
    generator = torch.Generator().manual_seed(seed)
    codec = build("codec", settings("codec", "raw"))
    found = []
    for ids in sequences:
        places = torch.randperm(len(ids), generator=generator)[: -(-count // len(sequences))].sort().values
        choice = Choice(Recorder("recorder", places), Allocator("uniform"), codec)
        context = Context(model, choice, Budget(1.0), None, (seed,))
        context.prefill(ids[None].to(next(model.parameters()).device))
        found.append([None if layer is None else layer.state.layer["queries"] for layer in context.layers])
    return [None if own[0] is None else torch.cat(own, 1) for own in zip(*found, strict=True)]


def query_filters(model: torch.nn.Module, sequences: Sequence[Tensor], count: int = 3000, seed: int = 0) -> Tensor:
    """(layers, KV heads, d) float32; zeros for layers with a sliding window, which no method cuts."""
    shape = layout(model)
    filters = torch.zeros(shape.layers, shape.heads, shape.dim)
    for layer, own in enumerate(queries(model, sequences, count, seed)):
        if own is not None:
            filters[layer] = -directions(own).view(shape.heads, -1, shape.dim).mean(1)
    return filters


def directions(own: Tensor) -> Tensor:
    """(query heads, d) first right singular vectors of queries (query heads, n, d), most queries on their side."""
    first = torch.linalg.svd(own, full_matrices=False).Vh[:, 0]
    positive = ((own @ first[..., None]) > 0).float().mean((1, 2)) >= 0.5
    return torch.where(positive[:, None], first, -first)


def texts(tokenizer: object, text: str, sequences: int, length: int) -> list[Tensor]:
    """`sequences` pieces of `length` tokens, each with what the tokenizer puts first; SettingError if text is short."""
    start = tokenizer("").input_ids
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    piece = length - len(start)
    if piece < 1 or len(ids) < sequences * piece:
        raise SettingError(f"--sequences={sequences}: the text has {len(ids)} tokens, {sequences * piece} are needed")
    return [torch.tensor(start + ids[i * piece : (i + 1) * piece]) for i in range(sequences)]


def arguments(argv: Sequence[str] | None) -> object:
    parser = ArgumentParser(prog="python -m kvbench.calibrate", description="Make the file that a method needs.")
    parser.add_argument("method", choices=["qfilters"])
    parser.add_argument("--model", required=True, help="reference, a local folder or a hub id")
    parser.add_argument("--out", required=True, type=Path, help="safetensors file to write")
    parser.add_argument("--text", type=Path, help="text file; default: the essays of tasks/prose.py")
    parser.add_argument("--sequences", type=int, default=20, help="texts read (official: 20)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text (official: 2048)")
    parser.add_argument("--queries", type=int, default=3000, help="queries sampled per head (official: about 3000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 and one line for a setting that cannot be used."""
    options = arguments(argv)
    try:
        for name in ("sequences", "length", "queries"):
            whole(f"--{name}", getattr(options, name), 1)
        checkpoint = Checkpoint("calibrated", str(REFERENCE) if options.model == "reference" else options.model)
        checkpoint.config()
        length = min(options.length, checkpoint.longest())
        text = " ".join(words()) if options.text is None else options.text.read_text(encoding="utf-8")
        pieces = texts(checkpoint.tokenizer(), text, options.sequences, length)
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        filters = query_filters(checkpoint.weights(dtype, options.device), pieces, options.queries, options.seed)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        save_file({"q_filters": filters.contiguous()}, str(options.out), {"model": checkpoint.identity()})
    except (SettingError, OSError, UnicodeDecodeError) as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: q_filters {tuple(filters.shape)} from {len(pieces)} texts of {length} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
