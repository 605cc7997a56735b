"""What the host hands into a sandbox beside the kernel: a way to allowed hosts, packages, and the tools of others.

All are sockets in the session's scratch folder, and live as long as the sandbox. A kernel sees only a sandbox.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from belljar.egress.rules import Rule
from belljar.egress.session_sockets import SessionSocket
from belljar.environments.base import Environment
from belljar.environments.install_room import InstallRoom
from belljar.environments.uv import OpenUv
from belljar.files.addresses import refusal
from belljar.inside import COMMANDS, RUNNER
from belljar.provisioning.folders import KernelFolders
from belljar.provisioning.package_server import install_for, open_package_server
from belljar.sandboxes.base import Sandbox, SandboxProcess
from belljar.toolbox.toolbox import Toolbox

PORT = 3128

_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
_SHOWN = ("/etc/ssl/certs", "/etc/pki/ca-trust", "/etc/pki/tls/certs", "/etc/ssl/cert.pem", "/usr")


@dataclass(frozen=True, slots=True)
class Egress:
    """What a session may reach; no rules, no network."""

    rules: Sequence[Rule] = ()
    allow_private: bool = False
    variables: Mapping[str, str] | None = None
    """Told to the session beside the proxy's address."""


async def open_services(
    sandbox: Sandbox,
    folders: KernelFolders,
    *,
    python: Path,
    environment: Environment | None,
    egress: Egress,
    open_uv: OpenUv,
    room: InstallRoom,
    toolbox: Toolbox | None = None,
    importable: Sequence[Path] = (),
    doors: Mapping[str, SessionSocket] | None = None,
) -> "ServicedSandbox":
    """The sandbox with its hatches, which close with it. `python` runs the relay; no environment, no packages.

    `doors` are those of a sandbox of an earlier server's, by name: its code knows of no others.
    """
    async with AsyncExitStack() as stack:
        stack.push_async_callback(sandbox.aclose)
        hatches = await stack.enter_async_context(AsyncExitStack())
        hatched = ServicedSandbox(sandbox, hatches)
        session_id, scratch = folders.session_id, folders.scratch
        # A new name for every kernel: the last one's code may have left anything under an old one.
        token = secrets.token_hex(4)
        kinds = ("packages", "egress", *(("toolbox",) if toolbox else ()))
        hatched.doors = {f"{kind}-{token}": SessionSocket() for kind in kinds} if doors is None else {**doors}
        names = {name.partition("-")[0]: name for name in hatched.doors}
        if environment is not None and (name := names.pop("packages", "")):
            fulfil = partial(install_for, environment, folders.layer, open_uv, room)
            door = hatched.doors[name]
            await hatches.enter_async_context(
                open_package_server(scratch, name, session_id=session_id, fulfil=fulfil, door=door)
            )
            hatched.variables["BELLJAR_PACKAGES"] = f"{sandbox.scratch}/{name}"
            hatched.variables["BELLJAR_PREFIX"] = str(environment.prefix)
        if egress.rules and (name := names.pop("egress", "")):
            from belljar.egress.proxy import open_proxy  # with an HTTP library, that most servers never need

            judge = partial(_judge, allow_private=egress.allow_private)
            door = hatched.doors[name]
            await hatches.enter_async_context(
                open_proxy(scratch, name, session_id=session_id, rules=egress.rules, judge=judge, door=door)
            )
            hatched.prefix = relay_command(python, f"{sandbox.scratch}/{name}")
            hatched.variables |= {**_certificates(), **proxy_variables(), **(egress.variables or {})}
        if toolbox is not None and (name := names.pop("toolbox", "")):
            inside, door = sandbox.workspace, hatched.doors[name]
            await hatches.enter_async_context(
                toolbox.open_hatch(scratch, name, session_id=session_id, folder_inside=inside, door=door)
            )
            hatched.variables["BELLJAR_TOOLBOX"] = f"{sandbox.scratch}/{name}"
            importable = (*toolbox.importable, *importable)
        hatched.importable = importable
        for name in names.values():
            hatched.close_door(name)
        hatched.resources = hatches.pop_all()
        stack.pop_all()
        return hatched
    raise AssertionError("the stack swallows nothing")


class ServicedSandbox:
    """A sandbox whose commands know of the hatches."""

    def __init__(self, sandbox: Sandbox, resources: AsyncExitStack) -> None:
        self.workspace = sandbox.workspace
        self.scratch = sandbox.scratch
        self.home = sandbox.home
        self.temporary = sandbox.temporary
        self.can_spare = sandbox.can_spare
        self.ends_with_command = sandbox.ends_with_command
        self.variables: dict[str, str] = {}
        self.prefix: list[str] = []
        self.importable: Sequence[Path] = ()
        """What its Python finds before anything that is installed."""
        self.resources = resources
        self.doors: dict[str, SessionSocket] = {}
        """What its code can knock at, by the name in its scratch folder."""
        self.inner = sandbox
        self.incidents = sandbox.incidents
        self.memory_peak_mb = sandbox.memory_peak_mb
        self.kill = sandbox.kill

    async def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> SandboxProcess:
        """See the contract. The relay listens before the command runs: it becomes the command."""
        return await self.inner.spawn(
            [*self.prefix, *command],
            environment=self.complete(environment),
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
        )

    def complete(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a command, with what tells of the hatches."""
        told = {**_with_commands(environment, self.variables), **self.variables}
        paths = [*map(str, self.importable), *filter(None, [told.get("PYTHONPATH", "")])]
        return {**told, "PYTHONPATH": os.pathsep.join(paths)} if self.importable else told

    def close_door(self, name: str) -> None:
        """Nobody answers at this one."""
        door = self.doors.pop(name)
        if door.descriptor >= 0:
            os.close(door.descriptor)

    async def detach(self) -> None:
        """Answer no longer and let the sandbox live: another server will answer at the same doors."""
        for door in self.doors.values():
            door.is_left = True
        await self.resources.aclose()

    async def aclose(self) -> None:
        """See the contract. The sandbox goes first, then what its code could still talk to."""
        await self.inner.aclose()
        await self.resources.aclose()


def relay_command(python: Path, socket: str) -> list[str]:
    """What goes before a command so that it finds the proxy behind a socket at `proxy_variables`."""
    return [str(python), "-I", "-S", str(RUNNER / "relay.py"), socket]


def proxy_variables(*, spared: str = "localhost,127.0.0.1") -> dict[str, str]:
    """What programs look for when they look for a proxy, in both spellings that are in use."""
    proxy = f"http://127.0.0.1:{PORT}"
    variables = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "ALL_PROXY": proxy, "NO_PROXY": spared}
    return {**variables, **{name.lower(): value for name, value in variables.items()}}


def _with_commands(environment: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Our `pip` and `uv` before the others', where there is a desk for them to ask."""
    if "BELLJAR_PACKAGES" not in variables:
        return dict(environment)
    path, python_path = environment.get("PATH", "/usr/bin:/bin"), environment.get("PYTHONPATH", "")
    # The command is caught, never the module: `import pip` is the environment's.
    paths = [*filter(None, [python_path]), str(COMMANDS / "startup")]
    return {**environment, "PATH": f"{COMMANDS / 'bin'}:{path}", "PYTHONPATH": os.pathsep.join(paths)}


def _certificates() -> dict[str, str]:
    """The host's choice of certificates, as far as a sandbox shows it: its own authorities are trusted inside too."""
    chosen = ((name, os.environ.get(name, "")) for name in _CERTIFICATES)
    return {name: path for name, path in chosen if any(Path(path).is_relative_to(tree) for tree in _SHOWN)}


def _judge(address: str, _: Rule, *, allow_private: bool) -> str:
    return refusal(ip_address(address), allow_private=allow_private)
