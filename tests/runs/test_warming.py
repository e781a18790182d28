"""Before a group's first sample its prompts are read as with samples, and nothing of that stays."""

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Thread

import pytest
import torch

from kvbench.config.compose import compose_config
from kvbench.engine.warming import hold_compiler
from kvbench.interfaces.budget import Budget
from kvbench.interfaces.task import Sample
from kvbench.methods.knorm import Knorm
from kvbench.models.transformers_port import read_layout
from kvbench.runs import responder, runner, warming
from kvbench.runs.prompt import Prompt
from kvbench.runs.responder import Responder
from kvbench.runs.shared_runs import RunGroup
from kvbench.runs.spec import RunSpec
from kvbench.runs.warming import choose_examples, hash_compilation, list_needs, make_warm_group, read_beginnings
from kvbench.validation import SettingError
from tests.support.recorded_runs import TIMES
from tests.support.selection import only_in_full


@dataclass(frozen=True)
class Settings:
    """The settings of a run that examples depend on."""

    question: str = "hidden"
    block_size: int | None = None


def make_prompts(*sizes: tuple[int, int], **more) -> dict[str, tuple[Sample, Prompt]]:
    """Samples with so many tokens of context and question, named by them."""
    made = {}
    for context, rest in sizes:
        uid = f"{context} {rest}"
        prompt = Prompt(tuple(range(context)), tuple(range(rest)))
        made[uid] = Sample(uid, "", "", "", "", (), 8, **more), prompt
    return made


def chosen(prompts, size=1, **settings) -> list[list[str]]:
    return [[sample.uid for sample, _ in batch] for batch in choose_examples(prompts, Settings(**settings), size)]


def test_an_example_is_read_for_each_size():
    prompts = make_prompts((1000, 9), (1010, 9), (2000, 12), (1001, 40))
    assert chosen(prompts) == [["2000 12"], ["1010 9"], ["1001 40"]]
    assert chosen(prompts, question="visible") == [["2000 12"], ["1010 9"]]
    prompts = make_prompts((128, 5), (129, 5), (131, 5), (193, 5))
    assert chosen(prompts, block_size=64) == [["193 5"], ["131 5"], ["128 5"]]


def test_an_example_has_the_samples_of_a_batch():
    [same] = make_prompts((900, 9)).values()
    prompts = make_prompts((900, 9), (900, 10)) | {f"same {number}": same for number in range(3)}
    assert [len(batch) for batch in chosen(prompts, size=3)] == [3]


def test_a_conversation_is_read_with_all_turns():
    turns = make_prompts((50, 4), (50, 6), conversation="one")
    first, second = turns
    turns[second] = turns[second][0], Prompt(turns[second][1].context, (1,), earlier=((1, 2),))
    assert chosen(turns) == [[first, second]]


@pytest.mark.parametrize("more", [only_in_full(()), ("block_size=128", "method.decoding=true", "fidelity=true")])
def test_records_are_the_same_after_a_rehearsal(kvbench, monkeypatch, tmp_path, more):
    from kvbench.store.runs import load_runs

    settings = ["task=niah", "task.lengths=[300]", "task.depths=[0,50]", "budget=0.3", "method=tova", *more]
    calls = []

    def rehearse(runs, bench):
        """What a GPU does, on a CPU."""
        group = RunGroup(runs, partial(Responder, bench=bench), bench.reload_model)
        state = torch.random.get_rng_state()
        for batch in choose_examples(bench.prompts, next(iter(runs.values())), 1):
            group.rehearse([batch])
            calls.append(batch)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(reader.context is None and reader.opening is None for reader in group.readers.values())
        return group

    found = []
    for name, make in (("plain", make_warm_group), ("rehearsed", rehearse)):
        monkeypatch.setattr(runner, "make_warm_group", make)
        code, _, errors = kvbench(*settings, f"results={tmp_path / name}")
        assert code == 0, errors
        records = {run.hash: run.records for run in load_runs(tmp_path / name)}
        found.append({
            (run, uid): {key: own for key, own in record.items() if key not in TIMES | {"fidelity_ms"}}
            for run, some in records.items() for uid, record in some.items()
        })  # fmt: skip
    assert calls and found[0] == found[1]


@pytest.fixture
def read_first(kvbench, monkeypatch, tmp_path):
    """Runs a sweep that reads the beginnings of its prompts first, as on a GPU, and gives what `look` found then."""

    def call(look, *settings: str) -> tuple[list, int, str]:
        found = []

        def make(runs, bench):
            examples = [some[0] for some in choose_examples(bench.prompts, next(iter(runs.values())), 1)]
            found.append(look(bench, lambda: read_beginnings(runs.values(), bench, examples)))
            return make_warm_group(runs, bench)

        monkeypatch.setattr(runner, "make_warm_group", make)
        task = ("-m", "task=niah", "task.lengths=[512]", "task.depths=[0]", "budget=0.3", f"results={tmp_path}")
        code, _, errors = kvbench(*task, *settings)
        assert "one after the other" not in errors
        return found, code, errors

    return call


def test_weights_that_a_method_spoils_are_loaded_again(read_first, monkeypatch):
    def score(self, observation, rows, state):
        observation.output_weight.zero_()
        return rows.values.norm(dim=-1)

    def look(bench, read) -> bool:
        before = {name: own.clone() for name, own in bench.model.state_dict().items()}
        read()
        return all(torch.equal(before[name], own) for name, own in bench.model.state_dict().items())

    monkeypatch.setattr(Knorm, "score", score)
    found, code, errors = read_first(look, "method=knorm,snapkv")
    assert found and all(found) and code == 1 and "wrote into observation.output_weight" in errors


@pytest.mark.parametrize("choosy", [False, only_in_full(True)])
def test_few_layers_read_the_beginnings_if_the_method_can(read_first, monkeypatch, choosy):
    layers, whole = [], []

    def check(self, layout):
        if whole:  # the run is being executed
            layers.append(layout.layers)
            if choosy and layout.layers < whole[0]:
                raise SettingError("method.path: learned for each layer")

    def look(bench, read) -> int:
        whole.append(read_layout(bench.model).layers)
        monkeypatch.setattr(warming, "LAYERS", whole[0] - 1)
        read()
        assert layers[0] == whole[0] - 1 and layers[-1] == whole[0] - (not choosy)
        assert read_layout(bench.model).layers == whole[0]
        return 0

    monkeypatch.setattr(Knorm, "check", check)
    assert read_first(look, "method=knorm")[1] == 0


COMPILE = """
import ast, threading
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:  # of an H100 that is not there
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

triton.runtime.driver.set_active(Driver())
torch.cuda.current_device, torch.cuda.set_device, torch.Tensor.is_cuda = (lambda: 0), (lambda gpu: None), True
parse, turn = ast.parse, threading.Lock()

def parse_in_turn(*args, **named):  # in Python 3.11 two threads that parse disturb each other (python/cpython#106905)
    with turn:
        return parse(*args, **named)

ast.parse = parse_in_turn
from kvbench.engine.warming import compile_ahead, count_compilations
from kvbench.kernels.key_similarity import norms, similarity

keys = torch.randn(1, 2, 40, 64)
results = []

def work():
    results.append(norms(keys))
    results.append(similarity(keys, keys[:, :, 0], "dot"))

with count_compilations() as done:
    compile_ahead("one", work)
assert done.kernels == 2 * ["compare_kernel"] and done.seconds == 0.0, done
assert torch.allclose(results[0], keys.norm(dim=-1))
with count_compilations() as done:
    compile_ahead("other", work)
assert done.kernels == [], done
results.clear()
compile_ahead("one", work)
assert results == [], "compiled before"
"""


def compile_afresh(folder: Path) -> None:
    """Run COMPILE in a fork, which imports everything again that was decorated for Triton's interpreter here."""
    os.environ |= {"TRITON_CACHE_DIR": str(folder), "HOME": str(folder), "TRITON_INTERPRET": "0"}
    for name in [name for name in sys.modules if name.split(".")[0] in ("kvbench", "triton") and "._C" not in name]:
        del sys.modules[name]
    exec(COMPILE, {})


def test_kernels_are_compiled_and_not_run(tmp_path, capfd):
    process = get_context("fork").Process(target=compile_afresh, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0, capfd.readouterr().err


def test_a_method_is_tried_once_in_a_process(kvbench, monkeypatch, tmp_path):
    tried, rehearse = [], responder.rehearse

    def note(model, choice, *more):
        tried.append(choice.method.name)
        rehearse(model, choice, *more)

    monkeypatch.setattr(responder, "rehearse", note)
    task = ("task=niah", "task.lengths=[300]", "task.depths=[0]", f"results={tmp_path}")
    code, _, errors = kvbench("-m", *task, "method=knorm,keydiff", "budget=0.3,0.5")
    assert code == 0 and sorted(tried) == ["full", "keydiff", "knorm"], errors


def test_what_a_group_may_need_follows_from_its_runs_and_sizes():
    run = replace(
        RunSpec.from_config(compose_config(["task=niah", "method=knorm", "budget=0.3"])), question="hidden"
    )  # fmt: skip
    prompts, more = make_prompts((1000, 9), (1010, 9)), make_prompts((1000, 9), (2000, 9))
    needs = list_needs([run], prompts)
    assert list_needs([replace(run, seed=1)], prompts) == needs
    assert needs < list_needs([run], more)
    assert needs < list_needs([run, replace(run, budget=Budget(0.5))], prompts)
    for other in (replace(run, budget=Budget(0.5)), replace(run, fidelity=True), replace(run, question="visible")):
        assert not needs & list_needs([other], prompts)
    pair = [run, replace(run, budget=Budget(0.5))]
    together = list_needs([replace(own, shares_decoding=True) for own in pair], prompts)
    assert not together & list_needs(pair, prompts)
    assert not together & list_needs([replace(run, shares_decoding=True)], prompts)  # whose last sample is alone


def test_more_samples_of_the_same_sizes_compile_nothing_again():
    def name(*more, lengths=((1000, 9),)):
        run = RunSpec.from_config(compose_config(["task=niah", "method=knorm", "budget=0.3", *more]))
        prompts = make_prompts(*lengths)
        return hash_compilation([run], list_needs([run], prompts), [sample for sample, _ in prompts.values()])

    same = name()
    assert name("limit=3") == name("seed=1") == name(lengths=((1000, 9), (1010, 9))) == same
    others = [name("dtype=float16"), name("budget=0.4"), name("method=keydiff"), name(lengths=((2000, 9),))]
    assert len({same, *others}) == 5


def test_processes_compile_one_after_the_other(tmp_path, monkeypatch):
    """A second thread stands for a second process: `flock` tells them apart by the file that each opens."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    order = []

    def compile_too():
        with hold_compiler("key") as note:
            order.append("other" if note.exists() else "too early")

    other = Thread(target=compile_too)
    with hold_compiler("key") as note:
        other.start()
        other.join(0.05)
        order.append("own")
        note.touch()
    other.join()
    assert order == ["own", "other"]
