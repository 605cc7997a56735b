"""Things are killed, frozen, locked and filled up at any moment, and what was promised holds.

A model of sessions and executions beside a real server process, driven over the wire in both protocol eras. Few steps
by default; `BELLJAR_SOAK=1` with `-m soak` takes many.
"""

import os
import resource
import signal
import sqlite3
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from calls import ERAS
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from served import Served, all_events, events_of, stopped

from belljar.environments import Environment
from belljar.models import ExecutionResult
from serving_process import tree
from waiting import until

COUNT = "n = globals().get('n', 0) + 1\nprint('counted', n)\nn"
ENDLESS = "import time\ni = 0\nwhile True:\n    print(i, flush=True)\n    i += 1\n    time.sleep(0.001)"
FLOOD = "for i in range(3_000): print('line', i)"
CRASH = "import os\nprint('last words', flush=True)\nos._exit(7)"
FAST = {"BELLJAR_PRELOAD": "json", "BELLJAR_LOG_LEVEL": "ERROR", "BELLJAR_INTERRUPT_GRACE_S": "1"}
WORTH_A_START = 5
MOST_BESIDE_S = 31
"""How much longer than it is asked to wait a call may take, whatever happens."""
WHICH = st.integers(0, 1_000_000)
ERA = st.sampled_from(ERAS)


@dataclass
class Modelled:
    """A session as it should be."""

    n: int | None = None
    """Its variable; None when it has none, or lost it."""
    is_shaken: bool = False
    """Something was killed that may have been its process."""
    running: str = ""
    waiting: list[str] = field(default_factory=list[str])
    said: int = 0
    """Events of the running execution that somebody was told of."""


class Faults(RuleBasedStateMachine):
    """Rules are what clients, operators and accidents do."""

    environment: Environment
    workers = 1

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="belljar-faults-")
        Path(self.folder.name).chmod(0o755)
        self.served = Served(self.environment, Path(self.folder.name), workers=self.workers, **FAST)
        self.served.start()
        self._portal = start_blocking_portal()
        self.portal = self._portal.__enter__()
        self.sessions: dict[str, Modelled] = {}
        self.results: dict[str, ExecutionResult] = {}
        """Of executions that have ended, as first told."""
        self.since_start = 0
        """Things done since the server was started; starting it takes seconds."""

    @initialize(era=ERA)
    def the_first_session(self, era: str) -> None:
        self.a_session_begins(era)

    # What clients do

    @rule(era=ERA)
    @precondition(lambda self: len(self.sessions) < 4)
    def a_session_begins(self, era: str) -> None:
        result = self.portal.call(self._execute, era, COUNT, "")
        assert (result.status, result.result) == ("ok", "1"), result
        self.sessions[result.session_id] = Modelled(n=1)

    @rule(which=WHICH, era=ERA)
    @precondition(lambda self: self._idle())
    def a_cell_runs(self, which: int, era: str) -> None:
        session_id = _pick(self._idle(), which)
        self._check_count(self.portal.call(self._execute, era, COUNT, session_id))

    @rule(which=WHICH, era=ERA)
    @precondition(lambda self: self._idle())
    def a_cell_floods(self, which: int, era: str) -> None:
        session_id = _pick(self._idle(), which)
        result = self.portal.call(self._execute, era, FLOOD, session_id)
        assert result.status == "ok", result
        self._check_loss(result)
        events = self.portal.call(self._all_events, result.execution_id)
        text = "".join(event["text"] for event in events if event["kind"] == "stdout")
        assert text == "".join(f"line {i}\n" for i in range(3_000))

    @rule(which=WHICH, era=ERA)
    @precondition(lambda self: self._idle())
    def a_cell_kills_its_process(self, which: int, era: str) -> None:
        session_id = _pick(self._idle(), which)
        result = self.portal.call(self._execute, era, CRASH, session_id)
        assert (result.status, result.state) == ("died", "lost"), result
        assert "status 7" in str(result.cause), result
        assert "last words\n" in result.stdout
        self.sessions[session_id].n = None
        self.sessions[session_id].is_shaken = False

    @rule(which=WHICH, era=ERA)
    @precondition(lambda self: self._idle())
    def a_cell_is_left_running(self, which: int, era: str) -> None:
        session_id = _pick(self._idle(), which)
        session = self.sessions[session_id]
        result = self.portal.call(self._execute, era, ENDLESS, session_id, 0)
        assert result.status == "running", result
        session.running, session.said = result.execution_id, 0
        self._wait_for_words(session)

    @rule(which=WHICH, era=ERA)
    @precondition(lambda self: self._busy())
    def a_cell_waits_behind_it(self, which: int, era: str) -> None:
        session_id = _pick(self._busy(), which)
        result = self.portal.call(self._execute, era, COUNT, session_id, 0)
        if result.status == "running":
            self.sessions[session_id].waiting.append(result.execution_id)
        else:
            assert self.sessions[session_id].is_shaken, result
            self._finish(session_id)

    @rule(which=WHICH)
    @precondition(lambda self: self._busy())
    def somebody_looks_again(self, which: int) -> None:
        self._wait_for_words(self.sessions[_pick(self._busy(), which)])

    @rule(which=WHICH)
    @precondition(lambda self: self._busy())
    def it_is_interrupted(self, which: int) -> None:
        session_id = _pick(self._busy(), which)
        self.portal.call(self._interrupt, self.sessions[session_id].running)
        self._finish(session_id)

    @rule(era=ERA)
    @precondition(lambda self: self.results)
    def an_old_result_is_asked_for(self, era: str) -> None:
        self._check_old(next(iter(self.results)))

    # Accidents

    @rule()
    @precondition(lambda self: self.since_start >= WORTH_A_START)
    def the_server_is_killed(self) -> None:
        self.portal.call(self.served.kill)
        self._start()
        self.portal.call(self.served.tidied)
        self._lose(self.sessions)
        self._check_all()

    @rule()
    @precondition(lambda self: self.since_start >= WORTH_A_START)
    def the_server_is_stopped(self) -> None:
        self.portal.call(self.served.stop)
        assert self.served.leftovers() == []
        self._start()
        for session in self.sessions.values():
            for execution_id in filter(None, (session.running, *session.waiting)):
                ended = self.portal.call(self._get, execution_id)
                assert ended.status != "running"
                assert ended.status == "interrupted" or session.is_shaken, ended
            session.running, session.waiting = "", []
        self._check_all()

    @rule(which=WHICH)
    @precondition(lambda self: self.sessions)
    def some_process_of_it_is_killed(self, which: int) -> None:
        """A kernel, what holds its sandbox, or what sessions are forked from."""
        family = sorted(tree(self.served.pid) - self.served.pids())
        if family:
            for session in self.sessions.values():
                session.is_shaken = True
            os.kill(_pick(family, which), signal.SIGKILL)

    @rule(which=WHICH, frozen=WHICH)
    @precondition(lambda self: self._idle())
    def some_process_of_it_is_frozen(self, which: int, frozen: int) -> None:
        session_id = _pick(self._idle(), which)
        if self.sessions[session_id].n is None or self.sessions[session_id].is_shaken:
            return  # a kernel may have to be started for it, with the help of whoever is frozen
        family = sorted(tree(self.served.pid) - self.served.pids())
        with stopped(_pick(family, frozen)):
            result = self.portal.call(self._execute, ERAS[1], COUNT, session_id, 60, 1.0)
        self.sessions[session_id].is_shaken = result.status != "ok"
        self._check_count(result)

    @rule(which=WHICH)
    @precondition(lambda self: self._idle())
    def the_server_is_frozen_in_a_call(self, which: int) -> None:
        session_id = _pick(self._idle(), which)
        self._check_count(self.portal.call(self._execute_frozen, session_id))

    @rule(which=WHICH)
    @precondition(lambda self: self._idle())
    def the_journal_is_locked(self, which: int) -> None:
        session_id = _pick(self._idle(), which)
        if self.sessions[session_id].n is None:
            return  # it may have to be woken, which is refused then
        with self.served.journal_locked(session_id):
            result = self.portal.call(self._execute, ERAS[1], COUNT, session_id)
        self._check_count(result)
        self._until_written(result.execution_id)

    @rule(which=WHICH)
    @precondition(lambda self: self._idle())
    def the_disk_is_full(self, which: int) -> None:
        session_id = _pick(self._idle(), which)
        if self.sessions[session_id].n is None or self.sessions[session_id].is_shaken:
            return  # a kernel that starts now would have the same limit
        pid, _ = self.served.server_of(session_id)
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4_096, limits[1]))
        try:
            result = self.portal.call(self._execute, ERAS[1], COUNT, session_id)
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        self._check_count(result)
        self._until_written(result.execution_id)

    def teardown(self) -> None:
        try:
            for session_id in self._busy():
                self.portal.call(self._interrupt, self.sessions[session_id].running)
                self._finish(session_id)
            self._check_all()
            self.portal.call(self.served.stop)
            assert self.served.leftovers() == []
        finally:
            self.portal.call(self.served.aclose)
            self._portal.__exit__(None, None, None)
            self.folder.cleanup()

    # What must hold

    def _lose(self, sessions: dict[str, Modelled]) -> None:
        """The server of these sessions was killed, and there is another one in its place."""
        for session in sessions.values():
            if session.running:
                ended = self.portal.call(self._get, session.running)
                assert (ended.status, ended.state) == ("died", "lost"), ended
                assert "its server ended without notice" in str(ended.cause) or session.is_shaken, ended
                assert ended.sequence >= session.said
            for execution_id in session.waiting:
                ended = self.portal.call(self._get, execution_id)
                assert ended.status in (("rejected", "ok", "died") if session.is_shaken else ("rejected",)), ended
                assert "never ran" in str(ended.cause) or session.is_shaken, ended
            session.n, session.is_shaken, session.running, session.waiting = None, False, "", []

    def _check_count(self, result: ExecutionResult) -> None:
        """Its variable is what it was, or its loss is told: never a fresh process without a word."""
        session = self.sessions[result.session_id]
        is_lost = self._check_loss(result)
        if session.is_shaken and result.status in ("died", "timeout"):
            assert result.state == "lost" or result.status == "timeout", result
            session.n = None if result.state == "lost" else session.n
            session.is_shaken = result.state != "lost"
            return
        assert result.status == "ok", result
        assert result.result == str(1 if session.n is None or is_lost else session.n + 1), (session, result)
        session.n = int(str(result.result))
        session.is_shaken = False

    def _check_loss(self, result: ExecutionResult) -> bool:
        session = self.sessions[result.session_id]
        if session.n is not None and result.state == "lost":
            assert session.is_shaken, result
            assert "n" in result.lost, result
            session.n = None
            return True
        return False

    def _check_all(self) -> None:
        for execution_id in self.results:
            self._check_old(execution_id)

    def _check_old(self, execution_id: str) -> None:
        told, first = self.portal.call(self._get, execution_id), self.results[execution_id]
        fields = ("status", "stdout", "result", "cause", "state", "sequence", "error")
        assert [getattr(told, name) for name in fields] == [getattr(first, name) for name in fields]

    def _until_written(self, execution_id: str) -> None:
        """It was told while it could not be kept; it is kept now, and would be if the server were killed."""
        self.portal.call(self._written, execution_id)

    def _finish(self, session_id: str) -> None:
        """The endless cell has ended, and what waited behind it runs."""
        session = self.sessions[session_id]
        ended = self.portal.call(self._get, session.running, 60)
        assert ended.status in (("interrupted", "died", "rejected") if session.is_shaken else ("interrupted",)), ended
        if ended.state == "lost":
            assert session.is_shaken or session.n is None, ended
            session.n = None
        for execution_id in session.waiting:
            self._check_count(self.portal.call(self._get, execution_id, 60))
        session.running, session.waiting = "", []

    def _wait_for_words(self, session: Modelled) -> None:
        told = self.portal.call(self._look, session.running, session.said)
        if not told["events"]:
            assert session.is_shaken, told
            return
        first = session.said + 1
        assert [event["sequence"] for event in told["events"]] == [*range(first, first + len(told["events"]))]
        session.said = told["sequence"]

    def _start(self) -> None:
        self.served.start()
        self.since_start = 0

    def _idle(self) -> list[str]:
        return [session_id for session_id, session in self.sessions.items() if not session.running]

    def _busy(self) -> list[str]:
        return [session_id for session_id, session in self.sessions.items() if session.running]

    # Calls

    async def _execute(
        self, era: str, code: str, session_id: str, wait_s: float = 60, timeout_s: float = 600
    ) -> ExecutionResult:
        self.since_start += 1
        with anyio.fail_after(wait_s + MOST_BESIDE_S):
            async with self.served.client(era) as caller:
                return self._kept(await caller.execute(code, session_id, wait_s=wait_s, timeout_s=timeout_s))

    async def _execute_frozen(self, session_id: str) -> ExecutionResult:
        found: list[ExecutionResult] = []
        async with self.served.client() as caller, anyio.create_task_group() as group:

            async def run() -> None:
                found.append(await caller.execute(COUNT, session_id, wait_s=60))

            group.start_soon(run)
            await anyio.lowlevel.checkpoint()
            with stopped(self.served.server_of(session_id)[0]):
                await anyio.lowlevel.checkpoint()
        return self._kept(found[0])

    async def _get(self, execution_id: str, wait_s: float = 0) -> ExecutionResult:
        with anyio.fail_after(wait_s + MOST_BESIDE_S):
            async with self.served.client() as caller:
                return self._kept(await caller.get(execution_id, wait_s=wait_s))

    def _kept(self, result: ExecutionResult) -> ExecutionResult:
        if result.status != "running" and result.execution_id:
            self.results.setdefault(result.execution_id, result)
        return result

    async def _look(self, execution_id: str, since: int) -> dict[str, Any]:
        async with self.served.client() as caller:
            return await events_of(caller, execution_id, since, wait_s=30)

    async def _all_events(self, execution_id: str) -> list[dict[str, Any]]:
        async with self.served.client() as caller:
            return await all_events(caller, execution_id)

    async def _interrupt(self, execution_id: str) -> None:
        async with self.served.client() as caller:
            await caller.call("interrupt_execution", execution_id=execution_id)

    async def _written(self, execution_id: str) -> None:
        query = "SELECT count(*) FROM executions WHERE id = ? AND result IS NOT NULL"
        with ExitStack() as stack:
            journals = [sqlite3.connect(folder / "journal.sqlite") for folder in self.served.folders]
            readers = [stack.enter_context(closing(journal)) for journal in journals]
            await until(lambda: any(reader.execute(query, (execution_id,)).fetchone()[0] for reader in readers))


def _pick(choices: list[Any], which: int) -> Any:
    return choices[which % len(choices)]


def run_faults(kind: type[Faults], environment: Environment, *, examples: int, steps: int, derandomize: bool) -> None:
    kind.environment = environment
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=derandomize,
            # A shorter way to the same failure would take hours of starting servers.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(300)
def test_what_was_promised_holds_through_a_few_accidents(default_environment: Environment) -> None:
    run_faults(Faults, default_environment, examples=1, steps=24, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif("BELLJAR_SOAK" not in os.environ, reason="takes minutes: set BELLJAR_SOAK=1 to run it")
def test_what_was_promised_holds_through_many_accidents(default_environment: Environment) -> None:
    run_faults(
        Faults,
        default_environment,
        examples=int(os.environ.get("BELLJAR_SOAK_EXAMPLES", "40")),
        steps=40,
        derandomize=False,
    )
