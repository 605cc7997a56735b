"""Where uv fetches packages for sessions: a sandbox of its own for each run, with the package index as its only host.

uv reads what strangers wrote, so it is held as a session is: the same glass, a user of its own, limits, and a proxy
that knows the index's hosts only. It sees the environment, the folder it installs into, and what it needs to reach the
index, credentials included; the session sees none of that. Its cache is new with every installation and goes with it,
so that nothing one installation leaves can reach another. A provider that does not isolate leaves uv on the host.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from belljar.egress.rules import Rule, parse_rules
from belljar.environments.base import Environment, describe, inspect_interpreter
from belljar.environments.conda.channels import channel_folders, channel_rules
from belljar.environments.install_room import largest_file_mb
from belljar.environments.package_index import IndexAccess, find_index_hosts, read_access
from belljar.environments.uv import (
    SIDE,
    SOLVER,
    OpenUv,
    Uv,
    UvAnswer,
    find_rattler,
    find_uv,
    listen,
    open_uv_on_host,
    solver_command,
    stopped_after,
)
from belljar.files.addresses import refusal, refusal_of_chosen
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_missing, write_file
from belljar.inside import FOLDER
from belljar.provisioning.session_services import proxy_variables, relay_command
from belljar.sandboxes.base import Identity, Limits, Provider, Sandbox, SandboxSpec
from belljar.settings import Settings

if TYPE_CHECKING:
    from belljar.egress.proxy import Proxy

_SOCKET = "egress"
_CONNECTIONS = 256
# uv and the workers that compile hold a few threads for each processor, however small a session may be.
_PROCESSES = 1024
_OPEN_FILES = 4096
_LEAST_MEMORY_MB = 1024
# An index that did not answer may do so later; one that did is not asked again.
_ASK_AGAIN_S = 60.0
_UPSTREAM = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")

log = logging.getLogger(__name__)


class UvSandbox:
    """Knows the settings and the provider, and asks where the index is once."""

    def __init__(self, settings: Settings, provider: Provider) -> None:
        self._settings = settings
        self._provider = provider
        self._rules: list[Rule] = []
        self._ask_at = 0.0
        self._asking = asyncio.Lock()
        self._has_warned = False

    async def index_rules(self) -> list[Rule]:
        """The hosts of the package index."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if now >= self._ask_at:
                found = await find_index_hosts()
                self._rules = found.rules
                self._ask_at = float("inf") if found.is_complete else now + _ASK_AGAIN_S
            return [*self._rules]

    def uv_for(self, session_id: str) -> OpenUv:
        """Return what opens uv for the packages of a session."""
        if not self._provider.isolates:
            return open_uv_on_host
        if upstream := next((name for name in _UPSTREAM if os.environ.get(name) or os.environ.get(name.lower())), ""):
            self._warn(f"packages are fetched outside the sandbox: the server itself is behind {upstream}")
            return open_uv_on_host

        def open_uv(environment: Environment, folder: Path) -> contextlib.AbstractAsyncContextManager[Uv]:
            return self._open(session_id, environment, folder)

        return open_uv

    def _warn(self, warning: str) -> None:
        """Once."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s", warning)

    @asynccontextmanager
    async def _open(self, session_id: str, environment: Environment, folder: Path) -> AsyncGenerator[Uv]:
        index = [*await self.index_rules(), *channel_rules(environment.channels)]
        access = await asyncio.to_thread(read_access, {rule.host for rule in index})
        async with AsyncExitStack() as stack:
            side = await stack.enter_async_context(_open_side(folder.parent))
            _write(side / "scratch", access.files)
            # The same one for every run: what the first leaves in the cache is the next one's to read.
            identity = self._provider.take_identity()
            if identity is not None:
                stack.callback(self._provider.release_identity, identity)
            proxy = await stack.enter_async_context(self._open_proxy(session_id, side / "scratch", index))
            solver = await asyncio.to_thread(_solver_trees, environment.channels)
            spec = self._spec(environment, folder, side, (*access.readable, *solver), identity)
            yield ConfinedUv(self._provider, spec, environment, access, proxy)

    def _open_proxy(
        self, session_id: str, folder: Path, index: Sequence[Rule]
    ) -> contextlib.AbstractAsyncContextManager["Proxy"]:
        from belljar.egress.proxy import ProxyLimits, open_proxy  # see hatches.py

        allow_private = self._settings.egress_allow_private
        chosen: set[str] = set()

        def judge(address: str, rule: Rule) -> str:
            # An index at a private address is the operator's choice. Where its answers lead to is not, unless there.
            if not rule.is_configured:
                return "" if address in chosen else refusal(ip_address(address), allow_private=allow_private)
            reason = refusal_of_chosen(ip_address(address))
            if not reason:
                chosen.add(address)
            return reason

        return open_proxy(
            folder,
            _SOCKET,
            session_id=session_id,
            purpose="packages",
            # What its code may reach anyway is no more than uv may.
            rules=[*index, *parse_rules(self._settings.egress)],
            judge=judge,
            limits=ProxyLimits(connections=_CONNECTIONS),
        )

    def _spec(
        self, environment: Environment, folder: Path, side: Path, shown: Sequence[Path], identity: Identity | None
    ) -> SandboxSpec:
        memory_mb = self._settings.memory_mb or 0
        return SandboxSpec(
            session_id=f"packages{secrets.token_hex(4)}",
            workspace=folder,
            scratch=side / "scratch",
            home=side / "home",
            readable=(*environment.readable, FOLDER, Path(find_uv()), *shown),
            limits=Limits(
                memory_mb=memory_mb and max(memory_mb, _LEAST_MEMORY_MB),
                cpus=self._settings.cpus or 0,
                processes=_PROCESSES,
                disk_mb=largest_file_mb(self._settings.disk_mb or 0),
                temporary_mb=self._settings.temporary_mb or 0,
                open_files=_OPEN_FILES,
            ),
            identity=identity,
        )


@dataclass(frozen=True, slots=True)
class ConfinedUv:
    """uv in a sandbox; each run has a new one."""

    provider: Provider
    spec: SandboxSpec
    environment: Environment
    access: IndexAccess
    proxy: "Proxy"

    async def __call__(self, arguments: Sequence[str], *, timeout_s: float) -> UvAnswer:
        """Run it once; what the proxy refused is told with what uv says."""
        return await self._heard([find_uv(), "--color", "never", *arguments], timeout_s)

    async def solve(self, request: str, *, timeout_s: float) -> UvAnswer:
        """Run conda's solver once, in the server's own Python."""
        return await self._heard(solver_command(request, str(_own_python())), timeout_s)

    async def _heard(self, command: Sequence[str], timeout_s: float) -> UvAnswer:
        already = len(self.proxy.refused)
        sandbox = await self.provider.open(self.spec)
        hit: list[str] = []
        async with _hearing() as (writing, hearing):
            try:
                async with asyncio.timeout(timeout_s):
                    status = await self._run(sandbox, command, writing)
                hit += [f"{incident.kind}: it {incident.detail}" for incident in sandbox.incidents()]
            except TimeoutError:
                return stopped_after(timeout_s)
            finally:
                # To the end, though the caller be cancelled: what runs inside holds credentials.
                with anyio.CancelScope(shield=True):
                    await sandbox.aclose()
            # With the sandbox the last one is gone that could still hold the pipe.
            words = await hearing
        more = [*hit, *self.proxy.refused[already:]] if status else []
        return UvAnswer(status, "\n".join([words.rstrip(), *more]))

    async def _run(self, sandbox: Sandbox, command: Sequence[str], output: int) -> int:
        relay = relay_command(self.environment.python, f"{sandbox.scratch}/{_SOCKET}")
        try:
            process = await sandbox.spawn(
                [*relay, *command],
                environment=self._variables(sandbox),
                stdout=output,
                stderr=output,
            )
        finally:
            os.close(output)
        return await process.wait()

    def _variables(self, sandbox: Sandbox) -> dict[str, str]:
        """All that uv gets to know; nothing else of the server's own."""
        placed = {name: f"{sandbox.scratch}/{path}" for name, path in self.access.places.items()}
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": sandbox.home,
            "TMPDIR": sandbox.temporary,
            "LANG": "C.UTF-8",
            "UV_CONCURRENT_DOWNLOADS": "16",
            **self.access.variables,
            **placed,
            "UV_CACHE_DIR": f"{sandbox.workspace}/cache",
            # Its cache goes before anyone sees the packages, so that nothing is shared through a link.
            "UV_LINK_MODE": "hardlink",
            "UV_KEYRING_PROVIDER": "disabled",
            "UV_NO_PROGRESS": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            # A loopback address is one of the host's: there is nothing at this one's.
            **proxy_variables(spared=""),
        }


def _own_python() -> Path:
    """Behind the links of the server's environment, whose packages are not shown."""
    return Path(sys.executable).resolve()


def _solver_trees(channels: Sequence[str]) -> tuple[Path, ...]:
    """What conda's solver has to see; blocks while the server's interpreter tells where its library is."""
    rattler = find_rattler() if channels else None
    if rattler is None:
        return ()
    python = describe("", inspect_interpreter(_own_python()))
    return (*python.readable, SOLVER, rattler, *channel_folders(channels))


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Nobody but the folder's user, to be, may enter it."""
    for path, content in files.items():
        file = folder / path
        make_missing(file.parent)
        write_file(file, content)
        file.chmod(0o644)
        for parent in file.relative_to(folder).parents[:-1]:
            # uv locks a store of credentials with a file beside it.
            (folder / parent).chmod(0o777)


@asynccontextmanager
async def _open_side(parent: Path) -> AsyncGenerator[Path]:
    """Folders for one installation that neither the session nor, outside of them, uv can reach."""
    side = Path(tempfile.mkdtemp(dir=parent, prefix=SIDE))
    try:
        for name in ("scratch", "home"):
            (side / name).mkdir(mode=0o700)
        yield side
    finally:
        with anyio.CancelScope(shield=True):
            await asyncio.to_thread(remove_tree, side)


@asynccontextmanager
async def _hearing() -> AsyncGenerator[tuple[int, asyncio.Task[str]]]:
    """The end of a pipe to write to, which is the caller's to close, and what will have been heard of it."""
    loop = asyncio.get_running_loop()
    reading, writing = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", buffering=0)
    )
    hearing = loop.create_task(listen(reader))
    try:
        yield writing, hearing
    finally:
        hearing.cancel()
        transport.close()
