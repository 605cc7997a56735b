"""What every provider promises, whatever its glass."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from trials import DEADLINE_S, ENVIRONMENT, PYTHON, SLOW, Opener, Outcome, read_to_end, read_until, run

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Provider, Sandbox

pytestmark = pytest.mark.anyio
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ADDED = {"PWD", "BELLJAR_SANDBOX"}
"""What a provider may add to the environment, as its docstring says."""

SURVIVORS = {
    "a child": "fork()",
    "a child in a session of its own": "fork(); os.setsid()",
    "a daemon forked twice": "fork(); os.setsid(); fork()",
    "a daemon forked twice, elsewhere": "fork(); os.setsid(); fork(); os.chdir('/')",
    "a child that ignores signals": "fork(); [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 13, 15)]",
}
SURVIVE = """
import os, signal, sys
def fork():
    if os.fork():
        signal.pause() if os.getpid() == first else os._exit(0)
first = os.getpid()
{survive}
os.write({fd}, b"ready")
while True:
    signal.pause()
"""


@pytest.fixture
def pipe() -> tuple[int, int]:
    """A pipe; `read_to_end` closes its reading end, the test its writing end."""
    return os.pipe()


async def test_the_status_and_both_streams_come_back(sandbox: Sandbox) -> None:
    outcome = await run(sandbox, "import sys; print(6 * 7); print('oh', file=sys.stderr); sys.exit(3)")
    assert (outcome.status, sorted(outcome.output.split())) == (3, ["42", "oh"])


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
async def test_death_by_a_signal_is_a_negative_status(sandbox: Sandbox, number: signal.Signals) -> None:
    outcome = await run(sandbox, f"import os; os.kill(os.getpid(), {number:d})")
    assert outcome.status == -number


@linux
async def test_the_environment_is_the_given_one(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_SECRET", "hunter2")
    given = {**ENVIRONMENT, "NAME": "a value = with\nlines", "EMPTY": "", "HOME": "/home/belljar"}
    outcome = await run(sandbox, "print(ascii(open('/proc/self/environ').read()))", environment=given)
    pairs = dict(entry.split("=", 1) for entry in eval(outcome.output).split("\0") if entry)
    assert {name: value for name, value in pairs.items() if name not in ADDED} == given


async def test_the_working_directory_is_the_session_folder(provider: Provider, open_sandbox: Opener) -> None:
    sandbox, spec = await open_sandbox(provider)
    (spec.workspace / "given.txt").write_text("from the host")
    outcome = await run(
        sandbox, "import os; print(os.getcwd(), open('given.txt').read()); open('made', 'w').write('x')"
    )
    assert outcome.output == f"{sandbox.workspace} from the host\n"
    assert (spec.workspace / "made").read_text() == "x"


async def test_the_scratch_folder_is_shared_with_the_host(provider: Provider, open_sandbox: Opener) -> None:
    sandbox, spec = await open_sandbox(provider)
    await run(sandbox, f"open({sandbox.scratch!r} + '/connection', 'w').write('here')")
    assert (spec.scratch / "connection").read_text() == "here"


async def test_home_and_the_folder_for_temporary_files_are_writable(sandbox: Sandbox) -> None:
    code = f"for folder in {[sandbox.home, sandbox.temporary]}: open(folder + '/file', 'w').write('x')"
    assert await run(sandbox, code) == Outcome(0, "")


async def test_standard_input_is_at_its_end(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "import sys; print(repr(sys.stdin.read()))")).output == "''\n"


@linux
async def test_only_passed_descriptors_are_open_inside(sandbox: Sandbox, tmp_path: Path, pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    with (tmp_path / "server-file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        listing = "[n for n in range(500) if os.path.lexists('/proc/self/fd/%d' % n)]"
        code = f"import os; os.write({writing}, b'passed'); print(*{listing})"
        outcome = await run(sandbox, code, pass_fds=[writing])
    os.close(writing)
    assert outcome.output.split() == ["0", "1", "2", str(writing)]
    assert await read_to_end(reading) == "passed"


@pytest.mark.parametrize("survive", SURVIVORS.values(), ids=SURVIVORS.keys())
async def test_kill_ends(sandbox: Sandbox, survive: str, pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    code = SURVIVE.format(survive=survive, fd=writing)
    process = await sandbox.spawn(
        [PYTHON, "-c", code], environment=ENVIRONMENT, stdout=writing, stderr=writing, pass_fds=[writing]
    )
    os.close(writing)
    assert await read_until(reading, b"ready") == b"ready"
    await sandbox.kill()
    assert await process.wait() == -signal.SIGKILL
    assert await read_to_end(reading) == ""


async def test_what_a_finished_command_left_behind_is_ended(sandbox: Sandbox, pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    code = f"import os, signal, sys\nif os.fork(): sys.exit(5)\nos.setsid()\nos.write({writing}, b'up')\nsignal.pause()"
    process = await sandbox.spawn(
        [PYTHON, "-c", code], environment=ENVIRONMENT, stdout=writing, stderr=writing, pass_fds=[writing]
    )
    os.close(writing)
    assert await process.wait() == 5
    await sandbox.aclose()
    assert await read_to_end(reading) in {"", "up"}


async def test_a_killed_sandbox_can_be_used_again(sandbox: Sandbox) -> None:
    await run(sandbox, "pass")
    await sandbox.kill()
    assert (await run(sandbox, "print('again')")).output == "again\n"


async def test_a_closed_sandbox_closes_again_and_starts_nothing(sandbox: Sandbox) -> None:
    await run(sandbox, "pass")
    await sandbox.aclose()
    await sandbox.aclose()
    with pytest.raises(SandboxUnavailable, match="closed"):
        await run(sandbox, "pass")


async def test_closing_a_sandbox_that_never_ran_anything(sandbox: Sandbox) -> None:
    await sandbox.aclose()


async def test_kill_and_close_at_once_from_several_tasks(sandbox: Sandbox) -> None:
    started = run(sandbox, "import signal; signal.pause()")
    async with asyncio.timeout(DEADLINE_S):
        endings = (sandbox.kill(), sandbox.kill(), sandbox.aclose(), sandbox.aclose())
        outcome, *nothing = await asyncio.gather(started, *endings, return_exceptions=True)
    assert nothing == [None] * 4
    assert isinstance(outcome, SandboxUnavailable) or outcome == Outcome(-signal.SIGKILL, "")


async def test_several_tasks_wait_for_one_process(sandbox: Sandbox) -> None:
    with Path(os.devnull).open("w") as nowhere:
        process = await sandbox.spawn(
            [PYTHON, "-c", "raise SystemExit(4)"],
            environment=ENVIRONMENT,
            stdout=nowhere.fileno(),
            stderr=nowhere.fileno(),
        )
    async with asyncio.timeout(DEADLINE_S):
        assert await asyncio.gather(*(process.wait() for _ in range(3))) == [4, 4, 4]
        assert await process.wait() == 4


@linux
async def test_many_sandboxes_leave_no_descriptor_and_no_zombie(provider: Provider, open_sandbox: Opener) -> None:
    async def cycle() -> None:
        sandbox, _ = await open_sandbox(provider)
        await run(sandbox, "pass", command=["true"])
        await sandbox.aclose()

    await cycle()
    before, children = _descriptors(), _children()
    for _ in range(3 if provider.name in SLOW else 8):
        await cycle()
    assert _descriptors() == before
    assert _children() <= children


async def test_without_pidfds_a_thread_waits(
    provider: Provider, open_sandbox: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    if provider.name == "nested":
        pytest.skip("a nested sandbox is entered through a pidfd")

    def refuse(_pid: int, _flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    sandbox, _ = await open_sandbox(provider)
    assert (await run(sandbox, "raise SystemExit(7)")).status == 7
    with Path(os.devnull).open("w") as nowhere:
        process = await sandbox.spawn(
            [PYTHON, "-c", "import signal; signal.pause()"],
            environment=ENVIRONMENT,
            stdout=nowhere.fileno(),
            stderr=nowhere.fileno(),
        )
    async with asyncio.timeout(DEADLINE_S):
        await sandbox.aclose()
        assert await process.wait() == -signal.SIGKILL


def _children() -> set[str]:
    """Return the processes that this one started and has not waited for; that of `warm_processes` is among them."""
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}


def _descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}
