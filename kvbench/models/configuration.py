"""Read the configuration of a model and check that the model is supported.

transformers reads configurations, and to import it takes seconds. `load_layout` therefore keeps what kvbench needs of a
local configuration in the user's cache folder, so that the settings of a sweep are checked without transformers.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from kvbench.atomic import replace_file
from kvbench.config.paths import CACHE
from kvbench.config.provenance import content_hash, find_installed_version
from kvbench.interfaces.layout import Layout
from kvbench.network import use_hub
from kvbench.validation import SettingError, refuse_on_error, summarize

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text", "phi3")
LARGEST = {  # what a configuration may say, several times that of the largest models
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 4096,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 19,
    "vocab_size": 1 << 22,
}
LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")  # RoPE whose frequencies follow the largest position


class Configuration(Protocol):
    """The part of a transformers configuration that all supported architectures have."""

    model_type: ClassVar[str]
    hidden_size: int
    max_position_embeddings: int
    num_attention_heads: int
    num_hidden_layers: int
    num_key_value_heads: int

    def get_text_config(self, decoder: bool = ...) -> "Configuration": ...


def read_rope_settings(config: object) -> dict[str, Any]:
    """Return the settings of the rotary embedding, {} for the plain one. (`rope_scaling` before transformers 5.)"""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def check_architecture(config: Configuration) -> None:
    """Raise a SettingError unless the architecture was tested with kvbench's attention function."""
    if config.model_type not in ARCHITECTURES:
        raise SettingError(
            f"model: architecture {config.model_type} is not supported; use one of {', '.join(ARCHITECTURES)}"
        )


def load_configuration(path: str, revision: str | None = None) -> Any:
    """Read a configuration.

    Args:
        path: A folder, a config.json, or an id of the hub.
        revision: A revision of the hub.

    Raises:
        SettingError: There is no configuration, or the architecture is not supported.
    """
    config = find_stamped(path, revision) if Path(path).exists() else deepcopy(find_on_hub(path, revision))
    if isinstance(config, str):
        raise SettingError(f"model.path={path}: cannot read a model there ({config})")
    check_architecture(config)
    return config


def find_files(path: str, revision: str | None) -> Any:
    """Return a configuration, or a text that says why it cannot be read."""
    from transformers import AutoConfig

    try:
        check_numbers(Path(path) / "config.json" if Path(path).is_dir() else Path(path))
        with suppress(KeyError):  # Phi-3's configuration lacks an entry if its RoPE has the type su
            config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
            if read_rope_settings(config).get("rope_type") != "su":
                return config
        return read_as_longrope(path, revision)
    except Exception as error:  # transformers may fail in any way on a damaged file
        return summarize(error)


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


def check_numbers(file: Path) -> None:
    """Raise a ValueError if a number of a local configuration is larger than that of any model.

    transformers makes lists and modules as long as these numbers say before it looks at the weights.
    """
    if file.is_file():
        for key, value in iterate_items(json.loads(file.read_text(encoding="utf-8"))):
            most = LARGEST.get(key)
            if most is not None and isinstance(value, int | float) and not 1 <= value <= most:
                raise ValueError(f"{file.name}: {key}={value}; kvbench reads 1 to {most}")


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


def find_max_tokens(config: Any) -> int:
    """Return how many tokens a model supports.

    These are its positions, or those that its RoPE scaling extends them to (YaRN, dynamic, LongRoPE), or its window if
    all layers slide. Positions of a linear scaling are taken as they are stated: some checkpoints state them as scaled
    (Gemma 3), others as they were before. `model.longest` overrides them.
    """
    from transformers.cache_utils import DynamicCache

    text = config.get_text_config(decoder=True)
    longest, rope = text.max_position_embeddings, read_rope_settings(text)
    parts = [part for part in rope.values() if isinstance(part, dict)]  # Gemma 3 has one for each kind of layer
    for scaling in (rope, *parts):
        if scaling.get("rope_type") in ("yarn", *LENGTH_DEPENDENT_ROPE):
            original = scaling.get("original_max_position_embeddings") or text.max_position_embeddings
            longest = max(longest, int(original * (scaling.get("factor") or 1)))
    layers: list[Any] = list(DynamicCache(config=text).layers)
    if layers and all(layer.is_sliding for layer in layers):
        longest = min(longest, layers[0].sliding_window)
    return longest


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


def find_rope_switch(text: Configuration) -> int | None:
    """Return the length beyond which a text decoder's RoPE changes its frequencies, or None if it never does."""
    rope = read_rope_settings(text)
    if rope.get("rope_type") not in LENGTH_DEPENDENT_ROPE:
        return None
    original = rope.get("original_max_position_embeddings")
    return original or getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings


def read_config_layout(config: Configuration) -> Layout:
    """Return the layout of a model by its configuration, before the model is loaded."""
    from transformers.cache_utils import DynamicCache

    check_architecture(config)
    longest = find_max_tokens(config)
    config = config.get_text_config(decoder=True)
    layers: list[Any] = list(DynamicCache(config=cast(Any, config)).layers)
    sliding = tuple(i for i, layer in enumerate(layers) if layer.is_sliding)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    all_slide = len(sliding) == config.num_hidden_layers
    window = layers[0].sliding_window if all_slide else None
    return Layout(
        layers=config.num_hidden_layers,
        heads=config.num_key_value_heads,
        query_heads=config.num_attention_heads,
        dim=dim,
        hidden=config.hidden_size,
        sliding=() if all_slide else sliding,
        window=window,
        longest=longest,
        rope_switch=find_rope_switch(config),
    )


def load_layout(path: str, revision: str | None = None) -> Layout:
    """Return the layout of a model that is not loaded.

    For a local configuration it is read once: a file in the user's cache folder, named by a hash of the configuration,
    of transformers' version and of this module, keeps it.

    Args:
        path: A folder, a config.json, or an id of the hub.
        revision: A revision of the hub.

    Raises:
        SettingError: There is no configuration, or the architecture is not supported.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        return read_config_layout(load_configuration(path, revision))
    made_of = f"{content_hash(file)}-{find_installed_version('transformers')}-{content_hash(Path(__file__))}"
    kept = CACHE / "layouts" / f"{made_of}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):  # not there, or damaged: read again
        fields = json.loads(kept.read_text())
        return Layout(**fields | {"sliding": tuple(fields["sliding"])})
    config = load_configuration(path, revision)
    with refuse_on_error(f"model.path={path}: cannot read a model there"):
        layout = read_config_layout(config)
    with suppress(OSError):  # without the file the next process reads the configuration again
        kept.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(kept) as draft:
            draft.write_text(json.dumps(asdict(layout)))
    return layout
