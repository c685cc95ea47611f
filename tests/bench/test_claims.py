"""Several real processes on one plan: nothing twice, nothing left out, whoever is killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worker import CELLS

from elsa.bench.claims import claimed
from elsa.bench.plans import Cell
from elsa.bench.run import append_line

HERE = Path(__file__).parent


def until(condition, seconds=60):
    """Wait for it, but not forever."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path):
    """Starts workers by name; ends those that a failed test leaves."""
    processes = []
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"}

    def starting(*names, plans=()):
        for name in names:
            places = [str(tmp_path / "results.jsonl"), str(tmp_path), name]
            command = [sys.executable, str(HERE / "worker.py"), *places, *plans]
            processes.append(subprocess.Popen(command, env=environment))
        until(lambda: all((tmp_path / f"{name}.ready").exists() for name in names))
        return processes[-len(names) :]

    yield starting
    for process in processes:
        process.kill()
        process.wait()


def cells_of(results):
    names = CELLS[0].fields()
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return [Cell(**{name: line[name] for name in names}) for line in lines]


def test_processes_side_by_side_share_a_plan(start, tmp_path):
    workers = start("one", "two", "three")
    (tmp_path / "go").touch()
    for worker in workers:
        assert worker.wait(60) == 0
    cells = cells_of(tmp_path / "results.jsonl")
    assert sorted(map(str, cells)) == sorted(map(str, CELLS))
    added = [int((tmp_path / f"{name}.added").read_text()) for name in ("one", "two", "three")]
    assert sum(added) == len(CELLS)
    assert min(added) > 0  # they did work at the same time


def test_processes_on_plans_that_overlap_double_and_skip_nothing(start, tmp_path):
    workers = [*start("one"), *start("both", plans=("other", "small")), *start("other", plans=("other",))]
    (tmp_path / "go").touch()
    for worker in workers:
        assert worker.wait(60) == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    done = [(line["plan"], str(Cell(**{name: line[name] for name in CELLS[0].fields()}))) for line in lines]
    assert sorted(done) == sorted([("small", str(c)) for c in CELLS] + [("other", str(c)) for c in CELLS[2:5]])


def test_the_work_of_a_killed_process_is_taken_over(start, tmp_path):
    victim, survivor = start("victim", "survivor")
    (tmp_path / "go").touch()
    until(lambda: (tmp_path / "victim.working").exists())
    victim.kill()  # SIGKILL: it can clear up nothing
    assert survivor.wait(60) == 0
    cells = cells_of(tmp_path / "results.jsonl")
    assert sorted(map(str, cells)) == sorted(map(str, CELLS))
    assert not (tmp_path / "victim.added").exists()


def test_a_process_waits_for_what_another_one_may_drop(start, tmp_path):
    results = tmp_path / "results.jsonl"
    for cell in CELLS[1:]:
        append_line(results, {"plan": "small", **cell.fields()})
    (worker,) = start("late")
    with claimed(results, "small", CELLS[0].group) as mine:
        assert mine
        (tmp_path / "go").touch()
        time.sleep(0.5)
        assert worker.poll() is None
        assert not (tmp_path / "late.working").exists()
    assert worker.wait(60) == 0
    assert sorted(map(str, cells_of(results))) == sorted(map(str, CELLS))


def test_a_line_is_added_by_one_process_at_a_time(tmp_path):
    # Each writer repairs what looks like a cut line, so without a lock they would cut each other's.
    code = (
        "import sys; from pathlib import Path; from elsa.bench.run import append_line\n"
        "for n in range(60): append_line(Path(sys.argv[1]), {'who': sys.argv[2], 'n': n, 'long': 'x' * 20000})"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    command = [sys.executable, "-c", code, str(tmp_path / "r")]
    writers = [subprocess.Popen([*command, who], env=environment) for who in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert sorted((line["who"], line["n"]) for line in lines) == [(who, n) for who in "ab" for n in range(60)]


def test_claims_are_per_plan_and_per_work_and_leave_nothing_for_git(tmp_path):
    code = (
        "import sys; from pathlib import Path; from elsa.bench.claims import claimed\n"
        "with claimed(Path(sys.argv[1]), sys.argv[2], sys.argv[3]) as mine: print(mine)"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}

    def elsewhere(plan, work):
        command = [sys.executable, "-c", code, str(tmp_path / "r"), plan, work]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    with claimed(tmp_path / "r", "plan", "work"):
        assert elsewhere("plan", "work") == "False"
        assert elsewhere("plan", "other") == "True"
        assert elsewhere("other", "work") == "True"
    assert elsewhere("plan", "work") == "True"
    assert (tmp_path / ".r.claims" / ".gitignore").read_text() == "*\n"
