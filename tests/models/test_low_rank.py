"""Low-rank factors: the merged model against the sums in float64, and files that cannot be used."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbench.models import local_models, tuned_models
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.models.local_models import identify_converted
from kvbench.models.low_rank import PROJECTIONS, read_factors_file
from kvbench.models.model_kinds import TunedModel
from kvbench.models.tuned_models import find_tuned
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.tuned_models import LONGEST, THETA, write_base, write_factors


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(local_models, "MODELS", tmp_path / "models")
    write_base(tmp_path / "models")
    return tmp_path / "models"


def make_kind(factors: Path | None, **changed: object) -> TunedModel:
    plain = dict.fromkeys(("path", "revision", "device_map", "longest", "weights"))
    path = None if factors is None else str(factors)
    return TunedModel({"name": "smollm2_long", **plain, "factors": path, **changed})


def test_the_merged_weights_are_sums_rounded_once(models, tmp_path, capsys):
    factors = write_factors(tmp_path / "f.safetensors")
    base, merged = load_file(models / "smollm2/model.safetensors"), find_tuned("smollm2", tmp_path / "f.safetensors")
    assert "converting f.safetensors" in capsys.readouterr().err
    weights = load_file(merged / "model.safetensors")
    assert weights.keys() == base.keys()
    for name, weight in weights.items():
        expected, part = base[name].double(), name.split(".")[-2]
        if part in PROJECTIONS:
            a, b = (factors[f"{part}.{letter}"][int(name.split(".")[2])].double() for letter in "ab")
            expected = expected + 2.0 * b @ a
            assert not torch.equal(weight, base[name])
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, expected.to(torch.bfloat16)), name


def test_a_tuned_model_is_a_plain_checkpoint(models, tmp_path, capsys):
    """With its own RoPE, length and identity, and made once."""
    write_factors(tmp_path / "f.safetensors")
    kind = make_kind(tmp_path / "f.safetensors")
    kind.check()
    checkpoint = kind.checkpoint(0)
    assert isinstance(checkpoint, Checkpoint) and checkpoint.name == "smollm2_long" and checkpoint.longest() == LONGEST
    config = checkpoint.config()
    assert config.rope_parameters["rope_theta"] == THETA and config.max_position_embeddings == LONGEST
    assert checkpoint.identity() == identify_converted(Path(checkpoint.path)) != identify_converted(models / "smollm2")
    model = checkpoint.weights(torch.float32, "cpu")
    inv_freq = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(inv_freq, THETA ** (-torch.arange(0, 16, 2) / 16))
    assert (
        checkpoint.tokenizer()("a b").input_ids == Checkpoint("", str(models / "smollm2")).tokenizer()("a b").input_ids
    )
    capsys.readouterr()
    assert kind.checkpoint(0).path == checkpoint.path and not capsys.readouterr().err


def test_a_tuned_model_has_a_name_for_all_commands(models, tmp_path, monkeypatch):
    """Where a command takes a model by name; without its factors, or with another name, that is one line."""
    with pytest.raises(SettingError, match="model.path=smollm2_lang: no such model; did you mean smollm2_long"):
        find_model("smollm2_lang")
    monkeypatch.setattr(tuned_models, "__file__", str(tmp_path / "tuned_models.py"))
    with pytest.raises(SettingError, match="smollm2_long.safetensors: no such file of low-rank factors"):
        find_model("smollm2_long")
    write_factors(tmp_path / "smollm2_long.safetensors")
    assert find_model("smollm2_long") == make_kind(None).checkpoint(0).path


def test_other_factors_give_another_identity(models, tmp_path):
    names = "f.safetensors", "g.safetensors"
    for name, theta in zip(names, ("50000.0", "60000.0"), strict=True):
        write_factors(tmp_path / name, theta=theta)
    first, second = (make_kind(tmp_path / name).checkpoint(0) for name in names)
    assert first.path != second.path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def pickle(path: Path) -> None:
    torch.save({"q_proj.a": torch.ones(1)}, path)


def lose_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["up_proj.b"]
    save_file(tensors, path, {"model": "x"})


def change_a_rank(path: Path) -> None:
    tensors = load_file(path)
    save_file(tensors | {"up_proj.a": tensors["up_proj.a"][:, :2].contiguous()}, path, {"model": "x"})


FAULTS = {
    "cannot read low-rank factors there": truncate,
    "cannot read low-rank": pickle,
    r"\(up_proj.b is missing": lose_a_tensor,
    "different layers or ranks": change_a_rank,
    "no such file of low-rank factors": Path.unlink,
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_damaged_file_is_refused_before_anything_is_loaded(models, tmp_path, message):
    path = tmp_path / "f.safetensors"
    write_factors(path)
    FAULTS[message](path)
    with pytest.raises(SettingError, match=f"model.factors=.*{message}"):
        make_kind(path).check()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "0123"}, "the factors are of the base 0123, and smollm2 is "),
        ({"theta": ""}, "its metadata lack a number"),
        ({"theta": "nan"}, "make no model"),
        ({"longest": "inf"}, "make no model"),
    ],
)
def test_factors_with_other_metadata_are_refused(models, tmp_path, changed, message):
    write_factors(tmp_path / "f.safetensors", **changed)
    with pytest.raises(SettingError, match=message):
        make_kind(tmp_path / "f.safetensors").check()


def test_factors_that_are_not_finite_or_of_another_shape_leave_no_folder(models, tmp_path):
    path = tmp_path / "f.safetensors"
    about = {"model": identify_converted(models / "smollm2") or "", "alpha": "6", "theta": "5e4", "longest": "384"}
    factors = write_factors(path)
    factors["k_proj.b"][1, 2, 0] = float("nan")
    save_file(factors, path, about)
    with pytest.raises(SettingError, match="k_proj.b has a number that is not finite"):
        make_kind(path).checkpoint(0)
    factors = {
        name: factor[:, :, :-1].contiguous() if name == "k_proj.a" else factor for name, factor in factors.items()
    }
    save_file(factors | {"k_proj.b": torch.zeros(2, 16, 3)}, path, about)
    with pytest.raises(SettingError, match="its k_proj .* does not fit the base's"):
        make_kind(path).checkpoint(0)
    factors = write_factors(path)
    save_file({name: factor[:1].contiguous() for name, factor in factors.items()}, path, about)
    with pytest.raises(SettingError, match="has factors for 1 layers, and the base has more"):
        make_kind(path).checkpoint(0)
    assert [folder.name for folder in models.iterdir() if folder.is_dir()] == ["smollm2"]


def test_the_base_must_be_here(models, tmp_path):
    write_factors(tmp_path / "f.safetensors")
    (models / "smollm2/config.json").unlink()
    with pytest.raises(SettingError, match="model=smollm2: it is not here yet"):
        make_kind(tmp_path / "f.safetensors").check()


@pytest.mark.parametrize(
    ("loses", "message"),
    [
        ("base", "model=smollm2: it is not here yet; `make model` downloads it"),
        ("factors", "model.factors={}: no such file of low-rank factors; `kvbench dev tune` makes one"),
        ("header", "model.factors={}: cannot read low-rank factors there"),
    ],
)
def test_a_run_without_its_files_is_one_line(models, tmp_path, monkeypatch, capsys, loses, message):
    """The factors that kvbench holds, which no setting names, and nothing is written."""
    monkeypatch.setattr(tuned_models, "__file__", str(tmp_path / "tuned_models.py"))
    path = tmp_path / "smollm2_long.safetensors"
    write_factors(path)
    if loses == "base":
        (models / "smollm2/config.json").unlink()
    elif loses == "factors":
        path.unlink()
    else:
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    results = tmp_path / "results"
    results.mkdir()
    answer = run_cli(["model=smollm2_long", f"results={results}"], monkeypatch, capsys)
    assert_refused(answer, message.format(path), results)
    assert [folder.name for folder in models.iterdir() if folder.is_dir()] == ["smollm2"]


def test_settings_of_other_checkpoints_are_refused(models, tmp_path):
    write_factors(tmp_path / "f.safetensors")
    for setting in ("path", "revision", "device_map", "longest"):
        with pytest.raises(SettingError, match=f"model.{setting}=1"):
            make_kind(tmp_path / "f.safetensors", **{setting: 1}).check()
    assert read_factors_file(tmp_path / "f.safetensors", "model.factors").rank == 3
