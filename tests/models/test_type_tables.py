"""docs/models.md says what kvbench does with each type of model, as miniatures show it."""

import re

import pytest

from kvbench.cli.docs_tables import TYPES, TYPES_OPTION, complete_types
from kvbench.models.layouts import ARCHITECTURES, Architecture
from kvbench.models.probe import Refused
from kvbench.models.type_tables import (
    ADMITTED,
    REFUSED,
    TESTED,
    TypeFacts,
    describe_cut,
    list_tested,
    shorten_reason,
    try_other_type,
    try_tested_type,
)
from kvbench.report.doc_tables import TABLE, replace_table
from kvbench.validation import SettingError
from tests.support.families import configure
from tests.support.repository import ROOT


def read_table(label: str) -> list[list[str]]:
    """The cells of a table of the page, without its head."""
    text = (
        (ROOT / TYPES)
        .read_text()
        .partition(TABLE.format(label=label, option=TYPES_OPTION) + "\n\n")[2]
        .partition("\n\n")[0]
    )
    return [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]


def test_the_page_has_each_type_once():
    """With what the list says of it; `make test-all` tries each type."""
    rows = {name: row for row in read_table(TESTED) for name in re.findall(r"`(\w+)`", row[1])}
    listed = {
        name: (known.family, "CUDA graphs" if known.graphs else "modules") for name, known in ARCHITECTURES.items()
    }
    assert {name: (row[0], row[-1]) for name, row in rows.items()} == listed
    others = [
        name for label in (ADMITTED, REFUSED) for row in read_table(label) for name in re.findall(r"`(\w+)`", row[0])
    ]
    assert len(others) == len({*others} - ARCHITECTURES.keys()) > 20


@pytest.mark.full
def test_the_tables_say_what_miniatures_show():
    text = (ROOT / TYPES).read_text()
    assert complete_types(text) == text, "python -m kvbench dev docs-tables --types writes it"


def test_facts_come_from_the_miniature(monkeypatch):
    assert try_tested_type("llama") == TypeFacts("all layers", "right", True)
    assert try_tested_type("gemma3_text") == TypeFacts("full layers, not windows", "right", True)
    configure("doge")
    with pytest.raises(Refused, match="transformers' own cache differs"):
        try_other_type("doge")
    monkeypatch.setattr(
        "kvbench.models.type_tables.ARCHITECTURES", {"llama": Architecture("A"), "mistral": Architecture("A")}
    )
    assert list(list_tested())[2:] == ["| A | `llama`, `mistral` | all layers | right | modules |"]


@pytest.mark.parametrize(
    "name, layers", [("lfm2", "full"), ("nemotron_h", "full"), ("falcon_h1", "all"), ("zaya", "all")]
)
def test_a_state_may_lie_beside_rows_that_are_cut(name, layers):
    assert describe_cut(configure(name)) == f"{layers} layers, not states"


REASONS = {
    "it has 18 layers (the first is layer 0) with a recurrent state": "it has layers with a recurrent state",
    "layer 0: it appends keys (1, 2), expected (1, 3)": "it appends keys of another shape than its configuration says",
    "a cache differs from one pass by 9.3e-01 of the logits' spread, from layer 0 on": "a cache differs from one pass",
    "its configuration does not shrink (f(x) | g)": "its configuration does not shrink",
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_is_shown_without_numbers(reason):
    assert shorten_reason(reason) == REASONS[reason]


def test_a_table_is_written_anew():
    line = TABLE.format(label="a", option="--new")
    page = f"# Page\n\n{line}\n\n| old |\n|---|\n\nText\n\n| another |\n"
    assert (
        replace_table(page, "a", ["| new |", "|---|", "| row |"], "--new")
        == f"# Page\n\n{line}\n\n| new |\n|---|\n| row |\n\nText\n\n| another |\n"
    )
    with pytest.raises(SettingError, match="^b: the line .* is not on the page"):
        replace_table(page, "b", [], "--new")
