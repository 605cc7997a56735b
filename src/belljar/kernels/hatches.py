"""What the host hands into a sandbox beside the kernel: a way to allowed hosts, and a desk that installs packages.

Both are sockets in the session's scratch folder, and live as long as the sandbox. A kernel sees only a sandbox.
"""

import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from belljar.egress.proxy import open_proxy
from belljar.egress.rules import Rule
from belljar.environments.base import Environment
from belljar.environments.uv import OpenUv
from belljar.files.addresses import refusal
from belljar.kernels.desk import install_for, open_desk
from belljar.sandboxes.base import Incident, Sandbox, SandboxProcess

INSIDE = Path(__file__).parent / "runner"
COMMANDS = INSIDE / "commands"
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


async def open_hatches(
    sandbox: Sandbox,
    *,
    session_id: str,
    scratch: Path,
    python: Path,
    environment: Environment | None,
    layer: Path,
    egress: Egress,
    open_uv: OpenUv,
) -> "HatchedSandbox":
    """The sandbox with its hatches, which close with it. `python` runs the relay; no environment, no packages."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(sandbox.aclose)
        hatched = HatchedSandbox(sandbox, stack)
        # A new name for every kernel: the last one's code may have left anything under an old one.
        token = secrets.token_hex(4)
        if environment is not None:
            name = f"packages-{token}"
            fulfil = partial(install_for, environment, layer, open_uv)
            await stack.enter_async_context(open_desk(scratch, name, session_id=session_id, fulfil=fulfil))
            hatched.variables["BELLJAR_PACKAGES"] = f"{sandbox.scratch}/{name}"
        if egress.rules:
            name = f"egress-{token}"
            judge = partial(_judge, allow_private=egress.allow_private)
            await stack.enter_async_context(
                open_proxy(scratch, name, session_id=session_id, rules=egress.rules, judge=judge)
            )
            hatched.prefix = relay_command(python, f"{sandbox.scratch}/{name}")
            hatched.variables |= {**_certificates(), **proxy_variables(), **(egress.variables or {})}
        # The sandbox goes first, then what its code could still talk to.
        hatched.resources = stack.pop_all()
        return hatched
    raise AssertionError("the stack swallows nothing")


class HatchedSandbox:
    """A sandbox whose commands know of the hatches."""

    def __init__(self, sandbox: Sandbox, resources: AsyncExitStack) -> None:
        self.workspace = sandbox.workspace
        self.scratch = sandbox.scratch
        self.home = sandbox.home
        self.temporary = sandbox.temporary
        self.can_spare = sandbox.can_spare
        self.variables: dict[str, str] = {}
        self.prefix: list[str] = []
        self.resources = resources
        self.inner = sandbox

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
        return {**_with_commands(environment, self.variables), **self.variables}

    def incidents(self) -> list[Incident]:
        """See the contract."""
        return self.inner.incidents()

    def memory_peak_mb(self) -> float:
        """See the contract."""
        return self.inner.memory_peak_mb()

    async def kill(self, spare: Collection[int] = ()) -> None:
        """See the contract."""
        await self.inner.kill(spare)

    async def aclose(self) -> None:
        """See the contract."""
        await self.inner.aclose()
        await self.resources.aclose()


def relay_command(python: Path, socket: str) -> list[str]:
    """What goes before a command so that it finds the proxy behind a socket at `proxy_variables`."""
    return [str(python), "-I", "-S", str(INSIDE / "relay.py"), socket]


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
    return {
        **environment,
        "PATH": f"{COMMANDS / 'bin'}:{path}",
        "PYTHONPATH": f"{python_path}:{COMMANDS}" if python_path else str(COMMANDS),
    }


def _certificates() -> dict[str, str]:
    """The host's choice of certificates, as far as a sandbox shows it: its own authorities are trusted inside too."""
    chosen = ((name, os.environ.get(name, "")) for name in _CERTIFICATES)
    return {name: path for name, path in chosen if any(Path(path).is_relative_to(tree) for tree in _SHOWN)}


def _judge(address: str, _: Rule, *, allow_private: bool) -> str:
    return refusal(ip_address(address), allow_private=allow_private)
