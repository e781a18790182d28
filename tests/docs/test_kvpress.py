"""docs/kvpress.md: presses are translated into settings that exist, and parity was measured where the page says so."""

import re

import pytest

from kvbench.config import catalogue, compose
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "kvpress.md").read_text()
PARITY = (ROOT / "results" / "parity" / "kvpress.md").read_text()
PRESSES = dict(re.findall(r"^\| `(\w+)` \| `(method=[^`]+)`", PAGE, re.MULTILINE))
UNMEASURED = ("no_press", "kvzip_plus", "kvzap_mlp")


@pytest.mark.parametrize("press", PRESSES)
def test_a_press_is_translated_into_settings_that_exist(press):
    config = compose.compose_config(PRESSES[press].split())
    for group in ("method", "allocator"):
        catalogue.resolve(group, config[group])


def test_parity_was_measured_for_the_presses_that_the_page_names():
    assert f"but {', '.join(f'`{name}`' for name in UNMEASURED[:-1])} and `{UNMEASURED[-1]}`" in PAGE
    measured = set(re.findall(r"`(method=[^`]+)`", re.sub(r"(decode_(?:interval|size))=\w+", r"\1", PARITY)))
    for press, settings in PRESSES.items():
        cuts = re.sub(r"(decode_(?:interval|size))=\w+", r"\1", settings)
        assert (cuts in measured) == (press not in UNMEASURED), press
