"""A run of a probed architecture says so, and reads its first sample with transformers' eager attention too."""

import json
import shutil

import pytest
import torch

from kvbench.engine import full_cache_check
from kvbench.models import layouts


@pytest.fixture
def probed(checkpoint, tmp_path, monkeypatch):
    """The checkpoint as one of SmolLM3, whose modules are those of Llama; its first layer has no RoPE."""
    monkeypatch.delitem(layouts.ARCHITECTURES, "smollm3")
    folder = tmp_path / "probed"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config | {"no_rope_layers": [0, 1], "layer_types": None}))
    return folder


SETTINGS = ("task.subtasks=[niah_single_1]", "task.length=600", "task.samples=1", "budget=0.3")


def test_records_and_tables_name_the_architecture(probed, kvbench, tmp_path):
    code, out, err = kvbench(f"model.path={probed}", "method=snapkv", *SETTINGS)
    assert code == 0, err
    assert "architecture: smollm3, probed, not on the tested list" in out
    assert err.count("its architecture smollm3 was probed, and is not on the tested list") == 1
    files = (tmp_path / "results").rglob("records*.jsonl")
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert len(lines) == 2 and all('"architecture": "smollm3"' in line for line in lines)


def test_other_logits_with_the_loaded_weights_end_the_run(probed, kvbench, tmp_path, monkeypatch):
    monkeypatch.setattr(full_cache_check, "LIMITS", {torch.float32: 0.0})
    code, _, err = kvbench(f"model.path={probed}", "method=snapkv", "dtype=float32", *SETTINGS)
    assert code == 2 and "with its weights, the full cache's logits differ by" in err
    assert not list((tmp_path / "results").rglob("records*.jsonl"))


def test_a_tested_architecture_says_nothing(kvbench, tmp_path):
    code, out, err = kvbench("method=full", *SETTINGS)
    assert code == 0 and "architecture" not in out and "probed" not in err
    assert "architecture" not in next((tmp_path / "results").rglob("records*.jsonl")).read_text()
