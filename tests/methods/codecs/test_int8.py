"""int8: single rows at the borders of its formulas, and settings. test_rounded_rows.py compares whole answers."""

import numpy as np
import pytest
import torch

from kvbench.config.catalogue import build, load_settings
from kvbench.validation import SettingError
from tests.support.row_formulas import round_around_the_middle, round_symmetric


def read_back(rows: torch.Tensor, preset: str) -> torch.Tensor:
    """Rows as they are read."""
    codec = build("codec", load_settings("codec", "int8", {"preset": preset}))
    return codec.pack(rows, rows, torch.tensor([[len(rows)]])).read()[1]


@pytest.mark.parametrize("preset, formula", [("vllm", round_symmetric), ("sglang", round_around_the_middle)])
def test_zeros_constants_and_extremes(preset, formula):
    rows = torch.tensor([[0.0] * 8, [3.0] * 8, [-1e-9] * 8, [-5.0, *range(6), 9.0], [6e4, *[-1.0] * 7]])
    expected = torch.from_numpy(np.stack([formula(row) for row in rows.double().numpy()])).float()
    torch.testing.assert_close(read_back(rows, preset), expected)
    assert not read_back(rows[:1], preset).any()
    rows[3, 2] = torch.nan
    assert read_back(rows, preset).isnan().all(1).tolist() == [False, False, False, True, False]


def test_settings_are_checked():
    for args, message in (
        ({"preset": "trt"}, "codec.preset=trt: choose one of vllm, vllm_truncating, sglang"),
        ({"symmetric": "half"}, "codec.symmetric=half: choose one of true, false"),
        ({"rounding": "late"}, "codec.rounding=late: choose one of written, cut"),
    ):
        with pytest.raises(SettingError, match=f"^{message}"):
            build("codec", load_settings("codec", "int8", args))
