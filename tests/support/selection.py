"""Choose the cases of a cross that `make test` runs. The others carry the marker `full` and run in `make test-all`.

A test whose parameters multiply carries `@pytest.mark.cover` above its `parametrize` decorators:

    @pytest.mark.cover
    @pytest.mark.parametrize("block", [None, 1, 7])
    @pytest.mark.parametrize("method", list_choices("method"))
    def test_something(method, block): ...

Of its cases `make test` runs as few as hold every value of every parameter at least once: here one case a method. Each
size of blocks but None is in one case, because these read more often than one block does.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from types import NoneType

import pytest
import torch


def only_in_full(*values: object) -> object:
    """A case of `parametrize` that runs in `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.full)


def choose_quick(cases: Iterable[object], *quick: object) -> list[object]:
    """The cases of `parametrize`. Those that are not among `quick` run in `make test-all` alone."""
    listed = list(cases)
    assert all(own in listed for own in quick), f"{quick} are not all among {listed}"
    return [own if own in quick else only_in_full(own) for own in listed]


def choose_covering(cases: Sequence[frozenset[Hashable]], costs: Sequence[float] | None = None) -> list[int]:
    """Indices of cases that together hold every feature of any case: greedy, and the same every time.

    Among cases that add as much the cheapest wins. Of these, it is the one whose features were chosen least often, so
    that values meet in turn.
    """
    missing, used, chosen = set().union(*cases), Counter(), []
    costs = costs or [0.0] * len(cases)
    left = list(range(len(cases)))
    while missing:
        left = [index for index in left if missing & cases[index]]
        best = max(
            left,
            key=lambda index: (
                len(missing & cases[index]),
                -costs[index],
                -sum(used[own] for own in cases[index]),
                -index,
            ),
        )
        chosen.append(best)
        used.update(cases[best])
        missing -= cases[best]
    return sorted(chosen)


def list_features(item: pytest.Function) -> frozenset[Hashable]:
    """The values that a case gives its parameters.

    Plain values are the same if they are equal; others, such as tensors and functions, if they are one object.
    """
    plain = (str, int, float, NoneType, torch.dtype)
    return frozenset(
        (name, repr(value) if isinstance(value, plain) else id(value)) for name, value in item.callspec.params.items()
    )


def count_reads(item: pytest.Function) -> float:
    """How often a case reads for each token of a prompt, if a parameter says how many tokens a block has."""
    block = item.callspec.params.get("block")
    return 1 / block if isinstance(block, int) else 0.0


def mark_rest_as_full(items: Iterable[pytest.Item]) -> None:
    """Give the markers `full` and `rest` to every case that the selection of its test leaves out.

    `cover("codec")` selects among the cases of each value of the parameter `codec` alone.
    Cases that have one of them for a reason of their own, such as a large shape, stay out: the others hold all values
    without them.
    """
    tests: dict[tuple[str, ...], list[pytest.Function]] = {}
    for item in items:
        own = {marker.name for marker in item.iter_markers()}
        if "cover" in own and not own & {"full", "rest"}:
            apart = [repr(item.callspec.params[name]) for mark in item.iter_markers("cover") for name in mark.args]
            tests.setdefault((item.nodeid.partition("[")[0], *apart), []).append(item)
    for cases in tests.values():
        chosen = choose_covering([list_features(case) for case in cases], [count_reads(case) for case in cases])
        for index in set(range(len(cases))) - set(chosen):
            cases[index].add_marker(pytest.mark.full)
            cases[index].add_marker(pytest.mark.rest)
