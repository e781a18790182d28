"""Codecs as users of tiny models have them: with their files, and with settings that short prompts need."""

from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from kvbench.config.catalogue import build, list_choices, load_settings
from kvbench.config.paths import CONF
from kvbench.interfaces.codec import Codec
from kvbench.models.transformers_port import read_layout
from tests.support.delta_files import SMALL as SHORT_DELTA
from tests.support.delta_files import write_for
from tests.support.kvquant_files import find_kvquant
from tests.support.method_files import FOLDER
from tests.support.palu_files import find_palu
from tests.support.tiny_models import tiny


def write_row_scales(model: str) -> str:
    """Scales of fp8 for the layers and heads of a tiny model, which differ."""
    path, layout = Path(FOLDER.name) / f"row-scales-{model}", read_layout(tiny(model))
    scales = 0.01 * torch.arange(1.0, 1 + layout.layers * layout.heads).view(layout.layers, layout.heads)
    save_file({"k_scale": scales, "v_scale": scales / 2}, str(path))
    return str(path)


def write_delta(model: str) -> str:
    """Compressors that lose nothing, of one dimension for each of a token's."""
    path = Path(FOLDER.name) / f"laws-deltakv-{model}"
    return str(path) if path.exists() else write_for(path, tiny(model), "identity")


FILES: dict[str, Callable[[str], str]] = {"delta": write_delta, "kvquant": find_kvquant, "palu": find_palu}
"""What makes the file of a codec that cannot do without one."""
SHORT: dict[str, dict] = {
    "delta": SHORT_DELTA,
    "hf_quantized": {"group": 16, "residual": 6},
    "kivi": {"group": 8, "residual": 24},
    "turboquant": {"raw_layers": 1},
}
"""Settings for short prompts and models of few layers and channels."""


def list_variants() -> dict[str, tuple[str, dict]]:
    """Every codec that packs with every preset and both roundings: a label, the codec's name and settings.

    A codec's own defaults come first, under its name alone, and no variant is listed twice.
    """
    variants: dict[str, tuple[str, dict]] = {}
    for name in list_choices("codec"):
        if name == "raw":
            continue
        variants[name] = (name, {})
        stated = yaml.safe_load((CONF / "codec" / f"{name}.yaml").read_text())
        fitting = () if name == "delta" else stated.get("presets", ())  # delta's are layers of models that are deeper
        for preset in fitting:
            for rounding in ("written", "cut") if "rounding" in stated else (None,):
                own = {"preset": preset} | ({} if rounding is None else {"rounding": rounding})
                if load_settings("codec", name, own) != load_settings("codec", name):
                    variants[" ".join((name, *own.values()))] = (name, own)
    return variants


def build_codec(name: str, args: dict, model: str = "llama") -> Codec:
    """A codec with these settings, for a tiny model."""
    needed = {"path": FILES[name](model)} if name in FILES else {}
    if args.get("preset") == "head":
        needed = {"path": write_row_scales(model)}
    return build("codec", load_settings("codec", name, SHORT.get(name, {}) | needed | args))
