"""`kvbench model PATH` says what kvbench would do with a checkpoint, without loading its weights."""

import json
import re
import shutil

import pytest
from transformers import CONFIG_MAPPING

from kvbench.cli.model import main
from kvbench.config.catalogue import SHAPES
from kvbench.interfaces.layout import Probe
from kvbench.models import admission, layouts, loading, probe
from kvbench.runs import model_description

CHOICES = {"method": ("sink", "expected_attention", "triattention", "snapkv"), "codec": ("raw", "delta", "palu")}


@pytest.fixture
def describe(capsys, monkeypatch):
    monkeypatch.setattr(loading, "load_weights", None)  # nobody loads them
    monkeypatch.setattr(model_description, "list_choices", CHOICES.__getitem__)  # to build all takes long

    def call(*arguments) -> tuple[int, str, str]:
        return main([str(argument) for argument in arguments]), *capsys.readouterr()

    return call


def test_layers_bytes_and_memory_are_those_of_the_configuration(describe, tmp_path):
    shutil.copy(SHAPES / "gemma3_12b.json", tmp_path / "config.json")
    code, out, _ = describe(tmp_path, "--tokens", 2048)
    lines = out.splitlines()
    assert code == 0 and "architecture: gemma3_text, on the tested list" in lines
    assert "layers: 8 full, which methods cut; 40 with a sliding window of 1,024 tokens, which are not cut" in lines
    assert f"bytes per token: {8 * 2 * 8 * 256 * 2:,} in the layers that methods cut (bfloat16)" in lines
    cached = (8 * 2048 + 40 * 1024) * 2 * 8 * 256 * 2
    assert any(line.endswith(f"{cached / 1e9:.2f} GB for the full cache of 2,048 tokens") for line in lines)
    assert "refused: no method and no codec" in lines
    linear = 48 * 3840 * (2 * 16 * 256 + 2 * 8 * 256 + 3 * 15360)
    plain, packed = re.search(r"memory: (\S+) GB of weights \((\S+) with model.weights=int4\)", out).groups()
    assert float(plain) - float(packed) == pytest.approx(linear * (2 - 0.5 - 4 / 128) / 1e9, abs=0.011)


@pytest.mark.parametrize(
    ("settings", "heads", "held", "windowed"),
    [
        ({"model_type": "gemma4_text"}, "dimension 512", 5 * 4 * 2 * 512, 25 * 4 * 2 * 256 * 512),
        (
            {"model_type": "mimo_v2_flash", "num_hidden_layers": 4},
            "dimension 192, of values 128", 1 * 4 * (192 + 128), 3 * 8 * (192 + 128) * 128,
        ),
    ],
)  # fmt: skip
def test_heads_that_differ_by_layer_are_counted(describe, tmp_path, monkeypatch, settings, heads, held, windowed):
    if settings["model_type"] not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such type")
    monkeypatch.setattr(admission, "VERDICTS", {})
    monkeypatch.setattr(admission, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(model_description, "count_weight_bytes", lambda *given: 0)
    monkeypatch.setattr(probe, "probe", lambda config: Probe("mimo_v2_flash", None, graphs=False))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    code, out, _ = describe(tmp_path, "--tokens", 5000)
    assert code == 0 and re.search(f"^heads: .* {heads}$", out, re.MULTILINE)
    assert f"bytes per token: {2 * held:,} in the layers that methods cut (bfloat16)" in out.splitlines()
    cached = 2 * (held * 5000 + windowed)
    assert f"{cached / 1e9:.2f} GB for the full cache of 5,000 tokens" in out


@pytest.mark.parametrize(
    ("kind", "further"), [("llama", ""), ("phi3", "; with model.weights=int4 through the model's modules")]
)
def test_answers_with_weights_in_int4(describe, tmp_path, kind, further):
    """phi3 has queries, keys and values in one matrix, which the step takes apart."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
    code, out, _ = describe(tmp_path, "--tokens", 64)
    assert code == 0
    assert f"answers: in CUDA graphs on a GPU, where method and codec allow it{further}" in out.splitlines()


def test_what_rotates_keys_is_listed_where_rotations_differ(describe, tmp_path, monkeypatch):
    verdict = Probe("cohere2", "in layer 3 keys differ", graphs=False)
    monkeypatch.delitem(layouts.ARCHITECTURES, "cohere2")
    monkeypatch.setattr(probe, "probe", lambda config: verdict)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere2", "num_hidden_layers": 4}))
    code, out, _ = describe(tmp_path)
    refused = {line.split(": ")[1] for line in out.splitlines() if line.startswith("refused: ")}
    assert code == 0 and "architecture: cohere2, probed, not on the tested list" in out
    expected = {"method=expected_attention", "method=sink", "method=triattention", "codec=palu"}
    assert refused == expected and "answers: through the model's modules" in out


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"model_type": "none_such"}, r"does not know the type none_such\)"),
        ({"model_type": "none_such", "auto_map": {"AutoConfig": "a.B"}}, "its type needs custom code"),
        ({"model_type": "llama", "hidden_act": "magic"}, r"its config.json makes no model \(.*magic"),
        ({"model_type": "llava", "text_config": {"hidden_act": "magic"}}, r"its config.json makes no model \(.*magic"),
        ({"model_type": "mamba"}, "architecture mamba is not supported: it has no attention layer, and so no KV cache"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(describe, tmp_path, settings, line):

    (tmp_path / "config.json").write_text(json.dumps(settings))
    code, out, err = describe(tmp_path)
    assert code == 2 and not out and err.count("\n") == 1 and re.search(line, err)


def test_more_tokens_than_the_model_reads_are_refused(describe, tmp_path):
    shutil.copy(SHAPES / "tiny.json", tmp_path / "config.json")
    code, _, err = describe(tmp_path, "--tokens", 10**9)
    assert code == 2 and re.match("kvbench: --tokens=1000000000: .* takes at most", err)
