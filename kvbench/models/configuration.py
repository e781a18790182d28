"""Read the configuration of a model and check that the model is supported.

transformers reads configurations, and to import it takes seconds. `load_layout` therefore keeps what kvbench needs of a
local configuration in the user's cache folder, so that the settings of a sweep are checked without transformers.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from kvbench.atomic import replace_file
from kvbench.config.paths import CACHE
from kvbench.config.provenance import content_hash, find_installed_version
from kvbench.interfaces.layout import Layout, Probe
from kvbench.models.admission import hash_sources, probe_architecture
from kvbench.models.layouts import Configuration, is_tested, read_config_layout, read_layer_config, read_rope_settings
from kvbench.network import use_hub
from kvbench.validation import SettingError, refuse_on_error, summarize

MXFP4 = "mxfp4"
LARGEST = {  # what a configuration may say, several times that of the largest models
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 4096,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 19,
    "vocab_size": 1 << 22,
}

WINDOWS = {  # kinds of layers that see a part of a text, and the key that says how many tokens these are
    "chunked_attention": "attention_chunk_size",
    "sliding_attention": "sliding_window",
}

OTHER_KERNELS = "whose kernels are in a package that kvbench does not use"
UNREAD_FORMATS = {  # formats of stored weights that kvbench does not read, by transformers' names, and why
    **dict.fromkeys(
        ("fp8", "mxfp8"), "whose kernels transformers takes from the hub, and kvbench runs no code of the hub"
    ),
    **dict.fromkeys(("gptq", "awq", "auto-round", "bitsandbytes", "compressed-tensors", "torchao"), OTHER_KERNELS),
}


def check_architecture(config: Configuration) -> Probe | None:
    """Return what a probe says about an architecture, or None if it was tested with kvbench's attention function.

    Raises:
        SettingError: The probe refuses it.
    """
    return None if is_tested(config) else probe_architecture(config)


def load_configuration(path: str, revision: str | None = None) -> Any:
    """Read a configuration.

    Args:
        path: A folder, a config.json, or an id of the hub.
        revision: A revision of the hub.

    Raises:
        SettingError: There is no configuration, its weights are quantised in a format that kvbench does not read, some
            of its layers slide and have no window, or a probe refuses the architecture.
    """
    config = find_stamped(path, revision) if Path(path).exists() else deepcopy(find_on_hub(path, revision))
    if isinstance(config, str):
        raise SettingError(f"model.path={path}: cannot read a model there ({config})")
    refuse_quantized(path, config)
    check_window(path, config)
    check_architecture(config)
    return config


def find_stored_format(config: Configuration) -> str | None:
    """Return the format of the quantised weights that a checkpoint stores, by transformers' name, or None if it stores
    plain weights.
    """
    for part in (config, config.get_text_config(decoder=True)):
        if (stored := getattr(part, "quantization_config", None)) is not None:
            fields: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
            is_bitsandbytes = fields.get("load_in_4bit") or fields.get("load_in_8bit")
            method = "bitsandbytes" if is_bitsandbytes else fields.get("quant_method")
            return str(getattr(method, "value", method) or "an unnamed method")
    return None


def refuse_quantized(path: str, config: Configuration) -> None:
    """Raise a SettingError if a checkpoint stores quantised weights in a format that kvbench does not read.

    kvbench reads mxfp4, in which gpt-oss is published: transformers makes such weights plain without further packages.
    """
    stored = find_stored_format(config)
    if stored in (None, MXFP4):
        return
    reason = UNREAD_FORMATS.get(str(stored), "which kvbench does not read")
    raise SettingError(
        f"model.path={path}: its weights are quantised with {stored}, {reason}; use a checkpoint in bfloat16, with "
        "model.weights=int4 if it does not fit"
    )


def check_window(path: str, config: Configuration) -> None:
    """Raise a SettingError if some layers have a sliding window or attend within chunks, and their size is missing.

    transformers takes such a configuration, and fails once it makes a cache, or makes one that holds nothing.
    """
    text: Any = config.get_text_config(decoder=True)
    kinds: Sequence[str] = getattr(text, "layer_types", None) or ()
    kind = next((kind for kind in WINDOWS if kind in kinds), "sliding_attention")
    key = WINDOWS[kind]
    size = getattr(read_layer_config(text, kinds.index(kind)) if kind in kinds else text, key, None)
    slides = kind in kinds or (not kinds and size is not None)
    if slides and (type(size) is not int or size < 1):
        raise SettingError(
            f"model.path={path}: cannot read a model there (config.json: {key}={json.dumps(size)}; its layers of the "
            f"kind {kind} need 1 token or more)"
        )


def find_files(path: str, revision: str | None) -> Any:
    """Return a configuration, or a text that says why it cannot be read."""
    from transformers import AutoConfig

    try:
        check_values(Path(path) / "config.json" if Path(path).is_dir() else Path(path))
        with suppress(KeyError):  # Phi-3's configuration lacks an entry if its RoPE has the type su
            config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
            if read_rope_settings(config).get("rope_type") != "su":
                return config
        return read_as_longrope(path, revision)
    except Exception as error:  # transformers may fail in any way on a damaged file
        return explain_type(str(error)) or explain_part(path, revision) or summarize(error)


def explain_type(message: str) -> str | None:
    """Return what is wrong with the type of a configuration if transformers' message is about that, otherwise None."""
    if "custom code" in message:
        return "its type needs custom code, which kvbench does not run"
    if "does not recognize this architecture" in message:
        name = re.search("model type `([^`]*)`", message)
        type_ = name[1] if name else "in its config.json"
        return f"transformers {find_installed_version('transformers')} does not know the type {type_}"
    return None


def explain_part(path: str, revision: str | None) -> str | None:
    """Return which part of a configuration, such as the text decoder's, has a type that transformers does not know, or
    which value kvbench does not read.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    with suppress(Exception):  # the file may be damaged in any way
        raw, _ = PretrainedConfig.get_config_dict(path, revision=revision)
        if fault := find_bad_value(raw):
            return f"config.json: {fault}"
        for name, part in iterate_items(raw):
            kind = part.get("model_type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in CONFIG_MAPPING:
                if "auto_map" in part:
                    return f"the type {kind} of its {name} needs custom code, which kvbench does not run"
                version = find_installed_version("transformers")
                return f"transformers {version} does not know the type {kind} of its {name}"
    return None


def read_as_longrope(path: str, revision: str | None) -> Any:
    """Read a configuration whose RoPE has the type `su`, LongRoPE's name in the first files of Phi-3.

    Raises:
        KeyError: It has another type.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    raw, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    rope = raw.get("rope_scaling") or {}
    if "su" not in (rope.get("type"), rope.get("rope_type")):
        raise KeyError("an entry is missing in config.json")
    raw["rope_scaling"] = rope | {"type": "longrope", "rope_type": "longrope"}
    return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)


def check_values(file: Path) -> None:
    """Raise a ValueError if a local configuration has a value that kvbench does not read."""
    if file.is_file() and (fault := find_bad_value(json.loads(file.read_text(encoding="utf-8")))):
        raise ValueError(f"{file.name}: {fault}")


def find_bad_value(raw: object) -> str | None:
    """Return which value of a configuration kvbench does not read, and what it reads there, or None.

    A number may be larger than that of any model, and transformers makes lists and modules as long as these numbers say
    before it looks at the weights. Of the other values transformers says neither the key nor what it reads.
    """
    for key, value in iterate_items(raw):
        most = LARGEST.get(key)
        if most is not None and isinstance(value, int | float) and not 1 <= value <= most:
            return f"{key}={value}; kvbench reads 1 to {most}"
        if key == "quantization_config" and not isinstance(value, dict | None):
            return f"{key}={json.dumps(value)}; kvbench reads an object with a quant_method, or null"
        if key in WINDOWS.values() and isinstance(value, str | float | bool):
            return f"{key}={json.dumps(value)}; kvbench reads a whole number from 1 on, or null"
    return None


def iterate_items(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a JSON object and of the objects inside it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from iterate_items(inner)


def find_stamped(path: str, revision: str | None) -> Any:
    """Call `find_files` once for as long as a local configuration stays as it is: every cell of a sweep asks for it."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        return find_files(path, revision)
    stat = file.stat()
    return deepcopy(_find_once(path, revision, (stat.st_mtime_ns, stat.st_size, stat.st_ino)))


@lru_cache(maxsize=64)
def _find_once(path: str, revision: str | None, stamp: tuple[int, int, int]) -> Any:
    return find_files(path, revision)


@cache
def find_on_hub(path: str, revision: str | None) -> Any:
    """Call `find_files` once per model, because every call asks the hub."""
    with use_hub():
        return find_files(path, revision)


@cache
def note_linear_rope(path: str) -> None:
    """Print a line once if the RoPE of a local configuration is scaled linearly, because its length is not certain."""
    file = Path(path) / "config.json"
    if not file.is_file():
        return
    items = list(iterate_items(json.loads(file.read_text(encoding="utf-8"))))
    ropes = [
        rope for _, rope in items if isinstance(rope, dict) and "linear" in (rope.get("rope_type"), rope.get("type"))
    ]
    if ropes:
        stated = next((value for key, value in items if key == "max_position_embeddings"), None)
        print(
            f"kvbench: model.path={path}: its RoPE is scaled linearly by {ropes[0].get('factor')}, and it states "
            f"{stated} positions; if these are the ones before scaling, set model.longest",
            file=sys.stderr,
        )


def load_layout(path: str, revision: str | None = None) -> Layout:
    """Return the layout of a model that is not loaded.

    For a local configuration it is read once: a file in the user's cache folder, named by a hash of the configuration,
    of transformers' version and of the sources that read and probe it, keeps it.

    Args:
        path: A folder, a config.json, or an id of the hub.
        revision: A revision of the hub.

    Raises:
        SettingError: There is no configuration, or a probe refuses the architecture.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        config = load_configuration(path, revision)
        return read_config_layout(config, check_architecture(config))
    versions = "-".join(find_installed_version(name) for name in ("torch", "transformers"))
    made_of = f"{content_hash(file)}-{versions}-{hash_sources()}"
    kept = CACHE / "layouts" / f"{made_of}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):  # not there, or damaged: read again
        found = json.loads(kept.read_text())
        probe = None if found["probe"] is None else Probe(**found["probe"])
        lists = {name: tuple(found[name]) for name in ("sliding", "recurrent")}
        return Layout(**found | lists | {"probe": probe})
    config = load_configuration(path, revision)
    with refuse_on_error(f"model.path={path}: cannot read a model there"):
        layout = read_config_layout(config, check_architecture(config))
    with suppress(OSError):  # without the file the next process reads the configuration again
        kept.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(kept) as draft:
            draft.write_text(json.dumps(asdict(layout)))
    return layout
