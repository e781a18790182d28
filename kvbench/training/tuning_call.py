"""One call of `kvbench dev tune`: load, tune on one GPU or several, write; and the losses on plain text.

With several GPUs each has a process of its own. They are started by torch's spawn and sum gradients through NCCL.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed, multiprocessing

from kvbench.config.provenance import source_hash
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.models.local_models import hash_file
from kvbench.models.low_rank import read_factors_file
from kvbench.models.merging import check_fit, load_factors
from kvbench.models.tuned_models import find_tuned
from kvbench.stops import check_stop, stop_at_safe_points
from kvbench.training.delta_losses import compute_cross_entropy
from kvbench.training.interrupted_training import check_room, load_state
from kvbench.training.tuning import (
    Ranks,
    Tuning,
    describe_tuning,
    estimate_hours,
    make_deterministic,
    read_tuning,
    write_factors,
)
from kvbench.training.tuning_batches import SampleSource
from kvbench.training.tuning_model import LowRankLlama, Shape
from kvbench.training.tuning_notes import TextLoss
from kvbench.training.tuning_recipe import TuningRecipe
from kvbench.validation import SettingError, refuse_on_error

HELD_OUT = {2048: 64, 8192: 16}  # tokens of a held-out sequence -> how many sequences are read
TRIAL = {2048: 1}  # the same on a processor
DATA = "kvbench.training.tuning_data"


@dataclass(frozen=True)
class TuningCall:
    """What one call is to do."""

    model: str
    """The base, one of `FETCHED_MODELS`."""
    out: Path
    texts: Path
    """Folder of plain text as `kvbench.training.tuning_data.pack_texts` writes it."""
    recipe: TuningRecipe
    device: str
    """cuda or cpu."""
    gpus: int = 1
    workers: int = 0
    """Processes that draw samples, on all GPUs together."""
    pause: float = float("inf")
    """Seconds from `begun` after which the call stops."""
    steps: int | None = None
    """Number of steps after which the call stops."""
    earlier: Path | None = None
    """File of an earlier tuning, whose factors this one begins with."""
    make_source: Callable[[], SampleSource] | None = None
    """Makes what draws samples; None for that of `kvbench.training.tuning_data`."""
    begun: float = field(default_factory=time.monotonic)
    """When the call began, by a clock that all processes of the machine share."""


@dataclass(frozen=True)
class BaseSource:
    """Makes what draws samples, in the words of a base's tokenizer and chat template."""

    path: str
    """Folder of the base."""
    texts: Path
    """Folder of plain text."""

    def __call__(self) -> SampleSource:
        from kvbench.training.tuning_data import TuningData

        return TuningData(Checkpoint("base", self.path).tokenizer(), self.texts)


def prepare_texts(base: Checkpoint, texts: Path) -> str:
    """Pack plain text into a folder unless it is there, and return a hash of what is trained on.

    Raises:
        SettingError: A package whose documentation is read is missing, or the folder is damaged.
    """
    note = texts / "texts.json"
    if not note.exists():
        from kvbench.training.tuning_data import pack_texts

        pack_texts(base.tokenizer(), texts)
    with refuse_on_error(f"--texts={texts}: cannot read {note.name}"):
        return str(json.loads(note.read_text(encoding="utf-8"))["train"]["digest"])


def check_device(call: TuningCall) -> None:
    """Raise a SettingError if there are not so many GPUs here, or if a processor would tune for more than a trial."""
    if call.device == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            tokens = call.recipe.tokens
            hours = estimate_hours(count_weights(call.model), tokens)
            raise SettingError(
                f"--device=cuda: there is no GPU here; this processor would take about {hours:,.0f} hours for "
                f"{tokens:,} tokens, an H100 {tokens / 9e4 / 3600:.1f}. --device cpu --steps N is for a trial"
            )
        if call.gpus > count:
            raise SettingError(f"--gpus={call.gpus}: {count} are here")
    elif call.steps is None:
        raise SettingError("--device=cpu: is for a trial; give --steps, too")


def count_weights(model: str) -> int:
    """Return about how many weights a base has, by the size of its file."""
    return (Path(find_model(model, "--model")) / "model.safetensors").stat().st_size // 2


def start(call: TuningCall) -> int:
    """Tune, and write the output if the tuning is finished.

    Returns:
        The number of steps that were taken in all calls.

    Raises:
        SettingError: The base, the state or an option cannot be used.
    """
    base = Checkpoint("base", find_model(call.model, "--model"))
    base.check()
    if call.earlier is not None:
        check_earlier(call.earlier, call.recipe, base)
    check_device(call)
    shape = Shape.of(base.config())
    load_state(call.out, describe_options(call, base))  # refuses what another call began, before texts are packed
    load_state(call.out, describe_settings(call, base))
    model_numbers = 3 * call.recipe.rank * 14 * shape.hidden * shape.layers  # more than there are
    check_room(call.out, shape.layers, model_numbers, call.recipe.steps)
    if call.gpus == 1:
        return tune(call, Ranks())
    return start_ranks(call)


def describe_options(call: TuningCall, base: Checkpoint) -> dict[str, str | int | float]:
    """Return the value of each option with which a tuning must go on."""
    settings = {name.replace("_", "-"): value for name, value in call.recipe.describe().items()}
    settings |= {"model": base.identity(), "device": call.device, "gpus": call.gpus}
    return settings | {"start": "none" if call.earlier is None else hash_file(call.earlier)}


def describe_settings(call: TuningCall, base: Checkpoint) -> dict[str, str | int | float]:
    """Return the same with hashes of what is trained on. Plain text is packed unless it is there."""
    if call.make_source is not None:
        return describe_options(call, base)
    return describe_options(call, base) | {
        "texts": prepare_texts(base, call.texts),
        "samples": source_hash([DATA]),
    }


def check_earlier(path: Path, recipe: TuningRecipe, base: Checkpoint) -> None:
    """Raise a SettingError unless a tuning of a base by this recipe can begin with the factors of a file."""
    file = read_factors_file(path, "--start")
    if file.base != base.identity():
        raise SettingError(f"{file.setting}: the factors are of the base {file.base}, and --model is {base.identity()}")
    for name in ("rank", "alpha", "theta"):
        if getattr(file, name) != getattr(recipe, name):
            raise SettingError(f"--{name}={getattr(recipe, name)}: {path.name} has {getattr(file, name)}")
    read_tuning(file)
    check_fit(file, load_file(Path(base.path) / "model.safetensors"))
    load_factors(file)


def check_beginning(out: Path, earlier: Path | None) -> None:
    """Raise a SettingError unless a tuning began with the factors of a file, or with new ones if it is None."""
    *before, _ = read_tuning(read_factors_file(out, "--out"))
    if earlier is None and before:
        raise SettingError(f"--out={out}: began with the factors of an earlier tuning; name their file with --start")
    if earlier is not None and read_tuning(read_factors_file(earlier, "--start")) != before:
        raise SettingError(f"--start={earlier}: {out.name} did not begin with these factors")


def tune(call: TuningCall, ranks: Ranks) -> int:
    """Tune in this process, and return the number of steps that were taken in all calls."""
    device = f"cuda:{ranks.rank}" if call.device == "cuda" else "cpu"
    if call.device == "cuda":
        make_deterministic()
        torch.cuda.set_device(device)
    base = Checkpoint("base", find_model(call.model, "--model"))
    settings = describe_settings(call, base)
    state = load_state(call.out, settings)
    dtype = torch.float32 if call.device == "cpu" else torch.bfloat16
    weights = {
        name: weight.to(device, dtype) for name, weight in load_file(Path(base.path) / "model.safetensors").items()
    }
    recipe = call.recipe
    shape = Shape.of(base.config())
    compiles = call.device == "cuda"
    model = LowRankLlama(weights, shape, recipe.rank, recipe.scale, recipe.theta, recipe.seed, compiles)
    if call.earlier is not None and state is None:
        model.start_from(load_factors(read_factors_file(call.earlier, "--start")))
    tuning = Tuning(model, recipe, call.out, settings, state, ranks)
    make_source = call.make_source or BaseSource(base.path, call.texts)
    try:
        left = call.pause - (time.monotonic() - call.begun)
        finished = tuning.run(make_source, call.workers // ranks.count, left, call.steps)
    except KeyboardInterrupt as stop:
        where = f"step {tuning.step} of {recipe.steps}"
        stop.args = (f" at {where}; the same command goes on from step {tuning.saved}",)
        raise
    if finished and not ranks.rank:
        earlier = read_tuning(read_factors_file(call.earlier, "--start")) if call.earlier is not None else []
        metadata = describe_tuning(base.identity(), call.model, recipe, tuning.step, call.gpus, earlier)
        write_factors(call.out, model, metadata)
    return tuning.step


def start_ranks(call: TuningCall) -> int:
    """Tune in one process for each GPU, and return the number of steps that were taken in all calls."""
    with tempfile.TemporaryDirectory() as folder:
        processes = multiprocessing.spawn(run_rank, (call, Path(folder)), call.gpus, join=False)
        assert processes is not None
        try:
            while not processes.join(timeout=1):
                check_stop()
        except multiprocessing.ProcessRaisedException:
            if (error := Path(folder) / "error").exists():
                raise SettingError(error.read_text()) from None
            raise
        finally:
            for process in processes.processes:
                process.terminate()
        return int((Path(folder) / "step").read_text())


def run_rank(rank: int, call: TuningCall, folder: Path) -> None:
    """Tune in a process of several.

    Args:
        rank: Number of the process, which is that of its GPU.
        call: The call.
        folder: Where the processes meet, and where the first one leaves the number of steps, or what it refuses.
    """
    backend = "nccl" if call.device == "cuda" else "gloo"
    if call.device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(backend, f"file://{folder}/meeting", rank=rank, world_size=call.gpus)
    try:
        with stop_at_safe_points():
            step = tune(call, Ranks(rank, call.gpus))
        if not rank:
            (folder / "step").write_text(str(step))
    except SettingError as error:
        (folder / "error").write_text(str(error))
        raise
    finally:
        distributed.destroy_process_group()


@torch.no_grad()
def compute_text_losses(model: str, out: Path, texts: Path, device: str) -> list[TextLoss]:
    """Return the mean cross-entropy of the next token in plain text, in nats, of the base and of the tuned model.

    Both are loaded as runs load them, in bfloat16 on a GPU and float32 on a processor. The base reads no more than its
    own length.

    Args:
        model: The base.
        out: The file of factors.
        texts: Folder of plain text, of which only what is held out is read.
        device: "cpu" or "cuda".

    Returns:
        The losses by the length of the sequences, the shortest ones first.

    Raises:
        SettingError: The base, the factors or the text cannot be used.
    """
    from kvbench.training.tuning_data import held_out_text

    base, tuned = (
        Checkpoint("evaluated", path) for path in (find_model(model, "--model"), str(find_tuned(model, out)))
    )
    prepare_texts(base, texts)
    tokens = torch.tensor(held_out_text(texts).astype("int64"))
    packed = {
        length: tokens[: len(tokens) // length * length].view(-1, length)[:count]
        for length, count in (TRIAL if device == "cpu" else HELD_OUT).items()
        if length <= min(base.longest(), len(tokens))
    }
    losses: dict[int, list[float]] = {length: [] for length in packed}
    for checkpoint in (base, tuned):
        weights = checkpoint.weights(torch.float32 if device == "cpu" else torch.bfloat16, device)
        for length, sequences in packed.items():
            parts = [compute_cross_entropy(weights, part[None].to(device)).item() for part in sequences]
            losses[length].append(sum(parts) / len(parts))
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return [TextLoss(length, len(packed[length]), before, after, name) for length, (before, after) in losses.items()]
