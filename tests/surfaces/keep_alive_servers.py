"""Data directories whose sessions outlive their servers, and the servers, one after the other."""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from mcp import Client

from belljar.environments import Environment
from belljar.sandboxes.limits.cgroup_discovery import read_control_groups
from serving_process import alive, http_server, serve_over_http, supervisors, tree
from waiting import until


class KeptDirectory:
    """A data directory, and what belongs to it on the machine whichever server serves it."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.folder = folder
        self.environment = environment
        self._command = serve_over_http(environment)
        self._servers = {os.getpid()}
        self.members: set[int] = set()
        """Every process that was ever seen to belong to it."""

    @contextmanager
    def server(self, **variables: str) -> Generator["ServerRun"]:
        chosen = {"BELLJAR_KEEP_ALIVE": "true", "BELLJAR_KEEP_ALIVE_S": "60", **variables}
        with http_server(self._command, self.folder, **chosen) as (url, process):
            self._servers.add(process.pid)
            yield ServerRun(self, url, process)

    def supervisors(self) -> set[int]:
        return supervisors(self.folder)

    def look(self) -> set[int]:
        for pid in self.supervisors():
            self.members |= tree(pid)
        return alive(self.members)

    async def until_empty(self) -> None:
        await until(lambda: not [*self.look(), *self.supervisors(), *self.groups()])

    def groups(self) -> list[Path]:
        made = [path for base in read_control_groups().folders.values() for path in base.glob("belljar-*-*")]
        return [path for path in made if int(path.name.split("-")[1]) in self._servers]


class ServerRun:
    """One server process on a kept directory, from its start to its end."""

    def __init__(self, directory: KeptDirectory, url: str, process: Any) -> None:
        self.url = url
        self.directory = directory
        self._process = process

    def client(self) -> Client:
        return Client(f"{self.url}/mcp")

    async def until_ready(self) -> None:
        async with httpx.AsyncClient() as client:

            async def is_ready() -> bool:
                return (await client.get(f"{self.url}/ready")).status_code == 200

            await until(is_ready)

    async def until_measured(self, line: str) -> None:
        async with httpx.AsyncClient() as client:

            async def is_measured() -> bool:
                return line in (await client.get(f"{self.url}/metrics")).text.splitlines()

            await until(is_measured)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def kill(self) -> None:
        self.directory.members |= tree(self._process.pid)
        self.directory.look()
        self._process.kill()
        self._process.wait()


def kept_directory(environment: Environment, folder: Path) -> Generator[KeptDirectory]:
    made = KeptDirectory(environment, folder)
    yield made
    for pid in made.supervisors():
        os.kill(pid, signal.SIGTERM)
