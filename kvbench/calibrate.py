"""Files that methods need, made for a model: `python -m kvbench.calibrate qfilters --model reference --out FILE`,
`python -m kvbench.calibrate duo_attention --model reference --out FOLDER`.

qfilters (NathanGodey/qfilters, make_filters.py): rotated queries at random places of some texts; per query head the
first right singular vector v of the matrix of its queries, its sign set so that most of them project on it
positively; filter = mean of -v over the query heads of a KV head. (A singular vector has no sign of its own: without
the majority, half of the filters would keep exactly the wrong rows; NathanGodey/qfilters#6.)

duo_attention: a pattern for a model that has no trained one, by KVzip's head scores (snu-mllab/KVzip, test.py
--save_head_score): α of a head is the largest of its rows' KVzip scores over a text, the mean of it over several texts.
The pattern's config.json says so; the trained gates of DuoAttention's authors are something else.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.allocator import Allocator
from kvbench.budget import Budget
from kvbench.catalogue import build, settings
from kvbench.generation import Context
from kvbench.method import Method
from kvbench.methods.kvzip import KVzip
from kvbench.model import Checkpoint, find_model, layout
from kvbench.observation import Seen, State, Words
from kvbench.policy import Choice
from kvbench.prompt import words
from kvbench.rows import Rows
from kvbench.settings import Arguments, SettingError, answered, choose, whole
from kvbench.tasks.common import synthetic_prose

ROOM = 32  # tokens for what is read about a text beside the text


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


@dataclass(frozen=True)
class Noting(KVzip):
    """KVzip, whose scores stay in every layer's state."""

    def forget(self, state: State) -> None:
        pass


def head_scores(
    model: torch.nn.Module, sequences: Sequence[Tensor], own: Words, prefix: int = 0, **args: Any
) -> Tensor:
    """(layers, KV heads) float32 KVzip's head scores of texts (tokens,), of which `prefix` in front are no text; nan
    for layers with a sliding window. `args`: settings of conf/method/kvzip.yaml.
    """
    chosen = {k: v for k, v in settings("method", "kvzip", args).items() if k not in ("_target_", "preset")}
    choice = Choice(Noting(**chosen), Allocator("uniform"), build("codec", settings("codec", "raw")))
    found = []
    for ids in sequences:
        context = Context(model, choice, Budget(0.5), None, (0,), prefix, own)
        context.prefill(ids[None].to(next(model.parameters()).device))
        scores = [None if layer is None else layer.state.layer["scores"][0] for layer in context.layers]
        nothing = torch.full((layout(model).heads,), torch.nan)
        found.append(torch.stack([nothing if own is None else own.amax(-1).float().cpu() for own in scores]))
    return torch.stack(found).mean(0)


def write_pattern(alpha: Tensor, folder: Path, sinks: int, recent: int, source: str) -> None:
    """A folder as published: full_attention_heads.tsv with α (layers, KV heads), config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(f"{value:.6f}" for value in layer) for layer in alpha.tolist()]
    (folder / "full_attention_heads.tsv").write_text("\n".join(lines) + "\n")
    config = {"sink_size": sinks, "recent_size": recent, "source": source}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def arguments(argv: Sequence[str] | None) -> Namespace:
    parser = Arguments("kvbench.calibrate", "Make the file that a method needs.")
    parser.add_argument("method", choices=["qfilters", "duo_attention"])
    parser.add_argument("--model", required=True, help="reference, reference_v1, a local folder or a hub id")
    parser.add_argument("--out", required=True, type=Path, help="what to write: a safetensors file, or a folder")
    parser.add_argument("--text", type=Path, help="text file; default: the essays of tasks/common/synthetic_prose.py")
    parser.add_argument("--sequences", type=int, help="texts read (official: 20 for qfilters, 1 for duo_attention)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text (official: 2048)")
    parser.add_argument("--queries", type=int, default=3000, help="queries sampled per head (official: about 3000)")
    parser.add_argument("--sinks", type=int, default=128, help="first rows of a streaming head (duo_attention)")
    parser.add_argument("--recent", type=int, default=256, help="newest rows of a streaming head (duo_attention)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 and one line for a setting that cannot be used."""
    return answered(lambda: calibrate(arguments(argv)))


def calibrate(options: Namespace) -> None:
    """Make the file or folder that is asked for."""
    try:
        pattern = options.method == "duo_attention"
        sequences = options.sequences if options.sequences is not None else 1 if pattern else 20
        whole("--sequences", sequences, 1)
        for name, least in (("length", 2), ("queries", 1), ("sinks", 0), ("recent", 1)):
            whole(f"--{name}", getattr(options, name), least)
        if pattern and options.out.is_file():
            raise SettingError(f"--out={options.out}: a folder, and there is a file")
        if any(own.is_file() for own in options.out.parents) or (not pattern and options.out.is_dir()):
            raise SettingError(f"--out={options.out}: no {'folder' if pattern else 'file'} can be there")
        choose("--device", options.device, ("cpu", "cuda"))
        if options.device == "cuda" and not torch.cuda.is_available():
            raise SettingError("--device=cuda: there is no CUDA device here")
        checkpoint = Checkpoint("calibrated", find_model(options.model))
        checkpoint.config()
        longest = checkpoint.longest()
        length = min(options.length, longest // 2 - ROOM if pattern else longest)  # a text is read twice
        text = " ".join(synthetic_prose.words()) if options.text is None else options.text.read_text(encoding="utf-8")
        tokenizer = checkpoint.tokenizer()
        pieces = texts(tokenizer, text, sequences, length)
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        model = checkpoint.weights(dtype, options.device)
        if pattern:
            made = head_scores(model, pieces, words(tokenizer), len(tokenizer("").input_ids))
            source = f"KVzip head scores of {checkpoint.identity()}, {len(pieces)} texts of {length} tokens"
            write_pattern(made, options.out, options.sinks, options.recent, source)
        else:
            made = query_filters(model, pieces, options.queries, options.seed)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            save_file({"q_filters": made.contiguous()}, str(options.out), {"model": checkpoint.identity()})
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(str(error)) from None
    kind = "pattern" if pattern else "q_filters"
    print(f"{options.out}: {kind} {tuple(made.shape)} from {len(pieces)} texts of {length} tokens")


if __name__ == "__main__":
    sys.exit(main())
