"""kvbench's attention function refuses arguments of a model that it does not know."""

import pytest
import torch

from kvbench.models.transformers_port import attention
from kvbench.validation import SettingError

ROWS = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("given", [dict(position_bias=ROWS), dict(is_causal=False), dict(indices=False)])
def test_attention_refuses_what_changes_its_outputs(given):
    with pytest.raises(SettingError, match=f"model: its attention takes {next(iter(given))}, which kvbench"):
        attention(None, ROWS, ROWS, ROWS, None, **given)


@pytest.mark.parametrize("given", [dict(s_aux=ROWS[0, :1, 0, 0]), dict(softcap=0.0)])
def test_attention_refuses_sinks_and_caps_of_another_kind(given):
    with pytest.raises(SettingError, match=f"model: its attention takes {next(iter(given))}"):
        attention(None, ROWS, ROWS, ROWS, None, **given)


def test_attention_refuses_a_mask():
    with pytest.raises(SettingError, match="its attention takes attention_mask"):
        attention(None, ROWS, ROWS, ROWS, torch.ones(1, 1, 3, 3, dtype=torch.bool))


def test_attention_takes_what_is_none_or_changes_nothing():
    harmless = dict(softcap=None, is_causal=True, dropout=0.0, position_ids=torch.arange(3)[None], use_cache=True)
    outputs, _ = attention(None, ROWS, ROWS, ROWS, None, **harmless)
    torch.testing.assert_close(outputs, attention(None, ROWS, ROWS, ROWS, None)[0])
