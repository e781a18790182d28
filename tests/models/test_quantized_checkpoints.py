"""A checkpoint whose stored weights are quantised is read exactly, or refused by the name of the format."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvbench.models import configuration, loading
from kvbench.models.checkpoint import Checkpoint
from kvbench.validation import SettingError

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
STORED = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "bitsandbytes": {"load_in_4bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors"},
    "none_such": {"quant_method": "none_such"},
    "an unnamed method": {"bits": 4},
}


@pytest.mark.parametrize("stored", STORED)
def test_a_format_that_is_not_read_is_named_in_one_line(stored, tmp_path):
    settings = {"model_type": "llama", "quantization_config": STORED[stored]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    own = Checkpoint("own", str(tmp_path))
    for read in (own.layout, own.config):
        with pytest.raises(SettingError) as error:
            read()
        line = str(error.value)
        assert line.startswith(f"model.path={tmp_path}: its weights are quantised with {stored}, ")
        assert "\n" not in line and line.endswith(
            "; use a checkpoint in bfloat16, with model.weights=int4 if it does not fit"
        )


def draw_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Write a tiny gpt-oss whose experts are stored in mxfp4. Return what these stand for."""
    config = transformers.GptOssConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    weights, expected = dict(transformers.GptOssForCausalLM(config).bfloat16().state_dict()), dict[str, Tensor]()
    for name in [name for name in weights if name.endswith(EXPERTS)]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8)
        numbers = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1).flatten(-2)
        numbers = numbers * 2.0 ** (scales.double() - 127)[..., None]
        expected[name] = numbers.flatten(-2).transpose(1, 2)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    stored = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | stored))
    return expected


@pytest.fixture
def admitted(monkeypatch):
    """Whether kvbench reads gpt-oss is not the subject here."""
    monkeypatch.setattr(configuration, "check_architecture", lambda config: None)
    monkeypatch.setattr(loading, "admit_model", lambda model: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_is_made_plain_exactly(admitted, tmp_path, dtype):
    expected = draw_mxfp4(tmp_path)
    model = loading.load_weights(str(tmp_path), None, None, dtype, "cpu")
    weights = dict(model.named_parameters())
    assert len(expected) == 2 and {weight.dtype for weight in weights.values()} == {dtype}
    for name, numbers in expected.items():
        assert torch.equal(weights[name].double(), numbers)
    assert getattr(model.config, "quantization_config", None) is None


LAYER = "model.layers.0."
CHANGES = {
    "cannot read weights there": lambda weights: weights.pop(f"{LAYER}mlp.{EXPERTS[0]}_scales"),
    f"1 missing ({LAYER}mlp.router.weight)": lambda weights: weights.pop(f"{LAYER}mlp.router.weight"),
    "1 of another shape (model.norm.weight)": lambda weights: weights.update({"model.norm.weight": torch.ones(65)}),
    "1 unexpected (more)": lambda weights: weights.update({"more": torch.ones(2)}),
    "model.norm.weight in model.safetensors is not finite": lambda weights: weights["model.norm.weight"].fill_(
        torch.nan
    ),
}


@pytest.mark.parametrize("fault", CHANGES)
def test_what_is_wrong_with_mxfp4_is_one_line(admitted, tmp_path, fault):
    draw_mxfp4(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    CHANGES[fault](weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingError) as error:
        loading.load_weights(str(tmp_path), None, None, torch.bfloat16, "cpu")
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"model.path={tmp_path}: ") and fault in line, line
