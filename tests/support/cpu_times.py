"""Measure the CPU time of every test, so that `make test` stays short: `--cpu-times`.

The time of a test is what its process and the children that it waited for spent on setup, call and teardown. What a
fixture of a module or a session spends is listed by itself, because it is spent once for many tests.

All seconds are those of one machine at rest. A loop of Python and torch is timed beside the tests, and times are
divided by its time, so that a slow or busy machine does not fail a test that a quick one passes.
"""

import csv
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.support.repository import ROOT

DURATIONS = ROOT / "tests" / "durations.csv"  # `make durations` writes it
COLUMNS = ("name", "cases", "seconds", "longest")
LIMIT = 1.5  # seconds of CPU that a test of `make test` may take
SHARED_LIMIT = 3.0  # and a fixture, which many tests share
TOLERANCE = 2.0  # a single measurement may be wrong by this factor before it fails a test
LISTED = 0.3  # a test below it has no line of its own in DURATIONS
REFERENCE = 0.042  # seconds that `calibrate` takes on the machine whose seconds are meant


@dataclass
class Duration:
    """CPU seconds of the cases of a test, of a fixture, or of all tests of a file."""

    name: str
    cases: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    @property
    def is_fixture(self) -> bool:
        return self.name.endswith("]")

    @property
    def limit(self) -> float:
        return SHARED_LIMIT if self.is_fixture else LIMIT

    def add(self, seconds: float) -> None:
        self.cases += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


def read_cpu() -> float:
    """CPU seconds of this process and of the children that it waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def calibrate(rounds: int = 5) -> float:
    """CPU seconds of a fixed amount of work of the kind that tests do; the quickest of some rounds."""
    return min(_time_work() for _ in range(rounds))


def _time_work() -> float:
    begin = read_cpu()
    x = torch.ones(48, 48)
    words: dict[str, int] = {}
    for number in range(4000):
        x = torch.nn.functional.silu(x @ x) * 1e-2
        words[f"{number % 97}"] = words.get(f"{number % 89}", 0) + number
    return read_cpu() - begin


def warm_up() -> None:
    """Run a cell of the embedded model, so that no test is charged with what a process does once, such as imports."""
    from kvbench.config.compose import compose_config
    from kvbench.runs.resources import Resources
    from kvbench.runs.runner import execute_run
    from kvbench.runs.spec import RunSpec

    settings = ["device=cpu", "task=ruler", "task.subtasks=[niah_single_1]", "task.length=448", "limit=1"]
    run = RunSpec.from_config(compose_config(settings))
    with TemporaryDirectory() as folder, redirect_stderr(StringIO()):  # its progress bar
        execute_run(run, Path(folder), Resources(run))


def read_durations(path: Path = DURATIONS) -> list[Duration]:
    """What `make durations` measured."""
    with path.open(newline="") as lines:
        return [
            Duration(row["name"], int(row["cases"]), float(row["seconds"]), float(row["longest"]))
            for row in csv.DictReader(lines)
        ]


def write_durations(path: Path, durations: Iterable[Duration]) -> None:
    """A line for each file, and for each test and fixture of it that takes a while."""
    lines: dict[str, list[Duration]] = defaultdict(list)
    for own in durations:
        lines[own.name.partition("::")[0]].append(own)
    with path.open("w", newline="") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(COLUMNS)
        for name, parts in sorted(lines.items()):
            whole = Duration(name, seconds=sum(own.seconds for own in parts), longest=max(own.longest for own in parts))
            whole.cases = sum(own.cases for own in parts if not own.is_fixture)
            dear = sorted((own for own in parts if own.longest >= LISTED), key=lambda own: own.name)
            for own in (whole, *dear) if whole.cases else dear:
                table.writerow([own.name, own.cases, f"{own.seconds:.2f}", f"{own.longest:.2f}"])


@dataclass(eq=False)  # pluggy keeps plugins in sets
class Meter:
    """The plugin of a process that runs tests: each report carries what it measured."""

    config: pytest.Config
    fixtures: dict[str, float] = field(default_factory=dict)
    calibrations: list[float] = field(default_factory=list)
    collected: float = 0.0

    def pytest_collection_finish(self) -> None:
        self.collected = read_cpu()
        warm_up()
        self.calibrations.append(calibrate())

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[object]:
        begin, inner = read_cpu(), sum(self.fixtures.values())
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                owner = request.node.nodeid or "tests/conftest.py"  # a session's fixture has no file
                name = f"{owner}::[{fixturedef.argname}]"
                self.fixtures[name] = read_cpu() - begin - (sum(self.fixtures.values()) - inner)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[object]:
        self.fixtures.clear()
        self.begin = read_cpu()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            spent = read_cpu() - self.begin - sum(self.fixtures.values())
            if max(spent, *self.fixtures.values(), 0.0) > LIMIT * self.calibrations[-1] / REFERENCE:
                self.calibrations.append(calibrate())  # the machine may be busier than at the start
            slowness = max(self.calibrations[0], self.calibrations[-1]) / REFERENCE
            report.cpu = {item.nodeid: spent / slowness}
            report.cpu |= {name: own / slowness for name, own in self.fixtures.items()}
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if (output := getattr(self.config, "workeroutput", None)) is not None:
            output["cpu"] = {"all": read_cpu(), "collected": self.collected, "calibration": min(self.calibrations)}


@dataclass(eq=False)
class Summary:
    """The plugin of the process that prints: it collects what the reports carry."""

    config: pytest.Config
    tests: dict[str, Duration] = field(default_factory=dict)
    processes: list[dict[str, float]] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for nodeid, seconds in getattr(report, "cpu", {}).items():
            name = nodeid if nodeid.endswith("]") and "::[" in nodeid else nodeid.partition("[")[0]
            self.tests.setdefault(name, Duration(name)).add(seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.processes.append(getattr(node, "workeroutput", {}).get("cpu", {}))

    def find_long(self) -> list[Duration]:
        return [own for own in self.tests.values() if own.longest > TOLERANCE * own.limit]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.find_long() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        dearest = sorted(self.tests.values(), key=lambda own: -own.longest)
        own_time = time.process_time() if self.processes else read_cpu()  # workers tell their time themselves
        everything = own_time + sum(own.get("all", 0.0) for own in self.processes)
        collected = sum(own.get("collected", 0.0) for own in self.processes)
        slowness = max([own["calibration"] for own in self.processes if own] or [calibrate()]) / REFERENCE
        terminalreporter.section("CPU time")
        terminalreporter.write_line(
            f"{everything:.0f} s in all, {collected:.0f} s of them to start and collect; "
            f"{slowness:.2f} times as slow as the machine of the seconds below"
        )
        for own in dearest[:10]:
            terminalreporter.write_line(f"{own.longest:7.2f} s  {own.name}")
        for own in self.find_long():
            terminalreporter.write_line(
                f"too long: {own.name} takes {own.longest:.1f} s of CPU; make test allows {own.limit} (tests/README.md)"
            )
        if target := self.config.getoption("write_cpu_times"):
            write_durations(Path(target), dearest)
            terminalreporter.write_line(f"written: {target}")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("CPU time")
    group.addoption("--cpu-times", action="store_true", help="print the CPU time and the ten dearest tests")
    group.addoption("--write-cpu-times", metavar="FILE", help="write the CPU time of files and tests into FILE")


def register(config: pytest.Config) -> None:
    """Measure if an option asks for it: in every process that runs tests, and print in the one that prints."""
    if not (config.getoption("cpu_times") or config.getoption("write_cpu_times")):
        return
    works_for_another = hasattr(config, "workerinput")
    if works_for_another or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Meter(config), "cpu-meter")
    if not works_for_another:
        config.pluginmanager.register(Summary(config), "cpu-summary")
