"""Execute records of a store again and compare them: `kvbench check results --replay N`.

The answer, its score and the held rows are compared. If machine, versions, sources and batch are the same as then, any
difference is damage. Otherwise rounding may differ, so only the share that agrees is reported. A record that cannot be
executed again is named with the reason: the run was written before kvbench kept its settings, or its data, model or
method are missing. Nothing is written into the store, and generated samples are made again.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from kvbench.config import catalogue
from kvbench.runs.group_watch import COMPARED
from kvbench.runs.resources import Resources
from kvbench.runs.responder import Responder, list_turns
from kvbench.runs.runner import describe_machine
from kvbench.runs.shared_runs import spoils_model
from kvbench.runs.spec import UNCUT, RunSpec
from kvbench.runs.stranger_settings import compose_run
from kvbench.store.run_folder import RunFolder, read_run_value, run_hash, to_json_value
from kvbench.store.runs import flatten
from kvbench.validation import escape

MACHINE = ("python", "processor", "threads", "gpu", "versions")
ELSEWHERE = ("sources", "device")  # parts of a run's value that depend on machine and checkout
DEVICE = "device.type"  # the name of a condition
KERNELS = "; a CPU and a GPU add up in other orders, so a near tie of two rows or words may fall otherwise"
SHOWN = 40  # characters of a value in a message


class CannotReplay(Exception):
    """A record cannot be executed again; the message says why."""


class HoldsNoAnswer(CannotReplay):
    """A record has an error in place of an answer, so that there is nothing to compare."""


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
        fields: For each compared field, how many of the records made under other conditions agree in it.
        impossible: Records that cannot be executed again.
        drawn: For each run, its records, except for those that hold an error in place of an answer.
        agreeing: For each run, how many of these agree, under whatever conditions they were made.
    """

    agree: int = 0
    damaged: int = 0
    elsewhere: list[bool] = field(default_factory=list)
    differences: Counter[str] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)
    impossible: int = 0
    drawn: Counter[str] = field(default_factory=Counter)
    agreeing: Counter[str] = field(default_factory=Counter)

    def find_weak(self, share: float, together: bool = False) -> list[str]:
        """Return a text for each run of which less than this share of records agrees.

        Args:
            share: The share.
            together: Whether the records of all runs count as those of one.
        """
        runs = [(f"run {name}", self.agreeing[name], count) for name, count in sorted(self.drawn.items())]
        if together:
            runs = [("all runs", self.agreeing.total(), self.drawn.total())]
        return [f"{name}: {same} of {count} records agree" for name, same, count in runs if same < share * count]

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        if self.agree or self.damaged:
            yield f"replay: {self.agree} agree, {self.damaged} damaged, executed as they were then"
        if self.elsewhere:
            what = "; ".join(f"{name} ({count})" for name, count in self.differences.most_common())
            same, count = sum(self.elsewhere), len(self.elsewhere)
            yield escape(f"replay: {same} of {count} agree ({same / count:.0%}), where this differs: {what}")
            if same < count:
                parts = ", ".join(f"{name} in {self.fields[name]}" for name in COMPARED)
                yield f"replay: of these {count} agree {parts}{KERNELS if DEVICE in self.differences else ''}"
        if self.impossible:
            yield f"replay: {self.impossible} cannot be replayed"


def replay(results: Path, drawn: Sequence[tuple[str, str]], given: Mapping[str, Any] | None = None) -> ReplayCounts:
    """Execute records again, print what differs, and return the counts.

    Args:
        results: The folder of results.
        drawn: The records, as (run hash, uid).
        given: None for a store of one's own, whose runs are made from the settings in machine.json. If somebody else
            wrote the folder, the settings that differ here, such as ``{"model.path": "/data/model"}``; the others come
            from conf/ and from the runs' identities (kvbench.runs.stranger_settings).
    """
    counts, plans = ReplayCounts(), []
    by_run = {name: [uid for _, uid in pairs] for name, pairs in groupby(sorted(drawn), key=lambda one: one[0])}
    bar = tqdm(total=len(drawn), desc="replay", file=sys.stderr)

    def say(line: str) -> None:
        bar.write(escape(line), file=sys.stdout)

    def give_up(name: str, uids: Sequence[str], error: Exception) -> None:
        reason = str(error) if isinstance(error, CannotReplay | ValueError) else f"{type(error).__name__}: {error}"
        say(f"{name}  {', '.join(uids)}: cannot be replayed: {(reason.splitlines() or [''])[0]}")
        counts.impossible += len(uids)
        counts.drawn[name] += 0 if isinstance(error, HoldsNoAnswer) else len(uids)
        bar.update(len(uids))

    for name, uids in by_run.items():
        value = read_run_value(results / "runs" / name)
        folder = RunFolder(results / "runs", value)
        try:
            plans.append(ReplayPlan(rebuild_run(folder, uids[0], given), folder, uids))
        except Exception as error:
            give_up(name, uids, error)
    plans.sort(key=lambda plan: (*weights_key(plan), prompts_key(plan), plan.folder.hash))
    for _, some in groupby(plans, key=weights_key):
        replay_group(list(some), counts, give_up, say, bar.update)
    bar.close()
    return counts


def rebuild_run(folder: RunFolder, uid: str, given: Mapping[str, Any] | None = None) -> RunSpec:
    """Make the run of a record again.

    Args:
        folder: The run's folder.
        uid: The record.
        given: As in `replay`.

    Raises:
        CannotReplay: There are no settings, or they give another run today.
        SettingError: A setting cannot be used here.
    """
    value = folder.value
    config = read_settings(folder, uid) if given is None else compose_run(value, given)
    config.results = str(folder.path.parents[1])
    run = RunSpec.from_config(config)
    chosen = ({key: part for key, part in one.items() if key not in ELSEWHERE} for one in (value, run.value))
    then, now = map(flatten, chosen)
    if other := sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name)):
        hint = (
            "" if given is None or "data" not in other else "; settings such as task.path= say where the data are here"
        )
        raise CannotReplay(f"{', '.join(other[:3])}: not what it was then{hint}")
    return run


def read_settings(folder: RunFolder, uid: str) -> DictConfig:
    """Return the settings that the machine.json of a record holds.

    Raises:
        CannotReplay: It holds none.
    """
    settings = folder.machine(uid).get("settings")
    if not isinstance(settings, Mapping):
        raise CannotReplay("the run was written before kvbench kept its settings")
    value = folder.value
    overrides: dict[str, Any] = {"device": value["device"]["type"], "dtype": value["device"]["dtype"], "workers": None}
    # machine.json of the full cache's run may hold the settings of the cell that needed it
    if (value["method"]["name"], value["codec"]["name"]) == ("full", "raw"):
        overrides |= {group: catalogue.load_settings(group, name) for group, name in UNCUT.items()}
    config = OmegaConf.create({**settings, **overrides})
    if "cache" in config.task:
        config.task.cache = None  # the cache of samples lies in the store
    return config


def weights_key(plan: ReplayPlan) -> tuple[str, str, str]:
    """Return the key of the weights: runs with the same key use one copy."""
    return repr(plan.run.checkpoint), plan.run.dtype, plan.run.device


def prompts_key(plan: ReplayPlan) -> str:
    """Return the key of the prompts: runs with the same key answer the same prompts."""
    return run_hash(plan.run.baseline().value)


def replay_group(
    plans: Sequence[ReplayPlan], counts: ReplayCounts, give_up: Callable, say: Callable, step: Callable
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
                compare_records(counts, plan, records[uid], to_json_value(again[uid]), say)
                step()


def execute_again(reader: Responder, bench: Resources, uid: str, then: Mapping[str, Any]) -> dict[str, dict]:
    """Make the record of a sample again, and those of all turns of its conversation."""
    if then.get("error"):
        raise HoldsNoAnswer(f"it holds no answer ({then['error']})")
    if uid not in bench.prompts:
        raise CannotReplay("its task has no such sample")
    batch = list_turns(uid, bench.prompts) or [uid]
    made = reader.answer([bench.prompts[turn] for turn in batch])
    if made[0]["error"]:
        raise CannotReplay(f"executing it again ends with {made[0]['error']}")
    return {record["uid"]: record for record in made}


def compare_records(
    counts: ReplayCounts, plan: ReplayPlan, then: Mapping[str, Any], now: Mapping[str, Any], say: Callable
) -> None:
    """Count a record, and print each field that is damaged."""
    differ = [name for name in COMPARED if then.get(name) != now.get(name)]
    counts.drawn[plan.folder.hash] += 1
    counts.agreeing[plan.folder.hash] += not differ
    here = list(find_differences(plan.run, plan.folder, then))
    if here:
        counts.elsewhere.append(not differ)
        counts.differences.update(here)
        counts.fields.update(name for name in COMPARED if name not in differ)
        if differ:
            say(f"{plan.folder.hash}  {then['uid']}: {', '.join(differ)} not the same here")
        return
    counts.damaged += bool(differ)
    counts.agree += not differ
    for name in differ:
        one, other = shorten_both(then.get(name), now.get(name))
        say(f"{plan.folder.hash}  {then['uid']}: {name} is {one}, and {other} when it is executed again")


def find_differences(run: RunSpec, folder: RunFolder, then: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conditions under which a record was made and that differ today."""
    before, now = folder.machine(then["uid"]), to_json_value(describe_machine(run.device))
    before, now = (flatten({name: machine.get(name) for name in MACHINE}) for machine in (before, now))
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
