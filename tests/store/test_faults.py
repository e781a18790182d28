"""A system call that fails ends a sweep in one line, and the same command then makes what an undisturbed one makes."""

import pytest

from tests.support.faults import assert_unharmed, run_faults


def test_a_failing_system_call_harms_nothing(tmp_path):
    """A case for each kind of call, and another write, with made-up records."""
    for case in run_faults(tmp_path, 8, seed=0):
        assert_unharmed(case)


@pytest.mark.full
@pytest.mark.parametrize("real", [False, True])
def test_no_failing_system_call_harms_anything(real, tmp_path, checkpoint):
    task = ("task.subtasks=[niah_single_1]", "task.length=512", "task.samples=2")
    sweep = ("-m", "method=snapkv,knorm", "budget=0.3", "model=hf", f"model.path={checkpoint}", "device=cpu", *task)
    cases = run_faults(tmp_path, 100, 1, *(sweep if real else ()))
    assert len(cases) == 100 and any(case["code"] for case in cases) and not all(case["code"] for case in cases)
    for case in cases:
        assert_unharmed(case)
