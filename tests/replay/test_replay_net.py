"""All cells of the net, computed again; see README.md here."""

import copy
import re
from collections.abc import Callable

import pytest

from tests.replay import adapter, net
from tests.support.selection import choose_covering, choose_quick

CELLS, RUNS = net.load(net.CELLS), net.load(net.RUNS)


def check(before: net.Found, compute: Callable, make: Callable) -> None:
    """Fail with at most `net.LINES` lines on what differs from `before`."""
    others = net.other_versions()
    changed = net.compare(before, compute(before, make), net.CLOSE if others is None else net.LOOSE)
    if changed:
        head = f"{len(changed)} of {len(before)} cells differ{f' ({others})' if others else ''}:"
        pytest.fail("\n".join([head, *net.report(changed, net.LINES - 1)]), pytrace=False)


def list_settings(cell: str) -> frozenset[str]:
    """The settings that a cell names, but for those of its method, which tests/methods compares with formulas.

    Of a number other than 1 only whether it is whole or a fraction.
    """
    return frozenset(
        re.sub(r"=-?\d*\.\d+$", "=fraction", re.sub(r"=(0|[2-9]|\d\d+)$", "=whole", own))
        for own in cell.split()
        if not own.startswith("method.")
    )


def count_reads(cell: str) -> float:
    """How often a cell reads for each token of its prompt."""
    block = re.search(r" block_size=(\d+)", cell)
    return 1 / int(block[1]) if block else 0.0


# Every such setting in one cell at least.
SOME = choose_covering(list(map(list_settings, CELLS)), list(map(count_reads, CELLS)))


@pytest.mark.parametrize("cell", choose_quick(CELLS, *(list(CELLS)[index] for index in SOME)))
def test_the_engine_computes_what_it_did(cell):
    check({cell: CELLS[cell]}, net.compute_cells, adapter.play)


QUICK = ("task=ruler", "task=phonebook", "task=ledger")  # the others' answers take seconds


def command_of(cell: str) -> str:
    return cell.partition(" | ")[0]


COMMANDS = list(dict.fromkeys(map(command_of, RUNS)))
FIRST = [next(own for own in COMMANDS if own.startswith(f"{task} ")) for task in QUICK]


@pytest.mark.parametrize("command", choose_quick(COMMANDS, *FIRST))
def test_whole_runs_record_what_they_did(command):
    own = {cell: found for cell, found in RUNS.items() if command_of(cell) == command}
    check(own, net.compute_runs, adapter.execute)


def test_every_method_allocator_and_codec_has_a_cell():
    cells = [adapter.DEFAULTS | net.parse(cell) for cell in CELLS]
    for group in adapter.GROUPS:
        assert {cell[group] for cell in cells} == set(adapter.list_names(group))


def test_a_difference_is_named_and_a_rounding_is_not():
    before = CELLS
    cells = [cell for cell in before if "model=llama " in cell]
    after = copy.deepcopy(before)
    after[cells[0]]["answers"][0]["tokens"][0][-1] += 1
    after[cells[1]]["logits"][0][0] *= 1 + 1e-8
    after[cells[2]]["logits"][0][0] *= 1 + 1e-10
    after[cells[3]]["held"] = after[cells[3]]["held"][:-1]
    after[cells[4]]["bytes"]["resident"] += 1
    del after[cells[5]], after[cells[6]]["most"]
    changed = net.compare(before, after, net.CLOSE)
    assert list(changed) == [cells[number] for number in (0, 1, 3, 4, 5, 6)]
    assert [net.kind_of(own[0]) for own in changed.values()] == ["tokens", "logits", "held", "bytes", "is gone", "most"]
    lines = net.report({cell: ["is new"] for cell in before}, net.LINES)
    assert len(lines) == net.LINES and lines[-1] == f"… and {len(before) - net.LINES + 1} more cells"
