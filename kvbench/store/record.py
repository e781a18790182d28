"""Define the record of one sample: every field with its type, unit, meaning and the version that introduced it.

    python -m kvbench dev record-schema > docs/records.md      # the table of fields, for people

A record is one line of JSON in `results/runs/<hash>/records-<writer>.jsonl`. The runner builds it as a `Record`, which
rejects unknown fields and values of the wrong type. Readers keep the line as a plain dict, because a store holds
hundreds of thousands of lines and a field that a later version added must not get lost. `find_problems` checks such a
dict against the same rules: types, ranges, and fields that must be there.

A later version of the record may add fields. A change that removes a field or gives it another meaning increases the
number of the whole folder instead (`kvbench.store.run_folder.FORMAT`).
"""

import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import lru_cache
from operator import itemgetter
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

VERSION = 4
VERSIONS = {1: "0.1", 2: "0.2", 3: "0.2", 4: "0.2"}  # version of the record -> the first kvbench that wrote it
ABSENT: Any = object()  # marks a field that a record does not have

ALWAYS = "every record"
TEXT = "every record, except in bundles without texts"
ANSWERED = "records without `error`"
COMPARED = "runs with `fidelity=true`, records without `error`"
PREDICTED = "the same, where `fidelity` is not empty"
REFERENCE = "the same, of the full cache"
ASKED_TOGETHER = "records whose question was read beside others"
RETOKENIZED = "turns before which the tokenizer would give other tokens"
THOUGHT = "records whose `output` ends a thought with `</think>`"
STATEFUL = "records without `error` of a model with recurrent or convolutional layers"
QUANTIZED = "records of runs with `model.weights`"
PROBED = "records of a model whose architecture is not on the tested list"
SHARED_GPU = "records made beside other processes of the sweep on the same GPU"


HASH = "[0-9a-f]{16}"
SHARES = "(?:[0-9a-f]{2}){0,64}"
ABOVE_ZERO, LARGEST = math.nextafter(0, 1), sys.float_info.max


def described(
    meaning: str,
    unit: str = "",
    held_by: str = ALWAYS,
    since: int = 1,
    default: object = ABSENT,
    least: float = 0,
    most: float = LARGEST,
    pattern: str | None = None,
) -> Any:
    """Return a dataclass field of a record.

    Args:
        meaning: One or two sentences for the table of fields.
        unit: Unit of the value, "" if it has none.
        held_by: Which records have the field: `ALWAYS`, `TEXT`, `ANSWERED`, `COMPARED`, `PREDICTED`, `REFERENCE`,
            `ASKED_TOGETHER`, `RETOKENIZED`, `THOUGHT`, `STATEFUL`, `QUANTIZED`, `PROBED` or
            `SHARED_GPU`.
        since: Version of the record that introduced the field.
        default: Value of a record that is built without the field.
        least: The smallest number that the field may hold.
        most: The largest one.
        pattern: Regular expression of a text, None for any text.

    Returns:
        A `dataclasses.field` with these arguments as its metadata.
    """
    about: dict[str, Any] = {"meaning": meaning, "unit": unit, "held_by": held_by, "since": since}
    about |= {"least": least, "most": most, "pattern": pattern and re.compile(pattern)}
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of one sample. All arguments are keywords.

    Raises:
        TypeError: A field is unknown, has a value of the wrong type, or is missing although records of this kind have
            it. The message names the sample and the field.
    """

    version: int = described(
        "Version of the record; a record without it has version 1.", since=2, default=VERSION, least=1
    )

    # The sample
    uid: str = described("Name of the sample. It is unique within the run and equal in all runs of the task.")
    index: int = described("Place of the sample in the task's order, from 0.")
    subtask: str = described("Row of the closing table that the sample belongs to.")
    group: str = described("Name shared by all samples on one context. Intervals count contexts, not samples.")
    prompt_hash: str = described("Hash of the prompt's token ids. Only equal prompts are paired.", pattern=HASH)
    target_hash: str = described("Hash of `target`. Only equal targets are paired.", pattern=HASH)
    target: list[str] = described("The correct answers.", held_by=TEXT)
    asked: str = described("Question and answer prefix. A long text is shortened in the middle.", held_by=TEXT)
    tokens_in: int = described("Length of the prompt.", "tokens")
    tokens_context: int = described("Length of the part of the prompt before the question.", "tokens")
    budget: int | float | None = described(
        "Budget of the run: an int is the number of rows in each layer and KV head, a float is a share of the rows. "
        "The full cache has 1.0. null if the method decides how many rows stay.",
        "rows or share",
        least=ABOVE_ZERO,
    )
    meta: dict[str, Any] = described(
        "What the task says about the sample, for example `data`, `length` or `depth`.", least=-LARGEST
    )
    conversation: str | None = described("Name shared by all turns of one conversation. null outside a conversation.")
    turn: int = described("Number of turns before this one.", "turns")
    retokenized: int = described(
        "Number of tokens in the cache that the tokenizer does not give for the whole conversation. They were read "
        "before the conversation went on, and stay.",
        "tokens",
        RETOKENIZED,
        since=3,
    )
    weights: str = described("Format of the weights of the model's linear layers.", held_by=QUANTIZED, since=4)
    architecture: str = described(
        "Name of the model's architecture, which a probe admitted (docs/models.md).", held_by=PROBED, since=4
    )

    # The cache when the answer begins
    quota: int | None = described(
        "Rows of the prompt that each head of a layer may keep. null for the full cache, and if the method decides.",
        "rows",
        ANSWERED,
    )
    protected: int = described("Largest number of rows that the method protected in one head.", "rows", ANSWERED)
    given_up: dict[str, int] = described(
        "Protected rows that did not fit into the budget, the largest number in one head and one eviction: `sinks` at "
        "the beginning, `recents` at the end.",
        "rows",
        ANSWERED,
    )
    allocation: str | None = described(
        "Rule that the allocator used, if it has several. Otherwise null.", held_by=ANSWERED
    )
    resident_bytes: int = described("Keys and values in the cache, including `sliding_bytes`.", "bytes", ANSWERED)
    full_bytes: int = described("The same number if no row had been evicted.", "bytes", ANSWERED)
    metadata_bytes: int = described(
        "Positions, lengths and other bookkeeping of the rows in the cache.", "bytes", ANSWERED
    )
    state_bytes: int = described("Data that the method keeps in addition to the rows.", "bytes", ANSWERED)
    weights_bytes: int = described(
        "Weights that the method and the codec need beside the model, in bytes of their files. All samples share them.",
        "bytes",
        ANSWERED,
        since=3,
    )
    headroom_bytes: int = described("Memory that is reserved for rows but not used.", "bytes", ANSWERED)
    sliding_bytes: int = described(
        "Keys and values of sliding-window layers, from which nothing is evicted.", "bytes", ANSWERED
    )
    recurrent_bytes: int = described(
        "Recurrent and convolutional states of the model's layers, which `resident_bytes` does not include.",
        "bytes",
        STATEFUL,
        since=4,
    )
    rows_held: float = described("Rows in the cache, mean over layers and KV heads.", "rows", ANSWERED)
    rows_seen: int = described("Tokens read so far, which is the number of rows in the full cache.", "rows", ANSWERED)
    while_decoding: str = described(
        "What happens to new rows during decoding: `appends` keeps all of them, `cuts` evicts again.", held_by=ANSWERED
    )
    reread_tokens: int = described("Tokens that the model read a second time for the method.", "tokens", ANSWERED)
    reread_ms: float = described("Time spent on reading `reread_tokens`.", "ms", ANSWERED)
    batch: int = described("Samples that were answered together.", "samples", ANSWERED)
    survived: str = described(
        "Share of the tokens that are still in the cache, for each of at most 64 bins of positions. Each bin has two "
        "hexadecimal digits (`bytes.fromhex` reads them).",
        "%",
        ANSWERED,
        pattern=SHARES,
    )
    evidence: list[int] = described("Bins of `survived` that contain a correct answer.", "", ANSWERED, most=63)

    # The answer's cost
    rows_attended: float = described("Rows that a decoded token attends to, mean over tokens.", "rows", ANSWERED)
    rows_held_end: float = described(
        "Rows in the cache at the end of the answer, mean over layers and KV heads.", "rows", ANSWERED
    )
    rows_seen_decoding: float = described(
        "Rows that a decoded token would attend to in the full cache, mean over tokens.", "rows", ANSWERED
    )
    decoding: str = described("How tokens were decoded: transformers' `modules`, or a CUDA `graph`.", held_by=ANSWERED)
    decoded_together: int = described(
        "Number of contexts, of several runs and samples, whose answers were decoded as one batch. Above 1, "
        "`decode_ms` is the time of the batch, and `peak_bytes` the memory of all these contexts.",
        "contexts",
        ANSWERED,
        since=3,
    )
    capture_ms: float = described(
        "Time spent on preparing and recording CUDA graphs. `decode_ms` excludes it.", "ms", ANSWERED
    )
    peak_rows: int = described("Largest number of rows that one head held after an eviction.", "rows", ANSWERED)
    peak_rows_attended: int = described("Largest number of rows that one head attended to at once.", "rows", ANSWERED)
    prefill_ms: float = described("Time to read the prompt and evict rows.", "ms", ANSWERED)
    shared_prefill: int = described("Number of runs that shared the prefill of this prompt.", "runs", ANSWERED)
    gpu_processes: int = described(
        "Number of processes of the sweep that shared the GPU. Times of such a record say nothing about cost.",
        "processes",
        SHARED_GPU,
        since=3,
    )
    asked_together: int = described(
        "Number of contexts, of several runs and samples, whose questions were read token by token as one batch. "
        "`prefill_ms` and `ttft_ms` contain the time of the batch.",
        "contexts",
        ASKED_TOGETHER,
        since=3,
    )
    ttft_ms: float = described("Time to first token: `prefill_ms` plus the decoding of one token.", "ms", ANSWERED)
    peak_bytes: int = described("Peak memory. `peak_of` says which memory is counted.", "bytes", ANSWERED)
    peak_of: str = described(
        "What `peak_bytes` counts: `cuda` is everything that torch allocated, `cache` is rows only.", held_by=ANSWERED
    )

    # The answer
    output: str = described("Text that the model generated.")
    tokens_out: int = described("Length of `output`.", "tokens", ANSWERED)
    thought_tokens: int = described("Length of the thought with `</think>`, the last one.", "tokens", THOUGHT, since=3)
    answer_tokens: int = described(
        "Length of what follows the thought, which is what tasks score. Tasks of mathematics read the thought too.",
        "tokens",
        THOUGHT,
        since=3,
    )
    stop: str = described(
        "Why the answer ended: `eos` (an end token), `until` (a stop text of the task), `length` (the limit) or "
        "`error`."
    )
    decode_ms: float = described("Time from the first token of the answer to the last one.", "ms", ANSWERED)
    error: str | None = described("Why there is no answer, for example `out_of_memory`. Otherwise null.")
    score: float | None = described("Score of the answer, from 0 to 100. null with `error`.", "points", most=100)
    answer: str | None = described("Part of `output` that the task takes as the answer. null with `error`.")
    also: dict[str, float | bool | None] = described(
        "Further metrics of the task by name: a number of points, or true or false.", least=-LARGEST
    )
    seconds: float = described("Time for the whole sample, including this run's part of a shared prefill.", "s")

    # Fidelity
    fidelity: dict[str, int | float | None] = described(
        "How well the first tokens of the correct answer are predicted. `nll` is their negative log-likelihood, `kl` "
        "the divergence from the full cache's predictions (null if the full cache ran out of memory), `tokens` the "
        "number of tokens compared. Empty if the sample has nothing to compare.",
        "nats a token",
        COMPARED,
        least=-LARGEST,
    )
    fidelity_ms: float = described("Time spent on `fidelity`. Only `seconds` includes it.", "ms", PREDICTED)
    predictions: str = described(
        "The full cache's predictions, which other runs compare with (`kvbench.runs.fidelity.pack_predictions`).",
        "",
        REFERENCE,
    )

    def __post_init__(self) -> None:
        written = json.loads(json.dumps(self.to_json()), parse_constant=lambda name: None)  # as the store does
        problems = find_problems(written)
        problems += [
            f"{attribute.name} is missing"
            for attribute in fields(self)
            if attribute.metadata["held_by"] == TEXT and attribute.name not in written
        ]
        if problems:
            raise TypeError(f"record of {self.uid!r}: {'; '.join(problems)}")

    def to_json(self) -> dict[str, Any]:
        """Return the fields that the record has, by name."""
        return {
            attribute.name: value
            for attribute in fields(self)
            if (value := getattr(self, attribute.name)) is not ABSENT
        }


TITLES = {  # first field of a section -> its title
    "version": "The record",
    "uid": "The sample",
    "quota": "The cache when the answer begins",
    "rows_attended": "What the answer cost",
    "output": "The answer",
    "fidelity": "Fidelity",
}
FIELD_TYPES: dict[str, Any] = {attribute.name: attribute.type for attribute in fields(Record)}
REQUIRED_FIELDS = {  # whether there is an answer -> fields that the record has
    there: frozenset(attribute.name for attribute in fields(Record) if attribute.metadata["held_by"] in groups)
    for there, groups in {False: (ALWAYS,), True: (ALWAYS, ANSWERED)}.items()
}
SINCE = {attribute.name: attribute.metadata["since"] for attribute in fields(Record)}
CORE = frozenset(("uid", "prompt_hash", "target_hash", "error", "score"))  # fields that every record ever had


@dataclass(frozen=True)
class Rule:
    """What a field may hold: values of a type, numbers of a range, texts of a pattern."""

    kind: Any
    least: float
    most: float
    pattern: re.Pattern[str] | None
    container: type | None  # list or dict, None for a single value
    plain: frozenset[type]  # types of a value, or of the items of a list or mapping; empty if all are allowed

    @classmethod
    def of(cls, attribute: Field[Any]) -> "Rule":
        """Return the rule of a dataclass field of the record."""
        container = None if isinstance(attribute.type, UnionType) else get_origin(attribute.type)
        inner = attribute.type if container is None else get_args(attribute.type)[-1]
        kinds = get_args(inner) if isinstance(inner, UnionType) else () if inner is Any else (inner,)
        about = attribute.metadata
        plain = frozenset({*kinds, int} if float in kinds else kinds)
        return cls(attribute.type, about["least"], about["most"], about["pattern"], container, plain)

    def find_problem(self, value: Any) -> str | None:
        """Return what was expected if a value does not fit, otherwise None."""
        kind = type(value)
        if self.container is not None:
            fits = kind is self.container and self.fits_all(value.values() if kind is dict else value)
        elif kind is float or kind is int:
            fits = kind in self.plain and self.least <= value <= self.most
        else:
            fits = kind in self.plain and (self.pattern is None or self.pattern.fullmatch(value) is not None)
        if fits:
            return None
        if self.pattern is not None and kind is str:
            return f"a text like {self.pattern.pattern}"
        if not is_of_type(value, self.kind):
            return format_type(self.kind)
        least = "above 0" if self.least == ABOVE_ZERO else "finite" if self.least == -LARGEST else f"from {self.least}"
        return f"{format_type(self.kind)}, {least}{f' to {self.most}' if self.most < LARGEST else ''}"

    def fits_all(self, items: Collection[Any]) -> bool:
        """Return whether the items of a list or mapping have the right types, and all numbers in them are in range."""
        kinds = set(map(type, items))
        if self.plain and not kinds <= self.plain:
            return False
        if kinds <= {int, float}:
            return not kinds or (self.least <= min(items) and max(items) <= self.most)
        return kinds <= {str} or all(self.least <= number <= self.most for number in list_numbers(items))


RULES = {attribute.name: Rule.of(attribute) for attribute in fields(Record)}


def list_numbers(items: Iterable[Any]) -> Iterator[float]:
    """Yield the numbers among items, and those within them, however deep. A bool is no number."""
    for item in items:
        if type(item) in (int, float):
            yield item
        elif type(item) in (list, dict):
            yield from list_numbers(item.values() if type(item) is dict else item)


def read_version(record: Mapping[str, Any]) -> int:
    """Return the version of a stored record. Records of kvbench 0.1 do not state it; they have version 1."""
    version: int = record.get("version", 1)
    return version


def find_problems(record: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a stored record.

    Unknown fields are allowed, because a later version may have written them. Records of version 1 need only the fields
    in `CORE`, because kvbench 0.1 added fields without counting versions, and their texts have no patterns.

    Args:
        record: One parsed line, without NaN.

    Returns:
        One line for each field that is missing, has the wrong type, or is out of its range. Empty for a good record.
    """
    version = record.get("version", 1)
    plan = plan_check(tuple(record), tuple(map(type, record.values())), version if type(version) is int else 1)
    numbers, others = plan.numbers(record), plan.others
    if min(numbers) < 0 or max(numbers) > LARGEST:
        others = [entry for entry in RULES.items() if entry[0] in record]
    checked = [(name, rule.find_problem(record[name])) for name, rule in others]
    return [f"{name} is {shorten(record[name])}, expected {why}" for name, why in checked if why] + plan.missing


@dataclass(frozen=True)
class CheckPlan:
    """How to check all records that have the same fields with values of the same types, because most have.

    Attributes:
        numbers: Returns the numbers of a record that must be finite and at least 0.
        others: The fields whose values must be looked at one by one.
        missing: A line for each field that is missing.
    """

    numbers: Callable[[Mapping[str, Any]], Sequence[float]]
    others: list[tuple[str, Rule]]
    missing: list[str]


@lru_cache(1024)
def plan_check(names: tuple[str, ...], kinds: tuple[type, ...], version: int) -> CheckPlan:
    """Plan the check of all records with these fields, types of values, and version."""
    numbers, others, kind_of = [], [], dict(zip(names, kinds, strict=True))
    for name, kind in kind_of.items():
        if (rule := RULES.get(name)) is None:
            continue
        plain = get_args(rule.kind) if isinstance(rule.kind, UnionType) else (rule.kind,)
        fits = kind in plain or (kind is int and float in plain)
        if fits and kind in (int, float) and (rule.least, rule.most) == (0, LARGEST):
            numbers.append(name)
        elif not (fits and kind in (str, NoneType) and (rule.pattern is None or version == 1)):
            others.append((name, rule))
    needed = CORE if version == 1 else REQUIRED_FIELDS[kind_of.get("error", NoneType) is NoneType]
    missing = [
        f"{name} is missing" for name in FIELD_TYPES if name in needed - kind_of.keys() and SINCE[name] <= version
    ]

    def get_few(record: Mapping[str, Any]) -> list[float]:
        return [0, *(record[name] for name in numbers)]

    return CheckPlan(itemgetter(*numbers) if len(numbers) > 1 else get_few, others, missing)


def is_of_type(value: object, kind: Any) -> bool:
    """Return whether `value` is of type `kind`. An int also counts as a float; a bool counts as neither."""
    if kind is Any:
        return True
    if isinstance(kind, UnionType):
        return any(is_of_type(value, member) for member in get_args(kind))
    if (origin := get_origin(kind)) is not None:
        if not isinstance(value, origin):
            return False
        items, inner = value.values() if isinstance(value, dict) else value, get_args(kind)[-1]
        return set(map(type, items)) <= {inner} or all(is_of_type(item, inner) for item in items)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def shorten(value: object) -> str:
    """Return the repr of a value, cut to 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def format_type(kind: Any) -> str:
    """Return a type as the table of fields shows it."""
    if isinstance(kind, UnionType):
        return " or ".join(map(format_type, get_args(kind)))
    if (origin := get_origin(kind)) is not None:
        return f"{origin.__name__} of {format_type(get_args(kind)[-1])}"
    return {Any: "any value", type(None): "null"}.get(kind) or kind.__name__


def format_schema() -> str:
    """Return the text of docs/records.md."""
    lines = [HEAD]
    for attribute in fields(Record):
        if attribute.name in TITLES:
            lines += ["", f"## {TITLES[attribute.name]}", "", "| Field | Type | Unit | Meaning | In | Since |"]
            lines += ["| --- | --- | --- | --- | --- | --- |"]
        about = attribute.metadata
        cells = [f"`{attribute.name}`", format_type(attribute.type), about["unit"], about["meaning"], about["held_by"]]
        lines.append(f"| {' | '.join([*cells, VERSIONS[about['since']]])} |")
    return "\n".join(lines) + "\n"


HEAD = f"""# The record of a sample

<!-- `python -m kvbench dev record-schema > docs/records.md` writes this page from kvbench/store/record.py. -->

kvbench writes one line of JSON for each sample, to `results/runs/<hash>/records-<writer>.jsonl`.
`kvbench.load("results")` reads all of them: `loaded.records()` is a pandas frame with one line per sample. Each key of
`meta`, `also` and `fidelity` has a column of its own there (`meta.depth`).

*Since* is the version of kvbench that introduced a field. This page describes version {VERSION} of the record. A later
version only adds fields, and readers keep fields that they do not know. Records of kvbench {VERSIONS[1]} have no
`version`. The oldest of them also lack fields that were added during its development.

The last key of a line is `check`: the first 16 hexadecimal digits of the SHA-256 of the line's bytes before the comma
in front of it. Lines of version 3 and older have none. Readers remove it. Numbers are finite and, if the table does not
say otherwise, at least 0.

`null` also stands for numbers that JSON cannot express (NaN, infinity). A *row* is the entry of one token in the KV
cache of one layer and KV head."""
