"""Write the text of prompts around their targets into script files, which the page loads when needed.

A file is one call, kvbenchPrompts(name, {uid: [tokens, window, ...]}); kvbench.runs.prompt_excerpts defines a window.
The samples of a panel have the same prompts in all runs, so a panel has one file. Its name is a hash of the prompts'
hashes: a file that exists is used again, and only the first page of a study waits for its prompts.

Prompts are made in a process of their own, which has SECONDS for all panels. If a panel's prompts cannot be made, for
example because the data set is not at hand, the page says so.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvbench.analysis.answer_metrics import find_failure
from kvbench.analysis.run_labels import shorten
from kvbench.config.paths import make_environment
from kvbench.report.panels import Pairing
from kvbench.report.samples import escape_invisible, to_embedded_json, write_file

FORMAT = 1  # format of the files; raise it when kvbench.runs.prompt_excerpts writes something else
SAMPLES = 200  # samples shown of a panel; those that most runs lose come first
SECONDS = 60.0  # time limit for the prompts of all panels
PROMPT_HASH = re.compile("[0-9a-f]{16}")  # as kvbench.runs.prompt.Prompt.hash returns it
COMMAND = [sys.executable, "-P", "-m", "kvbench", "dev", "prompt-excerpts"]


def write_excerpts(folder: Path, pairings: Sequence[Pairing], count: int) -> list[dict[str, Any]]:
    """Write the files of `count` panels.

    Returns:
        For each panel {"name": file, "samples": how many of "of" samples it has}, or {"reason": why it has none}. Empty
        for a panel without pairs.
    """
    panels: dict[int, list[Pairing]] = {}
    for pairing in pairings:
        panels.setdefault(pairing.panel, []).append(pairing)
    entries: dict[int, dict[str, Any]] = {}
    asked: dict[int, list[str]] = {}
    for panel, some in panels.items():
        uids = choose_samples(some)
        name = name_file(some[0].full.records, uids)
        if not uids:
            entries[panel] = {"reason": "the records were not made by a run"}
            continue
        entries[panel] = {"name": name, "samples": len(uids), "of": len(some[0].full.records)}
        if not (folder / name).is_file():
            asked[panel] = uids
    requests = [
        {"run": str(panels[panel][0].full.folder.path.resolve()), "uids": uids} for panel, uids in asked.items()
    ]
    for panel, answer in zip(asked, request_excerpts(requests), strict=True):
        if "excerpts" in answer:
            name = entries[panel]["name"]
            text = to_embedded_json({uid: escape_windows(windows) for uid, windows in answer["excerpts"].items()})
            write_file(folder / name, f'kvbenchPrompts("{name}",{text});\n')
        else:
            entries[panel] = {"reason": shorten(answer["reason"], 300)}
    return [entries.get(panel, {}) for panel in range(count)]


def choose_samples(pairings: Sequence[Pairing]) -> list[str]:
    """Return the samples of a panel whose prompts are shown. Empty if the records cannot be those of a run."""
    full = pairings[0].full.records
    losses = dict.fromkeys(full, 0)
    for pairing in pairings:
        for uid in pairing.full.records.keys() & pairing.run.records.keys() & losses.keys():
            one, other = pairing.full.records[uid], pairing.run.records[uid]
            losses[uid] += not (find_failure(one) or find_failure(other)) and other["score"] < one["score"]
    shown = [
        uid
        for uid, record in full.items()
        if PROMPT_HASH.fullmatch(str(record.get("prompt_hash"))) and isinstance(record.get("rows_seen"), int)
    ]
    return sorted(shown, key=lambda uid: (-losses[uid], full[uid].get("index") or 0))[:SAMPLES]


def name_file(records: Mapping[str, Mapping[str, Any]], uids: Sequence[str]) -> str:
    """Return the name of the file with the prompts of these samples."""
    text = json.dumps([FORMAT, *sorted((uid, records[uid]["prompt_hash"], records[uid]["rows_seen"]) for uid in uids)])
    return f"prompts-{sha256(text.encode()).hexdigest()[:16]}.js"


def request_excerpts(requests: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the answer of kvbench.runs.prompt_excerpts to each request."""
    if not requests:
        return
    reason = "the process that makes prompts ended early"
    try:
        said = subprocess.run(
            COMMAND,
            input="".join(json.dumps(request) + "\n" for request in requests).encode(),
            timeout=SECONDS,
            env=make_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as error:
        said, reason = error.stdout or b"", f"it would take more than {SECONDS:g} s"
    answers = [json.loads(line) for line in said.splitlines(keepends=True) if line.endswith(b"}\n")]
    yield from answers
    yield from ({"reason": reason} for _ in requests[len(answers) :])


def escape_windows(excerpt: Sequence[Any]) -> list[Any]:
    """Escape control and invisible characters in an excerpt."""
    tokens, *windows = excerpt
    return [tokens, *([[escape_invisible(text), *rest] for text, *rest in window] for window in windows)]
