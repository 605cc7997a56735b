"""No attempt of `escape_attempts` gets out of a provider that isolates, and each can: without glass it does."""

import asyncio
import base64
import json
import os
import secrets
import socket
import subprocess
import tempfile
import textwrap
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from escape_attempts import ATTEMPTS, FORGERIES, PRELUDE, Attempt, Forgery
from trials import DEADLINE_S, ENVIRONMENT, PYTHON, Opener, read_to_end, read_until, run, tight, usable

from belljar.egress.proxy import open_proxy
from belljar.egress.rules import Rule
from belljar.environments import Environment
from belljar.errors import KernelDied
from belljar.kernels.ipython import IPythonKernel, start_ipython
from belljar.kernels.launch import RUNNER
from belljar.outputs.events import Event, Finished
from belljar.provisioning.request_server import PackageReply, open_package_server
from belljar.sandboxes.base import Provider
from belljar.toolbox.broker import Broker, ToolCatalogue
from belljar.toolbox.fair_share import FairShares
from belljar.toolbox.session_server import SearchMessage, open_tool_server

pytestmark = pytest.mark.anyio
OWN_KERNEL = {
    *("find a device of the host", "change a device's mode", "change a device's owner", "look at the hardware"),
    *("honour set-user-ID files", "honour devices", "gain privileges by exec", "become root"),
    *("make a user namespace", "make a user namespace by clone", "ask for the kernel's log", "trace a child"),
    *("make a user namespace by the call clone", "make a user namespace by the call clone3", "be traced"),
    *("read memory of a process", "write memory of a process", "read the first process's variables"),
    *("hear of the kernel's devices", "be more important than others", "type into a terminal, upper bits"),
    *("speak to the console", "load a line discipline", "ask for a keyring", "find a key", "place memory"),
}
"""What a sandbox with a kernel of its own may grant: that kernel answers, and the host's never hears of it."""
LEFT_BY_ENGINES = {"write to /proc"}
"""The mount is writable in containers; what is in it and concerns others is not, which another attempt tries."""
LEFT_BY_DOCKER = {*LEFT_BY_ENGINES, "honour set-user-ID files", "honour devices"}
"""It has no such options for mounts; with no-new-privileges and a list of devices neither gains anything."""
SOLITARY = {"see other processes", "signal everybody", "list the folder above"}
TOGETHER = """
import json, os, sys, tempfile
said = {}
for name, code in json.load(open('programs.json')).items():
    with tempfile.TemporaryDirectory(dir='.') as folder, tempfile.TemporaryFile(dir='.') as output:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.chdir(folder)
                os.setpgid(0, 0)
                for stream in (1, 2): os.dup2(output.fileno(), stream)
                exec(compile(code, name, 'exec'), {'__name__': '__main__'})
                status = 0
            finally:
                sys.excepthook(*sys.exc_info()) if sys.exc_info()[0] else None
                sys.stdout.flush()
                os._exit(status)
        status = os.waitpid(pid, 0)[1]
        output.seek(0)
        said[name] = output.read().decode() + ('' if status == 0 else 'BREACH: status %d' % status)
print(json.dumps(said))
"""
"""Each attempt in a fork of one process, and in a folder of its own."""
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


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _host() -> dict[str, object]:
    """What an attempt that got through might have changed."""
    devices = [Path("/dev") / name for name in ("full", "null", "random", "tty", "urandom", "zero")]
    settings = [Path("/proc/sys/kernel") / name for name in ("core_pattern", "hostname", "domainname")]
    return {
        **{str(path): (path.stat().st_mode, path.stat().st_uid, path.stat().st_gid) for path in devices},
        **{str(path): path.read_text() for path in settings},
        **{kind: Path(f"/proc/self/ns/{kind}").readlink() for kind in ("mnt", "net", "pid", "user", "uts")},
        # Those of containers that are on their way out are their engine's.
        "mounts": [line for line in _lines("/proc/self/mounts") if not {"containers", "docker"} & {*line.split("/")}],
        "swap": Path("/proc/swaps").read_text(),
        "ids": (os.getresuid(), os.getresgid(), os.getgroups(), os.getpriority(os.PRIO_PROCESS, 0)),
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["namespace", "gvisor", "container"])
async def test_the_glass_holds(name: str, hostile_host: dict[str, str], open_sandbox: Opener) -> None:
    provider = usable(name) if name == "container" else tight(name)
    before = _host()
    outcomes = await _try_all(ATTEMPTS, provider, hostile_host, open_sandbox)
    assert {name for name, said in outcomes.items() if "BREACH" in said} - _granted(provider, outcomes) == set()
    assert outcomes.keys() == {attempt.name for attempt in ATTEMPTS}
    assert _host() == before
    assert Path(hostile_host["SECRET"]).read_text() == "hunter2"


def _granted(provider: Provider, outcomes: dict[str, str]) -> set[str]:
    """What this provider may grant, because it means nothing there."""
    if provider.name == "gvisor":
        return OWN_KERNEL
    if provider.name != "container":
        return set()
    left = LEFT_BY_DOCKER if provider.check()[0].detail.startswith("docker") else LEFT_BY_ENGINES
    # Where it is root already, it is nobody's but its own: the one user of a user namespace, without capabilities.
    return {*left, "become root"} if outcomes["become root"] == "BREACH: 0\n" and not is_root else left


async def _try_all(
    attempts: list[Attempt], provider: Provider, host: dict[str, str], open_sandbox: Opener
) -> dict[str, str]:
    """What each said: all in one sandbox, and each that looks around it in one of its own."""
    solitary = [attempt for attempt in attempts if attempt.name in SOLITARY]
    said = {attempt.name: await _try(attempt, provider, host, open_sandbox) for attempt in solitary}
    return said | await _try_together([a for a in attempts if a not in solitary], provider, host, open_sandbox)


async def _try_together(
    attempts: list[Attempt], provider: Provider, host: dict[str, str], open_sandbox: Opener
) -> dict[str, str]:
    """What each said, one after the other, in a process and a folder of its own."""
    sandbox, spec = await open_sandbox(provider)
    programs = {a.name: PRELUDE.format(attempt=textwrap.indent(a.code, "    ")) for a in attempts}
    (spec.workspace / "programs.json").write_text(json.dumps(programs))
    outcome = await run(sandbox, "", environment=host, command=[PYTHON, "-ISB", "-c", TOGETHER])
    assert outcome.status == 0, outcome.output
    return json.loads(outcome.output)


async def test_without_glass_the_attempts_succeed(hostile_host: dict[str, str], open_sandbox: Opener) -> None:
    possible = [a for a in ATTEMPTS if a.unsealed == "everyone" or (a.unsealed == "root" and is_root)]
    attempts = [attempt for attempt in possible if not attempt.needs or Path(attempt.needs).exists()]
    outcomes = await _try_all(attempts, usable("process"), hostile_host, open_sandbox)
    assert [name for name, said in outcomes.items() if "BREACH" not in said or "BREACH: status" in said] == []


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.name)
@pytest.mark.parametrize("name", ["namespace", "gvisor", "container"])
async def test_a_message_that_only_the_runner_should_have_sent_is_refused(
    name: str, forgery: Forgery, default_environment: Environment, open_sandbox: Opener, tmp_path: Path
) -> None:
    layer = tmp_path / "layer"
    layer.mkdir()
    sandbox, _ = await open_sandbox(usable(name), readable=[*default_environment.readable, RUNNER, layer])
    kernel = await start_ipython(sandbox, default_environment, layer=layer, start_timeout_s=60)
    try:
        for cell in forgery.cells[:-1]:
            assert isinstance((await _run_cell(kernel, cell))[-1], Finished)
        with pytest.raises(KernelDied, match=forgery.refusal):
            await _run_cell(kernel, forgery.cells[-1])
    finally:
        await kernel.aclose()


async def _run_cell(kernel: IPythonKernel, code: str) -> list[Event]:
    async with asyncio.timeout(60):
        return [event async for event in kernel.execute(code, allow_input=False)]


async def test_what_is_written_to_tmp_stays_inside(isolating: Provider, open_sandbox: Opener) -> None:
    sandbox, _ = await open_sandbox(isolating)
    name = f"belljar-{secrets.token_hex(8)}"
    folders = ["/tmp", "/var/tmp", "/dev/shm", "/run", "/home/belljar"]
    code = f"for folder in {folders}: open(folder + '/{name}', 'w').write('x')\nprint('written')"
    assert (await run(sandbox, code)).output == "written\n"
    assert not any((Path(folder) / name).exists() for folder in folders)


def test_there_are_attempts_enough() -> None:
    assert len({attempt.name for attempt in ATTEMPTS}) == len(ATTEMPTS) >= 60
    assert {attempt.name for attempt in ATTEMPTS} > OWN_KERNEL


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
print(sorted(int(path[6:]) for path in glob.glob('/proc/[0-9]*')) == sorted({{1, os.getpid()}}))
"""
    assert (await run(mine, code)).output == "[False, False, False]\nTrue\n"
    owners = [spec.workspace.stat().st_uid for spec in (their_spec, my_spec)]
    if is_root and not isolating.warning:
        assert len({*owners, 0}) == 3
        assert subprocess.run(["cat", secret], user=owners[1], group=owners[1], extra_groups=[], check=False).returncode
    assert secret.stat().st_uid == owners[0]


CROWD = """
import os, socket, sys
held = []
for name, beginnings in {crowd}.items():
    for number in range({count}):
        way = socket.socket(socket.AF_UNIX)
        way.settimeout(20)
        try:
            way.connect(os.path.join({scratch!r}, name))
            way.sendall(beginnings[number % len(beginnings)])
        except OSError:
            pass
        held.append(way)
print('held', flush=True)
sys.stdin.read()
"""
FORBIDDEN = b"CONNECT forbidden.example:443 HTTP/1.1\r\nHost: forbidden.example:443\r\n\r\n"
SEARCH = b'{"id": 1, "op": "search", "query": "x", "limit": 1}\n'
CROWD_SIZE = 200
MAX_DESCRIPTORS = 16 + 64 + 20 + 80
"""Of one session: connections and spilled answers of its tools, of its packages, of its way out."""


@asynccontextmanager
async def _session_sockets(folder: Path) -> AsyncGenerator[None]:
    """What a session can connect to, as the server has it."""

    async def find(_: SearchMessage) -> dict[str, object]:
        return {"outcome": "found", "text": "x" * 1_000_000}

    async def fulfil(_: Sequence[str]) -> PackageReply:
        return PackageReply(lines=["installed"])

    def judge(_: str, __: Rule) -> str:
        return ""

    broker = Broker("session", cast("ToolCatalogue", None), limit_bytes=1_000)
    async with (
        open_tool_server(folder, "tools", broker=broker, find=find, folder_inside="/", paces=FairShares()),
        open_package_server(folder, "packages", session_id="session", fulfil=fulfil),
        open_proxy(folder, "egress", session_id="session", rules=[], judge=judge),
    ):
        yield


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def _asked(folder: Path, name: str, question: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(folder / name, limit=4_000_000)
    writer.write(question)
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await reader.readline()
    finally:
        writer.close()


async def test_a_crowd_of_connections_takes_few_descriptors_and_keeps_nobody_else_waiting(
    isolating: Provider, open_sandbox: Opener, tmp_path: Path
) -> None:
    """Some say nothing, some half a request, some ask and never read."""
    sandbox, spec = await open_sandbox(isolating)
    crowd = {
        "tools": [b"", SEARCH[:9], SEARCH],
        "packages": [b"", b'{"requirements"', b"?\n", b'{"requirements": ["x"]}\n'],
        "egress": [b"", FORBIDDEN[:9], FORBIDDEN],
    }
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    async with _session_sockets(spec.scratch), _session_sockets(theirs):
        before = _descriptors()
        (reading, writing), (waiting, going) = os.pipe(), os.pipe()
        code = CROWD.format(crowd=crowd, count=CROWD_SIZE, scratch=sandbox.scratch)
        process = await sandbox.spawn(
            [PYTHON, "-ISBc", f"import os; os.dup2({waiting}, 0)\n{code}"],
            environment=ENVIRONMENT,
            stdout=writing,
            stderr=writing,
            pass_fds=[waiting],
        )
        for descriptor in (writing, waiting):
            os.close(descriptor)
        assert await read_until(reading, b"held\n") == b"held\n"
        assert json.loads(await _asked(theirs, "tools", SEARCH))["outcome"] == "found"
        assert b"installed" in await _asked(theirs, "packages", b'{"requirements": ["x"]}\n')
        assert b" 403 " in await _asked(theirs, "egress", FORBIDDEN)
        assert _descriptors() - before <= MAX_DESCRIPTORS
        os.close(going)
        await read_to_end(reading)
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()
