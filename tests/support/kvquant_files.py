"""Files of KVQuant's ranges and code books for tiny models."""

from pathlib import Path

from kvbench.config.catalogue import build, load_settings
from kvbench.methods.codecs.kvquant import KVQuant
from kvbench.models.transformers_port import read_layout
from kvbench.training.kvquant_calibration import KVQuantRecipe, calibrate_model
from kvbench.training.recording import write_tensors
from tests.support.method_files import FOLDER
from tests.support.tiny_models import ids, make_double

TEXT = [ids(40, seed)[0] for seed in range(40, 43)]
"""Sequences that the files are made from, (40,) each."""


def find_kvquant(name: str, outliers: float = 0.05) -> str:
    """Calibrate a tiny model in float64, once, and return the path of the file."""
    path = Path(FOLDER.name) / f"kvquant-{name}-{outliers}"
    if not path.exists():
        model = make_double(name)
        recipe = KVQuantRecipe(outliers, weighed=False, length=40)
        write_tensors(path, calibrate_model(model, read_layout(model), recipe, TEXT), {"model": name})
    return str(path)


def build_kvquant(name: str, outliers: float = 0.05, **args: object) -> KVQuant:
    """The codec with the file of a tiny model and further settings."""
    return build("codec", load_settings("codec", "kvquant", {"path": find_kvquant(name, outliers)} | args))
