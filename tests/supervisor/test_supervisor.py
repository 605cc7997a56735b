"""The process that owns sandboxes: what it starts, keeps and ends, whoever its server is."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from belljar.distribution import own_version
from belljar.errors import SandboxUnavailable, SettingsError
from belljar.inside.supervisor.packets import PACKET_BYTES
from belljar.supervisor import Deposit, SupervisorClient, client, discovery, has_supervisor, open_supervisor
from belljar.supervisor.client import GONE, SupervisedChild, SupervisorConnection
from serving_process import alive, supervisors
from waiting import until

pytestmark = pytest.mark.anyio

LONG = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in supervisors(tmp_path):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def lines(folder: Path) -> Iterator["Lines"]:
    with ExitStack() as stack:
        yield Lines(folder, stack)


class Lines:
    """Servers, one after the other."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def open(self, patience_s: float = LONG) -> SupervisorClient:
        supervisor = self._stack.enter_context(open_supervisor(self._folder, patience_s))
        assert supervisor is not None
        return supervisor


async def start(supervisor: SupervisorClient, *command: str, **more: int) -> SupervisedChild:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return await supervisor.start_child(command, environment={}, folder="/", pass_fds=[*more.values()], **streams)


async def until_gone(*pids: int) -> None:
    await until(lambda: not alive({*pids}))


async def test_a_command_has_the_descriptors_it_was_promised_and_no_others(lines: Lines) -> None:
    reading, writing = os.pipe()
    look = f"import os; os.write({writing}, ' '.join(os.listdir('/proc/self/fd')).encode()); os._exit(3)"
    child = await start(lines.open(), sys.executable, "-I", "-S", "-c", look, out=writing)
    os.close(writing)
    assert await child.wait() == 3
    child.release()
    with os.fdopen(reading) as said:
        found = {int(word) for word in said.read().split()}
    # And the one that it looks with.
    assert found == {0, 1, 2, writing, 3}


async def test_how_a_command_ended_is_told_and_what_cannot_start_is_refused(lines: Lines) -> None:
    supervisor = lines.open()
    child = await start(supervisor, "/bin/sh", "-c", "kill -SEGV $$")
    assert await child.wait() == -signal.SIGSEGV
    child.release()
    child.release()
    with pytest.raises(SandboxUnavailable, match=r"Cannot start /nowhere: .*No such file"):
        await start(supervisor, "/nowhere")


async def test_what_is_kept_is_there_for_the_next_server_and_the_rest_has_ended(lines: Lines) -> None:
    first = lines.open()
    reading, writing = os.pipe()
    kept, other = await start(first, "/bin/sleep", "60"), await start(first, "/bin/sleep", "60")
    first.store("one", Deposit({"word": "ü"}, [writing], [kept.pid], is_session=True))
    os.close(writing)
    kept.detach()
    other.detach()
    first.close()
    await until_gone(other.pid)
    second = lines.open()
    assert second.found == ["one"]
    deposit = second.take("one")
    assert deposit.fields == {"word": "ü"}
    os.write(deposit.descriptors[0], b"still open")
    assert os.read(reading, 100) == b"still open"
    again = second.find_child(kept.pid)
    again.kill_group()
    assert await again.wait() == -signal.SIGKILL
    again.release()
    second.drop("one")
    os.close(deposit.descriptors[0])
    assert os.read(reading, 1) == b""
    os.close(reading)


async def test_it_ends_with_everything_when_nobody_comes_in_time(lines: Lines, folder: Path) -> None:
    supervisor = lines.open(patience_s=0.05)
    child = await start(supervisor, "/bin/sh", "-c", "trap '' TERM HUP; sleep 60 & wait")
    supervisor.store("one", Deposit({}, [], [child.pid], is_session=True))
    child.detach()
    (pid,) = supervisors(folder)
    supervisor.close()
    await until_gone(pid, child.pid)
    assert not (folder / "keep" / "socket").exists()
    assert (folder / "keep" / "log").read_text() == ""


async def test_whether_there_is_one_can_be_seen_from_outside(lines: Lines, folder: Path) -> None:
    assert not has_supervisor(folder)
    supervisor = lines.open()
    assert has_supervisor(folder)
    supervisor.store("one", Deposit({}, is_session=True))
    supervisor.close()
    assert has_supervisor(folder)
    (pid,) = supervisors(folder)
    os.kill(pid, signal.SIGTERM)
    await until_gone(pid)
    assert not has_supervisor(folder)


async def test_it_ends_at_once_when_there_is_no_session_to_keep(lines: Lines, folder: Path) -> None:
    supervisor = lines.open()
    supervisor.store("trunk", Deposit({}))
    (pid,) = supervisors(folder)
    supervisor.close()
    await until_gone(pid)


async def test_it_ends_when_it_is_told_to(lines: Lines, folder: Path) -> None:
    supervisor = lines.open()
    child = await start(supervisor, "/bin/sleep", "60")
    supervisor.store("one", Deposit({}, [], [child.pid], is_session=True))
    (pid,) = supervisors(folder)
    os.kill(pid, signal.SIGTERM)
    await until_gone(pid, child.pid)
    assert await child.wait() == -signal.SIGKILL
    child.release()


async def test_orphans_of_its_children_are_reaped(lines: Lines, folder: Path) -> None:
    supervisor = lines.open()
    child = await start(supervisor, "/bin/sh", "-c", "/bin/true & sleep 0.01 & exit 0")
    assert await child.wait() == 0
    child.release()
    (pid,) = supervisors(folder)
    await until(lambda: not Path(f"/proc/{pid}/task/{pid}/children").read_text())


async def test_orphans_of_its_children_are_nobodys_and_end(lines: Lines, folder: Path) -> None:
    supervisor = lines.open()
    child = await start(supervisor, "/bin/sh", "-c", "setsid sleep 600 & exit 0")
    assert await child.wait() == 0
    child.release()
    (pid,) = supervisors(folder)
    await until(lambda: not Path(f"/proc/{pid}/task/{pid}/children").read_text())


async def test_no_process_is_left_when_it_ends(lines: Lines, folder: Path) -> None:
    supervisor = lines.open()
    reading, writing = os.pipe()
    await start(
        supervisor, "/bin/sh", "-c", "setsid sleep 600 & echo up > /proc/self/fd/$0; wait", str(writing), line=writing
    )
    os.close(writing)
    assert await anyio.to_thread.run_sync(os.read, reading, 10) == b"up\n"
    supervisor.close()
    with anyio.fail_after(30):
        assert await anyio.to_thread.run_sync(os.read, reading, 10, abandon_on_cancel=True) == b""
    os.close(reading)


async def test_descriptors_that_come_with_a_bad_request_are_closed(lines: Lines, folder: Path) -> None:
    supervisor = lines.open()
    (pid,) = supervisors(folder)
    exchange = supervisor._exchange
    assert exchange is not None
    before = len([*Path(f"/proc/{pid}/fd").iterdir()])
    for request in ({"op": "keep", "key": "one"}, {"op": "juggle"}, {"op": "drop"}, {"op": "attend", "patience_s": 1}):
        exchange.ask(request, [0, 1, 2]).result(30)
    assert len([*Path(f"/proc/{pid}/fd").iterdir()]) == before


async def test_a_child_for_whose_descriptor_the_server_has_no_room_ends(lines: Lines, folder: Path) -> None:
    supervisor = lines.open()
    (pid,) = supervisors(folder)
    reading, writing = os.pipe()
    os.kill(pid, signal.SIGSTOP)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        async with anyio.create_task_group() as tasks:

            async def refused() -> None:
                with pytest.raises(SandboxUnavailable, match="Too many open files"):
                    await start(supervisor, "/bin/sleep", "600", line=writing)

            tasks.start_soon(refused)
            await anyio.wait_all_tasks_blocked()
            # The lowest that there is: nothing more can be opened.
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            os.kill(pid, signal.SIGCONT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.kill(pid, signal.SIGCONT)
    os.close(writing)
    with anyio.fail_after(30):
        assert await anyio.to_thread.run_sync(os.read, reading, 1, abandon_on_cancel=True) == b""
    os.close(reading)


async def test_it_serves_one_server_at_a_time_and_only_its_own_user(lines: Lines, folder: Path) -> None:
    lines.open()
    with open_supervisor(folder, LONG) as other:
        assert other is None
    assert (folder / "keep").stat().st_mode & 0o777 == 0o700
    assert (folder / "keep" / "socket").stat().st_mode & 0o777 == 0o600
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    (folder / "keep").chmod(0o711)
    (folder / "keep" / "socket").chmod(0o666)
    for parent in [folder, *folder.parents]:
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    code = (
        "import os, socket, sys\n"
        "os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); os.chdir(sys.argv[1]); sock.connect('socket')\n"
        "print(sock.recv(100))"
    )
    answer = subprocess.run(
        ["/usr/bin/env", "python3", "-c", code, str(folder / "keep")], capture_output=True, text=True
    )
    assert answer.stdout == "b'taken'\n", answer.stderr


async def test_a_supervisor_that_was_killed_is_replaced_with_the_next_command(lines: Lines, folder: Path) -> None:
    supervisor = lines.open()
    supervisor.store("one", Deposit({}, is_session=True))
    (pid,) = supervisors(folder)
    os.kill(pid, signal.SIGKILL)
    await until_gone(pid)
    supervisor.drop("one")
    assert not supervisor.has("one")
    child = await start(supervisor, "/bin/true")
    assert await child.wait() == 0
    child.release()
    assert len(supervisors(folder) - {pid}) == 1


def test_a_connection_that_takes_no_request_is_over_before_its_reader_has_noticed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    exchange = SupervisorConnection(ours)
    with theirs:
        theirs.shutdown(socket.SHUT_RD)  # ends what can be sent to it, and nothing that the reader hears of
        assert exchange.ask({"op": "look"}).result(30) == ({"error": GONE}, [])
        assert exchange.is_over
        exchange.close()


async def test_one_of_another_version_is_ended_and_replaced(
    lines: Lines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lines.open()
    child = await start(first, "/bin/sleep", "60")
    first.store("one", Deposit({}, [], [child.pid], is_session=True))
    child.detach()
    (pid,) = supervisors(folder)
    first.close()
    later = shutil.copytree(discovery.PROCESS, folder / "later")
    (later / "packets.py").write_text((later / "packets.py").read_text().replace("FORM = 1\n", "FORM = 2\n"))
    monkeypatch.setattr(client, "FORM", 2)
    monkeypatch.setattr(discovery, "PROCESS", later)
    second = lines.open()
    assert second.found == []
    own = own_version()
    assert second.refusal == f"it was made by belljar {own}, and this is belljar {own}, which cannot read it"
    await until_gone(pid, child.pid)


async def test_what_is_dropped_can_take_its_children_along(lines: Lines) -> None:
    supervisor = lines.open()
    child = await start(supervisor, "/bin/sleep", "60")
    supervisor.store("one", Deposit({}, [], [child.pid], is_session=True))
    supervisor.drop("one", ends=True)
    await until_gone(child.pid)
    child.detach()


async def test_what_is_too_long_for_a_packet_is_refused_and_the_rest_stays(lines: Lines, folder: Path) -> None:
    supervisor = lines.open()
    supervisor.store("one", Deposit({}, is_session=True))
    (pid,) = supervisors(folder)
    supervisor.store("two", Deposit({"words": "x" * PACKET_BYTES}, is_session=True))
    with pytest.raises(SandboxUnavailable, match="is the most"):
        await start(supervisor, "/bin/true", "x" * PACKET_BYTES)
    await supervisor.wait_until_settled()
    assert (supervisor.has("one"), supervisor.has("two")) == (True, False)
    assert supervisors(folder) == {pid}


async def test_it_keeps_more_descriptors_than_a_server_may_open(folder: Path) -> None:
    code = (
        "import os, pathlib, resource, subprocess, sys\n"
        "from belljar.supervisor import Deposit, open_supervisor\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (48, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "with open_supervisor(pathlib.Path(sys.argv[1]), 1) as supervisor:\n"
        "    for number in range(8):\n"
        "        supervisor.store(str(number), Deposit({}, [0] * 10, is_session=True))\n"
        "    assert all(supervisor.has(str(number)) for number in range(8))\n"
        "    for number in range(8):\n"
        "        found = supervisor.take(str(number)).descriptors\n"
        "        assert len(found) == 10, found\n"
        "        for descriptor in found: os.close(descriptor)\n"
        "    supervisor.store('many', Deposit({}, [0] * 60, is_session=True))\n"
        "    try: supervisor.take('many')\n"
        "    except Exception as error: assert type(error).__name__ == 'SandboxUnavailable'\n"
        "    else: raise AssertionError('there is no room')\n"
        "    assert supervisor.is_connected\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stderr=subprocess.PIPE, text=True) as server:
        _, complaints = server.communicate(timeout=60)
    assert (server.returncode, complaints) == (0, "")


async def test_one_that_is_stopped_holds_up_nobody_and_ends_what_it_starts_too_late(
    lines: Lines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.2)
    monkeypatch.setattr(client, "LOOK_S", 0.1)
    supervisor = lines.open()
    child = await start(supervisor, "/bin/sleep", "60")
    (pid,) = supervisors(folder)
    os.kill(pid, signal.SIGSTOP)
    assert await supervisor.fault() == "the supervisor for keep_alive gives no answer"
    with pytest.raises(SandboxUnavailable, match="gives no answer"):
        await start(supervisor, "/bin/sleep", "60")
    supervisor.store("one", Deposit({}, is_session=True))
    child.kill_group()
    await until_gone(child.pid)
    os.kill(pid, signal.SIGCONT)
    assert await child.wait() == -signal.SIGKILL
    child.release()
    await until(lambda: not Path(f"/proc/{pid}/task/{pid}/children").read_text())
    assert await supervisor.fault() == ""
    assert supervisor.has("one")


async def test_a_stopped_one_is_not_waited_for_without_end_by_a_server_that_starts(
    lines: Lines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lines.open()
    first.store("one", Deposit({}, is_session=True))
    (pid,) = supervisors(folder)
    await first.wait_until_settled()
    os.kill(pid, signal.SIGSTOP)
    # Said while nobody listens, by a server that is gone when somebody does.
    for number in range(20):
        first.store(f"late-{number}", Deposit({}, is_session=True))
    first.close()
    monkeypatch.setattr(discovery, "TIMEOUT_S", 0.2)
    with pytest.raises(SandboxUnavailable, match="gives no answer"):
        lines.open()
    os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    assert lines.open().found == ["one", *(f"late-{number}" for number in range(20))]


async def test_what_a_killed_server_said_last_is_heard_before_the_next_one_is_met(lines: Lines, folder: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\n"
        "from belljar.supervisor import Deposit, open_supervisor\n"
        "with open_supervisor(pathlib.Path(sys.argv[1]), 60) as supervisor:\n"
        "    os.kill(int(sys.stdin.readline()), signal.SIGSTOP)\n"
        "    for number in range(20): supervisor.store(str(number), Deposit({}, is_session=True))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as server:
        await until(lambda: has_supervisor(folder) and len(supervisors(folder)) == 1)
        (pid,) = supervisors(folder)
        server.communicate(f"{pid}\n", timeout=60)
    os.kill(pid, signal.SIGCONT)
    assert lines.open().found == [str(number) for number in range(20)]


async def test_what_it_starts_has_the_limits_of_its_server(lines: Lines) -> None:
    reading, writing = os.pipe()
    look = f"import os, resource; os.write({writing}, str(resource.getrlimit(resource.RLIMIT_NOFILE)).encode())"
    child = await start(lines.open(), sys.executable, "-I", "-S", "-c", look, out=writing)
    os.close(writing)
    assert await child.wait() == 0
    child.release()
    with os.fdopen(reading) as said:
        assert said.read() == str(resource.getrlimit(resource.RLIMIT_NOFILE))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
async def test_a_folder_of_somebody_elses_is_refused(folder: Path) -> None:
    (folder / "keep").mkdir()
    os.chown(folder / "keep", 12, 12)
    with pytest.raises(SettingsError, match="belongs to user 12"), open_supervisor(folder, LONG):
        pass


async def test_a_link_in_place_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "real").mkdir()
    (folder / "keep").symlink_to(folder / "real")
    with pytest.raises(SettingsError, match="is no folder"), open_supervisor(folder, LONG):
        pass
