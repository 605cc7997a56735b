"""No attempt of `escape_attempts` gets out of a provider that isolates, and each can: without glass it does."""

import base64
import os
import secrets
import socket
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from escape_attempts import ATTEMPTS, PRELUDE, Attempt
from trials import ENVIRONMENT, PYTHON, Opener, run, usable

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
    # Without the user's and the site's modules it starts twice as fast.
    outcome = await run(sandbox, code, environment=host, command=[PYTHON, "-ISB", "-c", code])
    assert outcome.status == 0, outcome.output
    return outcome.output


def _host() -> dict[str, object]:
    """What an attempt that got through might have changed."""
    devices = [Path("/dev") / name for name in ("full", "null", "random", "tty", "urandom", "zero")]
    settings = [Path("/proc/sys/kernel") / name for name in ("core_pattern", "hostname", "domainname")]
    return {
        **{str(path): (path.stat().st_mode, path.stat().st_uid, path.stat().st_gid) for path in devices},
        **{str(path): path.read_text() for path in settings},
        **{kind: Path(f"/proc/self/ns/{kind}").readlink() for kind in ("mnt", "net", "pid", "user", "uts")},
        "mounts": Path("/proc/self/mounts").read_text(),
        "swap": Path("/proc/swaps").read_text(),
        "ids": (os.getresuid(), os.getresgid(), os.getgroups(), os.getpriority(os.PRIO_PROCESS, 0)),
    }


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
async def test_the_glass_holds(
    attempt: Attempt, isolating: Provider, hostile_host: dict[str, str], open_sandbox: Opener
) -> None:
    before = _host()
    assert "BREACH" not in await _try(attempt, isolating, hostile_host, open_sandbox)
    assert _host() == before
    assert Path(hostile_host["SECRET"]).read_text() == "hunter2"


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


def test_there_are_attempts_enough() -> None:
    assert len({attempt.name for attempt in ATTEMPTS}) == len(ATTEMPTS) >= 60


async def test_one_session_cannot_reach_another(isolating: Provider, open_sandbox: Opener) -> None:
    """Neither by its path, nor by its processes; and where the server is root, nor by their users on the host."""
    theirs, their_spec = await open_sandbox(isolating)
    mine, my_spec = await open_sandbox(isolating)
    await run(theirs, "import os; os.umask(0); open('secret', 'w').write('hunter2')")
    secret = their_spec.workspace / "secret"
    assert secret.read_text() == "hunter2"
    code = f"""
import glob, os
print([os.path.exists(path) for path in ({str(secret)!r}, {str(their_spec.scratch)!r}, '/mnt/data/secret')])
print(sorted(int(path[6:]) for path in glob.glob('/proc/[0-9]*')) == [1, os.getpid()])
"""
    assert (await run(mine, code)).output == "[False, False, False]\nTrue\n"
    owners = [spec.workspace.stat().st_uid for spec in (their_spec, my_spec)]
    if is_root and not isolating.warning:
        assert len({*owners, 0}) == 3
        assert subprocess.run(["cat", secret], user=owners[1], group=owners[1], extra_groups=[], check=False).returncode
    assert secret.stat().st_uid == owners[0]
