"""Read the configuration of a model and check that the model is supported."""

from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.cache_utils import DynamicCache

from kvbench.validation import SettingError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text", "phi3")
LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")  # RoPE whose frequencies follow the largest position


def read_rope_settings(config: Any) -> dict[str, Any]:
    """Return the settings of the rotary embedding, {} for the plain one. (`rope_scaling` before transformers 5.)"""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def check_architecture(config: Any) -> None:
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
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


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
    """Call `find_files` once per model, because every call takes half a minute if the hub cannot be reached."""
    return find_files(path, revision)


def find_max_tokens(config: Any) -> int:
    """Return how many tokens a model supports.

    These are its positions, or those that its RoPE scaling extends them to (YaRN, dynamic, LongRoPE), or its window if
    all layers slide.
    """
    text = config.get_text_config(decoder=True)
    longest, rope = text.max_position_embeddings, read_rope_settings(text)
    for own in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # Gemma 3 has one a kind of layer
        if own.get("rope_type") in ("yarn", *LENGTH_DEPENDENT_ROPE):
            original = own.get("original_max_position_embeddings") or text.max_position_embeddings
            longest = max(longest, int(original * (own.get("factor") or 1)))
    layers: list[Any] = list(DynamicCache(config=text).layers)
    if layers and all(layer.is_sliding for layer in layers):
        longest = min(longest, layers[0].sliding_window)
    return longest
