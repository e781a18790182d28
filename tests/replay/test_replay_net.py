"""All cells of the net, computed again; see README.md here."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.replay import adapter, net
from tests.support.selection import choose_covering, only_in_full


def check(path: Path, compute, make, chosen: Callable[[str], bool] = bool) -> None:
    """Fail with at most `net.LINES` lines on the chosen cells that differ from those in `path`."""
    others = net.other_versions()
    before = {cell: found for cell, found in net.load(path).items() if chosen(cell)}
    changed = net.compare(before, compute(before, make), net.CLOSE if others is None else net.LOOSE)
    if changed:
        head = f"{len(changed)} of {len(before)} cells differ{f' ({others})' if others else ''}:"
        pytest.fail("\n".join([head, *net.report(changed, net.LINES - 1)]), pytrace=False)


@pytest.mark.parametrize("covering", [True, only_in_full(False)], ids=["every_setting", "the_rest"])
def test_the_engine_computes_what_it_did(covering):
    """Every setting in one cell at least, each method with its allocators; the other cells in `make test-all`."""
    cells = list(net.load(net.CELLS))
    some = {cells[index] for index in choose_covering([frozenset(cell.split()) for cell in cells])}
    check(net.CELLS, net.compute_cells, adapter.play, lambda cell: (cell in some) == covering)


def command_of(cell: str) -> str:
    return cell.partition(" | ")[0]


@pytest.mark.parametrize("covering", [True, only_in_full(False)], ids=["every_task", "the_rest"])
def test_whole_runs_record_what_they_did(covering):
    """Every task with one command line; the other command lines in `make test-all`."""
    commands = list(dict.fromkeys(map(command_of, net.load(net.RUNS))))
    tasks = [frozenset(word for word in own.split() if word.startswith("task=")) for own in commands]
    some = {commands[index] for index in choose_covering(tasks)}
    check(net.RUNS, net.compute_runs, adapter.execute, lambda cell: (command_of(cell) in some) == covering)


def test_every_method_allocator_and_codec_has_a_cell():
    cells = [adapter.DEFAULTS | net.parse(cell) for cell in net.load(net.CELLS)]
    for group in adapter.GROUPS:
        assert {cell[group] for cell in cells} == set(adapter.list_names(group))


def test_a_difference_is_named_and_a_rounding_is_not():
    before = net.load(net.CELLS)
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
