"""A random miniature of every type of model on the tested list, and what reads it correctly: transformers' `eager`.

Tests iterate over `ARCHITECTURES`, so a type that is added there is under all of them.
"""

from functools import cache

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvbench.models import probe
from kvbench.models.layouts import ARCHITECTURES, Configuration, is_tested
from kvbench.models.miniature import draw_miniature, shrink
from kvbench.models.type_tables import make_default_config


def configure(name: str, **more: object) -> Configuration:
    """The default configuration of a type, with what it lacks. A test of a type that transformers lacks is skipped."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    return make_default_config(name, **more)


def configure_miniature(name: str) -> Configuration:
    """The same as a miniature, in which two heads of queries share one of keys, as in most checkpoints."""
    small = shrink(configure(name))
    text = small.get_text_config(decoder=True)
    if getattr(text, "num_key_value_heads", None) == text.num_attention_heads and not hasattr(text, "kv_lora_rank"):
        text.num_key_value_heads //= 2
    return small


@cache
def make_trial(name: str) -> probe.Trial:
    """A miniature of a type, a text of distinct positions, and what one pass of `eager` computes for it."""
    small = configure_miniature(name)
    if not is_tested(small):
        pytest.skip(f"{name} counts as tested in later versions of transformers")
    return probe.make_trial(draw_miniature(small))


def choose_types() -> list[str]:
    """The first type of each family."""
    return list({known.family: name for name, known in reversed(ARCHITECTURES.items())}.values())[::-1]
