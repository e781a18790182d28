"""Compute scores once for several contexts whose methods are equal.

Contexts that read a prompt together hold the same rows until their first cut. If they differ only in the budget, their
methods give these rows the same scores. That is certain if the method remembers nothing (its state is empty before and
after the call) and does not ask for the budget. Otherwise every context computes its own scores.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from kvbench.cache.guard import Handed
from kvbench.cache.watched_observation import watch
from kvbench.engine.context import PromptContext
from kvbench.engine.timing import Stamps
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows


class SharedScores:
    """The scores of the rows that one layer holds in several contexts with equal methods.

    Attributes:
        borrowers: The numbers of the contexts that took the scores that another one had computed.
    """

    def __init__(self, device: str, shown: Handed, timed: bool = True) -> None:
        """Share scores on a device.

        Args:
            device: The device.
            shown: Watches the scores as soon as they may be shared.
            timed: Whether to take the time that they need.
        """
        self.borrowers: list[int] = []
        self.shown, self.timed, self.stamps = shown, timed, Stamps(device)
        self.kept: tuple[Rows, Tensor] | None = None

    def find(
        self, number: int, observation: Observation, rows: Rows, state: State, compute: Callable[[Observation], Tensor]
    ) -> Tensor:
        """Return the scores of the rows, (B, H, n), for the context with this number.

        The other arguments are those of `kvbench.cache.eviction.ScoreSharing`.
        """
        if state.layer or state.shared or (self.kept and self.kept[0] is not rows):
            return compute(observation)
        if self.kept:
            self.borrowers.append(number)
            return self.kept[1]
        asked: list[str] = []
        self.stamps = Stamps(self.stamps.device)
        if self.timed:
            self.stamps.put()
        scores = compute(watch(observation, asked))
        if self.timed:
            self.stamps.put()
        if not ("share" in asked or state.layer or state.shared):
            self.kept = rows, scores
            self.shown.add("scores", scores)
        return scores

    def release(self) -> None:
        """Release the rows and the scores, because all contexts have cut the layer."""
        self.kept = None

    def saved(self) -> float:
        """Return the milliseconds that the scores took, which each borrower has saved."""
        return sum(self.stamps.between())


def group_by_scores(contexts: Sequence[PromptContext]) -> list[int]:
    """Return for each context the number of the first one whose method, seeds and prefix are equal."""
    groups: list[int] = []
    for number, context in enumerate(contexts):
        equal = (first for first in range(number) if scores_alike(contexts[first], context))
        groups.append(next(equal, number))
    return groups


def scores_alike(one: PromptContext, other: PromptContext) -> bool:
    """Return whether hooks of two contexts get the same settings, seeds and prefix."""
    methods = [context.choice.method for context in (one, other)]
    same = methods[0] == methods[1] and repr(methods[0]) == repr(methods[1])  # 1 == 1.0 == True
    return same and (one.seeds, one.prefix) == (other.seeds, other.prefix)
