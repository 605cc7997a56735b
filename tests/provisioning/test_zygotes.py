"""Zygotes that die, and modules that break them: sessions are had all the same, and somebody is told."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from belljar.environments import Environment
from belljar.kernels.base import Kernel
from belljar.kernels.ipython import IPythonKernel
from belljar.provisioning import zygotes
from belljar.provisioning.zygotes import EnvironmentZygote, ZygoteProcess
from belljar.sandboxes.base import Sandbox
from belljar.sandboxes.namespace.process import NamespaceProcess
from belljar.sandboxes.namespace.sandbox import NamespaceSandbox
from cells import ForkingPlace, open_forking_place, run
from waiting import until

pytestmark = pytest.mark.anyio

MODULES = {
    "raises": "raise ValueError('out of order')",
    "leaves": "import sys; sys.exit(3)",
    "lacks": "import a_module_that_nobody_has",
    "starts": "import threading as t; t.Thread(target=t.Event().wait, name='heartbeat', daemon=True).start()",
    "prints": "import sys; print('hello from the module'); print('and to stderr', file=sys.stderr)",
    "floods": "print('x' * 5_000_000)",
    "hooks": (
        "import os; ran = []; fail = lambda: 1 / 0; os.register_at_fork(before=fail, after_in_child=fail); "
        "os.register_at_fork(before=lambda: ran.append('before'), after_in_parent=lambda: ran.append('in the parent'), "
        "after_in_child=lambda: ran.append('in the child'))"
    ),
    "loops": (
        "import asyncio, warnings; warnings.simplefilter('ignore', DeprecationWarning)\n"
        "class Loop(asyncio.SelectorEventLoop): pass\n"
        "class Policy(asyncio.DefaultEventLoopPolicy): _loop_factory = Loop\n"
        "asyncio.set_event_loop_policy(Policy())\n"
    ),
    "changes": "import os, random; random.seed(1); os.chdir('/tmp'); os.environ['LEFT'] = 'behind'",
    "hangs": "import threading; threading.Event().wait()",
    "may_hang": "import os, threading; os.path.exists(__file__ + '.hangs') and threading.Event().wait()",
    "dies": "import os; os._exit(7)",
    "crashes": "import ctypes; ctypes.string_at(0)",
}
FILLING = """
import os, signal
try:
    while os.fork():
        pass
except OSError:
    os.write(1, b"full")
signal.pause()
"""
IS_FORKED = "'zygote' in __import__('sys').orig_argv"


@pytest.fixture(scope="module")
def environment(default_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default one's packages, and modules that misbehave."""
    return make_environment(default_environment, tmp_path_factory.mktemp("environment"))


def make_environment(default_environment: Environment, folder: Path) -> Path:
    folder.chmod(0o755)
    subprocess.run([default_environment.python, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (default,) = default_environment.python.parent.parent.glob("lib/python3*/site-packages")
    (packages / "default.pth").write_text(f"{default}\n")
    for name, code in MODULES.items():
        (packages / f"{name}.py").write_text(code)
    return folder


@asynccontextmanager
async def preloaded(
    environment: Path, folder: Path, *modules: str, **flags: object
) -> AsyncIterator[tuple[ForkingPlace, str]]:
    """A place whose zygote was told to import these, and what is said of it."""
    described = Environment("", environment / "bin/python", ())
    flags |= {"environment": str(environment), "preload": [*modules]}
    async with open_forking_place(described, folder, **flags) as place:
        yield place, (await environment_zygote(place)).complaint


async def environment_zygote(place: ForkingPlace) -> EnvironmentZygote:
    found = await place.starter.zygotes.of(await place.starter.environments.get(place.name))
    assert found is not None
    return found


async def zygote_of(place: ForkingPlace) -> ZygoteProcess | None:
    return await (await environment_zygote(place)).zygote()


async def is_replaced(place: ForkingPlace, first: ZygoteProcess | None) -> bool:
    return await zygote_of(place) is not first


async def value(kernel: Kernel, code: str) -> object:
    outcome = await run(kernel, code)
    assert outcome.is_ok, outcome.events
    return outcome.result and outcome.result["text/plain"]


async def test_modules_that_fail_are_told_of_and_the_others_are_there(environment: Path, tmp_path: Path) -> None:
    modules = ["raises", "leaves", "lacks", "nowhere", "starts", "prints", "floods", "changes", "colorsys"]
    async with preloaded(environment, tmp_path, *modules) as (place, complaint):
        told = dict(part.split(" does not import ") for part in complaint.split("; "))
        assert told == {
            "raises": "(ValueError: out of order)",
            "leaves": "(SystemExit: 3)",
            "lacks": "(ModuleNotFoundError: No module named 'a_module_that_nobody_has')",
            "starts": "(it starts threads, which no session would have: heartbeat)",
        }
        async with place.open("ipython", "one") as one, place.open("ipython", "two") as two:
            first = await run(one, "import sys; sorted({'prints', 'colorsys', 'starts', 'raises'} & {*sys.modules})")
            assert (first.stdout, first.stderr) == ("", "")
            assert first.result == {"text/plain": "['colorsys', 'prints']"}
            assert await value(one, "import os; os.getcwd(), os.environ.get('LEFT')") == "('/mnt/data', None)"
            drawn = [await value(kernel, "import random; random.random()") for kernel in (one, two)]
            assert drawn[0] != drawn[1]
            # It works for who imports it: a thread of the session's own.
            assert await value(one, "import starts, threading; threading.active_count()") == "2"


HOOKED = "import hooks; hooks.ran[-3:]"


async def test_fork_hooks_of_modules_run_for_each_session_and_one_that_fails_stops_nothing(
    environment: Path, tmp_path: Path
) -> None:
    async with preloaded(environment, tmp_path, "hooks") as (place, complaint):
        assert complaint == ""
        async with place.open("ipython", "one") as one, place.open("ipython", "two") as two:
            assert [await value(kernel, IS_FORKED) for kernel in (one, two)] == ["True", "True"]
            # The warm-up forks checkpoints, so there were hooks in the parent before.
            for kernel in (one, two):
                assert await value(kernel, HOOKED) == "['in the parent', 'before', 'in the child']"


async def test_fork_hooks_of_what_the_interpreter_imports_at_its_start_run_too(
    default_environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "environment").mkdir()
    environment = make_environment(default_environment, tmp_path / "environment")
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "early.pth").write_text("import hooks\n")
    (tmp_path / "forks").mkdir()
    async with preloaded(environment, tmp_path / "forks") as (place, _), place.open() as kernel:
        assert await value(kernel, IS_FORKED) == "True"
        assert await value(kernel, HOOKED) == "['in the parent', 'before', 'in the child']"


async def test_sessions_have_a_loop_of_their_own_of_the_kind_that_a_module_has_chosen(
    environment: Path, tmp_path: Path
) -> None:
    asked = "import asyncio; await asyncio.to_thread(int, '3'), type(asyncio.get_running_loop()).__name__"
    async with preloaded(environment, tmp_path, "loops") as (place, complaint):
        assert complaint == ""
        async with place.open("ipython", "one") as one, place.open("ipython", "two") as two:
            for kernel in (one, two):
                assert await value(kernel, IS_FORKED) == "True"
                assert await value(kernel, asked) == "(3, 'Loop')"


async def test_a_module_that_is_not_installed_is_nothing_to_complain_of(environment: Path, tmp_path: Path) -> None:
    async with preloaded(environment, tmp_path, "nowhere", "nowhere.below") as (place, complaint):
        assert complaint == ""
        async with place.open() as kernel:
            assert await value(kernel, IS_FORKED) == "True"


@pytest.mark.parametrize(
    ("module", "said"), [("hangs", "not ready after 1 s"), ("dies", "gone"), ("crashes", "gone")], ids=lambda x: x
)
async def test_a_zygote_that_never_gets_warm_is_told_of_and_sessions_start_cold(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, said: str
) -> None:
    if module == "hangs":
        monkeypatch.setattr(zygotes, "TIMEOUT_S", 1.0)
    async with preloaded(environment, tmp_path, module) as (place, complaint):
        assert said in complaint
        assert not await place.starter.wait_until_warm(place.name)
        async with place.open() as kernel:
            assert await value(kernel, IS_FORKED) == "False"


async def test_copies_of_a_kernel_that_was_started_cold_end_without_a_trace(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygotes, "TIMEOUT_S", 0.5)
    code = (
        "import atexit\natexit.register(lambda: open('left', 'w').close())\n"
        "file = open('log', 'w'); written = file.write('once')"
    )
    async with preloaded(environment, tmp_path, "hangs") as (place, _), place.open() as kernel:
        await run(kernel, code)
        copy = await kernel.fork_checkpoint()
        kernel.forget(copy)
        await until(lambda: not read(copy.pid, "cmdline"))
        assert await value(kernel, "import os; os.listdir(), open('log').read()") == "(['log'], '')"
        assert await value(kernel, "file.close(); open('log').read()") == "'once'"


async def test_a_dead_zygote_is_replaced_and_nobody_notices(environment: Path, tmp_path: Path) -> None:
    async with preloaded(environment, tmp_path) as (place, _), place.open("ipython", "before") as before:
        await run(before, "kept = 1")
        first = await zygote_of(place)
        os.kill(find_zygote(), signal.SIGKILL)
        # The one that comes while it is missing may be cold; it works.
        async with place.open("ipython", "meanwhile") as meanwhile:
            assert await value(meanwhile, "1 + 1") == "2"
            assert await place.starter.wait_until_warm(place.name)
            assert await zygote_of(place) is not first
            async with place.open("ipython", "after") as after:
                assert await value(after, IS_FORKED) == "True"
                assert await value(before, "kept + 1") == "2"
                assert await value(meanwhile, "2 + 2") == "4"


async def test_a_worn_out_zygote_goes_on_until_its_successor_is_warm(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygotes, "RECYCLE_AFTER", 2)
    async with preloaded(environment, tmp_path) as (place, _), place.open("ipython", "before") as before:
        first = await zygote_of(place)
        async with place.open("ipython", "second"), place.open("ipython", "meanwhile") as meanwhile:
            assert await value(meanwhile, IS_FORKED) == "True"
            await until(lambda: is_replaced(place, first))
            async with place.open("ipython", "after") as after:
                assert await value(after, IS_FORKED) == "True"
                seeds = [await value(kernel, "hash('seed')") for kernel in (before, meanwhile, after)]
                assert seeds[0] == seeds[1] != seeds[2]


async def test_a_successor_that_never_gets_warm_is_given_up_for_another(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (module,) = environment.glob("lib/python3*/site-packages/may_hang.py")
    hangs = module.with_name("may_hang.py.hangs")
    monkeypatch.setattr(zygotes, "RECYCLE_AFTER", 2)
    async with preloaded(environment, tmp_path, "may_hang") as (place, _):
        first = await zygote_of(place)
        monkeypatch.setattr(zygotes, "RETRY_AFTER_S", 0.0)
        monkeypatch.setattr(zygotes, "TIMEOUT_S", 0.2)
        hangs.touch()
        async with place.open("ipython", "one"), place.open("ipython", "two"):
            assert await zygote_of(place) is first
            held = await environment_zygote(place)
            await until(lambda: held.complaint)
            hangs.unlink()
            monkeypatch.setattr(zygotes, "TIMEOUT_S", 60.0)
            await until(lambda: is_replaced(place, first))
            async with place.open("ipython", "after") as after:
                assert await value(after, IS_FORKED) == "True"


async def test_a_worn_out_zygote_whose_successor_fails_is_given_up_in_the_end(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygotes, "RECYCLE_AFTER", 2)
    async with preloaded(environment, tmp_path) as (place, _):
        (environment / "bin/python").rename(environment / "bin/gone")
        try:
            kinds: list[object] = []
            for number in range(4):
                async with place.open("ipython", f"number{number}") as kernel:
                    kinds.append(await value(kernel, IS_FORKED))
            assert kinds == ["True"] * 4
            assert await zygote_of(place) is None
        finally:
            (environment / "bin/gone").rename(environment / "bin/python")
        assert (await environment_zygote(place)).complaint


async def test_a_zygote_that_cannot_fork_now_is_there_for_the_next(environment: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("what fills the zygote's sandbox is counted with what starts the next session")
    async with preloaded(environment, tmp_path, max_processes=16) as (place, _):
        zygote = await zygote_of(place)
        assert zygote is not None
        async with fill(zygote.sandbox, environment), place.open("ipython", "meanwhile") as kernel:
            assert await value(kernel, IS_FORKED) == "False"
        async with place.open("ipython", "later") as kernel:
            assert await value(kernel, IS_FORKED) == "True"
        assert await zygote_of(place) is zygote


@asynccontextmanager
async def fill(sandbox: Sandbox, environment: Path) -> AsyncIterator[None]:
    """As many processes in it as its limit allows."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as said, os.fdopen(writing, "wb") as saying:
        command = [str(environment / "bin/python"), "-I", "-c", FILLING]
        process = await sandbox.spawn(command, environment={}, stdout=writing, stderr=writing)
        assert isinstance(process, NamespaceProcess)
        saying.close()
        assert await asyncio.to_thread(said.read, 4) == b"full"
        try:
            yield
        finally:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            # Its end is when the last of them has gone; while the first is going, nested sandboxes are still made
            # below it.
            await asyncio.to_thread(said.read)
            await until(lambda: not process.is_there())


def find_zygote() -> int:
    """Of this process's descendants the one that forks: what holds its sandbox open has started it."""
    (found,) = [pid for pid in descendants(os.getpid()) if b"\0zygote\0" in read(pid, "cmdline") and is_held(pid)]
    return found


def is_held(pid: int) -> bool:
    return read(parent_of(pid), "comm") == b"sleep\n"


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


def parent_of(pid: int) -> int:
    return int(read(pid, "stat").rpartition(b")")[2].split()[1])


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


async def test_a_session_starts_though_what_it_was_to_be_forked_from_dies_at_that_moment(
    default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks = ZygoteProcess.fork

    async def fork_as_it_dies(zygote: ZygoteProcess, *words: Any, **options: Any) -> IPythonKernel:
        sandbox = zygote.sandbox
        assert isinstance(sandbox, NamespaceSandbox)
        os.kill(sandbox.holder().first_pid, signal.SIGKILL)
        await until(lambda: not sandbox.processes()[0].is_there())
        return await forks(zygote, *words, **options)

    async with preloaded(default_environment.python.parent.parent, tmp_path) as (place, _):
        monkeypatch.setattr(ZygoteProcess, "fork", fork_as_it_dies)
        async with place.open("ipython", "one") as one:
            assert await value(one, "6 * 7") == "42"
        monkeypatch.undo()
        # The next one has another to be forked from.
        assert await place.starter.wait_until_warm(place.name)
        async with place.open("ipython", "two") as two:
            assert await value(two, IS_FORKED) == "True"
