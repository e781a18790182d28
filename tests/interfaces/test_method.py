"""What a method declares is checked before it is used, and what it refuses is said in one line."""

import re
from dataclasses import dataclass, fields, replace

import pytest

import kvbench
from kvbench.cache.hook_table import check_declarations
from kvbench.cache.policy import choose_cache
from kvbench.cache.refusals import CONDITIONS, find_refusal
from kvbench.config.catalogue import build, load_settings
from kvbench.interfaces.further_hooks import REFUSABLE, WANTED
from kvbench.interfaces.method import Captured, Method
from kvbench.interfaces.observation import Observation
from kvbench.methods.rkv import RKV
from kvbench.validation import ContractError, SettingError
from tests.support.method_files import build_policy
from tests.support.tiny_models import ids, tiny

UNIFORM, RAW = build_policy("full", "uniform", "llama")[1:]


@dataclass(frozen=True)
class Newest(Method):
    def score(self, observation, rows, state):
        return rows.places.float()


def test_a_score_is_a_method():
    method = Newest("newest")
    assert method.scores and method.cuts and not method.watches and method.captured is None
    assert kvbench.prefill(tiny("llama"), ids(20), method, 5).places(0, 0).tolist() == [*range(15, 20)]


def test_what_may_be_wanted_are_fields_of_an_observation():
    assert all(Observation.__dataclass_fields__[name].default is None or name == "lse" for name in WANTED)


def declare(name: str, value: object) -> Method:
    return type("Newest", (Newest,), {name: value})("newest")


@pytest.mark.parametrize(
    "name, value, line",
    [
        ("wants", ("keys",), "wants is ('keys',), allowed are lse, unrotated_keys, hidden, normed_hidden, gradient"),
        ("wants", ("lse"), "wants is 'lse', allowed are lse"),
        ("refusals", {"rotation": "no"}, "refusals is {'rotation': 'no'}, allowed are decoding, allocator"),
        ("captured", True, "captured is True, expected a Captured or None"),
        ("score", lambda self, rows: rows, "score(rows) must take (observation, rows, state), as kvbench calls it"),
        ("protect", lambda self, *, quota: None, "protect(*, quota) must take (observation, rows, quota)"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_or_hook_is_named(name, value, line):
    with pytest.raises(ContractError, match=f"^method=newest: {re.escape(line)}"):
        choose_cache(declare(name, value), UNIFORM, RAW)


def test_hooks_may_name_their_arguments_as_they_like():
    check_declarations(declare("score", lambda self, *given: given[1].mass), RAW)
    check_declarations(declare("protect", lambda self, seen, held, size, more=None: None), RAW)


def test_a_state_that_is_captured_must_be_released():
    with pytest.raises(TypeError, match="capture_state and release_state need each other"):
        Captured(capture_state=lambda method, state, capture: state)


PARTNERS = {
    "decoding": ("method.decoding=true", "uniform", "raw"),
    "allocator": ("allocator=pyramid", "pyramid", "raw"),
    "uneven_allocator": ("allocator=ada", "ada", "raw"),
    "cascading_allocator": ("allocator=cake", "cake", "raw"),
    "codec": ("codec=kivi", "uniform", "kivi"),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_refusal_names_the_setting_and_the_reason(name):
    setting, *partners = PARTNERS[name]
    method = replace(declare(name="refusals", value={name: "has a reason; use another"}), decoding=name == "decoding")
    _, allocator, codec = build_policy("full", partners[0], "llama", partners[1])
    assert find_refusal(method, allocator, codec) == f"{setting}: newest has a reason; use another"
    assert find_refusal(replace(method, decoding=False), UNIFORM, RAW) is None


def test_what_needs_a_block_size_or_a_model_is_refused_there():
    assert REFUSABLE.keys() - CONDITIONS.keys() == {"block_size", "rope_switch", "softcap"}
    with pytest.raises(SettingError, match="^block_size=7: newest sees the whole prompt; use null$"):
        kvbench.prefill(
            tiny("llama"), ids(9), declare("refusals", {"block_size": "sees the whole prompt; use null"}), 5, 7
        )


@pytest.mark.parametrize(
    "method, more, line",
    [
        ("criticalkv", {"base": "tova"}, "; use method.base_args={scope: group}"),
        ("dms_threshold", {"base": "tova"}, "dms_threshold shares rows out itself; use allocator=uniform"),
    ],
)
def test_advice_about_a_base_names_settings_that_exist(method, more, line):
    built = build("method", load_settings("method", method, more))
    refusal = find_refusal(built, build("allocator", load_settings("allocator", "ada")), RAW)
    assert refusal is not None and refusal.startswith("allocator=ada: ") and refusal.endswith(line)


def test_a_subclass_cannot_override_a_hook_that_captured_does_not_have():
    @dataclass(frozen=True)
    class Other(RKV):
        def capture_state(self, state, capture):
            return None

    method = build_policy("rkv", "uniform", "llama")[0]
    other = Other(**{field.name: getattr(method, field.name) for field in fields(method)})
    check_declarations(method, RAW)
    with pytest.raises(ContractError, match="^method=rkv: captured has another capture_state than the class"):
        check_declarations(other, RAW)
