"""task.measure=regions: times by region add up to a token's time, and kernels belong to who launches them."""

import time
from dataclasses import replace

import numpy as np
import pytest

from kvbench.config.compose import compose_config
from kvbench.efficiency.caches import KVBenchCache, draw_prompt, load_model
from kvbench.efficiency.region_time import (
    PREFIX,
    REGIONS,
    SKIPPED,
    find_kernels,
    find_region,
    share_regions,
    share_time,
    split_token,
)
from kvbench.methods.keydiff import KeyDiff
from kvbench.runs.spec import RunSpec
from kvbench.tasks.efficiency import LEAST_SPLIT

SLEEP = 0.002


def test_intervals_that_overlap_share_their_time():
    drawn = np.random.default_rng(0)
    begins = drawn.integers(0, 40, 12)
    ends = begins + drawn.integers(0, 15, 12)
    expected = np.zeros(12)
    for moment in range(60):
        running = [own for own in range(12) if begins[own] <= moment < ends[own]]
        for own in running:
            expected[own] += 1 / len(running)
    assert np.allclose(share_time(begins, ends), expected)
    assert share_time(np.array([]), np.array([])).size == 0


def test_a_kernel_belongs_to_the_region_that_launched_it():
    def mark(at: float, region: str) -> dict:
        return {"cat": "user_annotation", "name": PREFIX + region, "ts": at, "dur": 0.5}

    def launch(at: float, number: int, kind: str = "cuda_runtime") -> dict:
        return {"cat": kind, "name": "cudaLaunchKernel", "ts": at, "dur": 1, "args": {"correlation": number}}

    def kernel(at: float, duration: float, name: str, number: int) -> dict:
        return {"cat": "kernel", "name": name, "ts": at, "dur": duration, "args": {"correlation": number}}

    events = [
        kernel(100, 30, "product", 1), kernel(130, 10, "product", 2), kernel(140, 7, "few", 3),
        kernel(150, 5, "lost", 9), launch(12, 1), launch(22, 2), launch(24, 3, "cuda_driver"),
        launch(25, 4), kernel(160, 4, "Memcpy DtoD", 4) | {"cat": "gpu_memcpy"},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}, mark(20, "method"), mark(10, "model"),
    ]  # fmt: skip
    expected = {"product": {"model": 0.75, "method": 0.25}, "few": {"method": 1}, "memcpy": {"method": 1}}
    assert share_regions(events) == expected
    assert [event["name"] for event in find_kernels([kernel(1, 2, "memcpy32_post", 1)])] == ["memcpy"]  # in a graph


@pytest.mark.parametrize(
    ("module", "function", "region"),
    [
        ("kvbench.kernels.attention", "attend_ragged", "attention"), ("kvbench.kernels.attention", "combine", None),
        ("kvbench.methods.codecs.delta", "pack", "codec"), ("kvbench.methods.keydiff", "score", "method"),
        ("kvbench.methods.allocators.ada", "heads", "method"), ("kvbench.cache.eviction", "evict", "method"),
        ("kvbench.models.decoder_step", "forward_step", "model"), ("kvbench.engine.graph_decoding", "one", "rest"),
        ("transformers.models.llama.modeling_llama", "forward", "model"), ("torch.nn.functional", "linear", None),
        ("kvbench.methodsx", "score", None),
    ],
)  # fmt: skip
def test_functions_work_for_their_package_s_region(module, function, region):
    assert find_region(module, function) == region


class SlowKeyDiff(KeyDiff):
    def score(self, observation, rows, state):
        time.sleep(SLEEP)
        return super().score(observation, rows, state)


def test_the_regions_of_a_token_add_up_to_its_mean_time():
    settings = ["task=efficiency", "model=random", "model.like=tiny", "device=cpu", "task.measure=regions"]
    run = RunSpec.from_config(compose_config([*settings, "method=keydiff", "budget=16", "task.length=24"]))
    model = load_model(run)
    own = KVBenchCache(model, run, 40)
    assert isinstance(own.choice.method, KeyDiff)
    slow: KeyDiff = object.__new__(SlowKeyDiff)
    vars(slow).update(vars(own.choice.method))
    own.choice = replace(own.choice, method=slow)
    own.read(draw_prompt(run, model))
    found = {line["quantity"]: line["value"] for line in split_token(own, SKIPPED + 2, SKIPPED + 4)}
    parts = [found[f"region_{name}_ms"] for name in (*REGIONS, "unattributed")]
    assert sum(parts) == pytest.approx(found["tpot_mean_ms"])
    layers = len(own.context.own_layers)
    assert found["region_method_ms"] >= 1000 * SLEEP * layers  # a cut in each layer after each token
    others = sum(parts[:-1]) - found["region_method_ms"]
    assert 0 < others and found["region_codec_ms"] < 1000 * SLEEP
    assert min(found["region_model_ms"], found["region_attention_ms"], found["region_rest_ms"]) > 0


def test_the_least_answer_goes_beyond_the_tokens_that_are_left_out():
    assert LEAST_SPLIT > SKIPPED
