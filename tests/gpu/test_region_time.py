"""task.measure=regions on a GPU: the regions of a token that a CUDA graph decodes add up to its mean time."""

from functools import cache

import pytest
import torch

from kvbench.config.compose import compose_config
from kvbench.efficiency.caches import load_weights
from kvbench.efficiency.measure import measure_run
from kvbench.efficiency.region_time import REGIONS, SKIPPED
from kvbench.runs.spec import RunSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
CASES = {  # settings -> the regions beside model, attention and rest that have kernels
    "full": (["method=full"], ()),
    "keydiff": (["method=keydiff", "budget=0.05"], ("method",)),
    "kivi": (["method=full", "codec=kivi", "codec.preset=paper"], ("codec",)),
    "quest": (["method=quest", "budget=0.05"], ("method",)),
    "modules": (["method=keydiff", "budget=0.05", "model.compile=off"], ("method",)),
}
QUICK = ("full", "keydiff", "kivi")


@cache
def split(name: str) -> dict[str, dict]:
    """The lines of a case, in the shape of Llama-3.2-3B at 16k tokens."""
    settings = ["task=efficiency", "model=random", "model.like=llama32_3b", "task.measure=regions", "task.length=16384"]
    run = RunSpec.from_config(compose_config([*settings, f"task.new_tokens={SKIPPED + 16}", *CASES[name][0]]))
    return {line["quantity"]: line for line in measure_run(run)}


@pytest.fixture(scope="module", autouse=True)
def no_weights_stay():
    yield
    load_weights.cache_clear()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.rest) for name in CASES]
)
def test_the_regions_of_a_token_add_up_to_its_mean_time(name):
    own, (_, beside) = split(name), CASES[name]
    mean, parts = own["tpot_mean_ms"]["value"], {part: own[f"region_{part}_ms"]["value"] for part in REGIONS}
    print(name, mean, parts)
    path = own["tpot_mean_ms"]["note"]
    assert path == ("modules" if name == "modules" else "graph")
    assert {part for part, ms in parts.items() if ms > 0} == {"model", "attention", "rest", *beside}
    left = own["region_unattributed_ms"]["value"]
    assert sum(parts.values()) + left == pytest.approx(mean)
    if path == "graph":
        assert left >= -0.1 * mean
    if path == "graph" and "method" not in beside:  # a cut's kernels have gaps, and the host copies rows now and then
        assert left <= 0.15 * mean


def test_the_full_cache_spends_more_on_attention_than_a_cut_one():
    full, cut = (split(name)["region_attention_ms"]["value"] for name in ("full", "keydiff"))
    assert full > 2 * cut
    models = [split(name)["region_model_ms"]["value"] for name in ("full", "kivi")]
    assert max(models) <= 1.15 * min(models)  # the same products whatever the cache; KeyDiff's share the GPU with cuts
