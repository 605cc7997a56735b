"""Many clients for many minutes, with everything that goes wrong going wrong: nothing is lost and nothing is left.

Opt in with `BELLJAR_SOAK=1` and `-m soak`; `BELLJAR_SOAK_MINUTES` says how long (10).
"""

import os
import random
import uuid
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from calls import ERAS
from served import Served, all_events

from belljar.environments import Environment
from belljar.models import ExecutionResult
from serving_process import alive, tree

MINUTES = float(os.environ.get("BELLJAR_SOAK_MINUTES", "10"))
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.soak,
    pytest.mark.timeout(int(MINUTES * 60) + 900),
    pytest.mark.skipif("BELLJAR_SOAK" not in os.environ, reason="takes minutes: set BELLJAR_SOAK=1 to run it"),
]

CLIENTS = 32
RESTART_S = 20.0
# Of the time: then the server is left alone, so that its memory can be watched.
RESTARTS_SHARE = 0.6
GROWTH_MB = 30.0
SETTINGS = {
    "BELLJAR_JOURNAL_MB": "64",
    "BELLJAR_LOG_LEVEL": "ERROR",
    "BELLJAR_INTERRUPT_GRACE_S": "2",
    "BELLJAR_SESSION_IDLE_S": "20",
    "BELLJAR_SWEEP_INTERVAL_S": "5",
}
# Every cell says in the session's folder that it was there.
MARK = "open('ran', 'a').write({key!r} + '\\n')\n"
CELLS = {
    "count": "n = globals().get('n', 0) + 1\nn",
    "raise": "1 / 0",
    "table": "import pandas\nprint(pandas.DataFrame({'a': range(50)}))",
    "flood": "for i in range(20_000): print('line', i)",
    "crash": "import os\nos._exit(3)",
    "hang": "import time\nwhile True: time.sleep(0.01)",
    "deaf": "import time\nwhile True:\n  try: time.sleep(1)\n  except KeyboardInterrupt: pass",
    "talk": "import time\nfor i in range(40): print(i, flush=True); time.sleep(0.02)",
}
WEIGHTS = {"count": 10, "raise": 3, "table": 3, "flood": 3, "crash": 2, "hang": 2, "deaf": 1, "talk": 5}
ENDS = {
    "count": {"ok"},
    "raise": {"error"},
    "table": {"ok"},
    "flood": {"ok"},
    "crash": {"died"},
    "hang": {"timeout"},
    "deaf": {"timeout"},
    "talk": {"ok"},
}
# Of any cell whose server was stopped or killed under it.
BROKEN_OFF = {"died", "interrupted", "rejected"}


@dataclass
class Soak:
    """What all clients share."""

    served: Served
    ends_at: float
    is_up: anyio.Event = field(default_factory=anyio.Event)
    restarts: Counter[str] = field(default_factory=Counter[str])
    done: Counter[str] = field(default_factory=Counter[str])
    busy: int = 0
    broken_calls: int = 0
    results: dict[str, ExecutionResult] = field(default_factory=dict[str, ExecutionResult])
    """By the key under which each was submitted."""
    submitted: set[str] = field(default_factory=set[str])

    @property
    def is_over(self) -> bool:
        return anyio.current_time() > self.ends_at

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """While there is no server."""
        self.is_up = anyio.Event()
        yield
        self.is_up.set()


class Worker:
    """One client with one session at a time."""

    def __init__(self, soak: Soak, number: int) -> None:
        self.soak = soak
        self.random = random.Random(number)
        self.session_id = ""
        self.has_run = False

    async def work(self) -> None:
        while not self.soak.is_over:
            kind = self.random.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
            key = uuid.UUID(int=self.random.getrandbits(128)).hex
            is_impatient = self.random.random() < 0.2
            self.soak.submitted.add(key)
            result = await self._until_ended(kind, key, is_impatient=is_impatient)
            self._check(kind, result)
            self.soak.results[key] = result
            self.has_run = True
            self.soak.done[f"{kind} {result.status}"] += 1
            if self.random.random() < 0.05:
                self.session_id = ""  # the old one is left to expire

    async def _until_ended(self, kind: str, key: str, *, is_impatient: bool) -> ExecutionResult:
        """The same call again and again, whatever becomes of the connection and of the server."""
        while True:
            await self.soak.is_up.wait()
            try:
                if is_impatient:
                    is_impatient = False
                    with anyio.move_on_after(self.random.random()):
                        await self._call(kind, key)
                    continue
                result = await self._call(kind, key)
            except Exception:  # the server is gone, or going
                self.soak.broken_calls += 1
                await anyio.sleep(0.05)
                continue
            if not result.execution_id:
                assert result.status == "rejected", result
                if "session-not-found" in str(result.error):
                    # One that was made and never used leaves nothing but the word that it has ended.
                    assert not self.has_run, result
                    assert "expired at" in str(result.error) or "ended with its server" in str(result.error), result
                    self.session_id = ""
                self.soak.busy += 1
                await anyio.sleep(self.random.random())
            elif result.status != "running":
                return result

    async def _call(self, kind: str, key: str) -> ExecutionResult:
        async with self.soak.served.client(self.random.choice(ERAS)) as caller:
            if not self.session_id:
                self.session_id, self.has_run = await caller.new_session(), False
            return await caller.execute(
                MARK.format(key=key) + CELLS[kind],
                self.session_id,
                idempotency_key=key,
                timeout_s=0.5 if kind in ("hang", "deaf") else 120,
                wait_s=30,
            )

    def _check(self, kind: str, result: ExecutionResult) -> None:
        if result.status in ENDS[kind]:
            return
        assert result.status in BROKEN_OFF, (kind, result)
        assert "server" in str(result.cause) or "interrupted" in str(result.cause), (kind, result)


async def _restart(soak: Soak) -> None:
    """By turns without warning and in good order."""
    stops_at = anyio.current_time() + (soak.ends_at - anyio.current_time()) * RESTARTS_SHARE
    while anyio.current_time() + RESTART_S < stops_at:
        await anyio.sleep(RESTART_S)
        async with soak.paused():
            way = "killed" if soak.restarts.total() % 2 == 0 else "stopped"
            await (soak.served.kill() if way == "killed" else soak.served.stop())
            soak.restarts[way] += 1
            await anyio.to_thread.run_sync(soak.served.start)
        await soak.served.tidied()


async def _watch_memory(soak: Soak, seen: list[float]) -> None:
    """From the middle of the time that the server is left alone, to the end of it."""
    left = soak.ends_at - anyio.current_time()
    await anyio.sleep(left * (RESTARTS_SHARE + (1 - RESTARTS_SHARE) / 2))
    while not soak.is_over:
        seen.append(resident_mb(soak.served.pid))
        await anyio.sleep(1)


async def test_nothing_is_lost_and_nothing_is_left(default_environment: Environment, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    async with aclosing(Served(default_environment, tmp_path, **SETTINGS)) as served:
        served.start()
        soak = Soak(served, ends_at=anyio.current_time() + MINUTES * 60)
        soak.is_up.set()
        memory: list[float] = []
        async with anyio.create_task_group() as group:
            for number in range(CLIENTS):
                group.start_soon(Worker(soak, number).work)
            group.start_soon(_restart, soak)
            group.start_soon(_watch_memory, soak, memory)
        missing = await _not_on_record(soak)
        journal_mb = sum(path.stat().st_size for path in tmp_path.glob("journal.sqlite*")) / 1024 / 1024
        family = tree(served.pid)
        await served.stop()
        _tell(soak, memory, journal_mb, len(missing))
        assert soak.results.keys() == soak.submitted
        assert missing == []
        assert _ran_twice(tmp_path) == []
        assert (alive(family), served.leftovers()) == (set(), [])
        assert memory[-1] - memory[0] < GROWTH_MB


def _tell(soak: Soak, memory: list[float], journal_mb: float, lost: int) -> None:
    print(f"\n{len(soak.results):,} executions of {CLIENTS} clients in {MINUTES:g} minutes: {dict(soak.done)}")
    print(f"server {dict(soak.restarts)}; {soak.busy} busy; {soak.broken_calls} calls broken off; {lost} lost")
    print(f"server's memory {memory[0]:.1f} MB, at the end {memory[-1]:.1f} MB; journal {journal_mb:.1f} MB")


async def _not_on_record(soak: Soak) -> list[str]:
    """Executions of which the server no longer knows how they ended, or tells it differently."""
    missing: list[str] = []
    async with soak.served.client() as caller:
        for key, result in soak.results.items():
            told = await caller.get(result.execution_id)
            if (told.status, told.cause, told.result) != (result.status, result.cause, result.result):
                missing.append(key)
        for result in random.Random(0).sample([*soak.results.values()], min(50, len(soak.results))):
            told = await caller.get(result.execution_id)
            if not any("was dropped at" in part for part in told.output):
                assert len(await all_events(caller, result.execution_id)) in (told.sequence, 1)
    return missing


def _ran_twice(folder: Path) -> list[str]:
    keys = Counter(
        key for path in (folder / "sessions").glob("*/workspace/ran") for key in path.read_text().splitlines()
    )
    return [key for key, count in keys.items() if count > 1]


def resident_mb(pid: int) -> float:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024
