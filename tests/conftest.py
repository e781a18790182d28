"""One thread: results are compared exactly, and several test processes share few cores. Without a GPU Triton's
interpreter runs the kernels.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():  # before any kernel is decorated
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("kvbench", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("kvbench")


@pytest.fixture(autouse=True)
def no_trace_of_attached_models():
    """Whatever a test does, no tiny model may stay attached to kvbench."""
    yield
    from models import MADE

    for name, model in MADE.items():
        assert model.config._attn_implementation == "sdpa", f"{name} was left attached"
