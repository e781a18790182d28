"""Find studies by their names, and the studies that a paper's exhibits need (conf/papers/exhibits/)."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import kvbench.studies
from kvbench.studies.study import ClosedForm, LayerStudy, PromptStudy, Study

KINDS = (LayerStudy, PromptStudy, ClosedForm)


@cache
def load_studies() -> dict[str, type[Study]]:
    """Return every study of kvbench/studies/ by its name, in alphabetical order."""
    found: dict[str, type[Study]] = {}
    for module in iter_modules(kvbench.studies.__path__, "kvbench.studies."):
        for own in vars(import_module(module.name)).values():
            if is_study(own) and own.__module__ == module.name:
                found[own.name] = own
    return dict(sorted(found.items()))


def is_study(value: Any) -> bool:
    """Return whether a value is the class of a study, and not one of the interfaces."""
    return isinstance(value, type) and issubclass(value, KINDS) and value not in KINDS
