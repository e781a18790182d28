"""All cells of the net, computed again; see README.md here."""

import pytest
from replay import adapter, net


def check(path, compute, make) -> None:
    """Fail with at most `net.LINES` lines on the cells that differ from those in `path`."""
    others, before = net.other_versions(), net.load(path)
    changed = net.compare(before, compute(before, make), net.CLOSE if others is None else net.ELSEWHERE)
    if changed:
        head = f"{len(changed)} of {len(before)} cells differ{f' ({others})' if others else ''}:"
        pytest.fail("\n".join([head, *net.report(changed, net.LINES - 1)]), pytrace=False)


def test_the_engine_computes_what_it_did():
    check(net.CELLS, net.compute_cells, adapter.play)


def test_whole_runs_record_what_they_did():
    check(net.RUNS, net.compute_runs, adapter.execute)
