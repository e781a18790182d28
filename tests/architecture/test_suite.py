"""`make test` runs a selection of the suite that holds every method, allocator and codec under every law."""

import re
from collections import defaultdict

import pytest

from kvbench.config.catalogue import list_choices
from tests.support.cpu_times import read_durations
from tests.support.repository import ROOT
from tests.support.selection import choose_covering

PLAIN = re.search(r"^PLAIN := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
LAWS = {
    *("test_law_1_a_full_budget_changes_nothing", "test_law_2_every_cut_leaves_exactly_the_quota"),
    *("test_law_2_while_decoding", "test_law_3_tokens_are_conserved", "test_law_4_no_state_leaks"),
    *("test_law_5_ragged_equals_gathered", "test_law_6_blocks_without_eviction_equal_one_shot"),
    *("test_law_7_a_batch_gives_what_its_samples_give_alone", "test_eviction_happens_inside_the_loop"),
    "test_bytes_are_those_of_the_rows_held",
}


BUDGET = 480.0  # CPU seconds of all tests of `make test`; who adds more than five removes as much (CONTRIBUTING.md)


class Collector:
    """A plugin that keeps what pytest collected."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def collect(*paths: str) -> dict[str, list[dict]]:
    """Test function -> the parameters of each case that `make test` runs."""
    own, found = Collector(), defaultdict(list)
    quiet = ["--collect-only", "-qq", "--assert=plain", "-p", "no:xdist", "-p", "no:cacheprovider"]
    assert pytest.main([*quiet, "-m", PLAIN, *(str(ROOT / path) for path in paths)], plugins=[own]) == 0
    for item in own.items:
        if hasattr(item, "callspec"):
            found[item.originalname].append(item.callspec.params)
    return found


def test_make_test_holds_every_method_and_allocator_to_every_law():
    found = collect("tests/laws/test_laws.py")
    assert {name for name, own in found.items() if "cases" in own[0]} == LAWS
    for law in LAWS:
        accepted = [case for own in found[law] for case in own["cases"] if not case.refused]
        assert {case.method for case in accepted} == set(list_choices("method")), law
        assert {case.allocator for case in accepted} == set(list_choices("allocator")), law


def test_make_test_holds_every_codec_to_every_law():
    """By its defaults, with methods that cut in several ways."""
    found = collect("tests/laws/test_codecs.py")
    packing, methods = set(list_choices("codec")) - {"raw"}, set()
    for law, own in found.items():
        single = {"delta", "palu"} if "a_number_that_is_none" in law else set()  # they pack several heads together
        assert {case["name"] for case in own} == packing - single, law
        methods |= {case["method"] for case in own if "method" in case}
    assert len(found) == 7 and len(methods) == 5


@pytest.mark.parametrize("codec", [name for name in list_choices("codec") if name != "raw"])
def test_make_test_packs_the_rows_of_every_method_and_allocator(codec):
    """Or asserts that the codec refuses the method. `raw` packs nothing; the laws use it."""
    found = collect(f"tests/methods/codecs/test_{codec}.py", "tests/methods/codecs/test_rounded_rows.py")
    packed, refused = (
        [own for own in found[name] if own.get("codec", codec) == codec]
        for name in ("test_every_method_and_allocator", "test_what_cannot_be_packed_is_refused")
    )
    assert {own["allocator"] for own in packed} == set(list_choices("allocator"))
    assert {own["method"] for own in (*packed, *refused)} == set(list_choices("method"))


def test_no_test_of_make_test_takes_long():
    """`make durations` measured them, as multiples of the time of a fixed loop."""
    durations = read_durations()
    missing = {own.name for own in durations if not (ROOT / own.name.partition("::")[0]).is_file()}
    long = {own.name: own.longest for own in durations if "::" in own.name and own.longest > own.limit}
    assert not missing, f"{sorted(missing)} are gone: run make durations"
    assert not long, f"{long}: longer than make test allows (tests/README.md)"
    assert sum(own.seconds for own in durations if "::" not in own.name) <= BUDGET


def test_a_selection_holds_every_value_with_few_cases():
    cases = [frozenset([("one", a), ("two", b), ("three", c)]) for a in range(5) for b in range(3) for c in range(2)]
    chosen = choose_covering(cases)
    assert len(chosen) == 5 and set().union(*(cases[index] for index in chosen)) == set().union(*cases)
    assert choose_covering(cases) == chosen == sorted(chosen)
