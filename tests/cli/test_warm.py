"""`kvbench warm` where there is no GPU: one line, and the errors of a sweep. tests/gpu has it compile."""

import pytest
import torch

from kvbench.__main__ import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture
def warm(checkpoint, tmp_path, monkeypatch, capsys):
    """Gives exit code, output, errors of `kvbench warm` with a tiny model."""
    monkeypatch.chdir(tmp_path)

    def call(*settings: str) -> tuple[int, str, str]:
        code = main(["warm", "model=hf", f"model.path={checkpoint}", *settings])
        return code, *capsys.readouterr()

    return call


def test_there_is_nothing_to_compile_on_a_cpu(warm, tmp_path):
    code, out, errors = warm("method=snapkv,knorm", "budget=0.2", "task=niah")
    assert (code, out, errors) == (0, "There is nothing to compile on a CPU.\n", "")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("method=snapkw",), "method=snapkw"),
        (("method=snapkv", "budget=1.5"), "budget=1.5"),
        (("method=snapkv", "task=niah", "task.nonsense=1"), "nonsense"),
    ],
)
def test_a_wrong_setting_is_one_line(warm, settings, said):
    code, out, errors = warm(*settings)
    assert code == 2 and out == "" and errors.count("\n") == 1 and said in errors


def test_a_refused_cell_is_named(warm):
    code, out, _ = warm("method=snapkv,kvzip", "budget=0.2", "block_size=64", "task=niah")
    assert code == 2 and "kvzip: refused: " in out
