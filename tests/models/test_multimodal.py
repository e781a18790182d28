"""Checkpoints that read images too are read as text only: their text decoder, by its own type, with all weights."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import kvbench
from kvbench.cli.model import main
from kvbench.models import admission, probe
from kvbench.models.configuration import load_layout
from kvbench.models.decoder_weights import collect_weights
from kvbench.models.layouts import MULTIMODAL, is_tested, name_type
from kvbench.models.loading import check_stored_size, count_weight_bytes, load_weights, make_random_model
from kvbench.models.miniature import draw_miniature, shrink
from kvbench.models.transformers_port import find_text_decoder, read_layout
from kvbench.validation import SettingError
from tests.support.selection import only_in_full

LLAMA = dict(
    model_type="llama", vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32,
)  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
STATED = {  # what a checkpoint states and the defaults of transformers do not
    "llava": dict(text_config=LLAMA),
    "qwen2_vl": dict(text_config=dict(rope_parameters=MROPE)),
    "qwen2_5_vl": dict(text_config=dict(rope_parameters=MROPE)),
}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(admission, "VERDICTS", {})


def configure(name: str):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    return CONFIG_MAPPING[name](**STATED.get(name, {}))


@cache
def draw(name: str) -> torch.nn.Module:
    """A miniature with its vision tower."""
    return draw_miniature(shrink(configure(name)))


def save(name: str, folder: Path) -> torch.nn.Module:
    model = draw(name)
    model.save_pretrained(folder)
    return model


def draw_tokens(count: int = 40) -> torch.Tensor:
    return torch.randint(3, 128, (1, count), generator=torch.Generator().manual_seed(0))


def test_the_type_that_counts_is_that_of_the_text_decoder():
    llava = configure("llava")
    assert is_tested(llava) and name_type(llava) == "llava (text decoder llama)"
    llava.text_config = CONFIG_MAPPING["bloom"]()
    assert not is_tested(llava) and name_type(llava) == "llava (text decoder bloom)"
    assert is_tested(configure("gemma3")) and name_type(configure("llama")) == "llama"


def test_a_type_that_shifts_positions_is_probed_although_its_text_decoder_may_be_listed():
    config = configure("paligemma")
    config.text_config = configure("llama")
    assert not is_tested(config)
    verdict = probe.probe(configure("paligemma"))
    assert verdict.architecture == "paligemma (text decoder gemma)" and verdict.rotation_fault is None


def test_the_vision_tower_is_not_taken_for_the_text_decoder():
    """It comes first, and may have layers and a rotary embedding too."""
    model = draw_miniature(shrink(configure("llava")))
    tower = model.model.vision_tower
    tower.rotary_emb = tower.layers = torch.nn.Identity()
    decoder = find_text_decoder(model)
    assert decoder is model.get_decoder() and len(decoder.layers) == 2


@pytest.mark.parametrize(
    "name", ["llava", "mistral3", "qwen2_5_vl", "gemma3", *map(only_in_full, ["paligemma", "llama4", "gemma4"])]
)
def test_a_checkpoint_is_loaded_with_all_its_weights(name, tmp_path, kept):
    model = save(name, tmp_path)
    loaded = load_weights(str(tmp_path), None, None, torch.float32, "cpu")
    assert type(loaded) is type(model)
    held = loaded.state_dict()
    assert all(torch.equal(weight, held[name]) for name, weight in model.state_dict().items())
    weights_bytes = sum(weight.nbytes for weight in loaded.parameters())
    assert count_weight_bytes(loaded.config, torch.float32, None) == weights_bytes
    assert load_layout(str(tmp_path)) == read_layout(loaded)
    compressed = kvbench.prefill(loaded, draw_tokens(), "knorm", 1.0, 16)
    truth = model(input_ids=draw_tokens()).logits[0, -1]
    torch.testing.assert_close(compressed.logits[0], truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("part", ["language_model", "vision_tower"])
def test_weights_that_a_checkpoint_lacks_or_has_beside_are_refused(part, tmp_path):
    save("llava", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if part in name and "norm" in name)
    weights[f"{part}.other"] = weights.pop(gone)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingError, match=rf"1 missing \(.*norm.*\); 1 unexpected \(.*{part}.other\)"):
        load_weights(str(tmp_path), None, None, torch.float32, "cpu")


def test_files_that_are_too_small_are_refused_by_the_size_of_the_text_decoder(tmp_path):
    config = configure("llava")
    config.text_config.num_hidden_layers = 500
    save_file({"weight": torch.zeros(9)}, tmp_path / "model.safetensors")
    with pytest.raises(SettingError, match="hold 9 weights, its config.json asks for"):
        check_stored_size(tmp_path, config)


def test_a_text_is_read_and_cut_as_by_the_text_decoder_alone():
    model = draw("llava")
    alone = AutoModelForCausalLM.from_config(model.config.text_config).eval()
    alone.model.load_state_dict(find_text_decoder(model).state_dict())
    alone.lm_head.load_state_dict(model.lm_head.state_dict())
    caches = [kvbench.prefill(each, draw_tokens(), "snapkv", 10, 16) for each in (model, alone)]
    assert [cache.places(1, 1).tolist() for cache in caches][0] == caches[1].places(1, 1).tolist()
    answers = [cache.generate(4, stop=frozenset())[0].tolist() for cache in caches]
    assert answers[0] == answers[1] and torch.equal(caches[0].logits, caches[1].logits)
    assert collect_weights(model) is not None


def test_a_random_model_has_a_shape_of_a_multimodal_type():
    model = make_random_model(shrink(configure("mistral3")), torch.float32, "cpu", 0)
    assert type(model).__name__ == "Mistral3ForConditionalGeneration" and read_layout(model).probe is None


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(MULTIMODAL))
def test_every_multimodal_type_is_right(name):
    probe.probe(configure(name))


# What is refused is refused for its text decoder, before weights are loaded

REFUSED = {
    "gemma3n": r"gemma3n \(text decoder gemma3n_text\) .* layers .* that read the rows of earlier ones",
    "kimi_k25": r"kimi_k25 \(text decoder deepseek_v3\) .* latent rows \(MLA\)",
    "minimax_m3_vl": "a sparse indexer chooses which rows a query reads",
    "gemma4": r"gemma4 \(text decoder gemma4_text\) .* 10 layers .* that read the rows of earlier ones",
    "gemma3n_text": "that read the rows of earlier ones",
    "deepseek_v2": "latent rows",
    "deepseek_v3": "latent rows",
    "glm4_moe_lite": "latent rows",
    "mistral4": "latent rows",
    "minicpm3": "latent rows",
    "kimi_linear": "latent rows",
    "deepseek_v32": "a sparse indexer",
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_a_text_decoder_does_otherwise_is_named(name, tmp_path, kept, capsys):
    configure(name)
    stated = {"text_config": {"num_kv_shared_layers": 10}} if name == "gemma4" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **stated}))
    assert main([str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and re.match(f"kvbench: .*{REFUSED[name]}", err)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ({"model_type": "none_such"}, "does not know the type none_such of its text_config"),
        ({"model_type": "none_such", "auto_map": {"AutoConfig": "a.B"}}, "the type none_such of its text_config needs"),
        ({"model_type": "mamba"}, r"llava \(text decoder mamba\) .* no attention layer"),
        ({"model_type": "deepseek_v32"}, "a sparse indexer"),
        ({"model_type": "diffllama", "hidden_act": "magic"}, "does not shrink to a miniature"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
    ],
)
def test_a_text_decoder_that_cannot_be_read_is_one_line(text, line, tmp_path, kept):
    if text["model_type"] not in CONFIG_MAPPING and text["model_type"] != "none_such":
        pytest.skip("this transformers does not know it")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    with pytest.raises(SettingError, match=line) as error:
        load_layout(str(tmp_path))
    assert "\n" not in str(error.value)
