"""The parts of `kvbench dev measured`: what they run, and which stores they refuse."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.analysis.power import compute_reach
from kvbench.config.compose import compose, list_choices
from kvbench.config.planned_pairs import count_pairs, parse_settings
from kvbench.config.study_parts import StudyPart, choose_study_parts, quote, read_study
from kvbench.runs.spec import SharedParts
from kvbench.sweeps.part_store import check_store, collect_runs, describe_return, list_values
from kvbench.sweeps.plan import describe_run, expand_sweep
from kvbench.sweeps.power_table import list_protocols
from kvbench.validation import SettingError
from tests.support.made_up_runs import VALUE, write_run
from tests.support.report_store import make_records
from tests.support.selection import choose_quick

GPU = {"type": "cuda", "dtype": "bfloat16", "gpu": "NVIDIA H200", "torch": "2.11.0"}


PLANNED_METHODS, PLANNED_CODECS = 28, 10  # when the study was planned
OTHER_MODELS = re.compile(r"^model=smollm2(_long)?$")


@pytest.mark.parametrize("name", choose_quick(sorted(read_study()), "presets"))
def test_no_cell_of_a_tier_is_refused(name, tmp_path):
    """Here with the embedded model, because SmolLM2 must be downloaded."""
    part, shared = read_study()[name], SharedParts()
    for path, command in part.list_files(tmp_path).items():
        assert command[:1] == ["calibrate"] and path.parent == tmp_path / "files"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert part.list_files(tmp_path) == {}
    cells = [cell for sweep in part.list_sweeps(tmp_path) for cell in expand_sweep(sweep)]
    assert len(set(map(tuple, cells))) == len(cells)
    different = {tuple(own for own in cell if not own.startswith(("budget=", "question="))): cell for cell in cells}
    for cell in different.values():
        composition = compose([OTHER_MODELS.sub("model=reference", text) for text in cell])
        config = composition.config
        assert config.results == str(tmp_path) and config.fidelity
        assert config.dtype == "bfloat16" or len(name) == 1
        parts = config.method, config.codec, config.method.get("base_args", {})
        if not any(str(own.get("path") or "").startswith(str(tmp_path)) for own in parts):  # made from the model
            run, _ = describe_run(composition, shared)
            run.choice()


def read_parts() -> dict[str, list[str]]:
    """Return part of the study -> what docs/statistics.md says of its answers and its power."""
    text = (Path(__file__).parents[2] / "docs" / "statistics.md").read_text(encoding="utf-8")
    lines = text.split("| part | answers |")[1].split("\n\n")[0].splitlines()[2:]
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: stated for name, *stated in rows}


@pytest.mark.parametrize("name", choose_quick(read_parts(), "confirmation", "turns", "ledgers"))
def test_the_page_states_what_a_part_of_the_study_can_tell(name, tmp_path):
    part = read_study()[name]
    assert part.title and part.question.endswith("?") and part.rate
    protocols, unknown = list_protocols(cell for sweep in part.list_sweeps(tmp_path) for cell in expand_sweep(sweep))
    compared = count_pairs(part.pairs, [cell for planned in protocols for cell in planned.cells])
    assert not unknown and len(compared) == (len(protocols) if part.pairs else 0)
    answers, together = sum(planned.answers for planned in protocols), sum(compared.values())
    pair, joint = (
        max(compute_reach(40.0, planned.samples, count) for planned in protocols) for count in (1, together or 1)
    )
    assert read_parts()[name] == [f"{answers:,}", f"{pair:.1f}", f"{together}", f"{joint:.1f}" if together else ""]


def test_every_part_is_on_the_page():
    assert list(read_study()) == list(read_parts())


def test_all_methods_and_codecs_of_the_plan_are_screened(tmp_path):
    """All that kvbench had, but for transformers' own quantised cache, whose packages it does not require. One that is
    added later is no part of the study.
    """
    part = read_study()["screening"]
    cells = [parse_settings(cell) for sweep in part.list_sweeps(tmp_path) for cell in expand_sweep(sweep)]
    methods, codecs = {cell["method"] for cell in cells}, {cell.get("codec", "raw") for cell in cells}
    assert methods <= {*list_choices("method")} and len(methods) == PLANNED_METHODS
    assert codecs <= {*list_choices("codec")} - {"hf_quantized"} and len(codecs) == PLANNED_CODECS
    assert {cell["question"] for cell in cells} == {"visible", "hidden"}
    assert [parse_settings(line)["question"] for line in part.list_sweeps(tmp_path)].index("hidden") > 14


def test_the_visible_question_comes_first_with_all_its_budgets(tmp_path):
    """Budgets that ran in sweeps of their own would read the same prompts again."""
    for name in ("screening", "confirmation", "untuned", "embedded", "presets"):
        part = read_study()[name]
        first = [parse_settings(cell) for line in part.list_stages(tmp_path)[0] for cell in expand_sweep(line)]
        again = {cell["method"] for cell in first if cell["budget"] == "0.2"}
        every = [parse_settings(cell) for line in part.list_sweeps(tmp_path) for cell in expand_sweep(line)]
        evicting = [cell for cell in every if cell["method"] in again and "codec" not in cell]
        assert {cell["question"] for cell in first} == {"visible"} and first[0]["budget"] == "0.2"
        budgets = {cell["budget"] for cell in evicting if len(cell["budget"]) < 5}  # 0.281 is that of int4's bytes
        assert len(budgets) > 1 and budgets == {cell["budget"] for cell in first}


def test_lines_of_a_sweep_run_together():
    part = StudyPart("x", "x", ["a=1", {"b=2": ["c=3", "c=4"], "b=5": ["c=6"]}], common="d=7")
    results = f"results={quote(Path('r'))}"
    assert part.list_stages(Path("r")) == [
        [["d=7", "a=1", results]],
        [["d=7", "b=2", "c=3", results], ["d=7", "b=2", "c=4", results], ["d=7", "b=5", "c=6", results]],
    ]


def test_files_of_a_sweep_are_in_the_folder_of_results(tmp_path):
    part = StudyPart("x", "x", ["codec.path=FILES/one,FILES/two codec.bits=null,4"])
    [cells] = map(expand_sweep, part.list_sweeps(tmp_path / "a b"))
    assert len(cells) == 4
    assert {path for cell in cells for path in cell if path.startswith("codec.path=")} == {
        f"codec.path='{tmp_path}/a b/files/{name}'" for name in ("one", "two")
    }


def test_a_tier_knows_the_files_of_its_methods_and_codecs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("files/one", "files/unused", "kept", "data"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    part = StudyPart("x", "x", ["codec.path=FILES/one,FILES/missing", "method.base_args.path=kept"], "task.path=data")
    assert part.find_files(tmp_path) == {tmp_path / "files" / "one", Path("kept")}


def test_tiers_are_chosen_by_name():
    assert [part.name for part in choose_study_parts(["turns", "seeds", "turns"])] == ["turns", "seeds"]
    with pytest.raises(SettingError, match="part=nosuch: choose one of screening, confirmation, longer"):
        choose_study_parts(["nosuch"])


@pytest.mark.parametrize(
    ("there", "said", "code"),
    [
        (
            {"device": GPU | {"gpu": "NVIDIA A100"}},
            "made on NVIDIA A100, bfloat16, torch 2.11.0, and this is NVIDIA H200",
            "git 0123",
        ),
        (
            {"device": GPU | {"torch": "2.9.0"}},
            "torch 2.9.0, and this is NVIDIA H200, bfloat16, torch 2.11.0; go on there",
            "git 0123",
        ),
        ({"device": GPU, "sources": "other"}, "than this; undo the uncommitted changes that", "git 4567"),
        (
            {"device": GPU, "sources": "other"},
            "made by git 0123, whose code may give other results than this; `git checkout 0123` first to go on with "
            "them, or give another folder with --results to begin anew",
            "git 0123",
        ),
    ],
)
def test_a_store_with_runs_of_the_tier_from_elsewhere_is_refused(there, said, code, tmp_path, monkeypatch):
    here = VALUE | {"device": GPU}
    monkeypatch.setattr("kvbench.sweeps.part_store.find_revision", lambda: "git 4567 dirty")
    run = write_run(tmp_path, make_records(0.5, 50), machine={"code": code}, **VALUE | there)
    with pytest.raises(SettingError, match=re.escape(said)) as error:
        check_store("a", {"0": here}, tmp_path)
    assert f"1 run of part a ({run.hash})" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        (["git 0123abcd"], "`git checkout 0123abcd` first to go on with them"),
        (["git 89ab"], "undo the uncommitted changes that `git status` shows to go on with them"),
        (["git 0123abcd dirty"], "bring that code back to go on with them"),
        (["git 0123abcd", "git 4567"], "bring that code back to go on with them"),
        (["version 0.2.0"], "install kvbench 0.2.0 to go on with them"),
        ([], "bring that code back to go on with them"),
    ],
)
def test_a_refused_store_says_how_to_go_on(codes, said):
    assert describe_return(codes, "git 89ab dirty") == said


def test_a_store_of_this_commit_without_changes_has_other_sources():
    assert describe_return(["git 89ab"], "git 89ab") == "`git checkout 89ab` first to go on with them"


def test_other_runs_of_a_store_do_not_matter(tmp_path):
    here = VALUE | {"device": GPU}
    own = write_run(tmp_path, make_records(0.5, 50), **here)
    write_run(tmp_path, make_records(0.5, 50), **here | {"budget": 0.3, "sources": "other"})
    check_store("a", {own.hash: here}, tmp_path)
    check_store("a", {own.hash: here}, tmp_path / "empty")


def test_runs_of_another_machine_are_collected(tmp_path):
    """Planned on a CPU: each cell has other settings of the device there, and perhaps other sources."""
    planned = {name: VALUE | {"method": {"name": name}, "sources": f"s-{name}"} for name in ("snapkv", "knorm")}
    elsewhere = {"device": GPU, "sources": "old"}
    made = [write_run(tmp_path, {}, machine={"code": "git 0123"}, **planned[name] | elsewhere) for name in planned]
    write_run(tmp_path, {}, **VALUE | elsewhere | {"budget": 0.3})  # of no cell
    assert {run.hash for run in collect_runs("a", planned, tmp_path)} == {run.hash for run in made}
    with pytest.raises(SettingError, match="the folder contains no run of part b"):
        collect_runs("b", {"0": VALUE | {"budget": 0.7}}, tmp_path)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            {"device": GPU | {"gpu": "NVIDIA A100"}},
            {"device": GPU},
            "were made by several machines .* by NVIDIA A100, .* by NVIDIA H200, .*; move those of all but one",
        ),
        (
            {"sources": "old", "machine": {"code": "git 0"}},
            {"machine": {"code": "git 1"}},
            "were made by several states of the code .* by git 0, .* by git 1",
        ),
        (
            {"sources": "old", "machine": {"code": "git 0"}, "method": {"name": "knorm"}},
            {"machine": {"code": "git 0"}},
            "are runs of one cell of part a; move all but one away",
        ),
    ],
)
def test_runs_of_several_origins_are_not_collected(one, other, said, tmp_path):
    snapkv, knorm = VALUE, VALUE | {"method": {"name": "knorm"}}
    write_run(tmp_path, {}, **snapkv | one)
    write_run(tmp_path, {}, **knorm | other)
    with pytest.raises(SettingError, match=said) as error:
        collect_runs("a", {"0": snapkv, "1": knorm}, tmp_path)
    assert "\n" not in str(error.value)


def test_revisions_may_differ_if_the_code_gives_the_same_results(tmp_path):
    knorm = VALUE | {"method": {"name": "knorm"}}
    for at, value in enumerate((VALUE, knorm)):
        write_run(tmp_path, {}, machine={"code": f"git {at}"}, **value)
    assert len(collect_runs("a", {"0": VALUE, "1": knorm}, tmp_path)) == 2


def test_runs_of_sweeps_include_the_full_cache():
    baseline = SimpleNamespace(value=VALUE | {"method": {"name": "full"}})
    run = SimpleNamespace(value=VALUE | {"budget": 0.5}, baseline=lambda: baseline)
    cells = [SimpleNamespace(run=run), SimpleNamespace(run=None)]
    found = list_values([SimpleNamespace(cells=cells)])
    assert [value["method"]["name"] for value in found.values()] == ["full", "snapkv"]
