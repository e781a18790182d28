"""The models that are a downloaded base with low-rank factors.

The factors are merged once, into a folder of `.models`. Every later run loads that folder like any other Llama, and
finds it without torch.
"""

from pathlib import Path

from kvbench.models import local_models
from kvbench.models.local_models import hash_file, is_converted, name_folder
from kvbench.models.low_rank import read_factors_file

TUNED_MODELS = {"smollm2_long": "smollm2"}  # model -> its base


def find_factors(model: str) -> Path:
    """Return the file of factors that kvbench holds for a model of `TUNED_MODELS`."""
    return Path(__file__).resolve().parent / f"{model}.safetensors"


def find_tuned(base: str, path: Path) -> Path:
    """Return the folder of a downloaded model with factors. Merge the factors into it if the folder is missing.

    Args:
        base: The downloaded model, one of `FETCHED_MODELS`.
        path: The file of factors.

    Raises:
        SettingError: The base is not here or is another one, the factors cannot be used, or the disk is full.
    """
    file = read_factors_file(path, "model.factors")
    file.check_base(base)
    known = hash_file(path)
    if is_converted(folder := name_folder(path, known), known):
        return folder
    from kvbench.models.merging import find_merged

    return find_merged(file, local_models.MODELS / base)
