"""Every exhibit of conf/papers/exhibits/ has a study that exists, yields its numbers and claims, and can be drawn."""

import inspect
import sys

import pytest

from kvbench.papers.exhibits import load_exhibits
from kvbench.papers.table_spec import list_papers
from kvbench.report.study_charts import KINDS
from kvbench.studies.catalogue import load_studies

STUDIES, EXHIBITS = load_studies(), load_exhibits()


@pytest.mark.parametrize("name", EXHIBITS)
def test_an_exhibit_has_what_it_needs(name):
    spec = EXHIBITS[name]
    assert name.startswith(tuple(f"{paper}_" for paper in list_papers()))
    known = {"title", "study", "lines", "claims", "proof", "notes"}
    if "rows" in spec:
        known |= {"rows", "columns", "line", "published", "file", "scale", "digits"}
    else:
        known |= {"chart", "axes", "names"}
        assert spec["chart"] in KINDS and spec.get("axes", {}).keys() <= {"x", "y", "value", "log"}
    assert {"title", "study"} <= spec.keys() <= known
    source = inspect.getsource(sys.modules[STUDIES[spec["study"]].__module__])
    shown = spec.get("lines", {}).get("quantity", [])
    for quantity in [*([shown] if isinstance(shown, str) else shown), *spec.get("claims", {})]:
        assert f'"{quantity}"' in source, f"{spec['study']} yields no {quantity}"
    named = {shown} if isinstance(shown, str) else set(shown)
    assert spec.get("proof", {}).keys() <= spec.get("claims", {}).keys() | named
