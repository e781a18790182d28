"""task.measure=regions on a GPU: the regions of a token that a CUDA graph decodes add up to its mean time."""

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
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, dict]]:
    """The lines of each case, in the shape of Llama-3.2-3B at 16k tokens."""
    settings = ["task=efficiency", "model=random", "model.like=llama32_3b", "task.measure=regions", "task.length=16384"]
    settings.append(f"task.new_tokens={SKIPPED + 16}")
    lines = {
        name: {line["quantity"]: line for line in measure_run(RunSpec.from_config(compose_config([*settings, *own])))}
        for name, (own, _) in CASES.items()
    }
    load_weights.cache_clear()
    return lines


@pytest.mark.parametrize("name", CASES)
def test_the_regions_of_a_token_add_up_to_its_mean_time(found, name):
    own, (_, beside) = found[name], CASES[name]
    mean, parts = own["tpot_mean_ms"]["value"], {part: own[f"region_{part}_ms"]["value"] for part in REGIONS}
    print(name, mean, parts)
    assert own["tpot_mean_ms"]["note"] == "graph"
    assert {part for part, ms in parts.items() if ms > 0} == {"model", "attention", "rest", *beside}
    left = own["region_unattributed_ms"]["value"]
    assert sum(parts.values()) + left == pytest.approx(mean)
    # a cut's kernels are small, with gaps between them
    assert -0.1 * mean <= left <= (0.3 if "method" in beside else 0.15) * mean


def test_the_full_cache_spends_more_on_attention_than_a_cut_one(found):
    full, cut = (found[name]["region_attention_ms"]["value"] for name in ("full", "keydiff"))
    assert full > 2 * cut
    models = [found[name]["region_model_ms"]["value"] for name in ("full", "kivi")]
    assert max(models) <= 1.15 * min(models)  # the same products whatever the cache; KeyDiff's share the GPU with cuts
