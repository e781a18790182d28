"""Files that do not fit the model, or hold numbers that are not finite, are refused before weights load."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbench.interfaces.layout import Layout
from kvbench.models.configuration import load_layout
from kvbench.models.embedded import REFERENCE
from tests.support.command_line import assert_refused, run_cli
from tests.support.delta_files import draw_compressor, write_compressors
from tests.support.palu_files import draw_palu


def write_statistics(path: Path, layout: Layout, query_heads: int) -> str:
    """Statistics of TriAttention for a model with so many query heads."""
    shape = layout.layers, query_heads, layout.dim
    save_file({"q_mean": torch.zeros(shape), "q_abs_mean": torch.ones(*shape[:2], shape[2] // 2)}, str(path))
    return str(path)


def write_surrogates(path: Path, layout: Layout) -> str:
    """Linear surrogates of KVzap."""
    save_file({f"layers.{i}.weight": torch.zeros(layout.heads, layout.hidden) for i in range(layout.layers)}, str(path))
    return str(path)


def write_delta(path: Path, layout: Layout) -> str:
    """Compressors of DeltaKV."""
    width = 2 * layout.heads * layout.dim
    return write_compressors(path, [draw_compressor(width, 8, layer) for layer in range(layout.layers)])


def spoil(path: str) -> str:
    """Make one number of the last tensor NaN, and return the tensor's name."""
    weights = load_file(path)
    name = max(weights)
    weights[name].view(-1)[-1] = math.nan
    save_file(weights, path)
    return name


@pytest.fixture
def refuse(tmp_path, monkeypatch, capsys):
    """Asserts that a run with these settings ends with one line before weights load."""
    monkeypatch.setattr("kvbench.models.loading.load_weights", lambda *_: pytest.fail("weights are loaded"))
    folder = tmp_path / "results"
    folder.mkdir()

    def run(settings: list[str], line: str) -> None:
        settings = [*settings, "model=reference", "task.subtasks=niah_single_1", "device=cpu", f"results={folder}"]
        assert_refused(run_cli(settings, monkeypatch, capsys), line, folder)

    return run


@pytest.mark.parametrize("more", [2, -1])
def test_statistics_of_other_query_heads(refuse, tmp_path, more):
    layout = load_layout(str(REFERENCE))
    path = write_statistics(tmp_path / "file", layout, layout.query_heads + more)
    found, needed = ((layout.layers, heads, layout.dim) for heads in (layout.query_heads + more, layout.query_heads))
    line = f"method.path={path}: the statistics have (layers, query heads, dimensions) {found}, the model {needed}"
    refuse(["method=triattention", f"method.path={path}", "budget=0.5"], line)


@pytest.mark.parametrize(
    "write, settings, setting",
    [
        (write_surrogates, ["method=kvzap", "budget=0.5"], "method.path"),
        (write_surrogates, ["method=dms_threshold", "method.preset=kvzap", "budget=null"], "method.base_args.path"),
        (draw_palu, ["method=full", "codec=palu"], "codec.path"),
        (draw_palu, ["method=full", "codec=palu", "codec.bits=4"], "codec.path"),
        (write_delta, ["method=deltakv", "codec=delta"], "codec.path"),
    ],
)
def test_files_with_nan(refuse, tmp_path, write, settings, setting):
    path = write(tmp_path / "file", load_layout(str(REFERENCE)))
    name = spoil(path)
    refuse([*settings, f"{setting}={path}"], f"{setting.replace('base_args.', '')}={path}: {name} is not finite")


def test_an_official_folder_with_nan_in_another_weight_is_read(tmp_path):
    """Only the projections are read of such a folder."""
    from kvbench.methods.codecs.palu_projections import check_numbers

    path = draw_palu(tmp_path / "file", load_layout(str(REFERENCE)))
    save_file(load_file(path) | {"model.norm.weight": torch.full((3,), math.nan)}, path)
    check_numbers(path)
