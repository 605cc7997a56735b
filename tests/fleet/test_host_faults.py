"""Two machines are killed, frozen, cut off, given up and robbed of their store, and what was promised holds.

A model of sessions beside two real servers. Every cell leaves a file of its own in a folder outside, which tells what
has run and that it ran once, and returns which cells ran before it in the same variables.
"""

import ast
import os
import random
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from calls import ERAS, text_of
from hosts import Hosts
from mcp.types import CallToolResult
from served import mounts
from workers import KEYS

from belljar.environments import Environment
from belljar.models import ExecutionResult
from belljar.sandboxes.limits.cgroup_discovery import read_control_groups
from belljar.sessions.bundles import Sealer
from belljar.sessions.session_objects import Head, SessionObjects
from belljar.sessions.store import FolderStore
from serving_process import alive, tree
from waiting import until_blocking

STORE_KEY = "s" * 40
CELL = """
open('/mnt/ledger/{token}', 'x').close()
{pause}
cells = [*globals().get('cells', []), '{token}']
cells
"""
MOST_BESIDE_S = 31
"""How much longer than it is asked to wait a call may take, whatever happens."""
WAIT_S = 20
SETTLED_S = 60
"""How long after everything is there again a session may be busy: machines that were lost are looked for meanwhile."""
NUMBERS = (1, 2)


@dataclass
class Modelled:
    """A session as its caller knows it."""

    cells: list[str] = field(default_factory=list[str])
    """Those that ran in its variables, as far as they were told."""
    unsure: set[str] = field(default_factory=set[str])
    """Those of which nobody was told what became of them: they may have run, or may yet."""
    is_told: bool = False
    """Somebody was told that its machine is lost."""
    results: dict[str, ExecutionResult] = field(default_factory=dict[str, ExecutionResult])


class HostFaults:
    """Two machines, and what clients, operators and accidents do to them, by chance."""

    def __init__(self, environment: Environment, seed: int) -> None:
        self.random = random.Random(seed)
        self.mounts = mounts()
        self.folder = tempfile.TemporaryDirectory(prefix="belljar-fleet-")
        self.path = Path(self.folder.name)
        self.path.chmod(0o755)
        self.ledger, self.store = self.path / "ledger", self.path / "store"
        self.ledger.mkdir()
        self.ledger.chmod(0o777)
        self.store.mkdir()
        self.hosts = Hosts(
            environment,
            self.path,
            BELLJAR_API_KEYS=",".join(f"{name}:{key}" for name, key in KEYS.items()),
            BELLJAR_STORE=f"file://{self.store}",
            BELLJAR_STORE_KEY=STORE_KEY,
            BELLJAR_DRAIN_S="2",
            BELLJAR_SESSION_IDLE_S="3",
            BELLJAR_SWEEP_INTERVAL_S="0.5",
            BELLJAR_POOL_SIZE="0",
            BELLJAR_FOLDERS=f'{{"ledger": {{"path": "{self.ledger}", "writable": true}}}}',
            BELLJAR_LOG_LEVEL="ERROR",
        )
        self.objects = SessionObjects(FolderStore("store", self.store), Sealer(STORE_KEY))
        self._portal = start_blocking_portal()
        self.portal = self._portal.__enter__()
        self.hosts.link(*NUMBERS)
        self.sessions: dict[str, Modelled] = {}
        self.tokens = (f"cell-{number}" for number in count())
        self.down: set[int] = set()
        self.frozen: set[int] = set()
        self.gone: set[int] = set()
        self.draining: set[int] = set()
        self.ended: list[int] = []
        """The processes of servers that have ended."""
        self.families: set[int] = set()
        """What such servers had of processes."""
        self.seen = Counter[str]()
        """What callers were told, for whoever wonders how much a run has tried."""
        for number in NUMBERS:
            self._start(number)
        self.hosts.see_each_other(*NUMBERS)
        self.tags = {number: self.hosts.status(number)[0]["tag"] for number in NUMBERS}

    def run(self, steps: int) -> None:
        """Take so many steps, put everything in order, and end."""
        taken: list[str] = []
        try:
            for number in NUMBERS:
                self._begin(number, ERAS[0])
            for _ in range(steps):
                possible = [step for step, is_possible in self._steps() if is_possible]
                step = self.random.choice(possible)
                taken.append(step.__name__)
                step()
            taken.append("the end")
            self._settle()
            for number in NUMBERS:
                self._note_end(number)
            self.hosts.close()
            self._check_leftovers()
        except BaseException as error:
            error.add_note(f"after {len(taken)} steps: {', '.join(taken)}")
            raise
        finally:
            self.seen["steps"] = len(taken)
            for number in [*self.frozen]:
                self.hosts.thaw(number)
            self.hosts.close()
            self._portal.__exit__(None, None, None)
            self.objects.close()
            self.folder.cleanup()

    def _steps(self) -> list[tuple[Callable[[], None], bool]]:
        """What may happen now; what is named twice is twice as likely."""
        fronts, sessions = bool(self._fronts()), bool(self.sessions)
        calm = not (self.down or self.frozen)
        return [
            (self.a_session_begins, fronts and len(self.sessions) < 5),
            *6 * [(self.a_cell_runs, fronts and sessions)],
            (self.something_happens_in_a_call, calm and sessions),
            (self.an_old_result_is_asked_for, fronts and sessions),
            (self.another_asks, fronts and sessions),
            *2 * [(self.a_machine_is_given_up, calm)],
            (self.a_machine_drains, fronts and not self.draining),
            (self.a_drain_is_undone, bool(self.draining)),
            (self.a_machine_is_killed, fronts),
            (self.a_machine_is_stopped, calm),
            (self.a_machine_starts_again, bool(self.down)),
            (self.a_machine_is_frozen, fronts),
            (self.frozen_machines_go_on, bool(self.frozen)),
            (self.a_way_is_cut, True),
            (self.ways_are_open_again, True),
            *2 * [(self.a_machine_is_listed_as_gone, not self.gone)],
            (self.all_are_listed_as_there, bool(self.gone)),
            (self.the_store_is_away, self.store.exists()),
            *2 * [(self.the_store_is_back, not self.store.exists())],
            *2 * [(self.time_passes, True)],
            (self.all_is_well_again, True),
        ]

    # What clients do

    def a_session_begins(self) -> None:
        self._begin(self._front(), self._era())

    def a_cell_runs(self) -> None:
        self._run(self._front(), self._session(), self._era())

    def something_happens_in_a_call(self) -> None:
        """A machine, or a way between both, is hit while a cell runs."""
        session_id, token = self._session(), next(self.tokens)
        how = self.random.choice(["kill", "freeze", "cut", "dark"])
        asked, hit = self.random.choice(NUMBERS), self.random.choice(NUMBERS)
        self._check(session_id, token, self.portal.call(self._run_and_hit, asked, session_id, token, how, hit))

    def an_old_result_is_asked_for(self) -> None:
        session_id = self._session()
        if results := self.sessions[session_id].results:
            self._look(self._front(), session_id, self.random.choice([*results]), is_quiet=False)

    def another_asks(self) -> None:
        """Nobody sees another's session, whatever state its machine is in."""
        token = next(self.tokens)
        answer = self._execute(self._front(), self._session(), token, self._era(), who="bob")
        said = text_of(answer)
        assert answer.is_error, said
        assert "cell-" not in said, said
        assert "variables cells" not in said, said
        assert not (self.ledger / token).exists()

    # Accidents, and what operators do

    def a_machine_is_killed(self) -> None:
        self._kill(self._front())

    def a_machine_is_given_up(self) -> None:
        """It is killed, or still there and cut off, and the other one believes that it is dead."""
        # First a session that is in the store wakes somewhere: what is done then can be lost.
        if stored := [session_id for session_id in self.sessions if self._head(session_id) is not None]:
            self._run(self._front(), self.random.choice(stored), self._era())
        number = self._front()
        how = self.random.choice(["kill", "freeze", "cut"])
        if how == "kill":
            self._kill(number)
        elif how == "freeze":
            self.hosts.freeze(number)
            self.frozen.add(number)
        else:
            for link in self.hosts.links.values():
                link.cut(is_dark=self.random.random() < 0.5)
        self.gone = {number}
        other = 3 - number
        self.hosts.write_list_of(other, number)
        until_blocking(lambda: self.hosts.states(other)[self.hosts.url_of(number, other)] in ("lost", "left"))

    def a_machine_drains(self) -> None:
        number = self._front()
        self.draining = {number}
        self._drain(number)

    def a_drain_is_undone(self) -> None:
        for number in self.draining & {*self._fronts()}:
            self._drain(number, "--undo")
            self.draining = set()

    def a_machine_is_stopped(self) -> None:
        number = self._front()
        self._note_end(number)
        self.hosts.stop(number)
        self.down.add(number)

    def a_machine_starts_again(self) -> None:
        self._start(self.random.choice(sorted(self.down)))

    def a_machine_is_frozen(self) -> None:
        number = self._front()
        self.hosts.freeze(number)
        self.frozen.add(number)

    def frozen_machines_go_on(self) -> None:
        self._thaw()

    def a_way_is_cut(self) -> None:
        one = self.random.choice(NUMBERS)
        for way in self.random.choice([[(one, 3 - one)], [(1, 2), (2, 1)]]):
            self.hosts.links[way].cut(is_dark=self.random.random() < 0.5)

    def ways_are_open_again(self) -> None:
        self._heal()

    def a_machine_is_listed_as_gone(self) -> None:
        """Its operator, or what watches it, believes that it is dead, rightly or not."""
        self.gone = {self.random.choice(sorted(self.down | self.frozen) or NUMBERS)}
        for number in NUMBERS:
            self.hosts.write_list_of(number, *self.gone)

    def all_are_listed_as_there(self) -> None:
        self._list_all()

    def the_store_is_away(self) -> None:
        self.store.rename(self.path / "away")

    def the_store_is_back(self) -> None:
        (self.path / "away").rename(self.store)

    def time_passes(self) -> None:
        time.sleep(self.random.choice([1, 5, 8, 32]))

    def all_is_well_again(self) -> None:
        self._settle()

    # What must hold

    def _check(self, session_id: str, token: str, answer: CallToolResult) -> str:
        """Check what a call with a new cell was told; return the code of its refusal, or nothing."""
        code = self._checked(session_id, token, answer)
        self.seen[code or "ok"] += 1
        return code

    def _checked(self, session_id: str, token: str, answer: CallToolResult) -> str:
        session = self.sessions[session_id]
        has_run = (self.ledger / token).exists()
        said = text_of(answer)
        fields = answer.structured_content or {}
        if "status" not in fields:
            assert answer.is_error, said
            if "session-lost" in said and "Nothing was run now" not in said:
                session.unsure.add(token)
                return "session-lost"
            assert not has_run, said
            code = next((code for code in ("session-lost", "session-not-found", "busy") if code in said), said)
            if code == "session-lost":
                session.is_told = True
            elif code == "session-not-found":
                assert session.is_told, said
                assert self._head(session_id) is None, said
                del self.sessions[session_id]
            else:
                assert code == "busy", said
            return code
        result = ExecutionResult.model_validate(fields)
        if result.status != "ok":
            # Its machine was hit meanwhile; only the cell itself must not have failed.
            assert result.status in ("running", "interrupted", "died", "rejected", "timeout"), result
            session.unsure.add(token)
            return ""
        self._check_cells(session_id, token, result)
        session.results[result.execution_id] = result
        return ""

    def _check_cells(self, session_id: str, token: str, result: ExecutionResult) -> None:
        session = self.sessions[session_id]
        assert (self.ledger / token).exists()
        found: list[str] = ast.literal_eval(str(result.result))
        assert len(found) == len({*found}), ("a cell ran twice", found)
        assert found[-1] == token, found
        assert {*found} <= {*session.cells, *session.unsure, token}, (found, session)
        before = [each for each in found[:-1] if each not in session.unsure]
        known = [each for each in session.cells if each not in session.unsure]
        if before != known:
            assert before == known[: len(before)], (found, session)
            assert result.state in ("lost", "rewound"), ("older without a word", result, session)
        if result.state == "rewound":
            assert session.is_told, ("rewound, and nobody was told before", result, session)
        session.cells, session.is_told = found, False
        self.seen[str(result.state)] += 1

    def _look(self, front: int, session_id: str, execution_id: str, *, is_quiet: bool) -> None:
        """Ask for a result that was told before."""
        session = self.sessions[session_id]
        head = self._head(session_id)
        answer = self.portal.call(
            self._call, front, "get_execution", "2026-07-28", "ada", {"execution_id": execution_id}
        )
        fields, said = answer.structured_content or {}, text_of(answer)
        if "status" in fields:
            told, first = ExecutionResult.model_validate(fields), session.results[execution_id]
            for name in ("status", "stdout", "result", "sequence"):
                assert getattr(told, name) == getattr(first, name), (told, first)
            return
        if "session-lost" in said:
            session.is_told = True
        elif not (is_quiet or "busy" not in said):
            return
        else:
            is_kept = head is not None and execution_id in head.executions
            assert not is_kept, (said, "a finished execution that a bundle has is gone", session_id, execution_id)
            if is_quiet:
                assert "busy" not in said, said
                del session.results[execution_id]

    def _settle(self) -> None:
        """Put everything in order, and check that every session and every result is there that has to be."""
        self._thaw()
        self._heal()
        self._list_all()
        if not self.store.exists():
            (self.path / "away").rename(self.store)
        for number in sorted(self.down):
            self._start(number)
        self.a_drain_is_undone()
        self.hosts.see_each_other(*NUMBERS)
        for session_id in [*self.sessions]:
            deadline = time.monotonic() + SETTLED_S
            tellings = 0
            while session_id in self.sessions:
                code = self._run(NUMBERS[tellings % 2], session_id, ERAS[1])
                if not code:
                    break
                tellings += code == "session-lost"
                assert tellings <= 2, "told again and again"
                assert time.monotonic() < deadline, (session_id, code)
        for number, (session_id, session) in enumerate([*self.sessions.items()]):
            for execution_id in [*session.results]:
                self._look(NUMBERS[number % 2], session_id, execution_id, is_quiet=True)
            unknown = session_id[:3] + "q" * 14
            for front in NUMBERS:
                said = {
                    text_of(self._execute(front, each, next(self.tokens), ERAS[1], who="bob")).replace(each, "ID")
                    for each in (session_id, unknown)
                }
                assert len(said) == 1, said
        self._check_owners()

    def _check_owners(self) -> None:
        """A session is open at one machine at most."""

        def owners() -> dict[str, list[int]]:
            found: dict[str, list[int]] = {}
            for number in NUMBERS:
                journal = f"file:{self.hosts.data_directory(number)}/journal.sqlite?mode=ro"
                with closing(sqlite3.connect(journal, uri=True)) as reader:
                    for (session_id,) in reader.execute("SELECT id FROM sessions WHERE state = 'live'"):
                        found.setdefault(session_id, []).append(number)
            return found

        until_blocking(lambda: all(len(each) == 1 for each in owners().values()))

    def _check_leftovers(self) -> None:
        """No sandbox, socket or folder is left behind."""
        until_blocking(lambda: not alive(self.families) and mounts() <= self.mounts)
        for number in NUMBERS:
            folder = self.hosts.data_directory(number)
            assert [*folder.glob("runs/*")] == []
            assert [*folder.glob("sessions/.*")] == []
        groups = [path for base in read_control_groups().folders.values() for path in base.glob("belljar-*-*")]
        assert [path for path in groups if int(path.name.split("-")[1]) in self.ended] == []
        for folder in (self.store / "sessions").glob("*"):
            kinds = sorted(path.suffix for path in folder.iterdir() if path.suffix != ".owner")
            assert kinds in ([], [".bundle", ".head"]), [*folder.iterdir()]

    # Calls

    def _begin(self, front: int, era: str) -> None:
        token = next(self.tokens)
        answer = self._execute(front, "", token, era)
        fields = answer.structured_content or {}
        if "status" not in fields:
            assert answer.is_error, text_of(answer)
            return  # whoever was to make it was hit meanwhile
        self.sessions[fields["session_id"]] = Modelled()
        self._check(fields["session_id"], token, answer)

    def _run(self, front: int, session_id: str, era: str) -> str:
        token = next(self.tokens)
        return self._check(session_id, token, self._execute(front, session_id, token, era))

    def _execute(self, front: int, session_id: str, token: str, era: str, who: str = "ada") -> CallToolResult:
        arguments = {"code": CELL.format(token=token, pause=""), "session_id": session_id}
        return self.portal.call(self._call, front, "execute_code", era, who, arguments)

    async def _call(self, front: int, tool: str, era: str, who: str, arguments: dict[str, Any]) -> CallToolResult:
        self.seen["calls"] += 1
        with anyio.fail_after(WAIT_S + MOST_BESIDE_S):
            async with self.hosts.client(front, era, name=who) as caller:
                return await caller.whole(tool, **arguments, wait_s=WAIT_S)

    async def _run_and_hit(self, asked: int, session_id: str, token: str, how: str, hit: int) -> CallToolResult:
        """Run a cell, and hit a machine in it; one that is asked itself is not killed, but frozen for a moment."""
        code = CELL.format(token=token, pause="import time; time.sleep(2)")
        found: list[CallToolResult] = []

        async def run() -> None:
            arguments = {"code": code, "session_id": session_id}
            found.append(await self._call(asked, "execute_code", ERAS[1], "ada", arguments))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            with anyio.move_on_after(5):
                while not (found or (self.ledger / token).exists()):
                    await anyio.sleep(0.05)
            if how in ("cut", "dark"):
                self.hosts.links[asked, 3 - asked].cut(is_dark=how == "dark")
            elif hit == asked:
                os.kill(self.hosts.pids[hit], signal.SIGSTOP)
                await anyio.sleep(1)
                os.kill(self.hosts.pids[hit], signal.SIGCONT)
            elif how == "kill":
                await anyio.to_thread.run_sync(self._kill, hit)
            else:
                self.hosts.freeze(hit)
                self.frozen.add(hit)
        return found[0]

    def _head(self, session_id: str) -> Head | None:
        """What the store has of a session's latest bundle, also while it is away."""
        store = self.store if self.store.exists() else self.path / "away"
        found = sorted((store / "sessions" / session_id).glob("*.head"))
        if not found:
            return None
        objects = SessionObjects(FolderStore("store", store), Sealer(STORE_KEY))
        try:
            return objects.read_head(session_id, int(found[-1].name.partition(".")[0]))
        finally:
            objects.close()

    # Choices

    def _front(self) -> int:
        return self.random.choice(self._fronts())

    def _session(self) -> str:
        return self.random.choice([*self.sessions])

    def _era(self) -> str:
        return self.random.choice(ERAS)

    # Machines

    def _fronts(self) -> list[int]:
        """Those that answer clients."""
        return [number for number in NUMBERS if number not in self.down | self.frozen]

    def _start(self, number: int) -> None:
        self.hosts.start(number)
        self.down.discard(number)
        self.draining.discard(number)

    def _kill(self, number: int) -> None:
        self._note_end(number)
        self.hosts.kill(number)
        self.hosts.stop(number)
        self.down.add(number)

    def _drain(self, number: int, *options: str) -> None:
        done = self.hosts.command(number, "fleet", "drain", self.tags[number], *options)
        assert done.returncode == 0, done.stderr

    def _note_end(self, number: int) -> None:
        if number not in self.down:
            self.families |= tree(self.hosts.pids[number])
            self.ended.append(self.hosts.pids[number])

    def _thaw(self) -> None:
        for number in [*self.frozen]:
            self.hosts.thaw(number)
        self.frozen.clear()

    def _heal(self) -> None:
        for link in self.hosts.links.values():
            link.heal()

    def _list_all(self) -> None:
        self.gone = set()
        for number in NUMBERS:
            self.hosts.write_list_of(number)


@pytest.mark.timeout(900)
def test_two_machines_keep_what_was_promised_through_many_accidents(default_environment: Environment) -> None:
    HostFaults(default_environment, seed=1).run(30)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.skipif("BELLJAR_SOAK" not in os.environ, reason="takes minutes: set BELLJAR_SOAK=1 to run it")
def test_two_machines_keep_what_was_promised_whatever_happens(default_environment: Environment) -> None:
    first = int(os.environ.get("BELLJAR_SOAK_SEED", "0"))
    for seed in range(first, first + int(os.environ.get("BELLJAR_SOAK_EXAMPLES", "20"))):
        trial = HostFaults(default_environment, seed)
        trial.run(40)
        print(seed, dict(trial.seen), flush=True)
