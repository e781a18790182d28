"""What the page calls runs, settings and methods."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.analysis.intervals import Mean
from kvbench.analysis.paired import Interval
from kvbench.store.run_folder import run_hash
from kvbench.store.runs import CACHE, OWN, Stored, differing
from kvbench.validation import SettingError, escape

CLIP = 120  # characters of a setting or reason


def lines(runs: Sequence[Stored]) -> list[tuple[str, int, list[Stored]]]:
    """(label, which of its method's variants, runs) of the runs that differ in their budget alone."""
    groups: dict[str, list[Stored]] = {}
    for run in runs:
        if not run.full:
            groups.setdefault(run_hash({key: own for key, own in run.value.items() if key != "budget"}), []).append(run)
    found, dashes = [], {}
    ordered = sorted(groups.values(), key=lambda own: (label_of(own[0].value), own[0].hash))
    for own in ordered:
        label = label_of(own[0].value)
        beside = [other[0] for other in ordered if label_of(other[0].value) == label]
        differ = [name for name in differing(beside, ()) if name.split(".")[0] in (*CACHE, "sources")]
        differ = [name for name in differ if name != "sources"] or differ
        more = [f"{name.removeprefix('method.')}={short(str(own[0].settings.get(name)))}" for name in differ]
        method = own[0].value["method"]["name"]
        dashes[method] = dashes.get(method, -1) + 1
        found.append((" · ".join([label, *more]), dashes[method], own))
    return found


def label_of(value: Mapping[str, Any]) -> str:
    """The method, and what else of the cache is not the usual."""
    parts = [named(value, "method")]
    parts += [named(value, group) for group, usual in USUAL.items() if value[group]["name"] != usual]
    if value.get("block_size") is not None:
        parts.append(f"block {value['block_size']}")
    if value.get("budget_of") not in (None, "prompt"):
        parts.append(f"of what was {value['budget_of']}")
    return " · ".join(map(short, parts))


USUAL = {"allocator": "uniform", "codec": "raw"}


def titled(run: Stored) -> tuple[str, str, str]:
    return named(run.value, "model"), named(run.value, "task"), str(run.value["question"])


def told(run: Stored, beside: Sequence[Stored]) -> list[str]:
    """The settings that tell a protocol from others of its model, task and question; always the task's length. Hashes
    only where nothing else does.
    """
    names = [name for name in differing(beside, OWN) if not name.startswith("averages")]
    names = list(dict.fromkeys(["task.length", *names]))
    clear = [name for name in names if name not in HASHES]

    def values(own: Stored) -> list[str]:
        return [json.dumps(own.settings.get(name)) for name in clear]

    names = clear if sum(values(own) == values(run) for own in beside) == 1 else names
    shown = [name for name in names if name in run.settings]
    return [f"{name.removeprefix('task.')} {setting(run.settings[name], name in HASHES)}" for name in shown]


def setting(value: Any, hashed: bool) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return short(text[:8] if hashed else text, 40)


HASHES = ("data", "model.identity")


def changed(own: Interval) -> dict[str, Any]:
    """A difference from the full cache, in points, and the samples behind it."""
    found = {"diff": own.difference, "diff_low": own.low, "diff_high": own.high, "full": own.mean_full}
    found |= {"score": own.mean_method, "lost": own.lost, "gained": own.gained, "same": own.same}
    return found | {"n": own.samples}


def stated(own: Mean) -> dict[str, Any]:
    """A mean score, in points."""
    return {"score": own.value, "score_low": own.low, "score_high": own.high, "n": own.samples}


def size(run: Stored) -> tuple[bool, float]:
    """Fractions first, then rows."""
    return isinstance(run.value["budget"], int), float(run.value["budget"])


def budget(run: Stored) -> str:
    own = run.value["budget"]
    return f"{own} rows" if isinstance(own, int) else f"{100 * own:g}\u202f%"


def named(value: Mapping[str, Any], group: str) -> str:
    return short(str(value[group]["name"]))


def said(error: Exception) -> str:
    return short(
        str(error) if isinstance(error, SettingError | ValueError) else f"{type(error).__name__}: {error}", 300
    )


def short(text: str, most: int = CLIP) -> str:
    """One line of a text, with what could steer or hide written out."""
    text = text if text.isprintable() else escape(text)
    return text if len(text) <= most else text[: most - 1] + "…"
