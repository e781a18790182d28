"""Whole runs through the command line: bad input, records, baselines, resume after SIGKILL, two processes, README."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch
import yaml

from kvbench.cli import run as command
from kvbench.cli.command import run_command
from kvbench.config.compose import compose_config
from kvbench.engine.generation import GenerationContext
from kvbench.interfaces.layout import Layout
from kvbench.interfaces.task import Sample
from kvbench.methods.snapkv import SnapKV
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.model_kinds import name_checkpoint
from kvbench.runs.responder import Responder
from kvbench.runs.spec import RunSpec
from kvbench.store.run_folder import RunFolder
from tests.support.checkpoints import write_checkpoint
from tests.support.command_line import assert_refused, run_cli
from tests.support.recorded_runs import TIMES, read_runs
from tests.support.repository import ROOT
from tests.support.selection import only_in_full

QUICK = ("task.subtasks=[niah_single_1,niah_multivalue]", "task.length=512", "task.samples=2")


def test_a_run_asks_its_method_about_the_model_once_and_before_weights(checkpoint, monkeypatch):
    asked: list[Layout] = []
    monkeypatch.setattr(SnapKV, "check", lambda method, layout: asked.append(layout))
    run = RunSpec.from_config(compose_config([f"model.path={checkpoint}", "model=hf", "method=snapkv", "device=cpu"]))
    assert asked == [run.checkpoint.layout()]
    model = run.checkpoint.weights(torch.float32, "cpu")
    for seed in range(2):
        GenerationContext(model, run.choice(), run.budget, None, (seed,))
    assert len(asked) == 1
    other = replace(run, dtype="bfloat16")  # not checked, so its first context asks
    GenerationContext(model, other.choice(), run.budget, None, (0,))
    assert len(asked) == 2


BAD = {  # beside those of tests/cli/test_refusals.py, which are refused before torch is imported
    "allocator=foo": "allocator=foo: choose one of ada",
    "model=foo": "model=foo: choose one that kvbench run --help lists",
    "codec=foo": "codec=foo: choose one that kvbench run --help lists",
    "budget=0": "budget=0: a fraction in (0, 1]",
    "budget=1": "budget=1: ambiguous, write 1.0",
    "budget=-0.5": "budget=-0.5: a fraction",
    "budget=nan": "budget=nan: a fraction",
    "budget=1.5": "budget=1.5: a fraction",
    "budget=many": "budget=many: a fraction",
    "budget=true": "budget=True: a fraction",
    "block_size=1.5": "block_size=1.5: a whole number",
    "limit=0": "limit=0: a whole number of at least 1",
    "seed=-1": "seed=-1: a whole number",
    "max_batch=0": "max_batch=0: a whole number",
    "method=null": "method=null: choose one that kvbench run --help lists",
    "results=/proc/nowhere": "results=/proc/nowhere: No such file or directory",
    "model.compile=on": "model.compile=on: choose one of auto, off",
    "top_p=0": "top_p=0: a share in (0, 1]",
    "method.window=0": "method.window=0: a whole number of at least 1",
    "method.nothing=1": "method.nothing: no such setting",
    "task.length=20000": "task.length=20000: ",
    "task.length=512": "task.length=512: at least 831 for ruler_vt, 885 for ruler_cwe, 732 for ruler_qa_hotpot ",
    "task.qa_path=/nowhere": "task.qa_path=/nowhere",
    "model.path=/nowhere": "model.path=/nowhere: no such folder",
}


@pytest.mark.parametrize("setting", BAD)
def test_a_bad_setting_is_one_line_and_leaves_nothing(kvbench, tmp_path, monkeypatch, setting):
    monkeypatch.setattr("kvbench.models.checkpoint.Checkpoint.weights", lambda *_: pytest.fail("weights were loaded"))
    assert_refused(kvbench(setting), BAD[setting], tmp_path)


def test_settings_that_only_fail_together(kvbench, tmp_path, monkeypatch):
    code, _, err = kvbench("method=centroidkv", "allocator=ada")
    assert code == 2 and "allocator=ada: centroidkv has no scores" in err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = kvbench("device=cuda")
    assert code == 2 and "device=cuda: there is no CUDA device here" in err
    assert list(tmp_path.iterdir()) == []


def test_a_reading_beyond_what_the_model_takes_is_refused(kvbench, checkpoint, tmp_path):
    """Where there is one: what keeps all of the prompt reads nothing about it."""
    small = shutil.copytree(checkpoint, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 600}))
    long = (f"model.path={small}", "method=kvzip", "task.subtasks=niah_single_1", "task.length=560", "task.samples=1")
    code, _, err = kvbench(*long, "budget=0.5")
    assert code == 2 and re.search(r"kvzip lets the model read \d+ more about them; it takes 600: a smaller", err)
    assert kvbench(*long, "budget=1.0")[0] == kvbench(*long, "budget=0.5", "method.chunk=50")[0] == 0


def test_an_unsupported_architecture_is_refused(kvbench, tmp_path):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    code, _, err = kvbench(f"model.path={tmp_path}/gpt2")
    assert (
        code == 2 and "architecture gpt2 is not supported: its decoder has no modules named layers (GPT2Model)" in err
    )


def test_a_checkpoint_is_called_by_its_name(checkpoint, kvbench, tmp_path, monkeypatch):
    """In the table and in the records; the weights are what a run is known by. Settings are printed as typed."""
    given = ("method=knorm", "budget=0.25", "task.subtasks=niah_single_1", "task.length=512", "task.samples=1")
    cached = tmp_path / "models--owner--my-llama" / "snapshots" / "0a1b2c"
    cached.parent.mkdir(parents=True)
    shutil.copytree(checkpoint, cached)
    code, out, _ = kvbench(*given, f"model.path={cached}")
    heading = out.splitlines()
    assert code == 0 and heading[0] == "model: my-llama" and "block_size: null" in heading
    values = [yaml.safe_load(path.read_text())["value"] for path in tmp_path.glob("results/runs/*/run.yaml")]
    names = {"name": "my-llama", "identity": Checkpoint("x", str(checkpoint)).identity()}
    assert [own["model"] for own in values] == [names, names]
    monkeypatch.chdir(cached)
    assert [name_checkpoint(path) for path in (".", f"{checkpoint}/", "owner/name", "owner/name/")] == [
        "my-llama", checkpoint.name, "name", "name"
    ]  # fmt: skip


def test_cfg_job_shows_the_preset_resolved(kvbench):
    code, out, _ = kvbench("method=snapkv", "method.preset=kvpress", "method.kernel=9", "--cfg", "job")
    shown = yaml.safe_load(out)
    assert code == 0 and shown["method"]["window"] == 64 and shown["method"]["kernel"] == 9


@pytest.mark.parametrize("question", ["hidden", only_in_full("visible")])
def test_a_run_writes_one_record_a_sample_and_its_baseline(kvbench, tmp_path, question):
    code, out, err = kvbench("method=snapkv", "budget=0.25", f"question={question}", *QUICK)
    assert code == 0, err
    assert "niah_single_1" in out and "average" in out
    found = read_runs(tmp_path / "results")
    assert set(found) == {"full", "snapkv"}
    for name, (folder, records) in found.items():
        assert (folder / "done").exists() and (folder / "machine.json").exists()
        assert len({record["uid"] for record in records}) == len(records) == 4
        for record in records:
            cut = record["tokens_in"] if question == "visible" else record["tokens_context"]
            share = 1 if name == "full" else (int(0.25 * cut) + record["tokens_in"] - cut) / record["tokens_in"]
            assert record["resident_bytes"] / record["full_bytes"] == pytest.approx(share, abs=1e-12)
            assert record["rows_held"] == pytest.approx(share * record["tokens_in"])
            assert record["metadata_bytes"] <= 0.032 * record["resident_bytes"]  # 4 bytes a row of 2·32 floats
            assert record["error"] is None and record["stop"] in ("eos", "length")
            assert record["peak_rows_attended"] >= record["rows_attended"] > 0
            assert record["budget"] == (1.0 if name == "full" else 0.25)
    pairs = zip(*(sorted(records, key=lambda r: r["uid"]) for _, records in found.values()), strict=True)
    assert all(a["prompt_hash"] == b["prompt_hash"] and a["target_hash"] == b["target_hash"] for a, b in pairs)


def test_one_baseline_serves_all_and_a_finished_run_is_not_run_again(kvbench, tmp_path, monkeypatch):
    one = ("task.subtasks=niah_single_1", "task.length=512", "task.samples=1")
    assert kvbench("method=knorm", "budget=0.25", *one)[0] == 0
    first = {path: path.read_bytes() for path in (tmp_path / "results" / "runs").rglob("records*")}
    assert kvbench("method=knorm", "budget=64", "block_size=100", "allocator=ada", *one)[0] == 0
    assert len(list((tmp_path / "results" / "runs").iterdir())) == 3  # one full, two knorm
    monkeypatch.setattr("kvbench.models.checkpoint.Checkpoint.weights", lambda *_: pytest.fail("weights were loaded"))
    code, out, _ = kvbench("method=knorm", "budget=2.5e-1", *one)
    assert code == 0 and "average" in out
    assert all(path.read_bytes() == text for path, text in first.items())


@pytest.mark.parametrize(
    "changes",
    [
        ({}, {"method.window": 9}, {"temperature": 0.5}),
        only_in_full(({"seed": 1}, {"method.window": 9}, {"task.length": 250}, {"temperature": 0.5}, {"limit": 1})),
    ],
    ids=len,
)
def test_a_change_of_a_setting_never_reuses_records(kvbench, tmp_path, changes):
    plain = {
        "method": "snapkv",
        "budget": 0.25,
        "task.subtasks": "niah_single_1",
        "task.length": 256,
        "task.samples": 1,
    }
    for change in changes:
        before = len(list((tmp_path / "results" / "runs").glob("*"))) if (tmp_path / "results").exists() else 0
        assert kvbench(*(f"{name}={value}" for name, value in (plain | change).items()))[0] == 0
        assert len(list((tmp_path / "results" / "runs").glob("*"))) > before


def test_records_do_not_depend_on_order_or_company(kvbench, tmp_path):
    """Law 4 and 7: the same records but for times, whether a sample is alone, first or last."""
    size = ("task.length=512", "task.samples=2")  # of one length: on a CPU none is read with another
    kvbench("method=snapkv", "budget=0.25", "results=a", "task.subtasks=[niah_single_1,niah_multivalue]", *size)
    kvbench("method=snapkv", "budget=0.25", "results=b", "task.subtasks=[niah_multivalue,niah_single_1]", *size)
    kvbench("method=snapkv", "budget=0.25", "results=c", "task.subtasks=niah_multivalue", "task.length=512", "limit=1")

    def plain(name: str) -> dict[str, dict]:
        records = read_runs(tmp_path / name)["snapkv"][1]
        return {r["uid"]: {k: v for k, v in r.items() if k not in TIMES | {"index"}} for r in records}

    a, b, c = plain("a"), plain("b"), plain("c")
    assert a == b and c.items() <= a.items() and len(c) == 1


def test_out_of_memory_is_a_record_and_the_run_goes_on(kvbench, tmp_path, monkeypatch):
    real, calls = GenerationContext.prefill, []

    def prefill(self, ids):
        calls.append(ids.shape[1])
        if len(calls) == 3:  # after the warm-up and one sample
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(self, ids)

    monkeypatch.setattr(GenerationContext, "prefill", prefill)
    code, out, _ = kvbench("method=full", *QUICK)
    records = read_runs(tmp_path / "results")["full"][1]
    assert code == 0 and [r["error"] for r in records].count("out_of_memory") == 1 and len(records) == 4
    assert "out_of_memory" in out


def test_a_batch_that_does_not_fit_is_freed_before_its_samples_are_read_alone(monkeypatch):
    held = []

    class Large:
        pass

    def measure(self, batch):
        context = Large()
        assert not any(other() for other in held)
        held.append(weakref.ref(context))
        if len(batch) > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return [{"error": "alone"}]
        yield  # a session

    monkeypatch.setattr(Responder, "_measure", measure)
    monkeypatch.setattr(
        Responder, "make_records", lambda self, batch, found, seconds: [found[0] | {"uid": batch[0][0].uid}]
    )
    samples = [Sample(uid, "", "", "", "", (), 1) for uid in "ab"]
    records = Responder.answer(Responder.__new__(Responder), [(sample, None) for sample in samples])
    assert [(record["uid"], record["error"]) for record in records] == [("a", "alone"), ("b", "alone")]


def test_a_sweep_says_and_records_what_it_refuses(kvbench, tmp_path):
    """Cells: centroidkv with uniform and ada, knorm with both; the second is refused and the others run."""
    cells = ("method=centroidkv,knorm", "allocator=uniform,ada", "budget=0.25", "sweep.share_prefill=false")
    code, out, err = kvbench(*cells, *QUICK, "task.samples=1", "-m", "--verbose")
    reason = "allocator=ada: centroidkv has no scores to share rows by; use allocator=uniform"
    assert code == 2 and "Traceback" not in err and len(re.findall("^method: ", out, re.MULTILINE)) == 3
    first = err[: err.index("knorm:")].splitlines()
    said = [line for line in first if line.endswith(reason)]  # at once, not when all is over
    assert said and all(word in said[0] for word in ("kvbench: ", "method=centroidkv", "budget=0.25"))
    (sweep,) = (tmp_path / "results" / "sweeps").iterdir()
    files = {str(path.relative_to(sweep)): path.read_text() for path in sweep.rglob("refused")}
    assert files == {"1/refused": f"{reason}\n"}
    assert len(list((tmp_path / "results" / "runs").glob("*/done"))) == 4  # one full cache, three cells


def process(checkpoint: Path, folder: Path, *settings: str, errors: int = subprocess.DEVNULL) -> subprocess.Popen:
    """The command line as a user starts it."""
    where = [f"model.path={checkpoint}", f"results={folder}/results", "device=cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, str(ROOT / "run.py"), "model=hf", *where, *settings]
    return subprocess.Popen(arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)


def run_forked(folder: Path, arguments: Sequence[str]) -> None:
    """The main function of a copy of this process, which has imported everything already."""
    os.chdir(folder)
    sys.argv[1:] = arguments
    sys.exit(run_command(command.main))


def forked(checkpoint: Path, folder: Path, *settings: str) -> ForkProcess:
    """The command line in a copy of this process: it starts at once, where a new one takes six seconds of CPU."""
    arguments = ["model=hf", f"model.path={checkpoint}", f"results={folder}/results", "device=cpu", *settings]
    copy = get_context("fork").Process(target=run_forked, args=(folder, arguments))
    copy.start()
    return copy


def is_alive(one: subprocess.Popen | ForkProcess) -> bool:
    return one.poll() is None if isinstance(one, subprocess.Popen) else one.is_alive()


@pytest.mark.parametrize(("start", "samples", "kills"), [(forked, 2, [5]), only_in_full(process, 6, [2, 9, 17])])
def test_killed_at_any_moment_it_continues_and_equals_an_undisturbed_run(
    checkpoint, kvbench, tmp_path, start, samples, kills
):
    settings = ("method=snapkv", "budget=0.25", *QUICK, f"task.samples={samples}")
    (tmp_path / "killed").mkdir()
    records = tmp_path / "killed" / "results" / "runs"
    for enough in kills:  # lines on the disk at which the run is killed
        victim = start(checkpoint, tmp_path / "killed", *settings)
        while is_alive(victim) and sum(p.read_bytes().count(b"\n") for p in records.rglob("records*")) < enough:
            time.sleep(0.01)
        victim.kill()
        victim.communicate() if isinstance(victim, subprocess.Popen) else victim.join()
    for folder in ("killed", "whole"):
        code, out, _ = kvbench(*settings, f"results={tmp_path / folder / 'results'}")
        assert code == 0 and "average" in out
    one, other = (read_runs(tmp_path / name / "results") for name in ("whole", "killed"))
    for name in ("full", "snapkv"):
        assert len(one[name][1]) == len(other[name][1]) == 2 * samples
        strip = [{r["uid"]: {k: v for k, v in r.items() if k not in TIMES} for r in x[name][1]} for x in (one, other)]
        assert strip[0] == strip[1]


@pytest.mark.full
def test_two_processes_share_one_run(checkpoint, tmp_path):
    settings = (
        "method=knorm",
        "budget=0.25",
        "task.subtasks=[niah_single_1,niah_multivalue]",
        "task.length=1024",
        "task.samples=5",
    )
    both = [process(checkpoint, tmp_path, *settings) for _ in range(2)]
    assert all("average" in each.communicate()[0] and each.returncode == 0 for each in both)
    for _, records in read_runs(tmp_path / "results").values():
        assert len(records) == len({record["uid"] for record in records}) == 10


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Path:
    """A checkpoint whose answers are as long as a task allows, so that a worker leaves samples to the other one."""
    folder = tmp_path_factory.mktemp("endless")
    write_checkpoint(folder, stops=False)
    return folder


def leave_samples_to_the_other(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let forks of this process wait with their first record until another one has one too."""
    append, parent = RunFolder.append, os.getpid()

    def append_together(self, record):
        if os.getpid() != parent:
            (folder / f"{self.path.name} {os.getpid()}").touch()
            wait(lambda: len(list(folder.glob(f"{self.path.name} *"))) == 2)
        append(self, record)

    monkeypatch.setattr(RunFolder, "append", append_together)


@pytest.mark.parametrize(
    ("how", "model", "most"), [("fork", "checkpoint", 2), only_in_full("forkserver", "endless", 3)]
)
def test_workers_share_one_run_without_loss_or_doubling(request, tmp_path, monkeypatch, capfd, how, model, most):
    """Each answers what a run alone answers, which stops after a sample a subtask."""
    monkeypatch.chdir(tmp_path)
    if how == "fork":
        monkeypatch.setattr("kvbench.runs.workers.start_fork_server", partial(get_context, how))
        leave_samples_to_the_other(monkeypatch, tmp_path)
    else:
        forkserver._forkserver._stop()  # one that an earlier test has started writes to that test's stderr
    path = request.getfixturevalue(model)
    given = ("model=hf", f"model.path={path}", "device=cpu", "method=knorm", "budget=0.25", *QUICK)
    for samples, own in ((1, ("results=alone",)), (most, ("results=shared", "workers=2"))):
        code, out, err = run_cli([*given, f"task.samples={samples}", *own], monkeypatch, capfd)
        assert code == 0 and "average" in out
        if how == "forkserver":
            err = re.sub(r"time of a worker: .*\n", "", err.replace("\r", "\n"))
            # one bar, whoever works: one is closed, however often and from where on it was drawn
            assert len(re.findall(r"knorm: [^\n]*\n(?:\n|\Z)", err)) == 1
            assert re.search(rf"knorm: 100%.*\| {2 * samples}/{2 * samples} \[", err)  # what all of them have done
    alone, shared = read_runs(tmp_path / "alone"), read_runs(tmp_path / "shared")
    for name, (folder, records) in shared.items():
        assert len(list(folder.glob("records*.jsonl"))) == 2  # each wrote some
        outputs = {record["uid"]: record["output"] for record in records}
        assert len(records) == len(outputs) == 2 * most
        assert outputs.items() >= {(record["uid"], record["output"]) for record in alone[name][1]}


@pytest.mark.full
def test_workers_end_with_their_parent(endless, tmp_path):
    victim = process(endless, tmp_path, "method=knorm", "budget=0.25", *QUICK, "task.samples=50", "workers=2")

    def descendants(number: int) -> list[int]:
        found = [int(own) for own in Path(f"/proc/{number}/task/{number}/children").read_text().split()]
        return [other for own in found for other in (own, *descendants(own))]

    def runs_still(number: int) -> bool:
        with suppress(FileNotFoundError):
            return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    wait(lambda: len(descendants(victim.pid)) >= 4)  # workers, what they are forked from, and multiprocessing's tracker
    found = descendants(victim.pid)
    victim.send_signal(signal.SIGTERM)
    victim.communicate(timeout=60)
    wait(lambda: not any(map(runs_still, found)))


def wait(until: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.full
def test_what_workers_cannot_use_is_said_once(checkpoint, tmp_path):
    (tmp_path / "results").touch()
    found = process(checkpoint, tmp_path, "method=knorm", *QUICK, "workers=2", errors=subprocess.PIPE)
    _, said = found.communicate()
    assert found.returncode == 2 and said.startswith("kvbench: results=") and said.count("\n") == 1, said


@pytest.mark.full
def test_readme_shows_a_method_that_runs(checkpoint, tmp_path):
    """The example is followed to the letter in a copy of the project."""
    copy = tmp_path / "copy"
    skip = shutil.ignore_patterns(
        ".venv", ".git", ".versions", "results", "tests", "__pycache__", ".*cache", ".hypothesis"
    )
    shutil.copytree(ROOT, copy, ignore=skip)
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```(?:python|yaml)\n# ((?:methods|conf)/\S+)\n(.*?)```", readme, re.DOTALL)
    assert len(blocks) == 2
    for path, text in blocks:
        (copy / path).write_text(text)
        assert len(text.splitlines()) <= 12
    where = [f"model.path={checkpoint}", "device=cpu", "limit=1", "task.subtasks=niah_single_1", "task.length=1024"]
    done = subprocess.run(
        [sys.executable, "run.py", "method=newest", "budget=0.5", "model=hf", *where],
        cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "method: newest" in done.stdout and re.search(r"(49.9|50.0)%", done.stdout)
