"""Name runs, settings and methods in tables, figures and on the report page."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any

import yaml

from kvbench.analysis.intervals import Mean
from kvbench.analysis.paired import PairedDifference
from kvbench.config.catalogue import CONF, find_nearest_preset, find_preset, load_settings
from kvbench.store.run_folder import run_hash
from kvbench.store.runs import CACHE_GROUPS, UNSHARED_SETTINGS, StoredRun, find_differences
from kvbench.validation import SettingError, escape, format_value

CLIP = 120  # characters of a setting or reason


def group_series(runs: Sequence[StoredRun]) -> list[tuple[str, int, list[StoredRun]]]:
    """Group runs that differ only in their budget.

    Returns:
        For each group its label, its number among the variants of its method, and its runs.
    """
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        if not run.full:
            rest = {key: setting for key, setting in run.settings.items() if key != run.budget_setting}
            groups.setdefault(run_hash(rest), []).append(run)
    series = []
    dashes: dict[str, int] = {}
    labelled = sorted(
        ((label_cache(group[0].value), group[0].hash, group) for group in groups.values()), key=lambda entry: entry[:2]
    )
    alike: dict[str, list[StoredRun]] = {}
    for label, _, group in labelled:
        alike.setdefault(label, []).append(group[0])
    known: dict[tuple[str, str], list[str]] = {}  # compared once for all runs of a label, not for each of them
    for label, _, group in labelled:
        beside, setting = alike[label], group[0].budget_setting
        if (differ := known.get((label, setting))) is None:
            differ = [
                name
                for name in find_differences(beside, (setting,))
                if name.split(".")[0] in (*CACHE_GROUPS, "sources")
            ]
            differ = known[label, setting] = [name for name in differ if name != "sources"] or differ
        differ = leave_out_defaults(differ, group[0], beside)
        given = {name: value for name in differ if (value := group[0].settings.get(name)) is not None}
        more = [
            f"{name.removeprefix('method.').removesuffix('.name')}={shorten(format_value(value))}"
            for name, value in given.items()
        ]
        method = group[0].value["method"]["name"]
        dashes[method] = dashes.get(method, -1) + 1
        series.append((" · ".join([label, *more]), dashes[method], group))
    return series


def leave_out_defaults(differ: Sequence[str], run: StoredRun, beside: Sequence[StoredRun]) -> list[str]:
    """Return settings that distinguish a run, without those that follow from the name of a method or codec inside it.

    Two methods have different settings. The name of one tells the run apart, unless another run has the same method
    inside with other settings. Likewise for codecs.
    """
    kept = list(differ)
    for name in [name for name in differ if name.startswith(("method.", "codec.")) and name.endswith(".name")]:
        alike = [other for other in beside if other.settings.get(name) == run.settings.get(name)]
        varied, inner = find_differences(alike, (run.budget_setting,)), name.removesuffix("name")
        kept = [setting for setting in kept if setting == name or setting in varied or not setting.startswith(inner)]
    return kept


def name_presets(group: str, settings: Mapping[str, Any]) -> str | None:
    """Return the preset of a part of a run, as `find_preset` does, with the others that have the same settings.

    A run does not record which of them was typed, so all are named, such as "official_code/kvpress". Otherwise the
    preset of a paper could be shown under the name of its twin. If the settings are those of no preset, the nearest one
    is named with what differs from it, such as "bits4 residual=32". What decides in the place of a budget is left out.
    A part with a file or with another part inside it is named by its preset alone, because `group_series` and
    `kvbench.analysis.result_lines.name_files` name these.
    """
    preset: str | None
    changed: dict[str, Any]
    if settings.get("path") or any(isinstance(value, Mapping) for value in settings.values()):
        preset, changed = find_preset(group, settings), {}
    else:
        preset, changed = find_nearest_preset(group, settings)
    names = "/".join(_find_twins(group, settings["name"], preset)) if preset else ""
    texts = [f"{key}={format_value(value)}" for key, value in changed.items() if key != settings.get("budget_setting")]
    return " ".join(filter(None, (names, *texts))) or None


@cache
def _find_twins(group: str, name: str, preset: str) -> list[str]:
    offered = yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))["presets"]
    settings = {each: {**load_settings(group, name, {"preset": each}), "preset": None} for each in offered}
    return [each for each in settings if settings[each] == settings[preset]]


def label_cache(value: Mapping[str, Any]) -> str:
    """Return the method and every setting of the cache that differs from the usual one, with presets by their name."""
    groups = ["method", *(group for group, usual in USUAL_GROUPS.items() if value[group]["name"] != usual)]
    parts = [" ".join(filter(None, (value[group]["name"], name_presets(group, value[group])))) for group in groups]
    if value.get("block_size") is not None:
        parts.append(f"block {value['block_size']}")
    if value.get("budget_of") not in (None, "prompt"):
        parts.append(f"budget_of={value['budget_of']}")
    return " · ".join(map(shorten, parts))


USUAL_GROUPS = {"allocator": "uniform", "codec": "raw"}


def name_panel(run: StoredRun) -> tuple[str, str, str]:
    """Return model, task and question of a run."""
    return get_name(run.value, "model"), get_name(run.value, "task"), str(run.value["question"])


def describe_protocol(run: StoredRun, beside: Sequence[StoredRun]) -> list[str]:
    """Return the settings that distinguish a protocol from others with the same model, task and question.

    The task's length is always among them if it has one. Hashes are among them only if no other setting distinguishes
    the protocol.
    """
    names = [name for name in find_differences(beside, UNSHARED_SETTINGS) if not name.startswith("averages")]
    names = list(dict.fromkeys(["task.length", *names]))
    clear = [name for name in names if name not in HASHED_SETTINGS]

    def values(other: StoredRun) -> list[str]:
        return [json.dumps(other.settings.get(name)) for name in clear]

    names = clear if sum(values(other) == values(run) for other in beside) == 1 else names
    alone = run.settings.get("task.length") is None  # a setting that this run lacks cannot tell it apart
    shown = [name for name in names if name in run.settings and not (alone and name == "task.length")]
    return [
        f"{name.removeprefix('task.')} {format_setting(run.settings[name], name in HASHED_SETTINGS)}" for name in shown
    ]


def format_setting(value: object, hashed: bool) -> str:
    """Return a short text for a setting's value. A hash is cut to eight characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return shorten(text[:8] if hashed else text, 40)


HASHED_SETTINGS = ("data", "model.identity")


def describe_difference(change: PairedDifference) -> dict[str, Any]:
    """Return a difference from the full cache in points, and the numbers of samples behind it."""
    numbers = {"diff": change.difference, "diff_low": change.low, "diff_high": change.high, "full": change.mean_full}
    numbers |= {"score": change.mean_method, "lost": change.lost, "gained": change.gained, "same": change.same}
    return numbers | {"n": change.samples}


def describe_mean(mean: Mean) -> dict[str, Any]:
    """Return a mean score in points, with its interval and number of samples."""
    return {"score": mean.value, "score_low": mean.low, "score_high": mean.high, "n": mean.samples}


def rank_budget(run: StoredRun) -> tuple[int, float]:
    """Return a key that sorts budgets: fractions first, then rows, then measured shares."""
    budget = run.value["budget"]
    if budget is None:
        return 2, measure_share(run) or 0.0
    return int(isinstance(budget, int)), float(budget)


def measure_share(run: StoredRun) -> float | None:
    """Return the mean share of the full cache's bytes that a run's samples held. None if no sample was answered."""
    held = [
        record["resident_bytes"] / record["full_bytes"] for record in run.records.values() if record.get("full_bytes")
    ]
    return fmean(held) if held else None


def format_budget(run: StoredRun) -> str:
    """Return a run's budget as a percentage or a number of rows.

    Where the method decides how many rows stay, this is the measured share of bytes and the setting that led to it.
    """
    budget = run.value["budget"]
    if budget is None:
        share = measure_share(run)
        return run.budget_name if share is None else f"{100 * share:.1f}\u202f% ({run.budget_name})"
    return f"{budget} rows" if isinstance(budget, int) else f"{100 * budget:g}\u202f%"


def get_name(value: Mapping[str, Any], group: str) -> str:
    """Return the name in a group of a run's settings, safe to show."""
    return shorten(str(value[group]["name"]))


def describe_error(error: Exception) -> str:
    """Return an error in one line, with its type unless the message was written for users."""
    return shorten(
        str(error) if isinstance(error, SettingError | ValueError) else f"{type(error).__name__}: {error}", 300
    )


def shorten(text: str, most: int = CLIP) -> str:
    """Return a text in one line, cut to `most` characters. Control and invisible characters are escaped."""
    text = text if text.isprintable() else escape(text)
    return text if len(text) <= most else text[: most - 1] + "…"
