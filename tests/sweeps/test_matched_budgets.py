"""The budgets of conf/measured.yaml match what cells hold (codecs) or read (methods that read few rows)."""

from functools import cache
from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvbench
from kvbench.analysis.byte_classes import SPREAD
from kvbench.config.planned_pairs import parse_settings
from kvbench.config.study_parts import read_study
from kvbench.sweeps.plan import expand_sweep
from tests.support.tiny_models import COMMON, draw_model, heads, ids, make_fresh, rope

PAIRS = dict.fromkeys(
    pair for part in ("confirmation", "equal_bytes") for pair in read_study()[part].pairs if "budget=" in pair[0]
)
READERS = [
    (settings["method"], float(settings["budget"]))
    for line in read_study()["screening"].list_sweeps(Path("results"))
    for settings in map(parse_settings, expand_sweep(line))
    if settings["method"] in ("quest", "pqcache", "omnikv", "deltakv")
    and settings["question"] == "visible"
    and settings.get("codec", "raw") == "raw"
]


@cache
def measure_bytes(cell: str) -> float:
    """Return the share of bytes that a cell holds of heads of 64 numbers in bfloat16."""
    settings = parse_settings(cell.split())
    budget = float(settings.get("budget", 1.0))
    model = make_fresh("wide").to(torch.bfloat16)
    held = kvbench.prefill(model, ids(500), settings["method"], budget, codec=settings.get("codec", "raw"))
    return held.resident_bytes / held.full_bytes


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_planned_pairs_of_codecs_hold_like_bytes(one, other):
    assert measure_bytes(one) == pytest.approx(measure_bytes(other), rel=0.05)  # whole rows of a short prompt


@pytest.fixture(scope="module")
def deep():
    """A model of 30 layers, as SmolLM2 has."""
    config = LlamaConfig(
        **COMMON | {"max_position_embeddings": 8192}, **heads(1, 1), num_hidden_layers=30, rope_parameters=rope()
    )
    return draw_model(lambda: LlamaForCausalLM(config), seed=0)


@pytest.mark.full
@pytest.mark.parametrize(("method", "budget"), READERS)
def test_methods_that_read_few_rows_read_the_planned_share(deep, method, budget):
    held = kvbench.prefill(deep, ids(4000), method, budget)
    held.generate(3)
    [context] = held.contexts
    share = mean(rows for layer in context.own_layers for rows in layer.attended) / 4001
    assert sum(abs(share / aim - 1) < SPREAD / 5 for aim in (0.2, 0.3, 0.5)) == 1
