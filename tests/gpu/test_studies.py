"""Studies on a GPU give the numbers of the CPU, and need little more memory than a prefill.

`make test-gpu` on a machine with a GPU.
"""

import math

import pytest
import torch

from kvbench.cache.policy import CachePolicy, choose_cache
from kvbench.interfaces.budget import Budget
from kvbench.studies import row_attention
from kvbench.studies.catalogue import load_studies
from kvbench.studies.cost import ALL, NONE, measure_costs
from kvbench.studies.delta_codes import DeltaCodes
from kvbench.studies.diagnosis import list_lines
from kvbench.studies.passes import StudyPrompt, read_prompt
from kvbench.studies.study import LayerStudy
from kvbench.studies.watched_run import Reading, WatchedRun
from kvbench.validation import ContractError
from tests.support.delta_files import write_for
from tests.support.gpu_models import make_llama
from tests.support.method_files import build_policy
from tests.support.tiny_models import ids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
LAYERED = [own for own in load_studies().values() if issubclass(own, LayerStudy)]


@pytest.mark.parametrize("kind", LAYERED, ids=[own.name for own in LAYERED])
@pytest.mark.parametrize("block_size", [None, 256], ids=["one block", "blocks"])
def test_numbers_are_those_of_the_cpu(kind, block_size, tmp_path):
    """In float32. One number in twenty may differ: some hang on which of two equal keys comes first, or on a start."""
    prompt, found = StudyPrompt("0", tuple(ids(700)[0].tolist())), []
    for device in ("cpu", "cuda"):
        model = make_llama(torch.float32, device=device)
        own = kind(path=write_for(tmp_path / "compressors.safetensors", model)) if kind is DeltaCodes else kind()
        memories = read_prompt(model, prompt, [own], block_size)[kind.name]
        found.append({line.place: line.value for line in own.finish(memories, False)})
    one, other = found
    same = [math.isclose(value, other.get(place, math.nan), rel_tol=1e-2, abs_tol=1e-3) for place, value in one.items()]
    assert len(one) == len(other) and sum(same) >= 0.95 * len(same)


def test_little_more_memory_than_a_prefill():
    """At 16,384 tokens. Activations of the model's own layers count in both."""
    model = make_llama(torch.bfloat16, hidden=4096, layers=2)
    studies = [own() for own in LAYERED if own is not DeltaCodes]  # its compressors would be larger than the model
    costs = {own.study: own for own in measure_costs(model, studies, 16384, None, 0)}
    assert costs[ALL].peak <= 1.3 * costs[NONE].peak, {name: own.peak / costs[NONE].peak for name, own in costs.items()}


def choose(name: str) -> CachePolicy:
    """A method of conf/method/ with an even allocator and raw rows."""
    return choose_cache(*build_policy(name, "uniform", "llama"))


READING = Reading(tuple(ids(700)[0].tolist()), tokens=8)


def diagnose(model: torch.nn.Module, name: str, block_size: int | None) -> dict[tuple, float]:
    """The numbers of a method that keeps 70 rows, by their places."""
    full = WatchedRun(model, choose("full"), Budget(1.0), None, READING, compared=True)
    answer = full.answer()
    own = WatchedRun(model, choose(name), Budget(70), block_size, READING)
    full.read(answer)
    own.read(answer)
    return {line.place: line.value for line in list_lines(full, own, name, 0)}


@pytest.mark.parametrize("block_size", [None, 256], ids=["one block", "blocks"])
@pytest.mark.parametrize("name", ["snapkv", "h2o", "quest", "centroidkv"])
def test_products_of_16_bit_numbers_change_a_diagnosis_by_little(monkeypatch, name, block_size):
    """Means over heads. A model in bfloat16 itself moves an output by 0.3 %."""
    model = make_llama(torch.bfloat16)
    found = diagnose(model, name, block_size)
    monkeypatch.setattr(row_attention, "HALVES", ())
    exact = diagnose(model, name, block_size)
    assert found.keys() == exact.keys()
    means = [place for place in found if place[4] is None]  # without those of single heads
    worst = max(means, key=lambda place: abs(found[place] - exact[place]))
    print(name, block_size, worst, found[worst], exact[worst])
    assert abs(found[worst] - exact[worst]) <= 3e-3


def test_a_fault_is_raised_although_the_host_runs_ahead(monkeypatch):
    choice = choose("keydiff")
    monkeypatch.setattr(type(choice.method), "score", lambda method, observation, rows, state: rows.mass * math.nan)
    own = WatchedRun(make_llama(torch.bfloat16), choice, Budget(70), 256, READING)
    with pytest.raises(ContractError, match="method=keydiff: score of layer 0 returned NaN"):
        own.context.raise_faults()
