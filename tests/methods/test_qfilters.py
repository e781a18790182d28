"""qfilters and its calibration against their formulas, in float64, on queries that the dense engine shows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kvbench
from kvbench.cli import calibrate
from kvbench.config.catalogue import build, identity_settings, load_settings
from kvbench.models.checkpoint import Checkpoint
from kvbench.models.embedded import REFERENCE
from kvbench.tasks.common.synthetic_prose import write_words
from kvbench.training import query_filters
from kvbench.validation import SettingError
from tests.support.dense_engine import DenseEngine, Head, HeadView
from tests.support.method_files import make_tiny_method_args
from tests.support.selection import choose_quick, only_in_full
from tests.support.tiny_models import distinct, ids, tiny

CLOSE = dict(rtol=3e-4, atol=3e-4)


def rotated_queries(name: str, tokens: torch.Tensor) -> dict[int, np.ndarray]:
    """(query heads, tokens, d) by layer, from the dense engine."""
    found = {}

    def note(glances: list[HeadView]) -> list[Head]:
        found[glances[0].layer] = np.concatenate([glance.queries for glance in glances])
        return [glance.rows for glance in glances]

    DenseEngine(name, note).prefill(tokens, None)
    return found


def keeps(path: str, quota: int, recent: int):
    own = load_file(path)["q_filters"].double().numpy()

    def cut(glances: list[HeadView]) -> list[Head]:
        return [keep(glance) for glance in glances]

    def keep(glance: HeadView) -> Head:
        rows = glance.rows
        if len(rows.places) <= quota:
            return rows
        room = quota - 1
        safe = [row for row in range(len(rows.places)) if rows.places[row] >= glance.tokens - recent][-room:]
        safe = [] if recent == 0 else safe
        scores = [-sum(a * b for a, b in zip(own[glance.layer, glance.head], key, strict=True)) for key in rows.keys]
        order = sorted((row for row in range(len(scores)) if row not in safe), key=lambda row: (-scores[row], row))
        return rows.take(np.array(sorted(safe + order[: quota - len(safe)])))

    return cut


@pytest.mark.cover
@pytest.mark.parametrize("recent, decoding", [(0, False), (0, True), (6, True), (64, True)])
@pytest.mark.parametrize("block", [None, only_in_full(1), 9])
@pytest.mark.parametrize(
    "name", choose_quick(["llama", "llama3", "yarn", "mistral", "qwen3", "phi3", "gemma3"], "llama")
)
def test_rows_kept(name, block, recent, decoding):
    path = make_tiny_method_args("qfilters", name)["path"]
    prompt, more = distinct(67, seed=3).split([60, 7], dim=1)
    dense = DenseEngine(name, keeps(path, 17, recent), cuts_decoding=decoding)
    expected = dense.prefill(prompt, block)
    args = {"path": path, "recent": recent, "decoding": decoding}
    held = kvbench.prefill(tiny(name), prompt, "qfilters", 17, block, method_args=args)
    torch.testing.assert_close(held.logits[0].double(), expected, **CLOSE)
    for part in more.split([1, 5, 1], dim=1):
        torch.testing.assert_close(held.extend(part)[0].double(), dense.extend(part), **CLOSE)
        for layer in set(dense.held) - set(held.sliding_layers):
            for head, rows in enumerate(dense.held[layer]):
                assert held.places(layer, head).tolist() == rows.places.tolist()


def test_presets_differ():
    def places(**args) -> list:
        args["path"] = make_tiny_method_args("qfilters", "llama")["path"]
        held = kvbench.prefill(tiny("llama"), ids(300), "qfilters", 80, method_args=args)
        held.extend(ids(3, seed=1))
        return [held.places(layer, head).tolist() for layer in range(3) for head in range(2)]

    official, kvpress = places(), places(preset="kvpress")
    assert all(rows[-64:] == list(range(303 - 64, 303)) and len(rows) == 80 for rows in official)
    assert all(len(rows) == 83 and rows[-67:-3] != list(range(300 - 64, 300)) for rows in kvpress)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "yarn", "gemma3"])
def test_calibration(name):
    """Against numpy's eigenvectors of the queries' Gram matrix, all queries taken; groups of 1 to 4."""
    tokens = ids(61, seed=8)
    found = query_filters.compute_query_filters(tiny(name), [tokens[0]], count=61)
    heads = found.shape[1]
    for layer, queries in rotated_queries(name, tokens).items():
        if layer in sliding(name):
            assert (found[layer] == 0).all()
            continue
        group = len(queries) // heads
        for head in range(heads):
            own = []
            for member in queries[head * group : (head + 1) * group]:
                direction = np.linalg.eigh(member.T @ member)[1][:, -1]
                if sum(query @ direction > 0 for query in member) < len(member) / 2:
                    direction = -direction
                own.append(-direction)
            np.testing.assert_allclose(found[layer, head].numpy(), np.mean(own, 0), atol=2e-4)


def sliding(name: str) -> tuple[int, ...]:
    return kvbench.prefill(tiny(name), ids(5)).sliding_layers


def test_the_sign():
    """Of a trained model: queries of a text that the calibration has not seen project positively on minus the filter,
    on average, so a large score is a key that queries look at.
    """
    checkpoint = Checkpoint("reference", str(REFERENCE))
    model, tokenizer = checkpoint.weights(torch.float32, "cpu"), checkpoint.tokenizer()
    own = query_filters.compute_query_filters(
        model, query_filters.split_text(tokenizer, " ".join(write_words()[:2000]), 4, 256), count=400
    )
    unseen = query_filters.split_text(tokenizer, " ".join(write_words()[-1000:]), 1, 400)
    for layer, queries in enumerate(query_filters.collect_queries(model, unseen, 400, seed=0)):
        grouped = queries.unflatten(0, (2, -1))
        assert ((grouped @ -own[layer][:, None, :, None]).mean((1, 2, 3)) > 0).all()


def test_the_sign_follows_the_majority_not_the_mean():
    """Few long queries one way, many short ones the other way: the many win."""
    rng = np.random.default_rng(0)
    long, short = np.tile([-9.0, 0.1], (3, 1)), np.tile([1.0, 0.0], (20, 1))
    queries = torch.from_numpy((np.concatenate([long, short]) + 0.01 * rng.normal(size=(23, 2)))[None]).float()
    assert (queries.mean(1)[0, 0] < 0) and (queries[0, :, 0] > 0).float().mean() > 0.5
    assert query_filters.find_directions(queries)[0, 0] > 0.9


def test_the_sample_is_seeded_and_spread():
    one, again, other = (
        query_filters.collect_queries(tiny("llama"), [ids(50, 1)[0], ids(50, 2)[0]], 21, seed) for seed in (0, 0, 1)
    )
    assert all(own.shape == (6, 22, 32) for own in one)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0], other[0])


# Files.


def refused(path: str, reason: str) -> None:
    with pytest.raises(SettingError, match=rf"^method\.path={path}: .*{reason}") as error:
        kvbench.prefill(tiny("llama"), ids(20), "qfilters", 0.5, method_args={"path": path})
    assert "\n" not in str(error.value)


def test_files_that_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"^method\.path=null: .*kvbench calibrate qfilters"):
        kvbench.prefill(tiny("llama"), ids(20), "qfilters", 0.5)
    refused(str(tmp_path / "missing"), "cannot read the filters")
    broken = tmp_path / "broken"
    broken.write_text("nothing")
    refused(str(broken), "cannot read the filters")
    refused(str(tmp_path), "cannot read the filters")
    torch.save({"q_filters": torch.zeros(3, 2, 32)}, broken)
    refused(str(broken), "pickled weights are not read; give a safetensors file")
    for number, (tensors, reason) in enumerate(
        [
            ({"other": torch.zeros(3, 2, 32)}, "cannot read the filters"),
            ({"q_filters": torch.zeros(3, 64)}, "must be a finite tensor"),
            ({"q_filters": torch.zeros(3, 2, 32, dtype=torch.int64)}, "must be a finite tensor"),
            ({"q_filters": torch.full((3, 2, 32), torch.nan)}, "must be a finite tensor"),
            ({"q_filters": torch.zeros(3, 6, 32)}, r"\(3, 6, 32\), the model \(3, 2, 32\)"),
            ({"q_filters": torch.zeros(2, 2, 32)}, r"\(2, 2, 32\), the model \("),
        ]
    ):
        path = tmp_path / str(number)
        save_file(tensors, str(path))
        refused(str(path), reason)


def test_a_file_of_another_model_of_the_same_shape_is_refused(tmp_path):
    """A file that does not say its model, like the authors', is taken. A composite asks its base."""

    def make(about: dict[str, str] | None, method: str = "qfilters"):
        path = tmp_path / "filters"
        save_file({"q_filters": torch.zeros(3, 2, 32)}, str(path), about)
        args = {"path": str(path)}
        args = args if method == "qfilters" else {"base": "qfilters", "base_args": args}
        return build("method", load_settings("method", method, args))

    make(None).file.check_identity(lambda: pytest.fail("needs no identity"))
    make({"model": "one"}).file.check_identity(lambda: "one")
    for method in ("qfilters", "criticalkv"):
        with pytest.raises(SettingError, match=r"^method\.path=.*made for the model one, this one is other$"):
            make({"model": "one"}, method).file.check_identity(lambda: "other")


def test_a_run_is_known_by_what_the_file_holds(tmp_path):
    one, moved, other = (tmp_path / name for name in ("one", "moved", "other"))
    save_file({"q_filters": torch.zeros(3, 2, 32)}, str(one))
    moved.write_bytes(one.read_bytes())
    save_file({"q_filters": torch.ones(3, 2, 32)}, str(other))
    values = [
        identity_settings({"_target_": "x", "name": "qfilters", "path": str(path)}) for path in (one, moved, other)
    ]
    assert values[0] == values[1] != values[2] and str(tmp_path) not in str(values)
    nested = identity_settings({"name": "outer", "base": {"_target_": "x", "name": "qfilters", "path": str(one)}})
    assert nested["base"] == values[0]
    assert identity_settings({"name": "qfilters", "path": None})["path"] is None


FEW = ["--sequences", "2", "--length", "32", "--queries", "20", "--device", "cpu"]


def write_text(folder: Path) -> Path:
    text = folder / "text"
    text.write_text("The old man gave the letter to nobody. " * 60)
    return text


def test_the_command(checkpoint, tmp_path, capsys):
    """The file serves it, the same command writes the same file, and none is overwritten."""
    out, text = tmp_path / "made" / "filters.safetensors", write_text(tmp_path)
    command = ["qfilters", "--model", str(checkpoint), "--out", str(out), "--text", str(text), *FEW]
    assert calibrate.main(command) == 0
    filters = load_file(out)["q_filters"]
    assert filters.shape == (2, 2, 32) and "(2, 2, 32) from 2 texts of 32 tokens" in capsys.readouterr().out
    own = ["qfilters", "--model", str(checkpoint), *FEW]  # of the prose that comes along
    for name, again, same in (("again", command, True), ("other", own, False)):
        assert calibrate.main([*again, "--out", str(tmp_path / name)]) == 0
        assert torch.equal(load_file(tmp_path / name)["q_filters"], filters) == same
    assert calibrate.main(command) == 2
    assert "there is a file; delete it or give another name" in capsys.readouterr().err
    model = Checkpoint("own", str(checkpoint)).weights(torch.float32, "cpu")
    held = kvbench.prefill(model, torch.arange(90)[None], "qfilters", 0.5, method_args={"path": str(out)})
    assert len(held.places(0, 0)) == 45


def test_a_wrong_setting_of_the_command_is_named(tmp_path, capsys):
    text = write_text(tmp_path)
    command = ["qfilters", "--model", "reference", "--out", str(tmp_path / "new")]
    for wrong, line in (
        ([*FEW, "--sequences", "900", "--text", str(text)], "--sequences=900"),
        ([*FEW, "--queries", "0"], "--queries=0"),
        ([*FEW, "--text", str(tmp_path / "none")], "No such file"),
        ([*FEW, "--model", "/none"], "--model=/none"),
        ([*FEW, "--out", str(tmp_path)], f"--out={tmp_path}: no file can be there"),
        ([*FEW, "--out", str(text / "filters")], f"--out={text}/filters: no file can be there"),
        ([*FEW, "--device", "tpu"], "--device=tpu: choose one of cpu, cuda"),
    ):
        assert calibrate.main([*command, *wrong]) == 2
        assert line in capsys.readouterr().err
