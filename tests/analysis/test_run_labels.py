"""Names of runs."""

import pytest

from kvbench.analysis.run_labels import describe_protocol
from tests.support.made_up_runs import write_run


@pytest.mark.parametrize("length, expected", [(2048, ["length 2048"]), (None, [])])
def test_a_length_is_named_if_the_task_has_one(length, expected, tmp_path):
    run = write_run(tmp_path, {}, task={"name": "scbench", "length": length})
    assert describe_protocol(run, [run]) == expected
