"""One thread: results are compared exactly, and several test processes share few cores. Without a GPU Triton's
interpreter runs the kernels.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # its workers share this folder; the user's own stays as it is
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="kvbench-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

import pytest
import torch

if not torch.cuda.is_available():  # before any kernel is decorated
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings

pytest.register_assert_rewrite("tests.support")  # before it is imported

gc.disable()  # until all tests are collected
torch.set_num_threads(1)
settings.register_profile("kvbench", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("quick", settings.get_profile("kvbench"), max_examples=30)
settings.load_profile("kvbench")


def pytest_addoption(parser):
    from tests.support.cpu_times import add_options

    add_options(parser)


def pytest_configure(config):
    config.addinivalue_line("markers", "cover(*apart): make test runs a selection of these cases (tests/README.md)")
    from tests.support.cpu_times import register
    from tests.support.yaml_files import parse_texts_once

    register(config)
    parse_texts_once()


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is marked
def pytest_collection_modifyitems(items):
    from tests.support.selection import mark_rest_as_full

    mark_rest_as_full(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep modules and tests out of Python's garbage collection: every full collection would go through all of them."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)  # tests make many objects that no cycle holds; the default is 700
        gc.enable()


def pytest_collection_finish():
    """Take time out of Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") and "triton" in sys.modules:
        from tests.support.interpreter import speed_up_interpreter

        speed_up_interpreter()


@pytest.fixture(autouse=True)
def no_trace_of_attached_models():
    """Whatever a test does, no tiny model may stay attached to kvbench."""
    yield
    if made := sys.modules.get("tests.support.tiny_models"):
        for name, model in made.MADE.items():
            assert model.config._attn_implementation == "sdpa", f"{name} was left attached"


@pytest.fixture(scope="module")
def checkpoint(request, tmp_path_factory) -> Path:
    """The folder of a checkpoint; a module's CHECKPOINT holds arguments of `write_checkpoint`."""
    from tests.support.checkpoints import write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, **getattr(request.module, "CHECKPOINT", {}))
    return folder


@pytest.fixture
def kvbench(checkpoint, tmp_path, monkeypatch, capsys):
    """Runs the command line in this process; gives exit code, output, errors. Results lie in tmp_path/results."""
    from tests.support.command_line import run_cli

    monkeypatch.chdir(tmp_path)

    def call(*settings: str) -> tuple[int, str, str]:
        base = ["model=hf", f"model.path={checkpoint}", "device=cpu"]
        return run_cli([*base, *settings], monkeypatch, capsys)

    return call
