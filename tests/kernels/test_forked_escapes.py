"""A session that came in by fork is as sealed as one that was started, and siblings know nothing of each other."""

import base64
import os
import secrets
import socket
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from belljar.kernels.base import Kernel
from cells import ForkingPlace, run
from sandboxes.escape_attempts import ATTEMPTS, PRELUDE

pytestmark = pytest.mark.anyio

# A forked session's sandbox is held open by a process of its own: `test_siblings_see_nothing_of_each_other` looks
# whether there are others.
ITS_OWN = {"see other processes", "signal everybody"}
# All that bubblewrap's own environment has where the session's user may read it.
NOTHING = "BREACH: PWD=/\0\n"


@pytest.fixture(scope="module")
def hostile_host() -> Iterator[dict[str, str]]:
    """Things of the host worth reaching, and where they are."""
    name = f"belljar-{secrets.token_hex(8)}"
    variable = max(Path("/proc/self/environ").read_bytes().split(b"\0"), key=len)
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        secret = Path(folder) / "secret"
        secret.write_text("hunter2")
        (Path(folder) / "other").mkdir()
        for endpoint, address in ((abstract, "\0" + name), (named, f"{folder}/socket")):
            endpoint.bind(address)
            endpoint.listen()
        yield {
            "SECRET": str(secret),
            "OTHER": f"{folder}/other",
            "PORT": str(server.getsockname()[1]),
            "ABSTRACT": name,
            "SOCKET": f"{folder}/socket",
            "SERVER": str(os.getpid()),
            "SERVER_VARIABLE": base64.b64encode(variable).decode(),
        }


@pytest.fixture(scope="module", params=["forked from a zygote", "forked from a session", "woken from a copy"])
async def kernel(
    request: pytest.FixtureRequest, forking_place: ForkingPlace, hostile_host: dict[str, str]
) -> AsyncIterator[Kernel]:
    async with AsyncExitStack() as stack:
        name = request.param.replace(" ", "-")
        kernel = await stack.enter_async_context(forking_place.open("ipython", name))
        if request.param == "forked from a session":
            folders = forking_place.folders(f"{name}-itself", fork_of=name)
            folders.make()
            kernel, _ = await forking_place.starter.fork(kernel, forking_place.folders(name), folders)
            stack.push_async_callback(kernel.aclose)
        elif request.param == "woken from a copy":
            kernel = await kernel.restore(await kernel.fork_checkpoint())
            stack.push_async_callback(kernel.aclose)
        await run(kernel, f"import os; os.environ.update({hostile_host!r})")
        yield kernel


async def test_the_glass_holds_for_a_forked_session(kernel: Kernel, hostile_host: dict[str, str]) -> None:
    before = _host()
    for attempt in ATTEMPTS:
        if attempt.name not in ITS_OWN:
            outcome = await run(kernel, PRELUDE.format(attempt=textwrap.indent(attempt.code, "    ")))
            assert outcome.is_ok, (attempt.name, outcome.events)
            assert "BREACH" not in outcome.stdout or outcome.stdout == NOTHING, attempt.name
            assert _host() == before, attempt.name
    assert Path(hostile_host["SECRET"]).read_text() == "hunter2"


def _host() -> dict[str, object]:
    """What an attempt that got through might have changed."""
    devices = [Path("/dev") / name for name in ("full", "null", "random", "tty", "urandom", "zero")]
    settings = [Path("/proc/sys/kernel") / name for name in ("core_pattern", "hostname", "domainname")]
    return {
        **{str(path): (path.stat().st_mode, path.stat().st_uid, path.stat().st_gid) for path in devices},
        **{str(path): path.read_text() for path in settings},
        # Without those of containers, which other tests start meanwhile.
        "mounts": [
            line
            for line in Path("/proc/self/mounts").read_text().splitlines()
            if not {"containers", "docker"} & {*line.split("/")}
        ],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
    }


_SETTLE = """
import os, socket, subprocess, sys
here = '{name}'
for folder in ('/mnt/data', '/tmp', '/dev/shm', '/home/belljar', '/run/belljar', '/var/tmp'):
    open(folder + '/' + here, 'w').write(here)
os.environ['MARK'] = here
child = subprocess.Popen(['sleep', '600'])
server = socket.create_server(('127.0.0.1', 7070 if here == 'left' else 7071))
abstract = socket.socket(socket.AF_UNIX); abstract.bind('\\0' + here); abstract.listen()
named = socket.socket(socket.AF_UNIX); named.bind('/mnt/data/socket-' + here); named.listen()
held = [here * 1000]
"""

_LOOK = """
import glob, os, re, socket, sys
found = [path for folder in ('/mnt/data', '/tmp', '/dev/shm', '/home/belljar', '/run/belljar', '/var/tmp', {root!r})
         for path in glob.glob(folder + '/**', recursive=True) if {other!r} in path]
found += [n for n in os.listdir('/proc') if n.isdigit() and n != str(os.getpid()) and
          open(f'/proc/{{n}}/comm').read().strip() not in ('bwrap', 'sleep')]
for number in {pids}:
    try: os.kill(number, 0); found.append(number)
    except ProcessLookupError: pass
for address in (('127.0.0.1', {port}), '\\0{other}', '{root}/socket-{other}'):
    family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
    try: socket.socket(family).connect(address); found.append(address)
    except OSError: pass
found += [kind for kind in ('unix', 'tcp') if {other!r} in open('/proc/net/' + kind).read()]
print(found)
"""


async def test_siblings_see_nothing_of_each_other(forking_place: ForkingPlace) -> None:
    async with forking_place.open("ipython", "one") as one, forking_place.open("ipython", "two") as two:
        for kernel, name in ((one, "left"), (two, "right")):
            outcome = await run(kernel, _SETTLE.format(name=name))
            assert outcome.is_ok, outcome.events
        # Each counts its own processes from 1 on; the numbers of the host mean nobody.
        for kernel in (one, two):
            assert (await run(kernel, "max(child.pid, os.getpid()) < 20")).result == {"text/plain": "True"}
        for kernel, other, port, theirs in ((one, "right", 7071, "two"), (two, "left", 7070, "one")):
            root = str(forking_place.workspace(theirs))
            pids = [pid for pid in host_pids() if pid > 1000]
            code = _LOOK.format(other=other, port=port, root=root, pids=pids)
            outcome = await run(kernel, code)
            assert outcome.stdout == "[]\n", outcome.events
        # And what each sees is there.
        for kernel, name in ((one, "left"), (two, "right")):
            mine = "print([open('/tmp/' + here).read(), os.environ['MARK'], child.poll(), held[0][:5]])"
            assert (await run(kernel, mine)).stdout == f"{[name, name, None, (name * 2)[:5]]}\n"


async def test_siblings_are_users_of_their_own_where_the_server_is_root(forking_place: ForkingPlace) -> None:
    if os.geteuid() != 0 or forking_place.provider.warning:
        pytest.skip("sessions are the server's own user here")
    async with forking_place.open("ipython", "three") as three, forking_place.open("ipython", "four") as four:
        users = {
            str((await run(kernel, "import os; os.getresuid(), os.getresgid(), os.getgroups()")).result)
            for kernel in (three, four)
        }
        assert len(users) == 2
        owners = {forking_place.workspace(name).stat().st_uid for name in ("three", "four")}
        assert len({*owners, 0}) == 3


async def test_a_fork_sees_nothing_of_its_origin(forking_place: ForkingPlace) -> None:
    async with forking_place.open("ipython", "origin") as origin:
        folders = forking_place.folders("fork", fork_of="origin")
        folders.make()
        fork, _ = await forking_place.starter.fork(origin, forking_place.folders("origin"), folders)
        try:
            await run(origin, _SETTLE.format(name="left"))
            root = str(forking_place.workspace("origin"))
            pids = [pid for pid in host_pids() if pid > 1000]
            outcome = await run(fork, _LOOK.format(other="left", port=7070, root=root, pids=pids))
            assert outcome.stdout == "[]\n", outcome.events
        finally:
            await fork.aclose()


def host_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
