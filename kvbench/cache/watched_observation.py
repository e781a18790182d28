"""Find out what the hooks of a method ask an observation for."""

from collections.abc import Sequence
from typing import Any

from kvbench.interfaces.observation import Observation

WATCHED = ("share", "layer")


class WatchedObservation(Observation):
    """An observation that notes in the lists `asked` which of `WATCHED` a hook asked for."""

    def __getattribute__(self, name: str) -> Any:
        if name in WATCHED:
            asked: Sequence[list[str]] = vars(self).get(
                "asked", ()
            )  # a copy that a hook made has none; copying asked for all
            for names in asked:
                names.append(name)
        return super().__getattribute__(name)


def watch(observation: Observation, asked: list[str]) -> Observation:
    """Return an equal observation that also notes in `asked` what hooks ask it for."""
    watched = object.__new__(WatchedObservation)
    vars(watched).update(vars(observation), asked=(*vars(observation).get("asked", ()), asked))
    return watched
