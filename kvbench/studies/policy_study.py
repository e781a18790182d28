"""The interface of a study that looks at what methods keep, beside those of `kvbench.studies.study`.

The study says which methods read a prompt, with which budgets and in which blocks. `kvbench.studies.policy_reads` reads
the prompt for each of them and shows the study the cache that the method left.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.observation import Observation
from kvbench.interfaces.rows import Rows
from kvbench.store.study_lines import Line
from kvbench.studies.study import Memory, Study


@dataclass(frozen=True)
class Policy:
    """A method and its allocator as a paper runs them, by the names of files in conf/ and of their presets."""

    method: str
    preset: str | None = None
    allocator: str = "uniform"
    allocator_preset: str | None = None


FULL = Policy("full")


@dataclass(frozen=True)
class Reading:
    """How a prompt is read. Equal readings of several studies are computed once.

    Attributes:
        policy: The method and its allocator.
        budget: Rows to keep, as of `kvbench.interfaces.budget.Budget`.
        tokens: Number of the prompt's first tokens that are read.
        block_size: Tokens read between two cuts; None reads all of them as one block.
    """

    policy: Policy
    budget: float | int
    tokens: int
    block_size: int | None = None


@dataclass(frozen=True)
class PolicyStudy(Study):
    """Looks at what methods keep of a prompt."""

    policies: ClassVar[tuple[Policy, ...]]
    """The methods that it compares."""

    def list_readings(self, tokens: int, first: bool) -> Sequence[Reading]:
        """Return how a prompt is to be read, in the order in which `inspect` is to see the caches.

        Args:
            tokens: Number of tokens of the prompt.
            first: Whether it is the first prompt.
        """
        raise NotImplementedError

    def watch(self, memory: Memory, reading: Reading, observation: Observation, rows: Rows) -> None:
        """Look at a block that a layer has just read, before the method cuts it. The default sees nothing.

        Args:
            memory: What the study remembers of the prompt, empty at first. The study changes it. It may hold copies
                of tensors, but not the tensors themselves, because those are reused.
            reading: How the prompt is read.
            observation: What the layer computed for the block.
            rows: All rows that the layer holds then, the block's included.
        """

    def inspect(self, memory: Memory, reading: Reading, context: GenerationContext, rest: Tensor) -> None:
        """Look at the cache that a method has left. The cache is freed afterwards.

        Args:
            memory: What the study remembers of the prompt.
            reading: How the prompt was read.
            context: The cache. What the study reads into it, it forgets again (`PromptContext.branch`).
            rest: The tokens of the prompt that were not read, (1, t).
        """
        raise NotImplementedError

    def finish(self, memory: Memory, first: bool) -> Iterable[Line]:
        """Return the lines of a prompt. Arguments are those of `inspect` and `list_readings`."""
        raise NotImplementedError
