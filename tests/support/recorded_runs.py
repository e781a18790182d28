"""What runs of the command line left on the disk."""

import json
from pathlib import Path

import yaml

from kvbench.store.run_folder import find_end, hash_file, make_seal, parse_line

TIMES = {"seconds", "prefill_ms", "ttft_ms", "decode_ms", "capture_ms"}
OWN = TIMES | {"reread_ms", "shared_prefill"}  # and whatever else depends on the runs beside it


def read_records(folder: Path) -> list[dict]:
    """The records in a run's folder, in the order of its files."""
    text = "".join(path.read_text() for path in sorted(folder.glob("records*.jsonl")))
    assert text.endswith("\n")
    return [parse_line(line.encode()) for line in text.splitlines(True)]


def read_whole_lines(file: Path) -> list[dict]:
    """The records of a file, whose writer may have been killed."""
    content = file.read_bytes()
    return [parse_line(line) for line in content[: find_end(content)].splitlines(True)]


def seal(folder: Path) -> None:
    """Write `done` of a run anew, as one who changes its files on purpose could."""
    files = {path.name: hash_file(path) for path in folder.iterdir() if path.name not in ("done", "claims.lock")}
    uids = [record["uid"] for record in read_records(folder)]
    (folder / "done").write_text(json.dumps(make_seal(uids, files)))


def read_runs(results: Path) -> dict[str, tuple[Path, list[dict]]]:
    """Method's name → folder and records; one run of each method is expected."""
    found = {}
    for folder in (results / "runs").iterdir():
        name = yaml.safe_load((folder / "run.yaml").read_text())["value"]["method"]["name"]
        assert name not in found
        found[name] = folder, read_records(folder)
    return found


def strip_circumstances(records: dict[str, dict]) -> dict[str, dict]:
    """What records say wherever, whenever and beside whichever others they were made."""
    return {uid: {key: item for key, item in own.items() if key not in OWN} for uid, own in records.items()}
