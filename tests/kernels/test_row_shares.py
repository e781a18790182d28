"""Shares of heads: both implementations against the host's function for lists."""

import pytest
import torch

from kvbench.interfaces.apportion import apportion
from kvbench.kernels.row_shares import share_rows
from tests.support.kernel_checks import BOTH, DEVICE, poison_memory
from tests.support.selection import only_in_full


def draw_shares(heads, samples=40):
    """Targets, narrow and wide bounds, and totals: those of the targets, or too many or too few rows."""
    draw = torch.Generator().manual_seed(heads)

    def whole(most):
        return torch.randint(most, (samples, heads), generator=draw)

    targets = whole(160).double() / torch.tensor([1, 3, 4, 7])[torch.arange(samples) % 4, None]
    least = 1 + whole(9) * (torch.arange(samples) % 3 == 0)[:, None] * 12
    most = least + whole(3) * torch.tensor([1, 40])[torch.arange(samples) % 2, None]
    total = targets.sum(-1).long() + torch.tensor([0, 0, 0, -50, 300])[torch.arange(samples) % 5]
    return targets, least, most, total


@BOTH
@pytest.mark.parametrize("heads", [1, only_in_full(2), 5])
def test_heads_get_what_the_host_gives_them(heads, implementation, monkeypatch):
    targets, least, most, total = draw_shares(heads)
    expected = [apportion(*own) for own in zip(*(part.tolist() for part in (targets, least, most, total)), strict=True)]
    poison_memory(monkeypatch)
    found = share_rows(*(part.to(DEVICE) for part in (targets, least, most, total)), implementation=implementation)
    assert found.tolist() == expected


def test_what_does_not_fit_is_refused():
    targets, *whole = draw_shares(2)
    with pytest.raises(ValueError, match="targets, least, most, total"):
        share_rows(targets.float(), *whole)
    with pytest.raises(ValueError, match="targets, least, most, total"):
        share_rows(targets, *whole[:2], whole[2][:1])


def ahead():
    from kvbench.kernels.row_shares.triton import _share

    types = dict.fromkeys(("least", "most", "total", "out"), "*i64") | {"targets": "*fp64", "heads": "i32"}
    yield _share, types | {"H": "constexpr"}, {"H": 8}, {"num_warps": 1}
