"""Servers of several machines on loopback: each with a data directory, a port for clients and one for the others."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2
from calls import Caller
from links import Link
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from workers import KEYS

from belljar import ipc
from belljar.environments import Environment
from serving_process import COLD, free_port, http_server, serve_command, variables
from waiting import until, until_blocking

SECRET = "f" * 32


class Hosts:
    """The servers of a fleet, by their numbers."""

    def __init__(self, environment: Environment, folder: Path, **chosen: str) -> None:
        self.folder = folder
        self.list = folder / "peers"
        self._environment = environment
        self._chosen = {**COLD, **chosen}
        self._stacks: dict[int, ExitStack] = {}
        self.ports: dict[int, int] = {}
        self.urls: dict[int, str] = {}
        self.pids: dict[int, int] = {}
        self.links: dict[tuple[int, int], Link] = {}
        """The ways from one to another that can be cut."""

    def data_directory(self, number: int) -> Path:
        return self.folder / f"host{number}"

    def inner_url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"

    def write_list(self, *lines: str) -> None:
        """Tell all which machines there are: those that were started, or these lines."""
        new = self.list.with_suffix(".new")
        new.write_text("\n".join(lines or [self.inner_url(number) for number in self.ports]) + "\n")
        new.replace(self.list)

    def link(self, *numbers: int) -> None:
        """Have these reach each other by ways that can be cut; call it before they are started."""
        for number in numbers:
            self.data_directory(number).mkdir(exist_ok=True)
            self.ports[number] = free_port()
        for one in numbers:
            for other in numbers:
                if one != other:
                    self.links[one, other] = Link(f"127.0.1.{one}", self.ports[other])
            self.write_list_of(one)

    def write_list_of(self, number: int, *gone: int) -> None:
        """Tell one which machines there are, if it has its own ways to them, and which of them are dead."""
        urls = {other: link.url for (one, other), link in self.links.items() if one == number}
        lines = [self.inner_url(number), *(url + " gone" * (other in gone) for other, url in urls.items())]
        path = self.list_of(number)
        new = path.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(path)

    def list_of(self, number: int) -> Path:
        return self.folder / f"peers{number}" if self.links else self.list

    def url_of(self, other: int, seen_by: int) -> str:
        return self.links[seen_by, other].url if self.links else self.inner_url(other)

    def variables(self, number: int, **more: str) -> dict[str, str]:
        return {
            **self._chosen,
            "BELLJAR_DATA_DIRECTORY": str(self.data_directory(number)),
            "BELLJAR_FLEET_PEERS": f"file:{self.list_of(number)}",
            "BELLJAR_FLEET_ADDRESS": f"127.0.0.1:{self.ports[number]}",
            "BELLJAR_FLEET_KEY": SECRET,
            **more,
        }

    def start(self, number: int, **more: str) -> None:
        self.data_directory(number).mkdir(exist_ok=True)
        if number not in self.ports:
            self.ports[number] = free_port()
            self.write_list()
        stack = self._stacks[number] = ExitStack()
        # One that starts again has its address again, as a balancer knows it.
        self.urls.setdefault(number, f"http://127.0.0.1:{free_port()}")
        command = serve_command(self._environment, "--http", urlsplit(self.urls[number]).netloc)
        _, process = stack.enter_context(http_server(command, self.folder, **self.variables(number, **more)))
        self.pids[number] = process.pid

    def stop(self, number: int) -> None:
        self._stacks.pop(number).close()

    def kill(self, number: int) -> None:
        os.kill(self.pids[number], signal.SIGKILL)

    def freeze(self, number: int) -> None:
        os.kill(self.pids[number], signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        os.kill(self.pids[number], signal.SIGCONT)

    def close(self) -> None:
        for number in [*self._stacks]:
            self.stop(number)
        for link in self.links.values():
            link.close()

    def command(self, number: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """What a command of belljar says on that machine."""
        return subprocess.run(
            [sys.executable, "-m", "belljar", *arguments, "--data-directory", str(self.data_directory(number))],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=variables(self.folder),
            cwd=self.folder,
        )

    def status(self, number: int) -> list[dict[str, Any]]:
        done = self.command(number, "fleet", "status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def states(self, number: int) -> dict[str, str]:
        """How the others are, as one of them sees it, by their addresses."""
        rows = json.loads(_ask(self.data_directory(number), "/fleet/status"))
        return {row["at"]: row["state"] for row in rows[1:]}

    def see_each_other(self, *numbers: int) -> None:
        """Wait until each of these answers each other."""

        pairs = [(one, other) for one in numbers for other in numbers if one != other]
        seen: dict[tuple[int, int], str] = {}

        def do() -> bool:
            seen.update((pair, self.states(pair[0]).get(self.url_of(pair[1], pair[0]), "")) for pair in pairs)
            return {*seen.values()} == {"ready"}

        try:
            until_blocking(do)
        except AssertionError as error:
            error.add_note(f"machines see each other as {seen}")
            raise

    @asynccontextmanager
    async def client(self, number: int, era: str = "auto", name: str = "", **options: Any) -> AsyncGenerator[Caller]:
        """A client that is connected to one of them, with a key if it has a name."""
        headers = {"authorization": f"Bearer {KEYS[name]}"} if name else {}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(f"{self.urls[number]}/mcp", http_client=http), mode=era, **options) as client,
        ):
            yield Caller(client)

    async def session_of(self, caller: Caller, number: int) -> str:
        """A session of that machine's, made through one of its own clients."""
        session_id = await caller.new_session()
        assert (self.data_directory(number) / "sessions" / session_id).exists()
        return session_id


def _ask(data_directory: Path, path: str) -> bytes:
    (found,) = data_directory.glob("runs/*/fleet.sock")
    with (
        ipc.reachable(found) as address,
        httpx2.Client(transport=httpx2.HTTPTransport(uds=address), base_url="http://belljar") as client,
    ):
        return client.get(path).content


@contextmanager
def two_hosts(environment: Environment, folder: Path, **chosen: str) -> Generator[Hosts]:
    hosts = Hosts(environment, folder, **chosen)
    try:
        hosts.start(1)
        hosts.start(2)
        hosts.see_each_other(1, 2)
        yield hosts
    finally:
        hosts.close()


@asynccontextmanager
async def both(hosts: Hosts, era: str = "auto", **options: Any) -> AsyncGenerator[tuple[Caller, Caller]]:
    async with hosts.client(1, era, **options) as one, hosts.client(2, era, **options) as two:
        yield one, two


async def in_thread(call: Any, *arguments: Any) -> Any:
    return await anyio.to_thread.run_sync(call, *arguments)


def numbers(hosts: Hosts, session_id: str, kind: str) -> list[int]:
    """The numbers of a session's objects in the store."""
    folder = hosts.folder / "store" / "sessions" / session_id
    return sorted(int(path.name.partition(".")[0]) for path in folder.glob(f"*.{kind}"))


async def asleep_in_the_store(hosts: Hosts, number: int, kept: str) -> str:
    """A session of that machine's that has one bundle: it was put when its machine ended, which is there again."""
    async with hosts.client(number, name="ada") as caller:
        session_id = await hosts.session_of(caller, number)
        await caller.execute(f"kept = {kept!r}", session_id)
    await in_thread(hosts.stop, number)
    assert numbers(hosts, session_id, "head") == [1]
    await in_thread(hosts.start, number)
    await in_thread(hosts.see_each_other, 1, 2)
    return session_id


async def until_lost(caller: Caller, session_id: str) -> str:
    """What a call says once the session's machine is given up; until then it is told to come again."""

    async def call() -> str:
        said = await caller.refusal("execute_code", code="open('ran', 'w')", session_id=session_id)
        assert "busy" in said or "session-lost" in said
        return said if "session-lost" in said else ""

    return await until(call)
