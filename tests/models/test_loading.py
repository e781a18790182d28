"""What a checkpoint holds is loaded exactly, or refused in one line before anything is measured."""

import json
import random
import re
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.engine.compressed_cache import prefill
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.configuration import load_configuration, load_layout
from kvbench.validation import SettingError
from tests.support.selection import only_in_full
from tests.support.tiny_models import tiny

CHECKPOINT = {"layers": 3}
LAYER = "model.layers.1."


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "copy")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    own = Checkpoint("own", str(folder))
    own.check()
    own.layout()
    own.tokenizer()
    return own.weights(dtype, "cpu")


def edit_weights(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refuse(folder: Path, *parts: str, dtype: torch.dtype = torch.float32) -> None:
    with pytest.raises(SettingError) as error:
        load(folder, dtype)
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"model.path={folder}: ") and all(part in line for part in parts), line


class TooLong(KeyboardInterrupt):
    """Passes through what turns errors of libraries into a line."""


@contextmanager
def within(seconds: int):
    def stop(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    except TooLong:
        raise AssertionError(f"longer than {seconds} s") from None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_weights_that_are_missing_unexpected_or_of_another_shape_are_refused(copy):
    def change(weights):
        for name in [name for name in weights if name.startswith(LAYER)]:
            del weights[name]
        weights["model.layers.0.other"] = torch.zeros(9000)
        weights["model.norm.weight"] = weights["model.norm.weight"][:5].clone()

    edit_weights(copy, change)
    refuse(copy, "9 missing (model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, ", ", …)")
    refuse(copy, "1 unexpected (model.layers.0.other); 1 of another shape (model.norm.weight)")


def test_a_run_on_them_measures_nothing(kvbench, checkpoint, copy, tmp_path):
    edit_weights(copy, lambda weights: weights.pop("model.norm.weight"))
    code, out, errors = kvbench(f"model.path={copy}", "method=full", "task=phonebook", "limit=1")
    assert (code, out) == (2, "") and "1 missing (model.norm.weight)" in errors and errors.count("\n") == 1
    assert not list(tmp_path.glob("results/runs/*"))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(copy, number):
    edit_weights(copy, lambda weights: weights[f"{LAYER}mlp.up_proj.weight"][3].fill_(number))
    refuse(copy, f"{LAYER}mlp.up_proj.weight in model.safetensors is not finite")


def test_an_infinity_that_the_cast_made_names_the_dtype(copy):
    edit_weights(copy, lambda weights: weights["model.norm.weight"][3].fill_(1e5))
    refuse(copy, "model.norm.weight does not fit into float16; use dtype=bfloat16", dtype=torch.float16)
    assert load(copy, torch.bfloat16).model.norm.weight[3] == torch.tensor(1e5, dtype=torch.bfloat16)


def test_a_model_that_is_handed_over_is_checked_once():
    model, ids = tiny("llama"), torch.tensor([[1, 2, 3, 4]])
    prefill(model, ids)
    other = LlamaForCausalLM(model.config)
    other.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(SettingError, match="^model: model.layers.0.mlp.up_proj.weight is not finite .float32.$"):
        prefill(other, ids)


def test_what_is_no_fault(copy):
    """Tied weights that are saved twice, pickled weights beside safetensors, and a vocabulary with padded rows."""
    torch.manual_seed(0)
    config = LlamaConfig(**json.loads((copy / "config.json").read_text()) | {"tie_word_embeddings": True})
    config.vocab_size += 32
    model = LlamaForCausalLM(config)
    model.save_pretrained(copy)
    edit_weights(copy, lambda own: own.setdefault("lm_head.weight", own["model.embed_tokens.weight"].clone()))
    (copy / "pytorch_model.bin").write_bytes(b"pickled")
    found = load(copy)
    assert all(torch.equal(own, found.state_dict()[name]) for name, own in model.state_dict().items())


OBJECT = "kvbench reads an object with a quant_method, or null)"
NUMBER = "kvbench reads a whole number from 1 on, or null)"
TOKENS = "its layers of the kind {}_attention need 1 token or more)"
VALUES = {  # what a config.json says, and what the line says of it
    '{"model_type": "llama", "quantization_config": "fp8"}': OBJECT,
    '{"model_type": "llama", "quantization_config": ["fp8"]}': OBJECT,
    '{"model_type": "gemma3", "text_config": {"quantization_config": 8}}': OBJECT,
    '{"model_type": "gemma2", "sliding_window": "4096"}': NUMBER,
    '{"model_type": "gemma2", "sliding_window": true}': NUMBER,
    '{"model_type": "gemma2", "sliding_window": null}': TOKENS.format("sliding"),
    '{"model_type": "gemma3", "text_config": {"sliding_window": 0}}': TOKENS.format("sliding"),
    '{"model_type": "mistral", "sliding_window": -1}': TOKENS.format("sliding"),
    '{"model_type": "llama4_text", "attention_chunk_size": null}': TOKENS.format("chunked"),
}


@pytest.mark.parametrize("config", VALUES)
def test_a_value_that_is_not_read_is_named_with_its_key(config, tmp_path):
    """Before a cache or a weight is made of it."""
    (tmp_path / "config.json").write_text(config)
    key, value = re.search(r'.*"(\w+)": ([^{}]+)}+$', config).groups()
    for read in (load_layout, load_configuration):
        with pytest.raises(SettingError) as error:
            read(str(tmp_path))
        assert str(error.value) == (
            f"model.path={tmp_path}: cannot read a model there (config.json: {key}={value}; {VALUES[config]}"
        )


def test_a_model_without_windows_needs_none(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "sliding_window": null}')
    assert load_layout(str(tmp_path)).window is None


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"hidden_size": 0},
        {"num_hidden_layers": 900},
        {"intermediate_size": 10**5},
        {"num_attention_heads": "four"},
        {"rope_parameters": 7},
        {"model_type": None},
        {"hidden_act": "magic"},
    ],
    ids=str,
)
def test_a_damaged_configuration_is_one_line(copy, changes):
    edit_config(copy, **changes)
    with within(10):
        refuse(copy)


def test_an_index_that_names_a_missing_shard_is_refused(copy):
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {name: f"model-0000{1 + (name == 'lm_head.weight')}-of-00002.safetensors" for name in weights}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    refuse(copy, "model-00002-of-00002.safetensors")


def damage(folder: Path, kind: str, draw: random.Random) -> None:
    """Flip a bit of a file, cut it, swap it with another one, or empty it."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    if kind == "flip":
        content[draw.randrange(min(len(content), draw.choice((200, 1 << 30))))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        content = content[: draw.randrange(len(content))]
    elif kind == "swap":
        other = draw.choice([path for path in files if path != file])
        content, theirs = other.read_bytes(), content
        other.write_bytes(theirs)
    else:
        content = b""
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["flip", "cut", "swap", "empty"])
@pytest.mark.parametrize("cases", [6, only_in_full(250)])
def test_a_damaged_folder_is_loaded_as_it_is_or_refused(checkpoint, tmp_path, kind, cases):
    draw, right = random.Random(kind), Checkpoint("right", str(checkpoint)).identity()
    refused = 0
    for case in range(cases):
        folder = shutil.copytree(checkpoint, tmp_path / f"{case}")
        damage(folder, kind, draw)
        with within(10):
            try:
                model = load(folder)
            except SettingError as error:
                refused += 1
                assert "\n" not in str(error) and str(error).startswith("model"), error
            else:
                stored = load_file(folder / "model.safetensors")
                held = model.state_dict()
                assert all(torch.equal(own, held[name]) for name, own in stored.items())
                assert Checkpoint("own", str(folder)).identity() != right or same_files(folder, checkpoint)
        shutil.rmtree(folder)
    assert refused


def same_files(folder: Path, other: Path) -> bool:
    """Whether the files of both folders are equal: the damage may have changed nothing."""
    return all((other / path.name).read_bytes() == path.read_bytes() for path in folder.iterdir())


def test_a_length_of_ones_own_is_part_of_what_a_run_is_known_by(kvbench, copy, tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    edit_config(copy, rope_parameters=rope, max_position_embeddings=512)
    settings = (f"model.path={copy}", "method=full", "task=niah", "task.lengths=[600]", "limit=1", "task.new_tokens=1")
    code, _, errors = kvbench(*settings)
    assert code == 2 and "takes at most 512 tokens" in errors
    assert "scaled linearly by 4.0, and it states 512 positions" in errors and "set model.longest" in errors
    code, out, errors = kvbench(*settings, "model.longest=2048")
    assert code == 0, errors
    [run] = tmp_path.glob("results/runs/*/run.yaml")
    assert "longest: 2048" in run.read_text()
    assert kvbench("model=reference", "model.path=null", "model.longest=9")[2].startswith("kvbench: model.longest=9: ")


def test_the_first_name_of_longrope_is_read(copy):
    factors = [1.0] * 16
    own = {"short_factor": factors, "long_factor": factors, "factor": 4.0, "original_max_position_embeddings": 1024}
    found = []
    for name in ("su", "longrope"):
        edit_config(copy, rope_parameters=None, rope_scaling={"type": name, **own})
        found.append(load_layout(str(copy)))
    assert found[0] == found[1] and found[0].rope_switch == 1024
    assert load(copy).config.rope_parameters["rope_type"] == "longrope"
