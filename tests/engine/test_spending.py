"""Every second of a process is counted once, for what it was spent on."""

import re
import time
from types import SimpleNamespace

import pytest

from kvbench.engine import spending
from kvbench.engine.spending import SECONDS, describe, move, spend, start_counting


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that only `pass_time` moves."""
    start_counting()
    now = [100.0]
    monkeypatch.setattr(spending.time, "perf_counter", lambda: now[0])

    def pass_time(seconds):
        now[0] += seconds

    yield pass_time
    start_counting()


def counted() -> dict[str, float]:
    return {name: seconds for name, seconds in SECONDS.items() if seconds}


def test_parts_inside_others_are_counted_once(clock):
    @spend("reading")
    def read():
        clock(2)

    with spend("answering"):
        clock(1)
        read()
        with spend("capturing"):
            clock(4)
            read()
        clock(8)
    assert counted() == {"answering": 9, "reading": 4, "capturing": 4} and spending.INNER == []
    move("reading", "cutting", 3)
    assert counted() == {"answering": 9, "reading": 1, "cutting": 3, "capturing": 4}


def test_a_part_that_fails_is_counted(clock):
    with pytest.raises(ValueError), spend("answering"):
        clock(1)
        with spend("reading"):
            clock(2)
            raise ValueError
    assert counted() == {"answering": 1, "reading": 2} and spending.INNER == []


def test_what_is_done_to_warm_up_counts_as_that(clock):
    with spend("warming up"):
        clock(1)
        with spend("reading"):
            clock(2)
            move("reading", "cutting", 1)
            with spend("loading"):
                clock(4)
        clock(8)
    assert counted() == {"warming up": 11, "loading": 4}


def test_a_line_says_it(clock, capsys):
    say = start_counting(" of a worker")
    say()
    assert capsys.readouterr().err == ""
    with spend("reading"):
        clock(30)
    with spend("answering"):
        clock(60)
    with spend("writing"):
        clock(0.1)
    clock(9.9)
    say()
    assert capsys.readouterr().err == "time of a worker: 100 s: answering 60 %, reading 30 %, rest 10 %\n"
    assert describe(100).endswith("rest 10 %") and set(spending.MEANINGS) == set(SECONDS)


def test_a_sweep_says_what_its_time_went_to(kvbench, monkeypatch, tmp_path):
    monkeypatch.undo()
    processor = SimpleNamespace(perf_counter=time.process_time)  # what other processes take does not count
    monkeypatch.setattr(spending, "time", processor)
    monkeypatch.chdir(tmp_path)
    begin = time.process_time()
    settings = ("-m", "task=niah", "task.lengths=[300]", "budget=0.3", "method=snapkv", "fidelity=true")
    code, _, errors = kvbench(*settings)
    wall = time.process_time() - begin
    [line] = re.findall(r"^time: (\d+) s: (.*)$", errors, re.MULTILINE)
    parts = {name: int(share) for name, share in re.findall(r"([a-z][a-z ]*) (\d+) %", line[1])}
    assert code == 0 and int(line[0]) <= round(wall) and {"answering", "starting"} <= parts.keys()
    assert all(SECONDS[name] > 0 for name in ("reading", "comparing", "grading", "cutting"))
    assert parts.get("rest", 0) <= 20
    code, _, errors = kvbench(*settings)  # nothing is left to do
    assert code == 0 and "time: " not in errors
