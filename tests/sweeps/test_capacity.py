"""A preset refuses what the machine cannot hold, in one line and before it starts."""

import pytest
import torch

from kvbench.config.catalogue import SHAPES
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.configuration import load_configuration, load_layout
from kvbench.models.loading import count_weight_bytes
from kvbench.sweeps import capacity
from kvbench.sweeps.plan import Sweep
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli


@pytest.fixture
def shapes(monkeypatch):
    """Configurations of models come from their shapes; RULER's port fetches nothing."""
    from kvbench.tasks.ruler.lm_eval_port import RulerLmEval

    for name, read in (("config", load_configuration), ("layout", load_layout)):
        monkeypatch.setattr(Checkpoint, name, lambda own, read=read: read(str(SHAPES / f"{own.name}.json")))
    monkeypatch.setattr(RulerLmEval, "fingerprint", lambda self: "data")


def check(overrides: list[str]) -> None:
    Sweep.plan(overrides)


def test_parameters_are_counted_without_memory():
    config = load_configuration(str(SHAPES / "llama31_8b.json"))
    assert count_weight_bytes(config, torch.bfloat16, None) == 2 * 8_030_261_248


def test_what_is_too_large_is_refused(shapes, monkeypatch, tmp_path, capsys):
    # 2 · 8.03e9 of weights and 131072 tokens of 128 KiB: 33.2 GB in bfloat16
    monkeypatch.setattr(capacity, "count_available_bytes", lambda run: 33_000_000_000)
    given = ["preset=dropkv_table5", "row=full", "dtype=bfloat16", f"results={tmp_path}"]
    line = "preset=dropkv_table5: model=llama31_8b needs 33.2 GB for weights and full cache, this machine has 33.0 GB"
    assert_refused(run_cli(["-m", *given], monkeypatch, capsys), line, tmp_path)
    monkeypatch.setattr(capacity, "count_available_bytes", lambda run: 34_000_000_000)
    check(given)
    monkeypatch.setattr(capacity, "count_available_bytes", lambda run: 20_000_000_000)
    with pytest.raises(SettingError, match="needs 33.2 GB"):
        check(given)
    check([*given, "task.length=16384"])  # 18.2 GB
    check(["method=dropkv", "model=llama31_8b", "dtype=bfloat16"])  # no preset


def test_the_largest_model_of_a_presets_rows_counts(shapes, monkeypatch):
    monkeypatch.setattr(capacity, "count_available_bytes", lambda run: 20_000_000_000)
    with pytest.raises(SettingError, match="deltakv_table9: model=qwen25_32b needs 65.5 GB"):
        check(["preset=deltakv_table9", "row=full", "dtype=bfloat16", "task.path=miniature"])


def test_a_preset_alone_is_refused(monkeypatch, tmp_path, capsys):
    found = run_cli(["preset=dropkv_table5", f"results={tmp_path}"], monkeypatch, capsys)
    assert_refused(found, "preset=dropkv_table5: is a sweep; python run.py -m preset=dropkv_table5", tmp_path)


def test_a_hub_out_of_reach_is_asked_once_for_a_model(monkeypatch):
    """A preset has many cells of few models, and each time would cost half a minute."""
    asked = []

    def unreachable(path, **_):
        asked.append(path)
        raise OSError("no network\nmore")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    for name in ("some/one", "some/one", "some/other"):
        with pytest.raises(SettingError, match=rf"^model.path={name}: cannot read a model there \(no network more\)$"):
            load_configuration(name)
    assert asked == ["some/one", "some/other"]
