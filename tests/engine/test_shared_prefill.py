"""One prefill for several contexts, runs and cells: their records are those of each alone."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import yaml

from kvbench.cache.policy import CachePolicy
from kvbench.cache.refusals import find_refusal
from kvbench.config.catalogue import list_choices
from kvbench.config.compose import compose_config
from kvbench.engine import shared_prefill
from kvbench.engine.cuts_in_turn import ContextFailed
from kvbench.engine.generation import GenerationContext
from kvbench.engine.sampling import Sampling
from kvbench.interfaces.allocator import Allocator
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.method import Method
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.configuration import load_layout, read_config_layout
from kvbench.runs import shared_runs
from kvbench.runs.resources import Resources
from kvbench.runs.responder import Responder
from kvbench.runs.runner import execute_run, execute_runs
from kvbench.runs.spec import RunSpec
from kvbench.runs.workers import Workers
from kvbench.store.run_folder import run_hash
from kvbench.sweeps import status
from kvbench.sweeps.plan import plan_cell
from kvbench.validation import ContractError, SettingError
from tests.support.command_line import run_cli
from tests.support.method_files import build_policy
from tests.support.palu_files import draw_palu
from tests.support.recorded_runs import read_records, strip_circumstances
from tests.support.selection import choose_covering, only_in_full
from tests.support.tiny_models import ids, tiny

BUDGETS = (0.2, 24, 1.0)


@cache
def choices(lse: bool) -> dict[tuple[str, str, str], CachePolicy]:
    """Whatever can take part on a tiny model: every method with every allocator, and every codec with the plain one."""
    found = {}
    for method in list_choices("method"):
        pairs = [(name, "raw") for name in list_choices("allocator")] + [("uniform", "kivi")]
        for allocator, codec in pairs:
            own = CachePolicy(*build_policy(method, allocator, "llama", codec))
            if (
                not (find_refusal(own.method, own.allocator, own.codec) or own.method.needs_extra_reads)
                and ("lse" in own.method.wants) == lse
            ):
                found[method, allocator, codec] = own
    return found


def choose_some(found: dict[tuple[str, str, str], CachePolicy]) -> list[CachePolicy]:
    """As few as hold every method, every allocator and every codec."""
    chosen = choose_covering([frozenset(enumerate(names)) for names in found])
    return [own for place, own in enumerate(found.values()) if place in chosen]


def facts(context: GenerationContext) -> dict:
    """All that is held after the prompt, and the answer."""
    found = {"bytes": str(context.bytes()), "peak": context.memory.peak}
    for layer in context.own_layers:
        rows, at = layer.rows.view(), layer.index
        found |= {f"{name}{at}": getattr(rows, name) for name in ("keys", "values", "places", "mass")}
        found |= {f"column {name}{at}": column for name, column in rows.columns.items()}
        found |= {
            f"{name}{at}": getattr(layer.tally, name)
            for name in ("protected", "given_up", "peak_rows", "peak_attended")
        }
    with context.branch():
        context.reserve(9)
        found["reserved"] = str(context.bytes())
        found["answer"] = torch.stack(list(context.generate(4, Sampling(), frozenset())))
        found |= {"logits": context.logits, "attended": [layer.attended for layer in context.own_layers]}
    return found


@pytest.mark.parametrize("choose", [choose_some, only_in_full(dict.values)], ids=["some", "all"])
@pytest.mark.parametrize(("lse", "part"), [(False, slice(0, None, 2)), (False, slice(1, None, 2)), (True, slice(None))])
def test_every_context_holds_and_answers_as_if_it_were_alone(lse, part, choose):
    taken = list(choose(choices(lse)))[part]
    own = [(choice, BUDGETS[i % 3] if choice.method.name != "full" else 1.0) for i, choice in enumerate(taken)]
    some, prompt = (
        lambda: [GenerationContext(tiny("llama"), c, Budget(b), None, (7,), 2, answer=9) for c, b in own],
        ids(48),
    )
    shared = some()
    milliseconds = shared_prefill.prefill(shared, prompt)
    assert len(milliseconds) == len(own) > 3 and min(milliseconds) > 0
    for alone, context in zip(some(), shared, strict=True):
        alone.prefill(prompt)
        expected, found = facts(alone), facts(context)
        wrong = [name for name in expected if not equal(expected[name], found.get(name))]
        assert expected.keys() == found.keys() and not wrong, (alone.choice, alone.budget, wrong)


def equal(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_rows_before_the_cut_are_written_once():
    plain = [
        GenerationContext(tiny("llama"), c, Budget(1.0), None, (7,), answer=4)
        for c in list(choices(False).values())[:4]
    ]
    shared_prefill.prefill(plain, ids(50))
    for layers in zip(*(context.own_layers for context in plain), strict=True):
        assert len({layer.rows.tail_keys.data_ptr() for layer in layers}) == 1


@pytest.fixture(scope="module")
def small(checkpoint) -> tuple[str, ...]:
    """Settings of a run of two samples."""
    task = ("task.subtasks=niah_single_1", "task.length=256", "task.samples=2")
    return ("model=hf", f"model.path={checkpoint}", "device=cpu", *task)


@pytest.fixture(scope="module")
def run_of(small) -> Callable[..., RunSpec]:
    return cache(lambda *settings: RunSpec.from_config(compose_config([*small, *settings])))


@pytest.fixture(scope="module")
def company(run_of) -> list[RunSpec]:
    """A full cache and three cells that go together."""
    own = [run_of(f"method={name}", "budget=0.2") for name in ("snapkv", "quest", "sink")]
    return [own[0].baseline(), *own]


@pytest.fixture
def runs(company) -> list[RunSpec]:
    return list(company)


@pytest.fixture(scope="module")
def bench(run_of):
    return Resources(run_of("method=full"))


@pytest.fixture(scope="module")
def alone(bench, company, tmp_path_factory):
    """The records of runs, each made alone, once."""
    results = tmp_path_factory.mktemp("alone")
    for run in company:
        execute_run(run, results, bench)
    return lambda runs: [strip_circumstances(execute_run(run, results, bench)) for run in runs]


def shares(folder) -> list[int]:
    return sorted(record["shared_prefill"] for record in folder.records().values())


def test_records_are_those_of_lone_runs_and_say_who_shared(runs, bench, alone, tmp_path):
    folders = execute_runs(runs, tmp_path, bench)
    assert [strip_circumstances(folder.records()) for folder in folders] == alone(runs)
    assert all(folder.finished and shares(folder) == [4, 4] for folder in folders)
    for record in folders[1].records().values():
        assert record["seconds"] > record["prefill_ms"] / 1000 > 0 and record["ttft_ms"] > record["prefill_ms"]


def test_runs_that_lack_a_sample_go_on_with_it_together(runs, bench, alone, tmp_path):
    first = execute_runs(runs[:2], tmp_path, bench)
    [lines] = first[1].path.glob("records*")
    lines.write_text(lines.read_text().splitlines(keepends=True)[0] + '{"uid": "torn')  # killed at the second
    (first[1].path / "done").unlink()
    folders = execute_runs(runs, tmp_path, bench)
    assert [strip_circumstances(folder.records()) for folder in folders] == alone(runs)
    assert [shares(folder) for folder in folders] == [[2, 2], [2, 3], [2, 3], [2, 3]]


def test_a_killed_process_loses_the_sample_in_flight_at_most(runs, bench, alone, tmp_path, monkeypatch):
    attempt, calls = Responder.attempt, []

    def killed(self, batch):
        calls.append(self)
        if len(calls) == 7:  # of the second sample two records are written
            raise KeyboardInterrupt
        return attempt(self, batch)

    monkeypatch.setattr(Responder, "attempt", killed)
    with pytest.raises(KeyboardInterrupt):
        execute_runs(runs, tmp_path, bench)
    written = [len(path.read_text().splitlines()) for path in tmp_path.rglob("records*")]
    assert sum(written) == 6
    assert [strip_circumstances(folder.records()) for folder in execute_runs(runs, tmp_path, bench)] == alone(runs)


@pytest.mark.parametrize("when", ["reading", "answering"])
def test_what_does_not_fit_beside_each_other_goes_in_smaller_companies(
    when, runs, bench, alone, tmp_path, monkeypatch, capsys
):
    real, attempt = shared_runs.prefill, Responder.attempt

    def prefill(contexts, ids):
        if len(contexts) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(contexts, ids)

    def full(self, batch):
        return None if self.shared > 2 and self.run.groups["method"]["name"] == "quest" else attempt(self, batch)

    if when == "reading":
        monkeypatch.setattr(shared_runs, "prefill", prefill)
    else:
        monkeypatch.setattr(Responder, "attempt", full)
    folders = execute_runs(runs, tmp_path, bench)
    assert [strip_circumstances(folder.records()) for folder in folders] == alone(runs)
    assert "kvbench: no memory for 4 runs at once: 2 from now on" in capsys.readouterr().err
    before = [2] * 4 if when == "reading" else [4, 4, 2, 2]
    assert [shares(folder) for folder in folders] == [sorted([own, 2]) for own in before]


@pytest.mark.parametrize("where", ["score", "generate"])
def test_a_run_that_fails_is_left_to_its_own_cell(where, runs, bench, alone, tmp_path, monkeypatch, capsys):
    broken = type(runs[1].choice().method)
    if where == "score":
        monkeypatch.setattr(broken, "score", lambda *_: [][0])
    else:
        speak = Responder._generate_answers
        name = lambda self: self.run.groups["method"]["name"]  # noqa: E731
        monkeypatch.setattr(
            Responder, "_generate_answers", lambda self, *own: [][0] if name(self) == "snapkv" else speak(self, *own)
        )
    folders = execute_runs(runs, tmp_path, bench)
    others = [0, 2, 3]
    said = capsys.readouterr().err
    assert where == "score" or (
        "kvbench: method=snapkv allocator=uniform codec=raw budget=0.2 is left to its own cell: IndexError" in said
    )  # what breaks a method's contract is said by its own cell
    assert not folders[1].records() and all(folders[index].finished for index in others)
    with pytest.raises(ContractError if where == "score" else IndexError):
        execute_run(runs[1], tmp_path, bench)
    monkeypatch.undo()
    assert [strip_circumstances(folders[index].records()) for index in others] == alone(
        [runs[index] for index in others]
    )


@pytest.mark.parametrize(
    ("kind", "scored"),
    [("pure", [1, 1, 1]), ("budget", [4, 4, 4]), ("memory", [4, 4, 4]), ("settings", [2, 2, 2]), ("seeds", [2, 2, 2])],
)
def test_equal_methods_score_the_same_rows_once(kind, scored):
    """Unless a method asks for the budget or remembers something. Each context's time contains the scores."""
    calls = [0] * 3

    @dataclass(frozen=True)
    class Counting(Method):
        power: int = 1

        def score(self, observation: Observation, rows: Rows, state: State) -> torch.Tensor:
            calls[observation.layer] += 1
            time.sleep(0.005)
            if kind == "memory":
                state.layer["seen"] = observation.tokens
            factor = float(observation.share) if kind == "budget" else 1.0
            return factor * rows.keys.norm(dim=-1) ** self.power + state.seeds[0] * (rows.places % 3)

    allocators = [build_policy("knorm", own, "llama")[1] for own in ("uniform", "ada")]
    codec = build_policy("knorm", "uniform", "llama")[2]

    def some() -> list[GenerationContext]:
        powers, seeds = (1, 2) if kind == "settings" else (1, 1), (1, 2) if kind == "seeds" else (1, 1)
        own = [(Counting("counting", power=powers[i % 2]), allocators[i // 2], seeds[i % 2]) for i in range(4)]
        return [
            GenerationContext(tiny("llama"), CachePolicy(method, allocator, codec), Budget(0.1 + i / 10), None, (seed,))
            for i, (method, allocator, seed) in enumerate(own)
        ]

    shared = some()
    milliseconds = shared_prefill.prefill(shared, ids(60))
    assert calls == scored and min(milliseconds) > 3 * 5
    for alone, context in zip(some(), shared, strict=True):
        alone.prefill(ids(60))
        expected, found = facts(alone), facts(context)
        assert all(equal(expected[name], found[name]) for name in expected)


def test_writing_later_into_what_contexts_are_shown_together_is_an_error():
    """Contexts that hold the same rows see one view of them, and no guard of another context watches the writer."""
    kept: list[torch.Tensor] = []

    @dataclass(frozen=True)
    class Keeper(Method):
        def score(self, observation: Observation, rows: Rows, state: State) -> torch.Tensor:
            kept.append(rows.mass)
            return rows.mass

    @dataclass(frozen=True)
    class Writer(Allocator):
        def layer(
            self, quota: int, observation: Observation, rows: Callable[[], Rows], shared: dict[str, Any]
        ) -> int | tuple[int, ...]:
            kept[-1].mul_(2)
            return quota

    uniform, codec = build_policy("knorm", "uniform", "llama", "raw")[1:]
    policies = [CachePolicy(Keeper("keeper"), own, codec) for own in (uniform, Writer("writer"))]
    contexts = [GenerationContext(tiny("llama"), policy, Budget(0.2), None, (1,)) for policy in policies]
    with pytest.raises(ContextFailed, match="^1$") as failed:
        shared_prefill.prefill(contexts, ids(60))
    assert isinstance(failed.value.__cause__, ContractError) and "rows.mass" in str(failed.value.__cause__)


@pytest.mark.full
def test_workers_share_the_samples_of_a_company(runs, bench, alone, tmp_path):
    """They do it together, whichever of them takes which sample."""
    workers = Workers(tmp_path, 2, "cpu")
    workers.execute([runs])
    workers.close()
    assert all((tmp_path / "runs" / run_hash(run.value) / "done").is_file() for run in runs)
    folders = execute_runs(runs, tmp_path, bench)
    assert [strip_circumstances(folder.records()) for folder in folders] == alone(runs)
    assert {own for folder in folders for own in shares(folder)} == {4}


def test_who_may_read_together(runs, run_of, checkpoint, tmp_path):
    same = {run.reading for run in runs}
    assert len(same) == 1 and None not in same
    for settings in (["method=kvzip"], ["block_size=64"]):
        assert run_of(*settings).reading is None
    others = ["method=h2o", "question=hidden", "seed=1", "temperature=0.5", "task.length=1024"]
    assert len({run_of(own).reading for own in others} | same) == len(others) + 1
    path = draw_palu(tmp_path / "file", load_layout(str(checkpoint)))
    palu = [f"codec.path={path}", "codec=palu"]  # the model attends to other rows
    projected = [run_of(*palu, *more).reading for more in ([], ["method=sink", "budget=0.2"], ["codec.bits=4"])]
    assert projected[0] == projected[1] != projected[2] and not {*projected} & same
    sliding = replace(runs[0], checkpoint=Windows("windows", "nowhere"))
    assert sliding.reading is None
    timed = ["task=efficiency", "model=random", "model.like=tiny"]
    timed, plain = (plan_cell(own).cell.readings for own in (timed, ["method=sink"]))
    assert timed == [] and len(plain) == 2 and None not in plain


class Windows(Checkpoint):
    """A checkpoint with sliding-window layers."""

    def layout(self):
        return read_config_layout(tiny("gemma3").config)


def records(results) -> dict:
    """(method, budget, uid) -> record."""
    found = {}
    for path in results.glob("runs/*/records*"):
        value = yaml.safe_load((path.parent / "run.yaml").read_text())["value"]
        for record in read_records(path.parent):
            found[value["method"]["name"], value["budget"], record["uid"]] = record
    return found


@pytest.mark.parametrize("methods", ["snapkv,kvzip", pytest.param("snapkv,h2o,kvzip", marks=pytest.mark.full)])
def test_a_sweep_reads_every_prompt_once_for_all_cells(methods, small, tmp_path, monkeypatch, capsys):
    """Cells of snapkv and h2o, which do not go together, and kvzip, which goes alone."""
    budgets = "0.2,0.4" if "h2o" in methods else "0.3"
    found, cells = [], ["-m", f"method={methods}", f"budget={budgets}", *small, "limit=1"]
    count = len(methods.split(",")) * len(budgets.split(","))
    for own in ("true", "false"):
        settings = [f"results={tmp_path}/{own}", f"sweep.share_prefill={own}"]
        code, out, err = run_cli([*cells, *settings], monkeypatch, capsys)
        assert code == 0 and out.endswith(f"{count} done\n"), err
        found.append(records(tmp_path / own))
    assert strip_circumstances(found[0]) == strip_circumstances(found[1]) and len(found[0]) == count + 1
    assert {own["shared_prefill"] for own in found[1].values()} == {1}
    expected = {"full": 3, "snapkv": 3, "h2o": 2, "kvzip": 1} if "h2o" in methods else dict(full=2, snapkv=2, kvzip=1)
    assert all(own["shared_prefill"] == expected[name] for (name, *_), own in found[0].items())


def test_the_plan_counts_a_shared_prefill_once(tmp_path, run_of, bench, monkeypatch):
    value = run_of("method=snapkv", "budget=0.2").value
    execute_run(run_of("method=snapkv", "budget=0.2"), tmp_path, bench)
    monkeypatch.setattr(status, "RunRecords", lambda path: iter([{"seconds": 60.0, "prefill_ms": 48000.0}] * 2))
    more = [value | {"budget": budget} for budget in (0.3, 0.4, 0.5)]
    for readings, minutes in (((), ["2.0"] * 3), (("one", "one"), ["2.0", "0.4", "0.4"])):
        cells = [status.SweepCell(str(own["budget"]), own, readings=readings) for own in more]
        lines = status.describe_plan(tmp_path, cells, status.read_planned_states(tmp_path, cells))
        assert [line.partition("about ")[2] for line in lines.splitlines()[1:]] == [f"{own} min" for own in minutes]


@pytest.mark.parametrize("setting", ["sweep.share_prefill=maybe", "sweep=null"])
def test_a_wrong_setting_is_one_line(setting, run_of, monkeypatch, capsys):
    code, out, err = run_cli([setting], monkeypatch, capsys)
    assert (code, out) == (2, "") and err.startswith("kvbench: sweep.share_prefill=") and err.count("\n") == 1
    with pytest.raises(SettingError):
        run_of(setting)
