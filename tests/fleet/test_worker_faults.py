"""What `test_faults.py` does to one server is done to two workers, of which one is killed while the other goes on."""

import os

import pytest
from hypothesis.stateful import precondition, rule
from test_faults import WHICH, WORTH_A_START, Faults, run_faults

from belljar.environments import Environment


class WorkerFaults(Faults):
    workers = 2

    @rule(which=WHICH)
    @precondition(lambda self: self.since_start >= WORTH_A_START)
    def a_worker_is_killed(self, which: int) -> None:
        folder = self.served.folders[which % self.workers]
        theirs = {name: session for name, session in self.sessions.items() if (folder / "sessions" / name).exists()}
        self.portal.call(self.served.kill_server, folder)
        self._lose(theirs)
        self._check_all()


@pytest.mark.timeout(120)
def test_two_workers_keep_what_was_promised_through_an_accident_or_two(default_environment: Environment) -> None:
    run_faults(WorkerFaults, default_environment, examples=1, steps=8, derandomize=True)


@pytest.mark.timeout(600)
def test_two_workers_keep_what_was_promised_through_many_accidents(default_environment: Environment) -> None:
    run_faults(WorkerFaults, default_environment, examples=2, steps=40, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif("BELLJAR_SOAK" not in os.environ, reason="takes minutes: set BELLJAR_SOAK=1 to run it")
def test_two_workers_keep_what_was_promised_whatever_happens(default_environment: Environment) -> None:
    examples = int(os.environ.get("BELLJAR_SOAK_EXAMPLES", "40"))
    run_faults(WorkerFaults, default_environment, examples=examples, steps=40, derandomize=False)
