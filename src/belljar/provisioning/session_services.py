"""The services that the host offers in a sandbox: the egress proxy, packages, files by URL, and tool calls.

Each is a listening socket in the session's scratch folder and lives as long as the sandbox. `ServicedSandbox` is a
sandbox together with its services, which kernels use like any other sandbox.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from belljar.egress.rules import Rule, refusal
from belljar.egress.session_sockets import SessionSocket
from belljar.environments.base import Environment
from belljar.environments.uv import OpenUv
from belljar.files.disk_usage import InstallRoom
from belljar.inside import COMMANDS, RUNNER
from belljar.provisioning.form_targets import VARIABLE as TARGETS
from belljar.provisioning.kernel_folders import KernelFolders
from belljar.provisioning.request_server import Transfers, install_for, open_package_server, open_transfer_server
from belljar.sandboxes.base import Sandbox, SandboxProcess
from belljar.skills.session_view import VARIABLE, ShownSkills
from belljar.toolbox.toolbox import Toolbox

PORT = 3128

_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
_SHOWN = ("/etc/ssl/certs", "/etc/pki/ca-trust", "/etc/pki/tls/certs", "/etc/ssl/cert.pem", "/usr")


@dataclass(frozen=True, slots=True)
class Egress:
    """What a session may reach; without rules it has no network."""

    rules: Sequence[Rule] = ()
    allow_private: bool = False
    variables: Mapping[str, str] | None = None
    """Environment variables that the session gets in addition to the proxy's address."""
    transfer_bytes: int = 0
    """The largest file that the host fetches or sends for the session's code."""


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
    skills: ShownSkills | None = None,
    targets: Path | None = None,
    sockets: Mapping[str, SessionSocket] | None = None,
) -> "ServicedSandbox":
    """Open the services of a sandbox, and return it with them. They close with the sandbox.

    `python` runs the relay. Without an environment there is no package installation. `sockets` are those that an
    earlier server opened for this sandbox, by name, because the code inside knows of no others.
    """
    async with AsyncExitStack() as stack:
        stack.push_async_callback(sandbox.aclose)
        services = await stack.enter_async_context(AsyncExitStack())
        serviced = ServicedSandbox(sandbox, services)
        session_id, scratch = folders.session_id, folders.scratch
        # New names for every kernel, because code of the last one may have left anything under an old name.
        token = secrets.token_hex(4)
        kinds = ("packages", "egress", "transfers", *(("toolbox",) if toolbox else ()))
        serviced.sockets = {f"{kind}-{token}": SessionSocket() for kind in kinds} if sockets is None else {**sockets}
        names = {name.partition("-")[0]: name for name in serviced.sockets}
        if environment is not None and (name := names.pop("packages", "")):
            fulfil = partial(install_for, environment, folders.layer, open_uv, room)
            socket = serviced.sockets[name]
            await services.enter_async_context(
                open_package_server(scratch, name, session_id=session_id, fulfil=fulfil, socket=socket)
            )
            serviced.variables["BELLJAR_PACKAGES"] = f"{sandbox.scratch}/{name}"
            serviced.variables["BELLJAR_PREFIX"] = str(environment.prefix)
        if egress.rules and (name := names.pop("egress", "")):
            from belljar.egress.proxy import open_proxy  # it imports an HTTP library that most servers never need

            judge = partial(_judge, allow_private=egress.allow_private)
            socket = serviced.sockets[name]
            await services.enter_async_context(
                open_proxy(scratch, name, session_id=session_id, rules=egress.rules, judge=judge, session_socket=socket)
            )
            serviced.prefix = relay_command(python, f"{sandbox.scratch}/{name}")
            serviced.variables |= {**_certificates(), **proxy_variables(), **(egress.variables or {})}
        if egress.rules and (name := names.pop("transfers", "")):
            # Imported here, because it imports an HTTP library, too.
            from belljar.files.https import Reach

            reach = Reach(egress.rules, egress.allow_private)
            identity = folders.identity
            owner = (identity.uid, identity.gid) if identity else None
            transfers = Transfers(folders.workspace, owner, reach, room, egress.transfer_bytes)
            socket = serviced.sockets[name]
            await services.enter_async_context(
                open_transfer_server(scratch, name, session_id=session_id, transfers=transfers, socket=socket)
            )
            serviced.variables["BELLJAR_TRANSFERS"] = f"{sandbox.scratch}/{name}"
        if toolbox is not None and (name := names.pop("toolbox", "")):
            inside, socket = sandbox.workspace, serviced.sockets[name]
            await services.enter_async_context(
                toolbox.serve_session(scratch, name, session_id=session_id, folder_inside=inside, session_socket=socket)
            )
            serviced.variables["BELLJAR_TOOLBOX"] = f"{sandbox.scratch}/{name}"
            serviced.importable = toolbox.importable
        if targets is not None:
            serviced.variables[TARGETS] = str(targets)
        if skills is not None:
            serviced.variables[VARIABLE] = str(folders.skills)
            serviced.importable = (*serviced.importable, *skills.importable)
        for name in names.values():
            serviced.close_socket(name)
        serviced.resources = services.pop_all()
        stack.pop_all()
        return serviced
    raise AssertionError("the stack swallows nothing")


class ServicedSandbox:
    """A sandbox and its services; its commands get the environment variables that name them."""

    def __init__(self, sandbox: Sandbox, resources: AsyncExitStack) -> None:
        self.workspace = sandbox.workspace
        self.scratch = sandbox.scratch
        self.home = sandbox.home
        self.temporary = sandbox.temporary
        self.can_spare = sandbox.can_spare
        self.ends_with_command = sandbox.ends_with_command
        self.variables: dict[str, str] = {}
        self.programs: Sequence[str] = ()
        """Folders that come last on PATH."""
        self.prefix: list[str] = []
        self.importable: Sequence[Path] = ()
        """Folders that come first on PYTHONPATH, before anything that is installed."""
        self.resources = resources
        self.sockets: dict[str, SessionSocket] = {}
        """The listening sockets of the services, by their names in the scratch folder."""
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
        """See `Sandbox`. The relay to the proxy starts to listen, and then becomes the command."""
        return await self.inner.spawn(
            [*self.prefix, *command],
            environment=self.complete(environment),
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
        )

    def complete(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a command, with the variables that name the services."""
        variables = {**_with_commands(environment, self.variables), **self.variables}
        if self.programs:
            variables["PATH"] = os.pathsep.join([variables.get("PATH", "/usr/bin:/bin"), *self.programs])
        paths = [*map(str, self.importable), *filter(None, [variables.get("PYTHONPATH", "")])]
        return {**variables, "PYTHONPATH": os.pathsep.join(paths)} if self.importable else variables

    def close_socket(self, name: str) -> None:
        """Close a socket that no service answers on."""
        socket = self.sockets.pop(name)
        if socket.descriptor >= 0:
            os.close(socket.descriptor)

    async def detach(self) -> None:
        """Stop the services without closing the sandbox; another server will answer on the same sockets."""
        for socket in self.sockets.values():
            socket.is_left = True
        await self.resources.aclose()

    async def aclose(self) -> None:
        """See `Sandbox`. Closes the sandbox first, then the services that its code could still talk to."""
        await self.inner.aclose()
        await self.resources.aclose()


def relay_command(python: Path, socket: str) -> list[str]:
    """Return what goes before a command so that it finds the proxy behind the socket at `proxy_variables`."""
    return [str(python), "-I", "-S", str(RUNNER / "relay.py"), socket]


def proxy_variables(*, spared: str = "localhost,127.0.0.1") -> dict[str, str]:
    """Return the variables in which programs look for a proxy, in both spellings that are in use."""
    proxy = f"http://127.0.0.1:{PORT}"
    variables = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "ALL_PROXY": proxy, "NO_PROXY": spared}
    return {**variables, **{name.lower(): value for name, value in variables.items()}}


def _with_commands(environment: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Put our `pip` and `uv` before all others, where there is a package server for them to ask."""
    if "BELLJAR_PACKAGES" not in variables:
        return dict(environment)
    path, python_path = environment.get("PATH", "/usr/bin:/bin"), environment.get("PYTHONPATH", "")
    # Only the command is replaced: `import pip` still finds the environment's module.
    paths = [*filter(None, [python_path]), str(COMMANDS / "startup")]
    changed = {"PATH": f"{COMMANDS / 'bin'}:{path}", "PYTHONPATH": os.pathsep.join(paths)}
    # For `python -I`, which does not look at PYTHONPATH: the environments that we make have a file that reads this.
    return {**environment, **changed, "BELLJAR_STARTUP": str(COMMANDS / "startup")}


def _certificates() -> dict[str, str]:
    """Return the variables that name the host's certificates, as far as a sandbox shows those files.

    So the certificate authorities that the host trusts are trusted inside too.
    """
    chosen = ((name, os.environ.get(name, "")) for name in _CERTIFICATES)
    return {name: path for name, path in chosen if any(Path(path).is_relative_to(tree) for tree in _SHOWN)}


def _judge(address: str, rule: Rule, *, allow_private: bool) -> str:
    return refusal(ip_address(address), rule.port, allow_private=allow_private)
