"""Methods rank rows by the softmax that the model has: a sink is as good as a row, and a cap as capped keys.

Queries are unit vectors here, so a channel of a key is its logit for one query.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kvbench.cache.hook_table import check_softcap
from kvbench.config.catalogue import build, load_settings
from kvbench.interfaces.observation import Observation, State
from kvbench.interfaces.rows import Rows
from kvbench.kernels.attention import attend
from kvbench.kernels.softmax_extras import SoftmaxExtras
from kvbench.studies.study import refuse_extras
from kvbench.validation import SettingError

HEADS, GROUP, TOKENS, ROWS, SCALING, CAP = 2, 2, 6, 30, 0.5, 0.8
CHANNELS = GROUP * TOKENS
SINKS = torch.tensor([2.0, -1.0, 4.0, 3.0], dtype=torch.float64)


def draw_block() -> tuple[Tensor, Tensor, Tensor]:
    """Queries (1, H·G, T, d), and keys and values (1, H, n, d). The last G channels are 0 in all keys."""
    draw = torch.Generator().manual_seed(0)
    queries = torch.zeros(1, HEADS, GROUP, TOKENS, CHANNELS + GROUP, dtype=torch.float64)
    queries[..., :CHANNELS] = torch.eye(CHANNELS).view(GROUP, TOKENS, CHANNELS)
    queries[..., CHANNELS:] = torch.eye(GROUP)[:, None]
    keys, values = (torch.randn(1, HEADS, ROWS, CHANNELS + GROUP, generator=draw).double() for _ in range(2))
    keys *= 3
    keys[..., CHANNELS:] = 0
    return queries.flatten(1, 2), keys, values


def observe(keys: Tensor, values: Tensor, extras: SoftmaxExtras | None) -> tuple[Observation, Rows]:
    """What a layer shows of the block. Rows before the block may have places below 0."""
    queries, _, _ = draw_block()
    outputs, lse = attend(queries, keys, values, None, SCALING, lse=True, extras=extras, implementation="reference")
    places = torch.arange(ROWS - keys.shape[2], ROWS).expand(keys.shape[:3])
    observation = Observation(
        queries, outputs, lse, SCALING, torch.zeros(8, queries.shape[1] * queries.shape[3]), lambda p: (p, p), 0, 1,
        first=ROWS - TOKENS, prompt=ROWS, last=True, decoding=False, cut_layers=(0,), share=Fraction(9), extras=extras,
    )  # fmt: skip
    return observation, Rows(keys, values, places, torch.ones(keys.shape[:3], dtype=torch.float64), {})


def score(name: str, settings: dict, observation: Observation, rows: Rows) -> Tensor:
    """The scores of a method by its settings, (1, H, n) or (1, n)."""
    method, state = build("method", load_settings("method", name, settings)), State((0,))
    if name == "omnikv":
        return method.score_rows(observation.queries, rows.keys, observation.scaling, observation.extras)
    if name == "kvzip":
        shown = replace(observation, about=(0, ROWS - TOKENS), prompt=ROWS - TOKENS)
        method.update(shown, rows, state)
        return state.layer["scores"]
    rows = replace(rows, columns=method.update(observation, rows, state))
    return method.score(observation, rows, state)


SCORED = [
    ("snapkv", dict(window=4, kernel=1)),
    ("tova", {}),
    ("cake", dict(window=4, kernel=1)),
    ("dropkv", dict(window=4, kernel=1, p_dtype="fp32")),
    ("andpro", dict(window=4, kernel=1, chunk=1, first=0)),
    ("andpro", dict(window=4, kernel=3, chunk=1, first=0)),
    ("h2o", {}),
    ("h2o", dict(gqa="max")),
    ("omnikv", dict(selector="softmax_last")),
    ("omnikv", dict(selector="exp")),
]


@pytest.mark.parametrize("name, settings", SCORED)
def test_a_sink_is_as_good_as_a_row(name, settings):
    """One before all rows, with the sink's logit for each query head and a value of 0."""
    _, keys, values = draw_block()
    row = torch.zeros_like(keys[:, :, :1])
    row[0, :, 0, CHANNELS:] = SINKS.view(HEADS, GROUP) / SCALING
    longer = torch.cat([row, keys], 2), torch.cat([torch.zeros_like(row), values], 2)
    found = score(name, settings, *observe(keys, values, SoftmaxExtras(SINKS)))
    expected = score(name, settings, *observe(*longer, None))[..., 1:]
    assert not torch.allclose(found, score(name, settings, *observe(keys, values, None)), rtol=0.01)
    start = 2 if settings.get("kernel") == 3 else 0  # where pooling does not reach the row
    torch.testing.assert_close(found[..., start:], expected[..., start:])


@pytest.mark.parametrize(
    "name, settings",
    [*SCORED, ("kvzip", {}), ("rkv", dict(window=4, mix=1.0)), ("attention_matching", dict(reference="context"))],
)
def test_a_cap_is_as_good_as_capped_keys(name, settings):
    _, keys, values = draw_block()
    capped = CAP * (keys * SCALING / CAP).tanh() / SCALING
    found = score(name, settings, *observe(keys, values, SoftmaxExtras(cap=CAP)))
    torch.testing.assert_close(found, score(name, settings, *observe(capped, values, None)))
    assert not torch.allclose(found, score(name, settings, *observe(keys, values, None)), rtol=0.01)


def test_peaks_with_a_sink_are_shares_of_all_terms():
    """kvzip scores by the largest probability, which a sink lowers in each query by a factor of its own."""
    _, keys, values = draw_block()
    plain, found = (score("kvzip", {}, *observe(keys, values, extras)) for extras in (None, SoftmaxExtras(SINKS)))
    assert (found < plain).all()


def test_studies_refuse_layers_with_either():
    _, keys, values = draw_block()
    refuse_extras(observe(keys, values, None)[0], "study")
    with pytest.raises(SettingError, match="^study: attention of layer 0 has sinks or a cap"):
        refuse_extras(observe(keys, values, SoftmaxExtras(SINKS))[0], "study")


def test_an_estimate_without_a_cap_is_refused():
    method = build("method", load_settings("method", "expected_attention", {}))
    check_softcap(method, None)
    with pytest.raises(SettingError, match="this model caps the logits of attention at 50, and expected_attention"):
        check_softcap(method, 50.0)
