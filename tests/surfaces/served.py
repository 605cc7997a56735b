"""A server process that tests stop, freeze and kill, and what it holds on the machine."""

import os
import signal
import sqlite3
import subprocess
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from calls import Caller
from mcp import Client

from belljar.environments import Environment
from belljar.sandboxes.limits.cgroup_discovery import read_control_groups
from serving_process import alive, http_server, serve_over_http, tree
from waiting import until, until_blocking

ADDRESS = "address"
"""The file in which a server tells the others where it is."""


class Served:
    """One data directory and, one after the other, the servers that use it: one at a time, or several workers."""

    def __init__(self, environment: Environment, folder: Path, *, workers: int = 1, **variables: str) -> None:
        self.folder = folder
        self.folders = [folder, *(folder / "workers" / str(number) for number in range(2, workers + 1))]
        """The data directory of each server."""
        self._environment = environment
        self._variables = variables
        self._stack = ExitStack()
        self._mounts = mounts()
        self._ended: list[int] = []
        self.url = ""
        self.process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def server_of(self, session_id: str) -> tuple[int, Path]:
        """The process of the server that has a session, and its data directory."""
        folder = next(folder for folder in self.folders if (folder / "sessions" / session_id).exists())
        return self._servers()[folder], folder

    def _servers(self) -> dict[Path, int]:
        """The process of each server that accepts connections, by its data directory."""
        if len(self.folders) == 1:
            return {self.folder: self.pid}
        found = {folder: _pids(folder.glob(f"runs/*/{ADDRESS}")) for folder in self.folders}
        return {folder: pid for folder, pids in found.items() for pid in alive(pids)}

    def pids(self) -> set[int]:
        """The processes of the servers, and of what starts them."""
        return {self.pid, *self._servers().values()}

    def start(self) -> None:
        workers = ["--workers", str(len(self.folders))] if len(self.folders) > 1 else []
        command = [*serve_over_http(self._environment), *workers]
        self.url, self.process = self._stack.enter_context(http_server(command, self.folder, **self._variables))
        until_blocking(lambda: len(self._servers()) == len(self.folders))

    async def aclose(self) -> None:
        """For the end of a test, whatever has become of it."""
        if self.process is not None:
            await self.kill()

    async def kill(self) -> None:
        """As the kernel does it when memory is short: no word, no end."""
        assert self.process is not None
        family, servers = tree(self.pid), self.pids()
        for pid in (self.pid, *servers):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._gone(family, servers)

    async def kill_server(self, folder: Path) -> None:
        """Kill one of the workers, and wait until it is there again."""
        pid = self._servers()[folder]
        family = tree(pid)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not alive(family))
        self._ended.append(pid)
        await until(lambda: self._servers().get(folder, pid) != pid)

    async def stop(self) -> None:
        """As an operator does it."""
        assert self.process is not None
        family, servers = tree(self.pid), self.pids()
        self.process.terminate()
        await self._gone(family, servers)

    async def _gone(self, family: set[int], servers: set[int]) -> None:
        """What a server leaves on the machine is nothing, whichever way it went."""
        assert self.process is not None
        await anyio.to_thread.run_sync(self.process.wait)
        await anyio.to_thread.run_sync(self._stack.close)
        self.process = None
        await until(lambda: not (alive(family) or mounts() > self._mounts))
        self._ended += servers

    async def tidied(self) -> None:
        """Until nothing is left of servers that are gone; the next one removes it when it makes its first sandbox."""
        await until(lambda: not self.leftovers())

    def leftovers(self) -> list[Path]:
        """Groups, and folders with sockets, of servers that are gone."""
        groups = [path for base in read_control_groups().folders.values() for path in base.glob("belljar-*-*")]
        running = self.pids() if self.process is not None else set[int]()
        runs = [
            path for folder in self.folders for path in folder.glob("runs/*") if not _pids([path / ADDRESS]) & running
        ]
        return [*runs, *(path for path in groups if int(path.name.split("-")[1]) in self._ended)]

    @asynccontextmanager
    async def client(self, era: str = "auto", **options: Any) -> AsyncGenerator[Caller]:
        async with Client(f"{self.url}/mcp", mode=era, **options) as client:
            yield Caller(client)

    @contextmanager
    def journal_locked(self, session_id: str) -> Generator[None]:
        """Another process is in the middle of a transaction, and stays there."""
        _, folder = self.server_of(session_id)
        with closing(sqlite3.connect(folder / "journal.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                other.execute("ROLLBACK")


@contextmanager
def stopped(pid: int) -> Generator[None]:
    """A process does nothing for a while, and does not know."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _pids(addresses: Iterable[Path]) -> set[int]:
    """Which servers tell these addresses, by the names of their folders."""
    return {int(path.parent.name.partition("-")[0]) for path in addresses}


def mounts() -> int:
    """Of the machine's, those that belljar made."""
    return sum("belljar" in line for line in Path("/proc/self/mountinfo").read_text().splitlines())


async def events_of(caller: Caller, execution_id: str, since: int = 0, wait_s: float = 0) -> dict[str, Any]:
    """The result of an execution with its events after `since`, the first 500."""
    answer = await caller.client.call_tool(
        "get_execution",
        {"execution_id": execution_id, "since": since, "wait_s": wait_s},
        meta={"belljar/structured": "always", "belljar/events": True},
    )
    assert answer.structured_content is not None, answer
    return answer.structured_content


async def all_events(caller: Caller, execution_id: str) -> list[dict[str, Any]]:
    """Every event of an execution, read piece by piece."""
    found: list[dict[str, Any]] = []
    while piece := (await events_of(caller, execution_id, len(found)))["events"]:
        assert [event["sequence"] for event in piece] == [*range(len(found) + 1, len(found) + len(piece) + 1)]
        found += piece
    return found
