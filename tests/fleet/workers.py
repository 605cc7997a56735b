"""Two servers of one machine, each at a port of its own, with folders as those of several workers are."""

from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
from calls import Caller
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from belljar.environments import Environment
from serving_process import http_server, serve_over_http

KEYS = {"ada": "a" * 40, "bob": "b" * 40}


class Workers:
    """The servers of one machine, by their numbers."""

    def __init__(self, environment: Environment, folder: Path, **chosen: str) -> None:
        self.folder = folder
        self._environment = environment
        self._chosen = chosen
        self._stacks: dict[int, ExitStack] = {}
        self.urls: dict[int, str] = {}
        self.pids: dict[int, int] = {}

    def data_directory(self, number: int) -> Path:
        return self.folder if number == 1 else self.folder / "workers" / str(number)

    def start(self, number: int) -> None:
        folder = self.data_directory(number)
        folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "workers").mkdir(exist_ok=True)
        stack = self._stacks[number] = ExitStack()
        chosen = {**self._chosen, "BELLJAR_DATA_DIRECTORY": str(folder)}
        # As one of several, or the first would start another server for the sessions of the second.
        command = [*serve_over_http(self._environment), *(["--worker", "1"] if number == 1 else [])]
        self.urls[number], process = stack.enter_context(http_server(command, self.folder, **chosen))
        self.pids[number] = process.pid

    def stop(self, number: int) -> None:
        self._stacks.pop(number).close()

    def close(self) -> None:
        for number in [*self._stacks]:
            self.stop(number)

    @asynccontextmanager
    async def client(self, number: int, era: str = "auto", name: str = "", **options: Any) -> AsyncGenerator[Caller]:
        """A client that is connected to one of them, with a key if it has a name."""
        headers = {"authorization": f"Bearer {KEYS[name]}"} if name else {}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(f"{self.urls[number]}/mcp", http_client=http), mode=era, **options) as client,
        ):
            yield Caller(client)


@contextmanager
def two_workers(environment: Environment, folder: Path, **chosen: str) -> Generator[Workers]:
    workers = Workers(environment, folder, **chosen)
    try:
        workers.start(1)
        workers.start(2)
        yield workers
    finally:
        workers.close()
