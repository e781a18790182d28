"""Build the texts of prompts around their targets again, for the report page: `kvbench dev prompt-excerpts`.

A record has no prompt, because the prompts of a study are gigabytes. They are made again from the run's settings, its
seed and its tokenizer, and a text is used only if the hash of its tokens is the record's. The page runs this module in
a process of its own, because it needs torch.

A request is {"run": folder of a run, "uids": [...]}, and its answer {"excerpts": {uid: [tokens, window, ...]}}, or
{"reason": why there are none}. A window is a list of [text, bin of kvbench.runs.survival, whether it is part of a
target].
"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbench.interfaces.task import Sample
from kvbench.runs.prompt import Prompt
from kvbench.runs.replay import CannotReplay, rebuild_run
from kvbench.runs.resources import Resources
from kvbench.runs.stranger_settings import find_local
from kvbench.runs.survival import BINS
from kvbench.store.run_folder import RunFolder, read_run_value

AROUND = 240  # characters shown on each side of a target
WINDOWS = 4  # windows of a sample
Piece = tuple[str, int, bool]  # text, bin, whether it is part of a target


def cut_windows(sample: Sample, prompt: Prompt, tokens: int) -> list[list[Piece]]:
    """Return the text of a sample's context around its targets, or its beginning if no target stands there.

    Args:
        sample: The sample.
        prompt: Its prompt.
        tokens: The number of tokens that were read, which the bins divide.
    """
    targets = find_targets(sample)
    spans: list[list[int]] = []
    for first, last in targets or [(0, 0)]:
        begin, end = max(0, first - AROUND), min(len(sample.context), last + AROUND)
        if spans and begin <= spans[-1][1]:
            spans[-1][1] = max(end, spans[-1][1])
        else:
            spans.append([begin, end])
    return [cut_pieces(sample.context, begin, end, targets, prompt.ends, tokens) for begin, end in spans[:WINDOWS]]


def find_targets(sample: Sample) -> list[tuple[int, int]]:
    """Return the characters at which a target stands in the sample's context, as whole words.

    The places are those of `kvbench.runs.survival.find_evidence`, which returns bins. That module is part of what
    identifies a run, so it cannot change for the page.
    """
    spans: set[tuple[int, int]] = set()
    for target in filter(None, map(str.strip, sample.answers)):
        begin, end = (r"\b" if re.match(r"\w", edge, re.ASCII) else "" for edge in (target[0], target[-1]))
        spans |= {match.span() for match in re.finditer(begin + re.escape(target) + end, sample.context, re.ASCII)}
    return sorted(spans)


def cut_pieces(
    text: str, begin: int, end: int, targets: Sequence[tuple[int, int]], ends: Sequence[int], tokens: int
) -> list[Piece]:
    """Cut text[begin:end] where a target begins or ends, and where a bin begins outside of targets."""
    bins = min(BINS, tokens)
    first = [-(-number * tokens // bins) for number in range(1, bins)]  # the first token of each bin but bin 0
    edges = {ends[token - 1] for token in first if token <= len(ends)}
    edges -= {place for place in edges if any(low < place < high for low, high in targets)}
    edges |= {place for target in targets for place in target}
    places = sorted({begin, end} | {place for place in edges if begin < place < end})
    pieces = []
    for start, stop in pairwise(places):
        token = bisect_right(ends, start)  # the token that the piece's first character is part of
        inside = any(low <= start and stop <= high for low, high in targets)
        pieces.append((text[start:stop], min(token, tokens - 1) * bins // tokens, inside))
    return pieces


def build_excerpts(path: Path, uids: Sequence[str]) -> dict[str, Any]:
    """Return [tokens, window, ...] of samples by uid.

    Args:
        path: Folder of the run.
        uids: The samples.

    Raises:
        CannotReplay: The run's settings are not known, or its prompts are other ones today.
    """
    folder = RunFolder(path.parent, read_run_value(path))
    records = folder.records()
    given = find_local(folder.machine(uids[0]).get("settings"))
    prompts = Resources(rebuild_run(folder, uids[0], given)).prompts
    return {uid: build_excerpt(prompts, records[uid]) for uid in uids}


def build_excerpt(prompts: Mapping[str, tuple[Sample, Prompt]], record: Mapping[str, Any]) -> list[int | list[Piece]]:
    """Return [tokens, window, ...] of a record's sample.

    Raises:
        CannotReplay: The prompt is another one today.
    """
    uid, tokens = record["uid"], record["rows_seen"]
    sample, prompt = prompts.get(uid, (None, None))
    if sample is None or prompt is None or prompt.hash() != record["prompt_hash"]:
        raise CannotReplay(f"{uid}: its prompt is another one today")
    return [tokens, *cut_windows(sample, prompt, tokens)]


def answer_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request.

    The run may be anybody's, so its settings are those of a stranger (kvbench.runs.stranger_settings). Only paths to a
    model and to data are taken from it, if they exist here.
    """
    try:
        return {"excerpts": build_excerpts(Path(request["run"]), request["uids"])}
    except Exception as error:  # a task, a tokenizer or a hub may fail in any way; the page says how
        said = str(error) if isinstance(error, CannotReplay | ValueError) else f"{type(error).__name__}: {error}"
        return {"reason": (said.splitlines() or ["?"])[0]}
