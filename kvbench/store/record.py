"""Say what the record of one sample holds: every field with its type, unit, meaning and the version that brought it.

    python -m kvbench record-schema > docs/records.md      # the table of fields, for people

A record is one line of JSON in `results/runs/<hash>/records-<writer>.jsonl`. The runner makes it as a `Record`, which
refuses a field it does not know and a value of another type. Readers take the line as a plain dict: a store has
hundreds of thousands of them, and a field that a later version added stays in the dict. `find_problems` holds such a
dict to the same rules.

A later version of the record may add fields. One that removes a field, or gives it another meaning, raises the number
of the whole folder instead (`kvbench.store.run_folder.FORMAT`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, get_args, get_origin

VERSION = 2
VERSIONS = {1: "0.1", 2: "0.2"}  # version of the record -> the first kvbench that wrote it
ABSENT: Any = object()  # stands for a field that a record does not have

ALWAYS = "every record"
ANSWERED = "records without `error`"
COMPARED = "runs with `fidelity=true`, records without `error`"
PREDICTED = "the same, where `fidelity` is not empty"
REFERENCE = "the same, of the full cache"


def described(meaning: str, unit: str = "", held_by: str = ALWAYS, since: int = 1, default: object = ABSENT) -> Any:
    """Return a dataclass field of a record.

    Args:
        meaning: A sentence or two for the table of fields.
        unit: The unit of the value, "" where it has none.
        held_by: Which records have the field: `ALWAYS`, `ANSWERED`, `COMPARED`, `PREDICTED` or `REFERENCE`.
        since: The version of the record that brought it.
        default: The value of a record that is made without it.
    """
    return field(default=default, metadata={"meaning": meaning, "unit": unit, "held_by": held_by, "since": since})


@dataclass(frozen=True, kw_only=True)
class Record:
    """What kvbench keeps of one sample. It is made by keywords.

    Raises:
        TypeError: A field is unknown, has a value of another type, or is missing although such a record has it. The
            message names the sample and the field.
    """

    version: int = described("Version of the record; a record without it has version 1.", since=2, default=VERSION)

    # The sample
    uid: str = described("Name of the sample. It is unique within the run and equal in all runs of the task.")
    index: int = described("Place of the sample in the task's order, from 0.")
    subtask: str = described("Row of the closing table that the sample belongs to.")
    group: str = described("Name that samples on one context share: the unit of all intervals.")
    prompt_hash: str = described("Hash of the prompt's token ids. Only equal prompts are paired.")
    target_hash: str = described("Hash of `target`. Only equal targets are paired.")
    target: list[str] = described("The right answers.")
    asked: str = described("Question and answer prefix; a long text is shortened in the middle.")
    tokens_in: int = described("Length of the prompt.", "tokens")
    tokens_context: int = described("Length of the part of the prompt in front of the question.", "tokens")
    budget: int | float = described(
        "Budget of the run: an int is rows in each layer and KV head, a float a share of the rows; 1.0 for the full "
        "cache.",
        "rows or share",
    )
    meta: dict[str, Any] = described("What the task says of the sample, for example `data`, `length` or `depth`.")
    conversation: str | None = described("Name that the turns of one conversation share; null outside of one.")
    turn: int = described("Number of turns in front of this one.", "turns")

    # The cache when the answer begins
    quota: int | None = described(
        "Rows that a head of a layer may keep of the prompt; null for the full cache.", "rows", ANSWERED
    )
    protected: int = described("Most rows that the method protected in a head of a layer.", "rows", ANSWERED)
    given_up: dict[str, int] = described(
        "Most protected rows that a head had no room for, in one eviction: `sinks` at the beginning, `recents` at the "
        "end.",
        "rows",
        ANSWERED,
    )
    allocation: str | None = described(
        "Rule that the allocator followed, where it has several; else null.", held_by=ANSWERED
    )
    resident_bytes: int = described("Keys and values that are held, `sliding_bytes` among them.", "bytes", ANSWERED)
    full_bytes: int = described("The same if no row were evicted.", "bytes", ANSWERED)
    metadata_bytes: int = described("Places, lengths and the like of the rows that are held.", "bytes", ANSWERED)
    state_bytes: int = described("What the method keeps beside the rows.", "bytes", ANSWERED)
    headroom_bytes: int = described("Memory that is reserved for rows and not used.", "bytes", ANSWERED)
    sliding_bytes: int = described(
        "Keys and values of sliding-window layers, from which nothing is evicted.", "bytes", ANSWERED
    )
    rows_held: float = described("Rows held, mean over layers and KV heads.", "rows", ANSWERED)
    rows_seen: int = described("Tokens read so far: the rows that the full cache would hold.", "rows", ANSWERED)
    while_decoding: str = described(
        "What happens to new rows in decoding: `appends` keeps all, `cuts` evicts again.", held_by=ANSWERED
    )
    reread_tokens: int = described("Tokens that the model read a second time for the method.", "tokens", ANSWERED)
    reread_ms: float = described("Time of reading them.", "ms", ANSWERED)
    batch: int = described("Samples that were answered at once.", "samples", ANSWERED)
    survived: str = described(
        "Share of the tokens read that is held, in each of at most 64 bins of places: two hexadecimal digits a bin "
        "(`bytes.fromhex` reads them).",
        "%",
        ANSWERED,
    )
    evidence: list[int] = described("Bins of `survived` in which a right answer stands in the context.", "", ANSWERED)

    # The answer's cost
    rows_attended: float = described("Rows that a decoded token attends to, mean.", "rows", ANSWERED)
    rows_held_end: float = described(
        "Rows held when the answer is over, mean over layers and KV heads.", "rows", ANSWERED
    )
    rows_seen_decoding: float = described(
        "Rows that a decoded token would attend to in the full cache, mean.", "rows", ANSWERED
    )
    decoding: str = described("How tokens were decoded: transformers' `modules`, or a CUDA `graph`.", held_by=ANSWERED)
    capture_ms: float = described("Time of recording CUDA graphs. `decode_ms` does not count it.", "ms", ANSWERED)
    peak_rows: int = described("Most rows that a head of a layer held after an eviction.", "rows", ANSWERED)
    peak_rows_attended: int = described("Most rows that a head of a layer attended to at once.", "rows", ANSWERED)
    prefill_ms: float = described("Time of reading the prompt and evicting.", "ms", ANSWERED)
    shared_prefill: int = described("Runs that read this prompt at once.", "runs", ANSWERED)
    ttft_ms: float = described("Time to the first token of the answer: `prefill_ms` and its decoding.", "ms", ANSWERED)
    peak_bytes: int = described("Most memory that was used at once; `peak_of` says of what.", "bytes", ANSWERED)
    peak_of: str = described(
        "What `peak_bytes` counts: `cuda`, all that torch allocated, or `cache`, rows alone.", held_by=ANSWERED
    )

    # The answer
    output: str = described("What the model wrote.")
    tokens_out: int = described("Length of `output`.", "tokens", ANSWERED)
    stop: str = described(
        "Why the answer ended: `eos` (an end token), `until` (a text of the task), `length` (the limit) or `error`."
    )
    decode_ms: float = described("Time from the first token of the answer to its last.", "ms", ANSWERED)
    error: str | None = described("Why there is no answer, for example `out_of_memory`; else null.")
    score: float | None = described("Worth of the answer, from 0 to 100; null with `error`.", "points")
    answer: str | None = described("What the task took from `output` as the answer; null with `error`.")
    also: dict[str, Any] = described("Further metrics of the task by name: points, or whether.")
    seconds: float = described("Time of the whole sample, with this run's part of a shared prefill.", "s")

    # Fidelity
    fidelity: dict[str, int | float | None] = described(
        "How the right answer's first tokens are predicted: `nll`, negative log-likelihood; `kl`, divergence from the "
        "full cache's predictions, null where the full cache had no memory; `tokens`, how many are compared. Empty "
        "where the sample has nothing to compare.",
        "nats a token",
        COMPARED,
    )
    fidelity_ms: float = described("Time of these predictions. Only `seconds` counts it.", "ms", PREDICTED)
    predictions: str = described(
        "The full cache's predictions, which other runs are compared with (`kvbench.runs.fidelity.pack_predictions`).",
        "",
        REFERENCE,
    )

    def __post_init__(self) -> None:
        if problems := find_problems(self.to_json()):
            raise TypeError(f"record of {self.uid!r}: {'; '.join(problems)}")

    def to_json(self) -> dict[str, Any]:
        """Return the fields that the record has, as JSON can say them."""
        return {own.name: value for own in fields(self) if (value := getattr(self, own.name)) is not ABSENT}


TITLES = {  # first field of a section -> its title
    "version": "The record",
    "uid": "The sample",
    "quota": "The cache when the answer begins",
    "rows_attended": "What the answer cost",
    "output": "The answer",
    "fidelity": "Fidelity",
}
FIELD_TYPES: dict[str, Any] = {own.name: own.type for own in fields(Record)}
REQUIRED_FIELDS = {  # whether there is an answer -> fields that the record has
    there: frozenset(own.name for own in fields(Record) if own.metadata["held_by"] in groups)
    for there, groups in {False: (ALWAYS,), True: (ALWAYS, ANSWERED)}.items()
}
EXACT_TYPES = {  # field -> types of which every value fits, so that most values are not looked into
    name: frozenset({dict} if kind == dict[str, Any] else get_args(kind) if isinstance(kind, UnionType) else {kind})
    for name, kind in FIELD_TYPES.items()
}
SINCE = {own.name: own.metadata["since"] for own in fields(Record)}


def read_version(record: Mapping[str, Any]) -> int:
    """Return the version of a record that was read; a record of kvbench 0.1 does not say it."""
    version: int = record.get("version", 1)
    return version


def find_problems(record: Mapping[str, Any]) -> list[str]:
    """Say what a record that was read lacks or holds wrongly, one line each, nothing for a good one.

    Records of version 1 are not looked at: 0.1 grew fields without saying so. Unknown fields are those of a later
    version.
    """
    if (version := read_version(record)) == 1:
        return []
    if not is_of_type(version, int):
        return [f"version is {version!r}, expected int"]
    wrong = [
        f"{name} is {shorten(value)}, expected {format_type(FIELD_TYPES[name])}"
        for name, value in record.items()
        if (plain := EXACT_TYPES.get(name)) is not None
        and type(value) not in plain
        and not is_of_type(value, FIELD_TYPES[name])
    ]
    if missing := REQUIRED_FIELDS[record.get("error") is None] - record.keys():
        wrong += [f"{name} is missing" for name in FIELD_TYPES if name in missing and SINCE[name] <= version]
    return wrong


def is_of_type(value: object, kind: Any) -> bool:
    """Whether `value` is of this type; an int is also a float, a bool is neither."""
    if kind is Any:
        return True
    if isinstance(kind, UnionType):
        return any(is_of_type(value, own) for own in get_args(kind))
    if (origin := get_origin(kind)) is not None:
        if not isinstance(value, origin):
            return False
        items, inner = value.values() if isinstance(value, dict) else value, get_args(kind)[-1]
        return set(map(type, items)) <= {inner} or all(is_of_type(item, inner) for item in items)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def shorten(value: object) -> str:
    """Return the beginning of a value, as Python writes it."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def format_type(kind: Any) -> str:
    """Return a type as the table of fields says it."""
    if isinstance(kind, UnionType):
        return " or ".join(map(format_type, get_args(kind)))
    if (origin := get_origin(kind)) is not None:
        return f"{origin.__name__} of {format_type(get_args(kind)[-1])}"
    return {Any: "any value", type(None): "null"}.get(kind) or kind.__name__


def format_schema() -> str:
    """Return docs/records.md."""
    lines = [HEAD]
    for own in fields(Record):
        if own.name in TITLES:
            lines += ["", f"## {TITLES[own.name]}", "", "| Field | Type | Unit | Meaning | In | Since |"]
            lines += ["| --- | --- | --- | --- | --- | --- |"]
        about = own.metadata
        cells = [f"`{own.name}`", format_type(own.type), about["unit"], about["meaning"], about["held_by"]]
        lines.append(f"| {' | '.join([*cells, VERSIONS[about['since']]])} |")
    return "\n".join(lines) + "\n"


HEAD = f"""# The record of a sample

<!-- `python -m kvbench record-schema > docs/records.md` writes this page from kvbench/store/record.py. -->

kvbench writes one line of JSON for each sample, `results/runs/<hash>/records-<writer>.jsonl`. `kvbench.load("results")`
reads them all: `loaded.records()` is a pandas frame with one line a sample, in which `meta`, `also` and `fidelity` have
a column for each of their keys (`meta.depth`).

*Since* is the version of kvbench that brought a field. This is version {VERSION} of the record. A later version only
adds fields; readers keep fields that they do not know. Records of kvbench {VERSIONS[1]} have no `version`, and those of
its early days lack fields that came while it was developed.

`null` also stands for numbers that JSON cannot say (NaN, infinity). A *row* is the entry of one token in the KV cache
of one layer and KV head."""
