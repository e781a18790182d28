"""Write answers next to the full cache's into script files, which the page loads when needed. This needs no server.

A file is one call, kvbenchSamples(run, part, samples), of about PART characters. A sample is [uid, subtask, targets,
full cache's side, method's side, question, strip, context], and a side is [output, score, error]. The samples that lost
most come first. Question and strip are null for runs of older versions, which did not record them. Contexts are
numbered; samples that share one have the same number.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from kvbench.analysis.paired import pair_records
from kvbench.analysis.run_labels import shorten
from kvbench.atomic import replace_file
from kvbench.report.panels import Pairing
from kvbench.store.run_folder import to_json_value, to_plain
from kvbench.validation import escape

LONGEST = 20_000  # characters of an answer that are shown
QUESTION = 2_000  # of a question
PART = 400_000
SURVIVED = re.compile("([0-5][0-9a-f]|6[0-4]){1,64}")  # percentages, as kvbench.runs.survival writes them


def escape_invisible(text: object, longest: int = LONGEST) -> str:
    """Escape control, format and surrogate characters except line ends and tabs, and cut the text if it is huge."""
    text = text if isinstance(text, str) else "" if text is None else json.dumps(text)
    more = len(text) - longest
    shown = text[:longest]
    if not shown.replace("\n", "").replace("\t", "").isprintable():  # most are
        shown = shown.translate({ord(char): escape(char) for char in set(shown) - {"\n", "\t"}})
    return f"{shown}\n… {more} more characters in the record" if more > 0 else shown


def format_side(record: dict) -> list:
    return [escape_invisible(record.get("output")), record["score"], record["error"] and shorten(str(record["error"]))]


def format_strip(record: dict) -> list | None:
    """Return [percentages of the bins, tokens read, bins that contain a target]; None if the record lacks them."""
    survived, tokens, places = (record.get(name) for name in ("survived", "rows_seen", "evidence"))
    if not (isinstance(survived, str) and SURVIVED.fullmatch(survived) and isinstance(tokens, int)):
        return None
    return [
        survived,
        tokens,
        [place for place in (places if isinstance(places, list) else []) if place in range(len(survived) // 2)],
    ]


def list_entries(pairing: Pairing) -> Iterator[list]:
    """Yield the samples of a run, those that lost most first."""

    def order(both: tuple[dict, dict]) -> tuple:
        scores = [record["score"] for record in both]
        return 0.0 if None in scores else scores[1] - scores[0], both[1].get("index") or 0, both[1]["uid"]

    contexts: dict[str, int] = {}
    for full, method in sorted(pair_records(pairing.full.records, pairing.run.records), key=order):
        targets = method.get("target")
        targets = targets if isinstance(targets, list) else [targets]
        shown = [escape_invisible(target, 2000) for target in targets[:20]]
        asked = None if method.get("asked") is None else escape_invisible(method["asked"], QUESTION)
        names = [shorten(method["uid"]), shorten(str(method["subtask"]))]
        context = contexts.setdefault(method["group"] or method["uid"], len(contexts))
        yield [*names, shown, format_side(full), format_side(method), asked, format_strip(method), context]


def write_samples(folder: Path, pairing: Pairing) -> list[str]:
    """Write a run's files into `folder` and return their names."""
    names: list[str] = []
    part: list[str] = []
    held = 0

    def close() -> None:
        name = f"samples-{pairing.run.hash}-{len(names)}.js"
        write_file(folder / name, f'kvbenchSamples("{pairing.run.hash}",{len(names)},[{",".join(part)}]);\n')
        names.append(name)
        part.clear()

    for entry in list_entries(pairing):
        text = to_embedded_json(entry)
        if part and held + len(text) > PART:
            close()
            held = 0
        part.append(text)
        held += len(text)
    if part:
        close()
    return names


def write_file(path: Path, text: str) -> None:
    """Write a file completely or not at all. A file that has this text already is left alone."""
    try:
        if path.read_bytes() == text.encode():
            return
    except FileNotFoundError:
        pass
    with replace_file(path) as draft:
        draft.write_text(text, encoding="utf-8")


def to_embedded_json(value: object) -> str:
    """Return ASCII JSON without characters that have a meaning in HTML."""
    try:
        text = json.dumps(to_plain(value), separators=(",", ":"), allow_nan=False)
    except ValueError:  # JSON has no NaN and no infinity; they become null
        text = json.dumps(to_json_value(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
