"""The interface of a study: it looks at a model, at prompts or at a formula, and returns lines of numbers.

A study is a class in a file of its own, whose name it has. There are five kinds, by what they look at:

    LayerStudy    every layer of a model that reads a prompt into a full cache. Written as a method is: `update` sees
                  what a layer computed for a block, and `finish` turns what it remembered into lines
    PolicyStudy   what methods keep of a prompt, each in a run of its own (kvbench.studies.policy_study)
    PromptStudy   the texts of a task's samples and their tokens. No model reads them
    ClosedForm    a formula, and at most the shape of a model
    TrainingStudy trainings of DeltaKV's compressors (kvbench.studies.training_study)

`conf/papers/exhibits/` says which lines make a paper's table or figure. docs/add-a-study.md shows a study in 30 lines.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypedDict, Unpack

import torch
from torch import Tensor

from kvbench.interfaces.layout import Layout
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.interfaces.settings import setting
from kvbench.interfaces.task import Sample
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.encoding import FastTokenizer
from kvbench.store.study_lines import HOLDS, Line
from kvbench.validation import SettingError

SHOWN = 6  # layers that an exhibit of single heads shows

Memory = dict[Any, Any]
"""What a study remembers while a prompt is read: of one layer, or of the prompt if it compares methods."""


class Part(TypedDict, total=False):
    """The fields of `Line` that say which part of a model a number is of."""

    series: str
    layer: int
    head: int


class Curve(Part, total=False):
    """The fields of `Line` that the numbers along x have in common."""

    y: float


class Place(Curve, total=False):
    """The fields of `Line` that say where a number belongs, and of how many tokens, pairs or samples it is."""

    x: float
    n: int


class TextConfig(Protocol):
    """The part of a decoder's configuration that studies read."""

    vocab_size: int
    intermediate_size: int


class ModelConfig(Protocol):
    """The part of a model's configuration, as transformers reads it, that studies use."""

    def get_text_config(self, decoder: bool = ...) -> TextConfig: ...


@dataclass(frozen=True)
class Study:
    """The base of every study. Everything random in a study is drawn with `seed`."""

    name: ClassVar[str]
    """The name of the study's file in kvbench/studies/."""
    seed: int = 0

    @property
    def inputs(self) -> str:
        """What the numbers depend on beside the model, the prompts and what the study's module imports, such as the
        contents of a file."""
        return ""

    def prepare(self, checkpoint: Checkpoint, compressors: str | None) -> Self:
        """Check that a model can give the study's numbers, and return the study for this model.

        Args:
            checkpoint: The model. Its configuration may be read, its weights are not.
            compressors: A file of DeltaKV's compressors, which the command's setting codec.path gives; None if it does
                not.

        Raises:
            SettingError: It cannot. The message names the setting that would help.
        """
        return self

    def line(self, quantity: str, value: float | Tensor, **place: Unpack[Place]) -> Line:
        """Return a line of this study.

        Args:
            quantity: What the value is.
            value: A number, or a tensor with one element.
            place: Other fields of `Line`.
        """
        return Line(self.name, quantity, float(value), **place)

    def claim(self, quantity: str, instances: Iterable[Tensor]) -> Line:
        """Return the share of instances in which a claim of a paper holds, such as heads or pairs of tokens.

        Args:
            quantity: The name of the claim. An exhibit states it in words.
            instances: True where it holds, any shapes.
        """
        every = torch.cat([instance.flatten().cpu() for instance in instances]).double()
        return self.line(quantity, every.mean(), series=HOLDS, n=len(every))


@dataclass(frozen=True)
class LayerStudy(Study):
    """Looks at every layer of a model that reads a prompt, in one block or in several.

    Only a study that says so gets what costs time or memory: `wants` is that of a method (`FurtherHooks`).
    Nothing of tokens × tokens may be held for more than one head and one block.
    """

    wants: ClassVar[tuple[str, ...]] = ()
    shown: tuple[int, ...] = ()
    """Layers that exhibits of single heads show; () for a few at equal distances."""

    def list_shown(self, layers: Sequence[int]) -> Sequence[int]:
        """Return the layers that an exhibit of single heads shows: `shown`, or a few with the first and the last.

        Args:
            layers: The layers to choose from, in order, such as ``observation.cut_layers``.
        """
        count = min(SHOWN, len(layers))
        every = [layers[round(index * (len(layers) - 1) / max(1, count - 1))] for index in range(count)]
        return self.shown or every

    def update(self, memory: Memory, observation: Observation, rows: Rows) -> None:
        """Look at one layer that has just read a block. Called for every layer of every block.

        Args:
            memory: What the study remembers of this layer, empty before the first block. The study changes it. It may
                hold no tensor of the observation, because those are reused, but copies or parts of them.
            observation: What the layer computed for the block. ``observation.last`` says whether it is the prompt's
                last block.
            rows: All rows of the layer so far, the block's included: keys (1, H, n, d) and values.
        """
        raise NotImplementedError

    def finish(self, memories: Mapping[int, Memory], first: bool) -> Iterable[Line]:
        """Return the lines of a prompt.

        Args:
            memories: What the study remembers, by layer. Layers with a sliding window are missing.
            first: Whether it is the first prompt. Lines that show a single prompt, such as a scatter, come from it.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class PromptStudy(Study):
    """Looks at the samples of a task and at their tokens."""

    def compute(self, samples: Sequence[Sample], tokenizer: FastTokenizer) -> Iterable[Line]:
        """Return the lines of all samples."""
        raise NotImplementedError


@dataclass(frozen=True)
class ClosedForm(Study):
    """Computes a formula, for the shape of a model if the formula depends on it."""

    def compute(self, layout: Layout, config: ModelConfig) -> Iterable[Line]:
        """Return the lines.

        Args:
            layout: The model's layers, heads and dimensions.
            config: The model's configuration, as transformers reads it.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Recorder(Method):
    """A method that keeps every row and shows what the layers compute to several studies, in one pass."""

    studies: tuple[LayerStudy, ...] = setting(default=(), kw_only=True)
    """The studies."""

    @property
    def wants(self) -> tuple[str, ...]:
        return tuple({name for study in self.studies for name in study.wants})

    def update(self, observation: Observation, rows: Rows, state: State) -> Mapping[str, Tensor]:
        refuse_extras(observation, "study")
        for study in self.studies:
            study.update(state.layer.setdefault(study.name, {}), observation, rows)
        return {}


def refuse_extras(observation: Observation, asking: str) -> None:
    """Raise a SettingError if the softmax of a layer has sinks or a cap, which the formulas of studies leave out."""
    if observation.extras is not None:
        line = "has sinks or a cap of its logits, which its formulas leave out; use another model"
        raise SettingError(f"{asking}: attention of layer {observation.layer} {line}")


def widen(x: Tensor) -> Tensor:
    """Return the numbers in float32, or in float64 if they have it already."""
    return x if x.dtype == torch.float64 else x.float()


def find_rotation(observation: Observation, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cos and sin, (n, r) each, that the model rotates the tokens at some positions with.

    Args:
        observation: What a layer computed. Its frequencies may depend on the last token that was read.
        places: Positions, (n,).
    """
    last = torch.tensor([observation.tokens - 1])
    every = torch.cat([places.cpu(), last]).to(observation.queries.device)
    cos, sin = (part[0, :-1] for part in observation.rotation(every[None]))
    return cos, sin


def collect_unrotated_keys(memory: Memory, observation: Observation) -> Tensor | None:
    """Remember the keys before norm and rotation, and return those of the whole prompt once it has been read.

    Args:
        memory: What a study that wants `unrotated_keys` remembers. Keys are copied unless the prompt is one block.
        observation: What a layer computed.

    Returns:
        (H, n, d), or None before the last block.
    """
    keys = observation.unrotated_keys
    assert keys is not None  # the study wants them
    if observation.last and not memory:
        return keys[0]
    before = memory.setdefault("unrotated keys", [])
    before.append(keys[0].clone())
    return torch.cat(before, 1) if observation.last else None


def draw_positions(count: int, tokens: int, seed: int, first: int = 0) -> Tensor:
    """Draw positions of a prompt without replacement, the same ones for every layer.

    Args:
        count: How many; all if there are fewer.
        tokens: Number of tokens of the prompt.
        seed: Seed of the draw.
        first: The smallest position that may be drawn.

    Returns:
        Positions in ascending order, (at most count,) int64, on the CPU.
    """
    order = torch.randperm(tokens - first, generator=torch.Generator().manual_seed(seed))[:count]
    return order.sort().values + first


def take_block(positions: Tensor, observation: Observation) -> Tensor:
    """Return the indices within a block of those of the prompt's positions that lie in it, on the block's device."""
    stop = observation.first + observation.queries.shape[2]
    places = positions[(positions >= observation.first) & (positions < stop)] - observation.first
    return places.to(observation.queries.device)


def count_bins(values: Tensor, low: float, high: float, bins: int) -> Tensor:
    """Count values in bins of equal width. Values outside of [low, high] count in the outermost bins.

    Args:
        values: Any shape.
        low: Lower end of the first bin.
        high: Upper end of the last bin.
        bins: Number of bins.

    Returns:
        (bins,) float64, on the CPU.
    """
    place = ((values.flatten().double() - low) / (high - low) * bins).floor().clamp_(0, bins - 1)
    return torch.bincount(place.long(), minlength=bins).double().cpu()


def list_shares(
    study: Study, quantity: str, counts: Tensor, low: float, high: float, **place: Unpack[Curve]
) -> Iterator[Line]:
    """Yield a histogram as shares of all values: a line for each bin, whose `x` is the bin's middle."""
    total = float(counts.sum())
    width = (high - low) / len(counts)
    for index, count in enumerate(counts.tolist()):
        yield study.line(quantity, count / total, x=low + (index + 0.5) * width, n=int(total), **place)


def find_quantiles(values: Tensor, shares: Tensor) -> Tensor:
    """Return quantiles of a vector of any length, interpolated linearly as torch.quantile does, on the CPU."""
    ordered = values.sort().values
    place = shares * (len(ordered) - 1)
    below = place.floor().long()
    above = (below + 1).clamp(max=len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below).cpu()


def rank(values: Tensor) -> Tensor:
    """Return the ranks of each line, from 1; equal values share the mean of their ranks.

    Args:
        values: (lines, n)

    Returns:
        (lines, n) float64
    """
    values = values.contiguous()
    ordered = values.sort(-1).values
    below = torch.searchsorted(ordered, values)
    through = torch.searchsorted(ordered, values, right=True)
    return (below + through + 1).double() / 2


def correlate(x: Tensor, y: Tensor) -> Tensor:
    """Return Pearson's correlation of each line of x and y (lines, n), in float64; of ranks that is Spearman's.

    It is 0 if all numbers of a line are equal.
    """
    x, y = (lines.double() - lines.double().mean(-1, keepdim=True) for lines in (x, y))
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)).clamp(min=torch.finfo(x.dtype).tiny)


def find_plane(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of points (n, d), (d,), and their first two principal components, (d, 2)."""
    centre = points.mean(0)
    _, axes = torch.linalg.eigh((points - centre).mT @ (points - centre))
    plane = axes[:, -2:].flip(-1)
    signs = plane.gather(0, plane.abs().argmax(0)[None]).sign()  # the sign of an eigenvector is arbitrary
    return centre, plane * signs
