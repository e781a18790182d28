"""Files of Palu's projections for tiny models."""

from pathlib import Path

import torch

from kvbench.config.catalogue import build, load_settings
from kvbench.interfaces.layout import Layout
from kvbench.methods.codecs.palu import Palu
from kvbench.models.transformers_port import read_layout
from kvbench.training.palu_calibration import calibrate_model, choose_recipe
from kvbench.training.recording import write_tensors
from tests.support.method_files import FOLDER
from tests.support.tiny_models import ids, make_double

TEXT = torch.stack([ids(64, seed)[0] for seed in range(40, 50)])
"""Sequences that the files are made from, (10, 64)."""


def write_palu(path: Path, name: str, **given: object) -> str:
    """Calibrate a tiny model in float64, with uniform ranks unless told otherwise, and return the path."""
    model = make_double(name)
    recipe = choose_recipe(read_layout(model), dict(search="uniform", length=64, fisher_length=64) | given)
    weights, _ = calibrate_model(model, read_layout(model), recipe, TEXT)
    write_tensors(path, weights, {})
    return str(path)


def find_palu(name: str, **given: object) -> str:
    """The same, made once, in a folder of the tests."""
    path = Path(FOLDER.name) / f"palu-{name}-{'-'.join(map(str, given.values()))}"
    return str(path) if path.exists() else write_palu(path, name, **given)


def draw_palu(path: Path, layout: Layout, rank: int = 8) -> str:
    """Write random projections for a model, of one group of all heads, and return the path."""
    generator = torch.Generator().manual_seed(7)
    weights = {
        f"model.layers.{layer}.self_attn.{side}_proj.U.0.weight": torch.randn(
            layout.heads * layout.dim, rank, generator=generator
        )
        for layer in range(layout.layers)
        for side in "kv"
    }
    write_tensors(path, weights, {})
    return str(path)


def build_palu(path: str, **args: object) -> Palu:
    """The codec with a file and further settings."""
    return build("codec", load_settings("codec", "palu", {"path": path} | args))
