"""Codecs that round each row on its own against their formulas in float64: what fp8, int8 and int4 have in common.

What one of them has beside this is in a file of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.support.rounded_codecs import (
    MODELS,
    Rounded,
    check_pair,
    check_refusal,
    check_rows_that_stay,
    check_samples_branches_and_shared_prefills,
    check_the_captured_step,
    check_the_full_cache,
    list_accepted,
    list_cuts,
    list_refused,
)
from tests.support.row_formulas import (
    E5M2,
    QuaRot,
    by_row,
    by_scale,
    round_around_the_middle,
    round_as_vllm,
    round_symmetric,
    round_truncating,
)
from tests.support.selection import only_in_full

GIVEN = dict(key_scale=0.02, value_scale=0.3)
FP8 = {
    "tensor": Rounded("fp8", {}, by_scale(1), by_scale(1), 64),
    "given": Rounded("fp8", GIVEN, by_scale(0.02), by_scale(0.3), 64),
    "row": Rounded("fp8", {"preset": "row"}, by_row, by_row, 72),
    "e5m2": Rounded("fp8", {"preset": "e5m2"}, by_scale(1, E5M2), by_scale(1, E5M2), 64),
    "cut": Rounded("fp8", {"preset": "row", "rounding": "cut"}, by_row, by_row, 72),
}
INT8 = {
    "vllm": Rounded("int8", {}, round_symmetric, round_symmetric, 72),
    "truncating": Rounded("int8", {"preset": "vllm_truncating"}, round_truncating, round_truncating, 72),
    "sglang": Rounded("int8", {"preset": "sglang"}, round_around_the_middle, round_around_the_middle, 72),
    "cut": Rounded("int8", {"rounding": "cut"}, round_symmetric, round_symmetric, 72),
}
PLAIN = QuaRot(turned=False)
INT4 = {
    "quarot": Rounded("int4", {}, QuaRot(), PLAIN, 40),
    "quarot, written": Rounded("int4", {"rounding": "written"}, QuaRot(), PLAIN, 40),
    "vllm": Rounded("int4", {"preset": "vllm"}, round_as_vllm, round_as_vllm, 40),
    "vllm, cut": Rounded("int4", {"preset": "vllm", "rounding": "cut"}, round_as_vllm, round_as_vllm, 40),
    "plain": Rounded("int4", {"preset": "plain"}, PLAIN, PLAIN, 40),
    "groups": Rounded("int4", dict(hadamard="both", group=8, clip=0.9), *[QuaRot(True, 8, 0.9)] * 2, 64),
}
CASES = {"fp8": FP8, "int8": INT8, "int4": INT4}


@dataclass(frozen=True)
class Chosen:
    """The cases of a codec that tests read which do not read all."""

    cut: tuple[str, ...]
    """While decoding."""
    quick_cut: tuple[str, str]
    """One of these, and the method with which `make test` has it."""
    uneven: tuple[str, str]
    """With heads of different lengths."""
    apart: str
    """In batches, branches and shared prefills."""
    captured: tuple[tuple[str, str], ...]
    """In the captured step, each with an allocator."""
    crossed: tuple[str, str]
    """With every method and allocator: rounded as rows are written, and after a cut."""
    share: float
    """The most bytes of a raw row's that one takes."""


CHOSEN = {
    "fp8": Chosen(
        ("tensor", "row", "cut"), ("row", "tova"), ("tensor", "cut"), "row", (("given", "ada"), ("cut", "uniform")),
        ("row", "cut"), 0.3,
    ),
    "int8": Chosen(
        ("vllm", "sglang", "cut"), ("cut", "h2o"), ("sglang", "cut"), "sglang", (("sglang", "ada"), ("cut", "uniform")),
        ("vllm", "cut"), 0.3,
    ),
    "int4": Chosen(
        ("quarot", "quarot, written", "vllm"), ("quarot", "keydiff"), ("quarot", "vllm"), "vllm",
        (("quarot", "ada"), ("vllm", "uniform")), ("vllm", "quarot"), 0.17,
    ),
}  # fmt: skip
ONLY_IN_FULL = [("int4", "quarot, written"), ("int4", "vllm, cut")]
ALL = [(codec, case) for codec, cases in CASES.items() for case in cases]


@pytest.mark.parametrize("codec, case", [only_in_full(*each) if each in ONLY_IN_FULL else each for each in ALL])
@pytest.mark.parametrize("model, block", MODELS)
def test_a_model_attends_to_what_the_formula_says(codec, case, model, block):
    check_the_full_cache(CASES[codec][case], model, block)


@pytest.mark.parametrize(
    "codec, case, method",
    [each for codec, chosen in CHOSEN.items() for each in list_cuts(codec, chosen.cut, chosen.quick_cut)],
)
def test_rows_are_cut_while_decoding(codec, case, method):
    check_rows_that_stay(CASES[codec][case], method)


@pytest.mark.parametrize("codec, case", [(codec, case) for codec, chosen in CHOSEN.items() for case in chosen.uneven])
def test_heads_of_different_lengths(codec, case):
    check_rows_that_stay(CASES[codec][case], "snapkv", "ada", window=4)


@pytest.mark.parametrize("codec", [only_in_full("fp8"), only_in_full("int8"), "int4"])  # laws read all of them apart
def test_samples_branches_and_shared_prefills_are_apart(codec):
    check_samples_branches_and_shared_prefills(CASES[codec][CHOSEN[codec].apart])


@pytest.mark.parametrize(
    "codec, case, allocator",
    [
        only_in_full(codec, *each) if each == ("cut", "uniform") else (codec, *each)
        for codec, chosen in CHOSEN.items()
        for each in chosen.captured
    ],
)
def test_the_captured_step_gives_what_the_modules_give(codec, case, allocator):
    check_the_captured_step(CASES[codec][case], allocator)


@pytest.mark.parametrize("codec", [only_in_full("fp8"), only_in_full("int8"), "int4"])
def test_a_graph_reads_the_tokens_between_distant_cuts(codec):
    """Rows are rounded after the last cut of the prompt, and the modules read the token behind which rows go."""
    case = CASES[codec][CHOSEN[codec].crossed[1]]
    check_the_captured_step(case, "uniform", "tova", 36, decoding=True, decode_interval=34)


def list_pairs(choose: Callable[[Rounded], list[tuple[str, str]]]) -> list[tuple[str, str, str, str]]:
    """A codec, a case, and the pairs of a method and an allocator that `choose` names for it."""
    crossed = [(codec, case) for codec, chosen in CHOSEN.items() for case in chosen.crossed]
    return [(codec, case, *pair) for codec, case in crossed for pair in choose(CASES[codec][case])]


@pytest.mark.cover("codec")
@pytest.mark.parametrize("codec, case, method, allocator", list_pairs(list_accepted))
def test_every_method_and_allocator(codec, case, method, allocator):
    check_pair(CASES[codec][case], method, allocator, CHOSEN[codec].share)


@pytest.mark.cover("codec")
@pytest.mark.parametrize("codec, case, method, allocator", list_pairs(list_refused))
def test_what_cannot_be_packed_is_refused(codec, case, method, allocator):
    check_refusal(CASES[codec][case], method, allocator)
