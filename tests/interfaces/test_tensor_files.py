"""Files of tensors: what is taken for a pickled file."""

import pickle

import pytest
import torch
from safetensors.torch import save

from kvbench.interfaces.tensor_files import is_pickled


def test_a_safetensors_file_is_not_taken_for_a_pickled_one(tmp_path):
    """Whatever its first byte, which is the length of the header modulo 256."""
    first = set()
    for size in range(40):
        content = save({"x": torch.ones(1)}, {"note": "n" * 8 * size})
        (tmp_path / "file").write_bytes(content)
        first.add(content[0])
        assert not is_pickled(tmp_path / "file")
    assert 0x80 in first


@pytest.mark.parametrize("old", [False, True])
def test_pickled_files_are_known(tmp_path, old):
    torch.save({"x": torch.ones(1)}, tmp_path / "file", _use_new_zipfile_serialization=not old)
    assert is_pickled(tmp_path / "file")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "file").write_bytes(pickle.dumps({"x": 1}, protocol))
        assert is_pickled(tmp_path / "file")
    assert not is_pickled(tmp_path / "none")
