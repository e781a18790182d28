"""Execute records of a store again and compare them: `make check-results REPLAY=n`.

The answer, its score and the held rows are compared. If machine, versions, sources and batch are the same as then, any
difference is damage. Otherwise rounding may differ, so only the share that agrees is reported. A record that cannot be
executed again is named with the reason: the run was written before kvbench kept its settings, or its data, model or
method are missing. Nothing is written into the store, and generated samples are made again.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tqdm import tqdm

from kvbench.config import catalogue
from kvbench.config.compose import compose_config, list_choices, parse_override
from kvbench.runs.group_watch import COMPARED
from kvbench.runs.resources import Resources
from kvbench.runs.responder import Responder, list_turns
from kvbench.runs.runner import describe_machine
from kvbench.runs.shared_runs import spoils_model
from kvbench.runs.spec import UNCUT, RunSpec
from kvbench.store.run_folder import RunFolder, read_run_value, run_hash, to_json_value
from kvbench.store.runs import flatten
from kvbench.validation import escape

MACHINE = ("python", "processor", "threads", "gpu", "versions")
ELSEWHERE = ("sources", "device")  # parts of a run's value that depend on machine and checkout
SHOWN = 40  # characters of a value in a message


class CannotReplay(Exception):
    """A record cannot be executed again; the message says why."""


@dataclass(frozen=True)
class ReplayPlan:
    """The records of a run that are executed again."""

    run: RunSpec
    folder: RunFolder
    uids: Sequence[str]


@dataclass
class ReplayCounts:
    """Counts of records that were executed again.

    Attributes:
        agree: Records that agree, under the same conditions.
        damaged: Records that differ, under the same conditions.
        elsewhere: For each record made under other conditions, whether it agrees.
        differences: The conditions that differ, with the number of records.
        impossible: Records that cannot be executed again.
    """

    agree: int = 0
    damaged: int = 0
    elsewhere: list[bool] = field(default_factory=list)
    differences: Counter[str] = field(default_factory=Counter)
    impossible: int = 0

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        if self.agree or self.damaged:
            yield f"replay: {self.agree} agree, {self.damaged} damaged, executed as they were then"
        if self.elsewhere:
            what = "; ".join(f"{name} ({count})" for name, count in self.differences.most_common())
            same, count = sum(self.elsewhere), len(self.elsewhere)
            yield escape(f"replay: {same} of {count} agree ({same / count:.0%}), where this differs: {what}")
        if self.impossible:
            yield f"replay: {self.impossible} cannot be replayed"


def replay(
    results: Path, drawn: Sequence[tuple[str, str]], overrides: Sequence[str] = (), from_stranger: bool = False
) -> ReplayCounts:
    """Execute records again, print what differs, and return the counts.

    Args:
        results: The folder of results.
        drawn: The records, as (run hash, uid).
        overrides: Settings that differ here from those of the runs, such as ``["model.path=/data/model"]``. Each
            changes the runs that have this setting.
        from_stranger: Whether others wrote the folder. Then its settings may only name classes that conf/ names here,
            because naming a class is enough to execute it.
    """
    found, plans = ReplayCounts(), []
    by_run = {name: [uid for _, uid in own] for name, own in groupby(sorted(drawn), key=lambda one: one[0])}
    bar = tqdm(total=len(drawn), desc="replay", file=sys.stderr)

    def say(line: str) -> None:
        bar.write(escape(line), file=sys.stdout)

    def give_up(name: str, uids: Sequence[str], error: Exception) -> None:
        reason = str(error) if isinstance(error, CannotReplay | ValueError) else f"{type(error).__name__}: {error}"
        say(f"{name}  {', '.join(uids)}: cannot be replayed: {(reason.splitlines() or [''])[0]}")
        found.impossible += len(uids)
        bar.update(len(uids))

    for name, uids in by_run.items():
        value = read_run_value(results / "runs" / name)
        folder = RunFolder(results / "runs", value)
        try:
            plans.append(ReplayPlan(rebuild_run(folder, uids[0], overrides, from_stranger), folder, uids))
        except Exception as error:
            give_up(name, uids, error)
    plans.sort(key=lambda plan: (*weights_key(plan), prompts_key(plan), plan.folder.hash))
    for _, some in groupby(plans, key=weights_key):
        replay_group(list(some), found, give_up, say, bar.update)
    bar.close()
    return found


def rebuild_run(folder: RunFolder, uid: str, overrides: Sequence[str] = (), from_stranger: bool = False) -> RunSpec:
    """Make the run of a record from the settings that its machine.json holds.

    Args:
        folder: The run's folder.
        uid: The record.
        overrides: As in `replay`.
        from_stranger: As in `replay`.

    Raises:
        CannotReplay: There are no settings, or they give another run today.
        SettingError: A setting cannot be used here.
    """
    settings = folder.machine(uid).get("settings")
    if not isinstance(settings, Mapping):
        raise CannotReplay("the run was written before kvbench kept its settings")
    if from_stranger:
        check_classes(settings)
    value = folder.value
    own = {"device": value["device"]["type"], "dtype": value["device"]["dtype"], "workers": None}
    own["results"] = str(folder.path.parents[1])
    if (value["method"]["name"], value["codec"]["name"]) == ("full", "raw"):  # a baseline has its cell's settings
        own |= {group: catalogue.load_settings(group, name) for group, name in UNCUT.items()}
    config = OmegaConf.create({**settings, **own})
    for override in map(parse_override, overrides):
        if override.key_or_group in flatten(settings):
            OmegaConf.update(config, override.key_or_group, override.value())
    if "cache" in config.task:
        config.task.cache = None  # the cache of samples lies in the store
    run = RunSpec.from_config(config)
    chosen = ({key: part for key, part in one.items() if key not in ELSEWHERE} for one in (value, run.value))
    then, now = map(flatten, chosen)
    if other := sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name)):
        raise CannotReplay(f"{', '.join(other[:3])}: not what it was then")
    return run


def check_classes(settings: Mapping[str, Any]) -> None:
    """Check that settings name only classes that conf/ names on this machine.

    Raises:
        CannotReplay: A class is another one, or conf/ has no such method, task or model.
    """
    if "${" in json.dumps(settings):
        raise CannotReplay("its settings are not resolved")  # an interpolation may read the environment
    for group, own in settings.items():
        while isinstance(own, Mapping) and ("_target_" in own or group in (*UNCUT, "task", "model")):
            name, known = str(own.get("name")), None
            if name in list_choices(group):
                known = compose_config([f"{group}={name}"])[group]["_target_"]
            if known is None or own.get("_target_", known) != known:
                raise CannotReplay(f"{group}: {own.get('_target_')} is not the class of {own.get('name')} here")
            own = own.get("base")
        if isinstance(own, Mapping) and "_target_" in json.dumps(own):
            raise CannotReplay(f"{group}: names a class, and is no group of conf/")


def weights_key(plan: ReplayPlan) -> tuple[str, str, str]:
    """Return the key of the weights: runs with the same key use one copy."""
    return repr(plan.run.checkpoint), plan.run.dtype, plan.run.device


def prompts_key(plan: ReplayPlan) -> str:
    """Return the key of the prompts: runs with the same key answer the same prompts."""
    return run_hash(plan.run.baseline().value)


def replay_group(
    plans: Sequence[ReplayPlan], found: ReplayCounts, give_up: Callable, say: Callable, step: Callable
) -> None:
    """Execute and compare the records of runs that use one model. The model is freed when this returns."""
    common: dict[str, Any] = {}  # tokenizer and weights
    for _, some in groupby(plans, key=prompts_key):
        bench = None
        for plan in some:
            try:
                if bench is None:
                    bench = Resources(plan.run, dict(common))
                    common |= {"tokenizer": bench.tokenizer, "model": bench.model}
                reader, records = Responder(plan.run, bench), plan.folder.records()
                again: dict[str, dict[str, Any]] = {}
            except Exception as error:
                give_up(plan.folder.hash, plan.uids, error)
                if spoils_model(error):  # the next run loads the weights again
                    common.clear()
                    bench = None
                continue
            for number, uid in enumerate(plan.uids):
                try:
                    if uid not in again:
                        again |= execute_again(reader, bench, uid, records[uid])
                except Exception as error:
                    if spoils_model(error):
                        give_up(plan.folder.hash, plan.uids[number:], error)
                        common.clear()
                        bench = None
                        break
                    give_up(plan.folder.hash, [uid], error)
                    continue
                compare_records(found, plan, records[uid], to_json_value(again[uid]), say)
                step()


def execute_again(reader: Responder, bench: Resources, uid: str, then: Mapping[str, Any]) -> dict[str, dict]:
    """Make the record of a sample again, and those of all turns of its conversation."""
    if then.get("error"):
        raise CannotReplay(f"it holds no answer ({then['error']})")
    if uid not in bench.prompts:
        raise CannotReplay("its task has no such sample")
    batch = list_turns(uid, bench.prompts) or [uid]
    made = reader.answer([bench.prompts[own] for own in batch])
    if made[0]["error"]:
        raise CannotReplay(f"executing it again ends with {made[0]['error']}")
    return {record["uid"]: record for record in made}


def compare_records(
    found: ReplayCounts, plan: ReplayPlan, then: Mapping[str, Any], now: Mapping[str, Any], say: Callable
) -> None:
    """Count a record, and print each field that is damaged."""
    differ = [name for name in COMPARED if then.get(name) != now.get(name)]
    here = list(find_differences(plan.run, plan.folder, then))
    if here:
        found.elsewhere.append(not differ)
        found.differences.update(here)
        return
    found.damaged += bool(differ)
    found.agree += not differ
    for name in differ:
        one, other = shorten_both(then.get(name), now.get(name))
        say(f"{plan.folder.hash}  {then['uid']}: {name} is {one}, and {other} when it is executed again")


def find_differences(run: RunSpec, folder: RunFolder, then: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conditions under which a record was made and that differ today."""
    before, now = folder.machine(then["uid"]), to_json_value(describe_machine(run.device))
    before, now = (flatten({name: own.get(name) for name in MACHINE}) for own in (before, now))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{name.removeprefix('versions.')} {before.get(name)} then, {now.get(name)} now"
    if run_hash(run.value) != folder.hash:
        one, other = flatten(folder.value), flatten(run.value)
        yield from (name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name))
    if run.device != "cpu" and any(then.get(name, 1) != 1 for name in ("batch", "shared_prefill", "decoded_together")):
        yield "read with other samples or runs then, alone now"


def shorten_both(one: object, other: object) -> tuple[str, str]:
    """Shorten two values to the characters around their first difference."""
    texts = repr(one), repr(other)
    first = next((place for place, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1), 0)
    start = max(0, first - SHOWN // 2)

    def shorten(text: str) -> str:
        return f"{'…' if start else ''}{text[start : start + SHOWN]}{'…' if len(text) > start + SHOWN else ''}"

    return shorten(texts[0]), shorten(texts[1])
