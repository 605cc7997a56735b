"""No attempt of `escape_attempts` gets out of a provider that isolates, and each can: without glass it does."""

import base64
import os
import secrets
import socket
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from escape_attempts import ATTEMPTS, PRELUDE, Attempt
from trials import ENVIRONMENT, Opener, run, usable

from belljar.sandboxes.base import Provider

pytestmark = pytest.mark.anyio
is_root = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture
def hostile_host(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Things of the host worth reaching, and where they are."""
    (tmp_path / "session-0" / "other").mkdir(parents=True)
    name = f"belljar-{secrets.token_hex(8)}"
    own = {f"{name}={value}".encode() for name, value in ENVIRONMENT.items()}
    variable = max(set(Path("/proc/self/environ").read_bytes().split(b"\0")) - own, key=len)
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        secret = Path(folder) / "secret"
        secret.write_text("hunter2")
        for endpoint, address in ((abstract, "\0" + name), (named, f"{folder}/socket")):
            endpoint.bind(address)
            endpoint.listen()
        yield {
            **ENVIRONMENT,
            "SECRET": str(secret),
            "OTHER": str(tmp_path / "session-0" / "other"),
            "PORT": str(server.getsockname()[1]),
            "ABSTRACT": name,
            "SOCKET": f"{folder}/socket",
            "SERVER": str(os.getpid()),
            "SERVER_VARIABLE": base64.b64encode(variable).decode(),
        }


async def _try(attempt: Attempt, provider: Provider, host: dict[str, str], open_sandbox: Opener) -> str:
    sandbox, _ = await open_sandbox(provider)
    code = PRELUDE.format(attempt=textwrap.indent(attempt.code, "    "))
    outcome = await run(sandbox, code, environment=host)
    assert outcome.status == 0, outcome.output
    return outcome.output


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
async def test_the_glass_holds(
    attempt: Attempt,
    isolating: Provider,
    hostile_host: dict[str, str],
    open_sandbox: Opener,
    request: pytest.FixtureRequest,
) -> None:
    if is_root and attempt.name == "change a device's mode":
        reason = "root's sessions are the host's uid 0 and own its device files: the provider's warning says so"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    assert "BREACH" not in await _try(attempt, isolating, hostile_host, open_sandbox)


@pytest.mark.parametrize(
    "attempt",
    [a for a in ATTEMPTS if a.unsealed == "everyone" or (a.unsealed == "root" and is_root)],
    ids=lambda attempt: attempt.name,
)
async def test_without_glass_the_attempt_succeeds(
    attempt: Attempt, hostile_host: dict[str, str], open_sandbox: Opener
) -> None:
    if attempt.needs and not Path(attempt.needs).exists():
        pytest.skip(f"this host has no {attempt.needs}")
    assert "BREACH" in await _try(attempt, usable("process"), hostile_host, open_sandbox)


async def test_what_is_written_to_tmp_stays_inside(isolating: Provider, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(isolating)
    name = f"belljar-{secrets.token_hex(8)}"
    folders = ["/tmp", "/var/tmp", "/dev/shm", "/run", "/home/belljar"]
    code = f"for folder in {folders}: open(folder + '/{name}', 'w').write('x')\nprint('written')"
    assert (await run(sandbox, code)).output == "written\n"
    assert not any((Path(folder) / name).exists() for folder in folders)
