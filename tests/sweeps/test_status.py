"""What a sweep says before it begins and while it runs."""

import fcntl
import json
import subprocess
import sys

import pytest

from kvbench.cli import sweep_cells, sweep_status
from kvbench.store.run_folder import RunFolder, make_seal, read_run_value
from kvbench.sweeps import status
from kvbench.validation import SettingError
from tests.support.command_line import run_cli
from tests.support.made_up_runs import VALUE
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

QUICK = ["task.subtasks=niah_single_1", "task.samples=2", "task.length=512"]


def value(method="snapkv", **own):
    groups = {"method": {"name": method}, "allocator": {"name": "uniform"}, "codec": {"name": "raw"}}
    common = {"model": {"name": "reference"}, "task": {"name": "ruler", "length": 2048}, "device": {"type": "cpu"}}
    return VALUE | groups | common | {"budget": 0.1, "block_size": None} | own


def begun(results, own, records, total=4, finish=False, **more):
    """A run with some records; its hash."""
    with RunFolder(results / "runs", own).open({}, total) as folder:
        for index in range(records):
            assert folder.claim(str(index))
            core = {"uid": str(index), "prompt_hash": "p", "target_hash": "t", "score": None, "error": None}
            folder.append(core | {"seconds": 30.0} | more)
        if finish:
            folder.finish(map(str, range(records)))
    return folder.hash


def test_states(tmp_path):
    assert status.read_state(tmp_path, "nothing") == status.RunState("missing")
    done = begun(tmp_path, value(), 4, finish=True)
    assert status.read_state(tmp_path, done) == status.RunState("done", 4, 4)
    stopped = begun(tmp_path, value(budget=0.2), 3)
    assert str(status.read_state(tmp_path, stopped)) == "stopped 3 of 4 samples"
    failed = begun(tmp_path, value(budget=0.3), 2, total=2, finish=True, error="out_of_memory")
    assert str(status.read_state(tmp_path, failed)) == "done: 2 samples failed"


def test_running_is_seen_without_taking_part(tmp_path):
    """Another process holds one sample's byte; looking neither takes nor frees a lock."""
    name = begun(tmp_path, value(), 1)
    code = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'r+')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX, 1, 77)\nprint(flush=True)\nsys.stdin.readline()"
    )
    locks = tmp_path / "runs" / name / "claims.lock"
    arguments = [sys.executable, "-c", code, str(locks)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        assert str(status.read_state(tmp_path, name)) == "running 1 of 4 samples"
        with open(locks, "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 78)
            with pytest.raises(OSError):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 77)
        other.communicate("\n")
    assert status.read_state(tmp_path, name).name == "stopped"


def test_a_run_that_is_open_is_running_between_two_samples_too(tmp_path):
    """As where a prompt is read for many runs, and each writes its record in its turn."""
    name = begun(tmp_path, value(), 1)
    code = (
        "import json, sys\nfrom pathlib import Path\nfrom kvbench.store.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1]), json.loads(sys.argv[2])).open({}):\n"
        "    print(flush=True)\n    sys.stdin.readline()"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "runs"), json.dumps(value())]
    with subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        assert str(status.read_state(tmp_path, name)) == "running 1 of 4 samples"
        with RunFolder(tmp_path / "runs", value()).open({}) as second:
            assert second.claim("niah/9")
        other.communicate("\n")
    assert status.read_state(tmp_path, name).name == "stopped"


def test_the_plan_counts_and_estimates(tmp_path):
    """Half a minute a sample: of the method where it ran, else of others on the same task."""
    full = value("full", budget=1.0)
    begun(tmp_path, full, 4, finish=True)
    begun(tmp_path, value(), 2, seconds=60.0)
    cells = [
        status.SweepCell("method=snapkv budget=0.1", value(), full),
        status.SweepCell("method=snapkv budget=0.2", value(budget=0.2), full),
        status.SweepCell("method=keydiff", value("keydiff"), full),
        status.SweepCell("method=full", full, full),
        status.SweepCell("method=kvzip", refused="block_size=8: not with kvzip"),
        status.SweepCell("length", value(task={"name": "ruler", "length": 9}), full),
    ]
    text = status.describe_plan(tmp_path, cells, status.read_planned_states(tmp_path, cells)).splitlines()
    assert text[0] == (
        "6 cells: 1 done, 1 stopped, 1 refused, 3 missing; about 0.13 hours are left on one worker; 1 runs have no "
        "measured time to go by"
    )
    minutes = [line.partition("about ")[2] for line in text[1:]]
    assert minutes == ["2.0 min", "4.0 min", "2.0 min", "", "", ""]
    assert text[5].endswith("refused: block_size=8: not with kvzip")


def test_the_plan_counts_a_full_cache_that_is_not_begun_once(tmp_path):
    """It takes the time that its own samples took in other runs; a cell that is the full cache is no second one."""
    others = [value("full", budget=1.0, seed=own) for own in (0, 1)]
    begun(tmp_path, others[0], 4, finish=True, seconds=15.0)
    begun(tmp_path, value(seed=1), 2, seconds=60.0)
    cells = [status.SweepCell(f"budget={own}", value(budget=own, seed=1), others[1]) for own in (0.2, 0.3)]
    states = status.read_planned_states(tmp_path, cells)
    *_, last = status.describe_plan(tmp_path, cells, states).splitlines()
    assert last.split("  ")[1] == "full cache, which these are compared with (1)" and last.endswith(
        "to do, about 1.0 min"
    )
    cells.append(status.SweepCell("method=full", others[1], others[1]))
    states = status.read_planned_states(tmp_path, cells)
    assert "which these are compared with" not in status.describe_plan(tmp_path, cells, states)


def test_damaged_runs_say_nothing_of_times(tmp_path):
    begun(tmp_path, value(), 2)
    known = status.SampleTimes(tmp_path)
    begun(tmp_path, {"method": {"name": "snapkv"}}, 2)
    begun(tmp_path, value(budget=0.2), 2, total="many", seconds="long")
    begun(tmp_path, value(budget=0.3), 2, seconds=30.0, prefill_ms="short")
    assert vars(status.SampleTimes(tmp_path)) == vars(known) and known.seconds


def test_a_gpu_that_was_shared_says_nothing_of_times(tmp_path):
    begun(tmp_path, value(), 2, gpu_processes=4)
    assert not any(status.SampleTimes(tmp_path).seconds.values())


def test_a_cell_waits_for_its_full_cache(tmp_path, monkeypatch):
    full, folder = value("full", budget=1.0), tmp_path / "sweeps" / "one"
    cells = [status.SweepCell("answered", value(), full), status.SweepCell("not begun", value(budget=0.2), full)]
    status.write_cells(folder, cells)

    def states() -> list[str]:
        found = [str(state) for _, state in status.read_states(tmp_path, folder)]
        told = status.describe_plan(tmp_path, cells, status.read_planned_states(tmp_path, cells)).splitlines()[1:3]
        assert all(own in line for own, line in zip(found, told, strict=True))
        return found

    begun(tmp_path, value(), 4, finish=True)
    assert states() == ["missing", "missing"]
    name = begun(tmp_path, full, 3)
    assert states() == ["stopped 3 of 4 samples", "missing"]
    with monkeypatch.context() as patched:
        patched.setattr(status, "is_busy", lambda locks: True)
        assert states() == 2 * ["running 3 of 4 samples"]
    done = tmp_path / "runs" / name / "done"
    done.write_text(json.dumps(make_seal("0123")))  # one more than there are
    assert states() == ["failed: damaged: done does not fit the 3 records in the folder", "missing"]
    done.write_text(json.dumps(make_seal("012")))
    assert states() == ["done", "missing"]


def test_status_says_why(tmp_path):
    full, folder = value("full", budget=1.0), tmp_path / "sweeps" / "one"
    cells = [
        status.SweepCell("done", value(), full), status.SweepCell("failed", value(budget=0.2), full),
        status.SweepCell("stopped", value(budget=0.3), full), status.SweepCell("missing", value(budget=0.4), full),
        status.SweepCell("refused", refused="why not"),
    ]  # fmt: skip
    status.write_cells(folder, cells)
    begun(tmp_path, value(), 4, finish=True)
    begun(tmp_path, full, 4, finish=True)
    begun(tmp_path, value(budget=0.3), 1)
    (folder / "1").mkdir()
    (folder / "1" / "failed").write_text("RuntimeError: the disk is full\n")
    assert {label: str(state) for label, state in status.read_states(tmp_path, folder)} == {
        "done": "done", "failed": "failed: RuntimeError: the disk is full", "stopped": "stopped 1 of 4 samples",
        "missing": "missing", "refused": "refused: why not",
    }  # fmt: skip
    assert status.find_newest(tmp_path) == folder
    with pytest.raises(SettingError, match="^results=.*: no sweep was begun there$"):
        status.find_newest(tmp_path / "other")
    with pytest.raises(SettingError, match="^sweep=.*: no cells.json there$"):
        list(status.read_states(tmp_path, tmp_path))


def test_a_sweep_from_the_command_line(kvbench, tmp_path):
    arguments = ["-m", "method=sink,kvzip", "block_size=128", "budget=0.2", f"results={tmp_path}", *QUICK]
    code, out, err = kvbench(*arguments)
    assert code == 2 and "Traceback" not in err
    first, *rest = out.splitlines()
    assert first == "2 cells: 1 refused, 1 missing; 2 runs have no measured time to go by"
    assert rest.pop(2).split() == ["full", "cache,", "which", "these", "are", "compared", "with", "(1)", "to", "do"]
    assert rest[0].split() == ["method=sink", "missing"] and rest[1].split()[:2] == ["method=kvzip", "refused:"]
    assert rest[2].startswith("[1 of 2] method=sink: score ") and rest[2].endswith(", n = 2")
    assert rest[-1] == "1 done, 1 refused" and rest[-2].split()[:2] == ["method=kvzip", "refused:"]
    assert [line.split()[0] for line in rest if line.startswith(("sink ", "full cache "))] == ["sink", "full"]
    again = kvbench(*arguments)[1].splitlines()
    assert again[0] == "2 cells: 1 done, 1 refused"
    code, out, err = kvbench("-m", "method=sink,kvzip", "budgets=0.1,0.2")
    assert (code, out) == (2, "") and err.startswith("kvbench: budgets: no such setting")
    assert (
        sweep_status.main(["--results", str(tmp_path)]) == 0
        and sweep_status.main(["--results", str(tmp_path / "nowhere")]) == 2
    )
    assert len(json.loads((status.find_newest(tmp_path) / "cells.json").read_text())) == 2


def test_what_is_refused_is_named_before_anything_is_read(tmp_path, monkeypatch, capsys):
    """Where cells share their prompts too, each pair that cannot work, with its reason."""
    monkeypatch.setattr(sweep_cells, "run_sweep_cell", lambda *own: None)
    cells = ["method=knorm,quest", "allocator=uniform,ada", "codec=raw,kivi"]
    code, out, err = run_cli(["-m", *cells, f"results={tmp_path}", *QUICK], monkeypatch, capsys)
    first, *lines = out.splitlines()[:9]
    refused = {tuple(line.split()[:3]): line.partition("refused: ")[2] for line in lines if "refused: " in line}
    assert (code, "kvbench:" in err) == (2, False) and first.startswith("8 cells: 4 refused, 4 missing"), out + err
    assert len(refused) == 4, out
    assert all(reason.startswith(("allocator=ada: quest", "codec=kivi: knorm")) for reason in refused.values()), refused


@pytest.mark.full
@pytest.mark.parametrize(
    ("preset", "own", "budget"),
    [
        ("centroidkv_table4", ["row=full,centroidkv_centroidkv", "task.subtasks=[trec]", "budget=0.3"], 0.3),
        only_in_full("centroidkv_table4", ["row=full,centroidkv_centroidkv", "task.subtasks=[qasper]"], 0.25),
        only_in_full(
            "keydiff_table4",
            ["row=keydiff_keydiff_20_recent", "budget=1024", "task.max_new_tokens=8", "task.repeats=1"],
            1024,
        ),
    ],
)
def test_a_preset_runs_with_the_embedded_model(preset, own, budget, tmp_path, monkeypatch, capsys):
    """What is given takes the place of the preset's own axis, in the plan and in the runs."""
    given = [f"preset={preset}", "model=reference", "task.path=miniature", "limit=1", *own, f"results={tmp_path}"]
    code, out, _ = run_cli(["-m", *given], monkeypatch, capsys)
    labels = ["method=centroidkv", "method=full"] if preset == "centroidkv_table4" else ["(one cell)"]
    first, *plan = out.splitlines()
    assert code == 0 and first.startswith(f"{len(labels)} cells: {len(labels)} missing")
    assert [line.partition("  ")[0] for line in map(str.strip, plan[: len(labels)])] == labels
    assert out.endswith(f"{len(labels)} done\n")
    values = [read_run_value(path.parent) for path in tmp_path.glob("runs/*/run.yaml")]
    assert {own["model"]["name"] for own in values} == {"reference"} and len(values) == 2
    assert {own["budget"] for own in values} == {1.0, budget}


def test_no_job_is_queued_for_a_sweep_that_is_done(kvbench, tmp_path):
    """There is no SLURM here: to ask for a job would fail. A refused cell has its exit code as it has without jobs."""
    own = ["-m", "method=full", f"results={tmp_path}", *QUICK]
    kvbench(*own)
    code, out, err = kvbench(*own, "hydra/launcher=slurm")
    assert (code, err) == (0, "") and out.startswith("1 cells: 1 done\n") and "full cache" in out
    own += ["block_size=null,0", "hydra/launcher=slurm"]
    code, out, err = kvbench(*own)
    assert (code, err) == (2, "") and out.startswith("2 cells: 1 done, 1 refused\n") and "block_size=0" in out


def test_launchers(kvbench, monkeypatch):
    for launcher, said in (("slurm", "array_parallelism: 32"), ("local", "BasicLauncher")):
        code, out, _ = kvbench(f"hydra/launcher={launcher}", "--cfg", "all")
        assert code == 0 and said in out
    asked = []
    monkeypatch.setattr("kvbench.cli.sweep_cells.count_workers", lambda workers, device: asked.append(workers) or 1)
    for own in ([], ["workers=1"]):
        kvbench("-m", "hydra/launcher=local", "method=full", f"results=r{len(own)}", *QUICK, *own)
    kvbench("method=full", "results=r0", *QUICK)
    assert asked == ["auto", 1, 1]
