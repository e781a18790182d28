"""Planning a sweep: what it reads, and what it can do without."""

import re
import subprocess
import sys

import pytest

from kvbench.cli import plan
from kvbench.config.compose import compose
from kvbench.config.imports import sources_unchanging
from kvbench.runs.spec import SharedParts
from kvbench.sweeps import plan as plan_module
from kvbench.sweeps.plan import import_for_workers, plan_cell
from tests.support.repository import ROOT

SWEEP = ["task.subtasks=niah_single_1", "task.samples=1", "task.length=512"]
WITHOUT = """
import sys
from kvbench.cli.command import run_command
from kvbench.cli.run import main
code = run_command(lambda: main(sys.argv[1:]))
print("imported:", *({"torch", "transformers"} & set(sys.modules)))
sys.exit(code)
"""


@pytest.mark.full
def test_a_finished_sweep_is_answered_without_torch(kvbench, checkpoint, tmp_path):
    """Its records were checked when they were made; a cell that is not done is checked with torch."""
    axes = ["-m", "method=snapkv", "budget=0.5,0.7", *SWEEP]
    assert kvbench(*axes)[0] == 0
    where = ["model=hf", f"model.path={checkpoint}", "device=cpu", f"results={tmp_path / 'results'}"]

    def again(*more: str) -> list[str]:
        command = [sys.executable, "-c", WITHOUT, *where, *axes, *more]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return found.stdout.splitlines()

    first, *_, last = again()
    assert first == "2 cells: 2 done" and last == "imported:"


@pytest.fixture
def starts(monkeypatch):
    """How often the process that workers are forked from was asked for; it does not start."""
    found = []
    monkeypatch.setattr(plan_module, "start_fork_server", lambda: found.append("started"))
    return found


@pytest.mark.parametrize(
    ("settings", "built", "count"),
    [
        ("workers=2", False, 1),  # when the cell is known to need it
        ("workers=2", True, 2),  # before torch is asked for a GPU, too
        ("workers=2 device=cpu", True, 1),
        ("workers=1", True, 0),
        ("workers=auto", True, 0),  # there is no GPU
        ("hydra/launcher=local", True, 0),
        ("workers=2 block_size=0", True, 0),  # refused
        ("workers=2 task=efficiency", True, 0),
    ],
)
def test_imports_of_workers_begin_where_there_will_be_some(settings, built, count, starts, monkeypatch):
    monkeypatch.setattr(plan_module, "is_built_for_gpus", lambda: built)
    monkeypatch.setattr("kvbench.runs.devices.has_gpu", lambda: False)
    given = [*settings.split(), *([] if "task=" in settings else SWEEP)]
    plan_cell(given, executes=True)
    assert len(starts) == count
    plan_cell(given)
    assert len(starts) == count


@pytest.mark.parametrize(
    ("settings", "gpus", "count"),
    [("hydra/launcher=local", 2, 1), ("hydra/launcher=local", 1, 0), ("", 2, 0), ("workers=auto", 2, 1)],
)
def test_imports_of_workers_begin_if_there_are_several_gpus(settings, gpus, count, starts, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    import_for_workers(compose(settings.split()), "cuda")
    assert len(starts) == count


def test_a_cell_that_is_done_needs_no_workers(kvbench, checkpoint, tmp_path, starts):
    settings = ["model=hf", f"model.path={checkpoint}", "device=cpu", "method=snapkv", "budget=0.5", *SWEEP]
    assert kvbench(*settings[3:])[0] == 0
    results = tmp_path / "results"
    plan_cell([*settings, f"results={results}", "workers=2"], results=results, executes=True)
    assert starts == []


def test_a_done_cell_is_described_and_another_one_is_checked(kvbench, checkpoint, tmp_path):
    """`is_done` looks for the records of both runs: removing the full cache's makes the cell unfinished."""
    settings = ["model=hf", f"model.path={checkpoint}", "device=cpu", "method=snapkv", "budget=0.5", *SWEEP]
    assert kvbench(*settings[3:])[0] == 0
    results = tmp_path / "results"
    settings.append(f"results={results}")
    assert plan_cell(settings, results=results).cell.readings == []
    own, full = (results / "runs" / name for name in plan_cell(settings).cell.names)
    (full / "done").unlink()
    assert len(plan_cell(settings, results=results).cell.readings) == 2
    assert kvbench("-m", *settings[3:])[1].startswith("1 cells: 1 stopped")
    assert kvbench("-m", *settings[3:])[1].startswith("1 cells: 1 done")
    [path] = own.glob("records*.jsonl")
    path.write_text("")  # a record was lost
    assert len(plan_cell(settings, results=results).cell.readings) == 2
    before = {path: path.read_bytes() for path in own.iterdir()}
    code, out, err = kvbench("-m", *[text.replace("=snapkv", "=snapkv,knorm") for text in settings[3:]])
    assert code == 1 and out.startswith("2 cells: 1 failed, 1 missing") and out.endswith("1 done, 1 failed\n")
    [said] = [line for line in err.splitlines() if line.startswith("kvbench: ") and "damaged" in line]
    assert f"{own} is damaged: {path.name} has another checksum than done says" in said
    assert {path: path.read_bytes() for path in own.iterdir()} == before


def test_the_command_says_what_a_sweep_would_do(kvbench, checkpoint, tmp_path, capsys):
    """It lists the cells with their states and runs nothing; a refused cell gives exit code 2."""
    where = ["model=hf", f"model.path={checkpoint}", "device=cpu", *SWEEP]
    assert kvbench("method=snapkv", "budget=0.5", *SWEEP)[0] == 0
    before = sorted(tmp_path.rglob("*"))
    assert plan.main([*where, "method=snapkv,knorm", "budget=0.5"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("2 cells: 1 done, 1 missing; about ") and len(out) == 4
    memory = (
        r"model=\S+, prompts of at most 512 tokens: \d+\.\d\d GB for weights and full cache; this machine .* \(cpu\)"
    )
    assert re.fullmatch(memory, out[3])
    assert out[1].split() == ["method=snapkv", "done"] and out[2].split()[:2] == ["method=knorm", "missing,"]
    capsys.readouterr()
    assert plan.main(["-m", *where, "method=snapkv,knorm", "budget=0.5"]) == 0  # as kvbench run takes it
    assert plan.main([*where, "method=snapkv,kvzip", "budget=0.5", "block_size=128"]) == 2
    assert "refused: block_size=128: kvzip" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert plan.main(["budgets=0.5"]) == 2 and capsys.readouterr().err.startswith("kvbench: budgets: no such setting")


def test_a_sweep_prints_a_line_or_a_table_for_each_cell(kvbench):
    """Both end with the matrix, which the same command prints again once all cells are done."""
    axes = ["-m", "method=snapkv,knorm", "budget=0.5", *SWEEP]
    _, short, _ = kvbench(*axes)
    _, again, _ = kvbench(*axes)
    assert short.count("lost/gained") == 0 and short.count("[1 of 2] method=snapkv: score ") == 1
    assert again.startswith("2 cells: 2 done\n") and again.partition("\n")[2] in short
    _, long, _ = kvbench(*axes, "--verbose", "results=long")
    assert kvbench("-m", "method=h2o", "budget=0.5", *SWEEP)[1].count("lost/gained") >= 1
    assert long.count("lost/gained") >= 2 and "[1 of 2]" not in long and "cannot be told from it" in long


def test_cells_share_the_checkpoint_and_the_full_cache(checkpoint):
    shared = SharedParts()
    settings = ["model=hf", f"model.path={checkpoint}", "device=cpu", "method=snapkv", *SWEEP]
    with sources_unchanging():
        one, other = (plan_cell([*settings, f"budget={own}"], shared=shared).run for own in (0.1, 0.2))
        assert one.checkpoint is other.checkpoint and one.baseline() is other.baseline()
        assert one.value == plan_cell([*settings, "budget=0.1"]).run.value
        assert one.baseline().value == plan_cell([*settings, "method=full"]).run.value


def test_sweeps_that_begin_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    """Also sweeps that measure cost, which list no cells. A folder that the user names is used again."""
    monkeypatch.setattr(plan_module.Sweep, "finished", False)
    monkeypatch.setattr(plan_module.Sweep, "counted", False)
    composition = compose([f"results={tmp_path}"])
    first = tmp_path / "sweeps" / "now"
    for is_given, name in ((False, "now"), (False, "now-2"), (False, "now-3"), (True, "now")):
        sweep = plan_module.Sweep(composition, [], tmp_path, first, is_given)
        sweep.announce(80, False)
        assert sweep.folder == first.with_name(name) and sweep.folder.is_dir()
    given = ["method=snapkv", "budget=0.5", f"results={tmp_path}"]
    assert not plan_module.Sweep.plan(given).is_folder_given
    assert plan_module.Sweep.plan([*given, f"hydra.sweep.dir={first}"]).is_folder_given
