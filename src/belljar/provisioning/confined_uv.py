"""Runs uv, and conda's solver, for sessions: each run in a sandbox of its own.

uv reads what strangers wrote, so it is confined as a session is: the same provider, a user of its own, limits, and a
proxy to the index and the hosts that sessions may reach. It sees the environment, the folder it installs into, and what
it needs to reach the index, credentials included; the session sees none of that. The cache is new for every
installation and removed with it, so that nothing of one can reach another. Where the provider does not isolate, uv runs
on the host.
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

from belljar.egress.rules import Rule, parse_rules, refusal, refusal_of_chosen
from belljar.environments.base import Environment, describe, inspect_interpreter
from belljar.environments.conda.channels import channel_folders, channel_rules
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
from belljar.files.disk_usage import largest_file_mb
from belljar.files.fd_walk import remove_tree
from belljar.files.private import make_missing, write_file
from belljar.inside import FOLDER
from belljar.provisioning.session_services import proxy_variables, relay_command
from belljar.sandboxes.base import Identity, Limits, Provider, Sandbox, SandboxSpec
from belljar.sandboxes.child import open_output_pipe
from belljar.settings import Settings

if TYPE_CHECKING:
    from belljar.egress.proxy import Proxy

_SOCKET = "egress"
_CONNECTIONS = 256
# uv and its workers that compile start a few threads for each processor, however small the session's limits are.
_PROCESSES = 1024
_OPEN_FILES = 4096
_LEAST_MEMORY_MB = 1024
# An index that did not answer is asked again after this time; one that answered is not asked again.
_ASK_AGAIN_S = 60.0
_UPSTREAM = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")

log = logging.getLogger(__name__)


class UvSandbox:
    """Makes sandboxes for uv from the settings and the provider, and finds the hosts of the index once."""

    def __init__(self, settings: Settings, provider: Provider) -> None:
        self._settings = settings
        self._provider = provider
        self._rules: list[Rule] = []
        self._ask_at = 0.0
        self._asking = asyncio.Lock()
        self._has_warned = False

    async def index_rules(self) -> list[Rule]:
        """Return rules for the hosts of the package index."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if now >= self._ask_at:
                found = await find_index_hosts()
                self._rules = found.rules
                self._ask_at = float("inf") if found.is_complete else now + _ASK_AGAIN_S
            return [*self._rules]

    def uv_for(self, session_id: str) -> OpenUv:
        """Return the function that opens uv for the packages of a session."""
        if not self._provider.isolates:
            return open_uv_on_host
        if upstream := next((name for name in _UPSTREAM if os.environ.get(name) or os.environ.get(name.lower())), ""):
            self._warn(f"packages are fetched outside the sandbox: the server itself is behind {upstream}")
            return open_uv_on_host

        def open_uv(environment: Environment, folder: Path) -> contextlib.AbstractAsyncContextManager[Uv]:
            return self._open(session_id, environment, folder)

        return open_uv

    def _warn(self, warning: str) -> None:
        """Log the warning, the first time only."""
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
            # The same user for every run of this installation, because each reads the cache that the last one wrote.
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
        from belljar.egress.proxy import ProxyLimits, open_proxy  # imported here for the reason in session_services.py

        allow_private = self._settings.egress_allow_private
        chosen: set[str] = set()

        def judge(address: str, rule: Rule) -> str:
            # The operator may choose an index at a private address. Where the index's answers lead is not the
            # operator's choice, so other private addresses are refused.
            if not rule.is_configured:
                if address in chosen:
                    return ""
                return refusal(ip_address(address), rule.port, allow_private=allow_private)
            reason = refusal_of_chosen(ip_address(address), rule.port)
            if not reason:
                chosen.add(address)
            return reason

        return open_proxy(
            folder,
            _SOCKET,
            session_id=session_id,
            purpose="packages",
            # uv may also reach the hosts that the session's code may reach anyway.
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
    """uv, with a new sandbox for each run."""

    provider: Provider
    spec: SandboxSpec
    environment: Environment
    access: IndexAccess
    proxy: "Proxy"

    async def __call__(self, arguments: Sequence[str], *, timeout_s: float) -> UvAnswer:
        """Run uv once; what the proxy refused is added to uv's output."""
        return await self._answer([find_uv(), "--color", "never", *arguments], timeout_s)

    async def solve(self, request: str, *, timeout_s: float) -> UvAnswer:
        """Run conda's solver once, in the server's own Python."""
        return await self._answer(solver_command(request, str(_own_python())), timeout_s)

    async def _answer(self, command: Sequence[str], timeout_s: float) -> UvAnswer:
        already = len(self.proxy.refused)
        sandbox = await self.provider.open(self.spec)
        hit: list[str] = []
        async with _captured_output() as (writing, output):
            try:
                async with asyncio.timeout(timeout_s):
                    status = await self._run(sandbox, command, writing)
                hit += [f"{incident.kind}: it {incident.detail}" for incident in sandbox.incidents()]
            except TimeoutError:
                return stopped_after(timeout_s)
            finally:
                # Close it even if the caller is cancelled, because what runs inside has credentials.
                with anyio.CancelScope(shield=True):
                    await sandbox.aclose()
            # With the sandbox closed, no process has the pipe open any more.
            text = await output
        more = [*hit, *self.proxy.refused[already:]] if status else []
        return UvAnswer(status, "\n".join([text.rstrip(), *more]))

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
        """Return all environment variables of uv; nothing else of the server's environment is passed on."""
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
            # The cache is removed before the session sees the packages, so no file is shared through a hard link.
            "UV_LINK_MODE": "hardlink",
            "UV_KEYRING_PROVIDER": "disabled",
            "UV_NO_PROGRESS": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            # Loopback addresses go through the proxy too, because they mean the host's: nothing listens on the
            # sandbox's own.
            **proxy_variables(spared=""),
        }


def _own_python() -> Path:
    """Return the server's interpreter with links resolved, because the server's environment is not shown."""
    return Path(sys.executable).resolve()


def _solver_trees(channels: Sequence[str]) -> tuple[Path, ...]:
    """Return the trees that conda's solver needs; blocks while the server's interpreter is asked for its own."""
    rattler = find_rattler() if channels else None
    if rattler is None:
        return ()
    python = describe("", inspect_interpreter(_own_python()))
    return (*python.readable, SOLVER, rattler, *channel_folders(channels))


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files that everybody may read, because only the sandbox's user will be able to enter the folder."""
    for path, content in files.items():
        file = folder / path
        make_missing(file.parent)
        write_file(file, content)
        file.chmod(0o644)
        for parent in file.relative_to(folder).parents[:-1]:
            # uv creates a lock file beside its store of credentials.
            (folder / parent).chmod(0o777)


@asynccontextmanager
async def _open_side(parent: Path) -> AsyncGenerator[Path]:
    """Make the scratch and home folders of one installation, out of the session's reach, and remove them afterwards."""
    side = Path(tempfile.mkdtemp(dir=parent, prefix=SIDE))
    try:
        for name in ("scratch", "home"):
            (side / name).mkdir(mode=0o700)
        yield side
    finally:
        with anyio.CancelScope(shield=True):
            await asyncio.to_thread(remove_tree, side)


@asynccontextmanager
async def _captured_output() -> AsyncGenerator[tuple[int, asyncio.Task[str]]]:
    """Open a pipe; yield its write end, which the caller closes, and a task that returns what was written to it."""
    async with open_output_pipe() as (writing, reader):
        output = asyncio.get_running_loop().create_task(listen(reader))
        try:
            yield writing, output
        finally:
            output.cancel()
