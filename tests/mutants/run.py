"""Say which mutants the tests catch: `make mutants`, or `python tests/mutants/run.py --help`.

For each line of mutants.jsonl a copy of the checkout gets that mistake. Then the tests of its folder, the laws and the
replay net run until one fails. A mutant is caught if one does within the time; one that only takes too long is not.
"""

import argparse
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
COLUMNS = ("file", "line", "outcome", "seconds", "by")
PLAIN = re.search(r"^PLAIN := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
QUICK = ["--hypothesis-profile", "quick", "-m", PLAIN]
FULL = ["-m", PLAIN.replace("not full and ", "")]


def copy_checkout(folder: Path) -> None:
    """Copy what git tracks or would track, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = ROOT / name, folder / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def list_folders(file: str) -> list[str]:
    """The tests that a mutant of this file has to pass."""
    return [f"tests/{Path(file).parent.name}", "tests/laws", "tests/replay"]


def mutate(folder: Path, mutant: dict) -> None:
    """Make the mistake. The line may have moved since the draw; if it is gone, the mutant must be drawn again."""
    path = folder / mutant["file"]
    lines = path.read_text(encoding="utf-8").split("\n")
    places = [index for index, line in enumerate(lines) if line == mutant["before"]]
    if not places:
        raise SystemExit(f"{mutant['file']} no longer has the line {mutant['before'].strip()!r}: draw it again")
    lines[min(places, key=lambda index: abs(index + 1 - mutant["line"]))] = mutant["after"]
    path.write_text("\n".join(lines), encoding="utf-8")


def run_tests(folder: Path, tests: list[str], selection: list[str], processes: int, limit: float) -> dict:
    """Run tests until one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-n", str(processes)]
    command += ["--dist", "worksteal", *selection, *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        output.seek(0)
        printed = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    if code and not failed:
        raise SystemExit(f"{printed[-2000:]}\npytest ended with {code}, but no test failed")
    outcome = {0: "survived", None: "out of time"}.get(code, "caught")
    return {"outcome": outcome, "seconds": round(time.monotonic() - begin), "by": failed[1] if failed else ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", type=Path, default=HERE / "mutants.jsonl", help="the mutants, a line of JSON each")
    parser.add_argument("--out", type=Path, help="a CSV file for the outcomes")
    parser.add_argument("--full", action="store_true", help="run the tests that `make test` leaves out too")
    parser.add_argument("--limit", type=float, default=60, help="seconds for each mutant")
    parser.add_argument("--processes", type=int, default=2, help="pytest's processes for each mutant")
    parser.add_argument("--at-once", type=int, default=1, help="mutants that are tested at the same time")
    chosen = parser.parse_args()
    mutants = [json.loads(line) for line in chosen.list.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory(prefix="kvbench-mutants-") as scratch:
        copies: Queue[Path] = Queue()
        for number in range(chosen.at_once):
            copy_checkout(Path(scratch) / str(number))
            copies.put(Path(scratch) / str(number))

        def judge(mutant: dict) -> dict:
            folder = copies.get()
            original = (folder / mutant["file"]).read_bytes()
            try:
                mutate(folder, mutant)
                selection = FULL if chosen.full else QUICK
                tests = list_folders(mutant["file"])
                found = run_tests(folder, tests, selection, chosen.processes, chosen.limit)
            finally:
                (folder / mutant["file"]).write_bytes(original)
                copies.put(folder)
            found = {"file": mutant["file"], "line": mutant["line"], **found}
            print("{outcome:11} {seconds:4} s  {file}:{line}  {by}".format(**found), flush=True)
            return found

        with ThreadPoolExecutor(chosen.at_once) as pool:
            outcomes = list(pool.map(judge, mutants))
    print(f"{sum(own['outcome'] == 'caught' for own in outcomes)} of {len(outcomes)} mutants are caught")
    if chosen.out:
        with chosen.out.open("w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            table.writeheader()
            table.writerows(outcomes)


if __name__ == "__main__":
    main()
