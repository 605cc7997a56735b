"""`belljar serve`: one server, or with `workers` several that share its address.

Each of these is a whole `belljar serve` with a data directory of its own: the first has the one of the settings, the
others have `workers/2` and so on in it. This process only starts them, starts again what dies, and passes signals on;
it imports nothing of a session.

Every server binds the port itself, with SO_REUSEPORT: Linux spreads connections over them, and one that dies takes
none of the others' with it. From one listening socket that all inherit, asyncio would accept as many as wait, so that
whoever wakes first gets them all.
"""

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from belljar import ipc, logs
from belljar.cli import uncollected_imports
from belljar.errors import SettingsError
from belljar.files.private import make_missing
from belljar.servers import FLEET_SOCKET, WORKERS
from belljar.settings import Settings, load_with_env_file, variable

DIVIDED = {
    "max_sessions": 1,
    "max_running": 1,
    "max_waiting": 1,
    "max_connections": 16,
    "pool_size": 1,
    "gpu_contexts": 1,
}
"""The limits that servers of one machine divide between them, and the least that each has; 0 stays 0."""
MOST_AUTO = 32
RESTART_S = 0.2
MOST_RESTART_S = 30.0
STEADY_S = 60.0
"""A server that ran for this long is started again as quickly as the first time."""
SILENT_LOOKS = 8
"""After how many questions without an answer, some 30 seconds, a server counts as frozen."""
_ASK_S = 2.0
_LOOK_S = 0.05
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def command(
    http: Annotated[str | None, typer.Option(help="HOST:PORT to serve over HTTP; stdio without it.")] = None,
    workers: Annotated[str | None, typer.Option(help="Servers that share the address: a number, or auto.")] = None,
    sandbox: Annotated[
        str | None,
        typer.Option(help="namespace, container, gvisor, microvm, process, or one of an installed package."),
    ] = None,
    environment: Annotated[str | None, typer.Option(help="Environment of sessions.")] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs of sessions: all, or indices and uuids with commas.")] = None,
    surface: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Surface to serve; repeatable.")] = None,
    mcp_config: Annotated[str | None, typer.Option(help="File that lists the MCP servers of the toolbox.")] = None,
    policy: Annotated[str | None, typer.Option(help="File of guardrails: what tools and code are allowed.")] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
    worker: Annotated[int, typer.Option(hidden=True, help="The number of this one of several servers.")] = 0,
) -> None:
    """Serve MCP over stdio, or over HTTP with --http HOST:PORT."""
    flags = {
        "http": http,
        "workers": workers,
        "sandbox": sandbox,
        "environment": environment,
        "gpus": gpus,
        "surfaces": surface or None,
        "mcp_config": mcp_config,
        "policy": policy,
        "log_level": log_level,
    }
    start(flags, worker)


def start(flags: Mapping[str, Any], worker: int = 0) -> None:
    """Serve until somebody ends it: as one server, as the worker of that number, or as the parent of several."""
    settings, env_file = load_with_env_file(flags)
    if not worker:
        count = worker_count(settings)
        left = left_workers(settings, count) if settings.http else []
        if count > 1 or left:
            sys.exit(asyncio.run(_Parent(settings, flags, count, left).run()))
    # Imported here, because the parent needs none of it.
    with uncollected_imports():
        from belljar.cli.serve import serve

    asyncio.run(serve(settings, env_file, worker))


def worker_count(settings: Settings) -> int:
    """Return how many servers are wanted."""
    count = settings.workers
    if count == "auto":
        return min(MOST_AUTO, max(1, len(os.sched_getaffinity(0)) // 2)) if settings.http else 1
    if count > 1 and not settings.http:
        raise SettingsError(
            f"workers is {count}, and over stdio a server has one client",
            hint="Add --http HOST:PORT, or leave workers out",
        )
    return count


def left_workers(settings: Settings, count: int) -> list[int]:
    """Return the numbers above `count` of which an earlier start with more workers left sessions."""
    folders = (settings.data_directory / WORKERS).glob("[0-9]*")
    numbers = {int(folder.name) for folder in folders if folder.name.isdecimal() and _has_sessions(folder)}
    return sorted(number for number in numbers if number > count)


def _has_sessions(data_directory: Path) -> bool:
    journal = data_directory / "journal.sqlite"
    if not journal.exists():
        return False
    query = "SELECT 1 FROM sessions WHERE state IN ('live', 'asleep') LIMIT 1"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(journal))}?mode=ro", uri=True)) as connection:
            return connection.execute(query).fetchone() is not None
    except sqlite3.Error:
        return True  # its own server says what is wrong with it


class _Parent:
    """The process above the servers of one machine."""

    def __init__(self, settings: Settings, flags: Mapping[str, Any], count: int, left: list[int]) -> None:
        self._settings = settings
        self._flags = {name: value for name, value in flags.items() if value is not None}
        self._numbers = [*range(1, count + 1), *left]
        self._left = left
        self._address = ""
        self._is_serving = False
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._is_stopping = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Run the servers until a signal ends them, or the first cannot start; return the exit status."""
        logs.configure(self._settings.log_level, self._settings.log_format)
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                loop.add_signal_handler(number, self._stop)
        for number in self._left:
            log.warning(
                "%s has sessions of an earlier start with more workers: a server of its own keeps them reachable until "
                "they are cleared or expire",
                self._folder(number),
            )
        try:
            make_missing(self._settings.data_directory / WORKERS)  # by which each server knows that it has others
        except OSError as error:
            raise SettingsError(
                f"data_directory {self._settings.data_directory} cannot be used: {error.strerror}",
                hint="Make room there, or set data_directory to a folder that can be written",
            ) from error
        with _reserved(self._settings.http) as self._address:
            # The first alone: what is wrong with the settings is said once, and one prepares the environment for all.
            first = asyncio.create_task(self._keep(1))
            while not first.done() and not self._is_ready(1):
                await asyncio.wait([first], timeout=_LOOK_S)
            self._is_serving = not first.done()
            others = self._numbers[1:] if self._is_serving else []
            await asyncio.gather(first, *(self._keep(number) for number in others))
        return self._status

    async def _keep(self, number: int) -> None:
        """Run one server, and again when it ends by itself."""
        delay_s = RESTART_S
        while not self._is_stopping.is_set():
            began = time.monotonic()
            process = await self._spawn(number)
            self._running[number] = process
            if self._is_stopping.is_set():
                process.terminate()
            watching = asyncio.create_task(self._watch(number, process))
            status = await process.wait()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            del self._running[number]
            if self._is_stopping.is_set():
                return
            if not self._is_serving and status >= 0:
                self._status = status  # it has said why it cannot start, and the others could not either
                return
            delay_s = RESTART_S if time.monotonic() - began > STEADY_S else delay_s
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            log.error("worker %d (pid %d) %s: it starts again in %.1f s", number, process.pid, how, delay_s)
            try:
                async with asyncio.timeout(delay_s):
                    await self._is_stopping.wait()
            except TimeoutError:
                delay_s = min(MOST_RESTART_S, 2 * delay_s)

    async def _watch(self, number: int, process: asyncio.subprocess.Process) -> None:
        """Kill a server that answers nobody any more: Linux would go on giving it a share of the connections."""
        silent = 0
        while silent < SILENT_LOOKS:
            await asyncio.sleep(_ASK_S)
            is_heard = self._is_stopping.is_set() or await self._answers(number, process.pid)
            silent = 0 if is_heard else silent + 1
        log.error(
            "worker %d (pid %d) is frozen, has not answered for half a minute, and is killed", number, process.pid
        )
        process.kill()

    async def _answers(self, number: int, pid: int) -> bool:
        """Return whether a server answers on its socket; True for one that has none, because it starts or ends."""
        path = next(self._folder(number).glob(f"runs/{pid}-*/{FLEET_SOCKET}"), None)
        if path is None:
            return True
        try:
            async with asyncio.timeout(_ASK_S):
                with ipc.reachable(path) as address:
                    reader, writer = await asyncio.open_unix_connection(address)
                try:
                    writer.write(b"GET /fleet/about HTTP/1.1\r\nhost: belljar\r\nconnection: close\r\n\r\n")
                    return bool(await reader.read(1))
                finally:
                    writer.close()
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except (OSError, TimeoutError):
            return False

    async def _spawn(self, number: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "belljar", "serve", "--worker", str(number)),
            env=self._variables(number),
            stdin=asyncio.subprocess.DEVNULL,
            # Ctrl-C in a terminal is for this process, which passes it on once.
            start_new_session=True,
            preexec_fn=partial(_end_with_parent, ctypes.CDLL(None).prctl, os.getpid()),
        )

    def _variables(self, number: int) -> dict[str, str]:
        """Return the environment of a server: this one's, with all settings that are its own."""
        settings = self._settings
        # One that is only there for what it was left gets no connections, but what the others pass on.
        http = "127.0.0.1:0" if number in self._left else self._address
        own: dict[str, Any] = {**self._flags, "workers": 1, "http": http}
        own["data_directory"] = self._folder(number)
        for name, least in DIVIDED.items():
            whole = getattr(settings, name)
            own[name] = max(least, whole // len(self._numbers)) if whole else 0
        if settings.servers_directory and number > 1:
            own["servers_directory"] = Path(settings.servers_directory) / WORKERS / str(number)
        texts = {name: json.dumps(value) if isinstance(value, list) else str(value) for name, value in own.items()}
        return {**os.environ, **{variable(name): text for name, text in texts.items()}}

    def _folder(self, number: int) -> Path:
        folder = self._settings.data_directory
        return folder if number == 1 else folder / WORKERS / str(number)

    def _is_ready(self, number: int) -> bool:
        """Return whether a server has told the others its address, which is when it accepts connections."""
        process = self._running.get(number)
        return process is not None and any(self._folder(number).glob(f"runs/{process.pid}-*/address"))

    def _stop(self) -> None:
        self._is_stopping.set()
        for process in self._running.values():
            process.terminate()


@contextmanager
def _reserved(http: str) -> Generator[str]:
    """Keep a port that servers can bind as well; yield the address with its number."""
    host, _, port = http.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(bare, int(port), type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        # Without SO_REUSEPORT first: somebody else's workers at the same address would share connections with ours.
        with socket.create_server(address[:2], family=family) as probe:
            number = probe.getsockname()[1]
        reserved = socket.socket(family, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((address[0], number))
    except OSError as error:
        raise SettingsError(
            f"Cannot listen on {http}: {error.strerror or error}",
            hint="Choose another address or port; port 0 takes any that is free",
        ) from error
    with reserved:
        yield f"{host}:{number}"


def _end_with_parent(prctl: Callable[..., int], parent: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent dies, however that dies; runs in the child."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
