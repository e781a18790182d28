"""Two presets of a method differ where their settings do."""

from functools import cache
from itertools import combinations

import pytest
import yaml
from hydra.utils import get_class

import kvbench
from kvbench.config.catalogue import CONF, list_choices, load_settings
from kvbench.interfaces.method import Method
from tests.support.method_files import make_tiny_method_args
from tests.support.selection import only_in_full
from tests.support.tiny_models import ids, tiny


@cache
def behaviour(name: str, preset: str, seed: int) -> tuple:
    """Rows held after a prompt and after more tokens, with uniform shares; a size while decoding that no prompt here
    reaches is taken smaller.
    """
    args = make_tiny_method_args(name, "llama") | {"preset": preset}
    args.pop("chunk", None)  # presets of kvgrad differ by it
    if load_settings("method", name, args).get("decode_size"):
        args["decode_size"] = 100
    held = kvbench.prefill(tiny("llama"), ids(420, seed), name, 120, method_args=args, prefix=6)
    found = []
    for more in (1, 2, 512):
        found.append([held.places(layer, head).tolist() for layer in range(3) for head in range(2)])
        found.append(held.extend(ids(more, seed=77)).tolist())
    return (*found, [held.places(layer, head).tolist() for layer in range(3) for head in range(2)])


def presets(name: str) -> list[str]:
    return list(yaml.safe_load((CONF / "method" / f"{name}.yaml").read_text()).get("presets", {}))


CUTS = [
    name
    for name in list_choices("method")
    if name != "dms_threshold" and get_class(load_settings("method", name)["_target_"]).read is Method.read
]
PAIRS = [(name, *pair) for name in CUTS for pair in combinations(presets(name), 2)]  # readers: their own tests
FIRST = [(name, *presets(name)[:2]) for name in ("knorm", "kvgrad", "rkv", "snapkv", "triattention")]


@pytest.mark.parametrize("name, one, other", [pair if pair in FIRST else only_in_full(*pair) for pair in PAIRS])
def test_presets_differ_where_their_settings_do(name, one, other):
    chosen = [load_settings("method", name, {"preset": preset}) | {"preset": None} for preset in (one, other)]
    for seed in range(6):
        if behaviour(name, one, seed) != behaviour(name, other, seed):
            assert chosen[0] != chosen[1]
            return
    assert chosen[0] == chosen[1], "two presets that never differ"
