"""The command line refuses what it cannot use in one line, before torch is imported, and says what would be right."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvbench.config import catalogue, compose
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.repository import ROOT

LONG = "x" * 300
REFUSED = {
    "budget=abc": "budget=abc: a fraction in (0, 1]",
    "budget_of=context": "budget_of=context: choose one of prompt, seen",
    "block_size=0": "block_size=0: a whole number",
    "temperature=-1": "temperature=-1: a number from 0",
    "question=x": "question=x: choose one of visible, hidden",
    "method=nosuch": "method=nosuch: choose one that kvbench run --help lists\n",
    "method=snapv": "method=snapv: did you mean snapkv? kvbench run --help lists all\n",
    "-m method=SnapKV,knorm": "method=SnapKV: did you mean snapkv? kvbench run --help lists all\n",
    "method=[snapkv]": "method=[snapkv]: choose one that kvbench run --help lists\n",
    "codec=kvi": "codec=kvi: did you mean kivi? kvbench run --help lists all\n",
    "allocator=null": "allocator=null: choose one of ada, cake, pyramid, uniform\n",
    "task=longbnech": "task=longbnech: did you mean longbench? kvbench run --help lists all\n",
    "model=referense": "model=referense: did you mean reference or reference_v2? kvbench run --help lists all\n",
    "nosuch=1": "nosuch: no such setting; choose one that kvbench run --cfg job lists\n",
    "bugdet=0.1": "bugdet: no such setting; did you mean budget? kvbench run --cfg job lists all\n",
    "methd=snapkv": "methd: no such setting; did you mean method? ",
    "method.windw=4": "method.windw: no such setting; did you mean window? Choose one of decoding, ",
    "seed.x=1": "seed.x: no such setting; seed is given as a whole\n",
    "device=[cpu]": "device=[cpu]: choose one of auto, cpu, cuda\n",
    "task.cache=3": "task.cache=3: a path, or null\n",
    "method.presets=3": "method.presets=3: presets belong into the file\n",
    "row=dropkv_snap": "row=dropkv_snap: did you mean dropkv_snapkv or ",
    "device=xyz": "device=xyz: choose one of auto, cpu, cuda",
    "dtype=int8": "dtype=int8: choose one of auto, float32",
    "workers=0": "workers=0: a whole number",
    "method.preset=nosuch": "method.preset=nosuch: choose one of paper",
    "method.name=knorm": "method.name=knorm: must be dropkv, as its file conf/method/dropkv.yaml",
    "task.subtasks=nosuch": "task.subtasks=nosuch: choose one of",
    "task.haystack_path=/nowhere": "task.haystack_path=/nowhere: ",
    "model=hf": "model.path=null: model=hf needs a local folder or a hub id",
    "model.path=/tmp": "model.path=/tmp: model=reference has its own; add model=hf",
    "model.thinking=maybe": "model.thinking=maybe: choose one of null, on, off",
    "task.system=": "task.system=: a text, or null",
    "task=efficiency task.system=brief": "task.system=brief: task=efficiency reads random tokens; null",
    "results=null": "results=null: a folder that can be written",
    "results=": "results=: a folder that can be written",
    "hydra/launcher=slurm": "hydra/launcher=slurm: needs -m, which makes each cell a job",
    "preset=dropkv_table5": "preset=dropkv_table5: is a sweep",
    "-m results=": "results=: a folder that can be written",
    f"-m results=/tmp/{LONG}": f"results=/tmp/{LONG}: File name too long",
    "-m budget=abc method=snapkv,knorm": "budget=abc: a fraction in (0, 1]",
    "-m question=x": "question=x: choose one of visible, hidden",
    "task.path=/data/a=b": "task.path=/data/a=b: cannot be read; ",
    "task.path=/data/é": "task.path=/data/é: cannot be read; ",
}


def run_all(commands: Iterable[str], folder: Path, project: Path) -> dict[str, list]:
    """Exit code, output, errors and whether torch was imported until then, of each, in a process of their own."""
    code = (
        "import io, json, shlex, sys\nfrom contextlib import redirect_stderr, redirect_stdout\nimport run\nfound = {}\n"
        "for given in json.load(sys.stdin):\n    sys.argv = ['run.py', *shlex.split(given)]\n"
        "    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:\n"
        "        try:\n            code = run.run_command(run.main)\n"
        "        except SystemExit as stop:\n            code = stop.code\n"
        "    heavy = [name for name in ('torch', 'transformers') if name in sys.modules]\n"
        "    found[given] = code, out.getvalue(), err.getvalue(), heavy\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(list(commands)), capture_output=True, text=True, cwd=folder,
        env={"PYTHONPATH": str(project), "PATH": ""}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory) -> dict[str, list]:
    folder = tmp_path_factory.mktemp("refusals")
    found = run_all(REFUSED, folder, ROOT)
    assert list(folder.iterdir()) == []
    return found


@pytest.mark.parametrize("given", REFUSED)
def test_a_refusal_is_one_line_and_imports_no_torch(refusals, given):
    code, out, err, heavy = refusals[given]
    assert (code, out, heavy) == (2, "", [])
    assert err.startswith(f"kvbench: {REFUSED[given]}") and err.count("\n") == 1, err


def test_results_are_no_link_that_leads_nowhere(monkeypatch, capsys, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    line = f"results={tmp_path}/link: a folder that can be written"
    found = run_cli(["-m", f"results={tmp_path}/link", "limit=1"], monkeypatch, capsys)
    assert found[:2] == (2, "") and line in found[2] and not (tmp_path / "nowhere").exists()


def test_a_path_that_is_too_long_is_one_line(tmp_path, monkeypatch, capsys):
    line = f"results={tmp_path}/{LONG}: File name too long"
    assert_refused(run_cli([f"results={tmp_path}/{LONG}", "limit=1"], monkeypatch, capsys), line, tmp_path)


def test_jobs_are_refused_where_there_is_no_slurm(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    given = ["-m", "hydra/launcher=slurm", "method=snapkv,knorm", f"results={tmp_path}", "limit=1"]
    assert_refused(
        run_cli(given, monkeypatch, capsys), "hydra/launcher=slurm: no sbatch and no srun on PATH; ", tmp_path
    )


@pytest.mark.parametrize(
    "path", ["/data/a=b", "/data/a[0]", "/data/{a", "/data/a(1)", "/data/it's", '/data/"a"', "/data/é", "/data/a\\'b"]
)
def test_the_line_says_how_a_path_is_quoted(path):
    """What it says reaches the setting as it was meant, through the shell and through Hydra."""
    line = catalogue.explain_quoting(f"task.path={path}")
    assert line.startswith(f"task.path={path}: cannot be read; ") and "\n" not in line
    [typed] = shlex.split(line.partition("for Hydra and for the shell: ")[2])
    [override] = OverridesParser.create().parse_overrides([typed])
    assert (override.key_or_group, override.value()) == ("task.path", path)


def test_what_was_quoted_wrongly_gets_an_example():
    assert catalogue.explain_quoting('task.path="/data').endswith("for the shell: 'task.path=\"/data/a=b\"'")


FILES = {
    "broken": (
        "method",
        "name: x\nwindow: [1",
        "method={0}: conf/method/{0}.yaml line 2 is not valid YAML (expected ',' or ']'",
    ),
    "twice": (
        "method",
        "name: x\nname: x",
        "method={0}: conf/method/{0}.yaml line 2 is not valid YAML (found duplicate key name)",
    ),
    "empty": ("method", "", "method={0}: conf/method/{0}.yaml has no settings; it needs at least name: {0}"),
    "list": ("method", "- a", "method={0}: conf/method/{0}.yaml has no settings; it needs at least name: {0}"),
    "no_class": (
        "method",
        "name: no_class",
        "method={0}: conf/method/{0}.yaml has no _target_, a class such as kvbench.",
    ),
    "of_method": ("method", None, "method.name=snapkv: must be {0}, as its file conf/method/{0}.yaml"),
    "of_allocator": ("allocator", None, "allocator.name=ada: must be {0}, as its file conf/allocator/{0}.yaml"),
    "of_codec": ("codec", None, "codec.name=kivi: must be {0}, as its file conf/codec/{0}.yaml"),
    "of_task": ("task", None, "task.name=niah: must be {0}, as its file conf/task/{0}.yaml"),
    "of_model": ("model", None, "model.name=hf: must be {0}, as its file conf/model/{0}.yaml"),
    "of_logger": ("logger", None, "logger.name=wandb: must be {0}, as its file conf/logger/{0}.yaml"),
}
COPIED = {"method": "snapkv", "allocator": "ada", "codec": "kivi", "task": "niah", "model": "hf", "logger": "wandb"}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A copy of conf/ with each file of FILES, named after the case."""
    conf = shutil.copytree(ROOT / "conf", tmp_path_factory.mktemp("project") / "conf")
    for case, (group, text, _) in FILES.items():
        folder = conf / group
        (folder / f"{case}.yaml").write_text((folder / f"{COPIED[group]}.yaml").read_text() if text is None else text)
    return conf


@pytest.mark.parametrize("sweep", [[], ["-m"]], ids=["run", "sweep"])
@pytest.mark.parametrize("case", FILES)
def test_a_file_of_conf_that_cannot_be_used_is_one_line(files, case, sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compose, "CONF", files)
    monkeypatch.chdir(tmp_path)
    given = [*sweep, f"{FILES[case][0]}={case}"]
    assert_refused(run_cli(given, monkeypatch, capsys), FILES[case][2].format(case), tmp_path)


@pytest.mark.parametrize(
    ("text", "line"),
    [("", "no settings"), ("- a", "no settings"), ("a: [", "line 1 is not valid YAML"), ("name: y", "no _target_")],
)
def test_so_it_is_from_python(tmp_path, monkeypatch, text, line):
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    monkeypatch.setattr(compose, "CONF", tmp_path / "conf")
    (tmp_path / "conf" / "method" / "x.yaml").write_text(text)
    with pytest.raises(SettingError, match=f"^method=x: conf/method/x.yaml .*{line}"):
        catalogue.load_settings("method", "x")
