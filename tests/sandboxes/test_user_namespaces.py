"""The process that writes maps and limits into the user namespaces of sandboxes, and what holds a sandbox open."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from forked_sandboxes import ForkedSandboxes, SandboxedProcess

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.child import children
from belljar.sandboxes.namespace import user_namespaces
from belljar.sandboxes.namespace.sandbox import NamespaceSandbox
from belljar.sandboxes.namespace.user_namespaces import UserNamespaceWriter

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="Linux only")]
LIMIT = "answer = open('/proc/sys/user/max_inotify_instances').read().strip()"


def writers() -> list[int]:
    """The processes of this one that write into user namespaces."""
    name = os.fsencode(user_namespaces.MODULE)
    return [pid for pid in children(os.getpid()) if name in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def first_process(sandboxed: SandboxedProcess) -> Path:
    """The first process of a sandbox, as the host sees it."""
    assert isinstance(sandboxed.sandbox, NamespaceSandbox)
    return Path(f"/proc/{sandboxed.sandbox.holder().first_pid}")


async def test_after_it_was_killed_another_one_maps_users_and_sets_limits(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    one = await forks.nested(parent)
    (killed,) = writers()
    pidfd = os.pidfd_open(killed)
    os.kill(killed, signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    os.close(pidfd)
    other = await forks.nested(parent)
    assert await other.ask("answer = os.getuid()") == other.spec.workspace.stat().st_uid or os.geteuid() != 0
    assert await other.ask(LIMIT) == await one.ask(LIMIT)
    (again,) = writers()
    assert again != killed


async def test_sandboxes_that_are_made_at_once_each_get_their_own_map(forks: ForkedSandboxes) -> None:
    parent = await forks.parent()
    several = await asyncio.gather(*(forks.open_nested(parent.sandbox) for _ in range(20)))
    found: set[str] = set()
    for sandbox, _ in several:
        assert isinstance(sandbox, NamespaceSandbox)
        found.add(Path(f"/proc/{sandbox.holder().first_pid}/uid_map").read_text())
    assert len(found) == (20 if os.geteuid() == 0 else 1)


async def test_a_map_that_cannot_be_written_is_told_of(forks: ForkedSandboxes) -> None:
    nested = await forks.nested(await forks.parent())
    with pytest.raises(SandboxUnavailable, match="The users of a sandbox cannot be mapped: Operation not permitted"):
        # Its users are mapped already, which Linux lets nobody do twice.
        await UserNamespaceWriter().write(int(first_process(nested).name), maps="0 0 1\n", counts={})


async def test_it_keeps_no_user_namespace_open(forks: ForkedSandboxes) -> None:
    nested = await forks.nested(await forks.parent())
    users = (first_process(nested) / "ns/user").readlink()
    (writer,) = writers()
    assert users not in [entry.readlink() for entry in Path(f"/proc/{writer}/fd").iterdir()]
    assert Path(f"/proc/{writer}/ns/user").readlink() == Path("/proc/self/ns/user").readlink()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="for a server that root runs")
async def test_what_holds_a_sandbox_open_is_another_user_and_has_no_rights(forks: ForkedSandboxes) -> None:
    nested = await forks.nested(await forks.parent())
    (command,) = (Path(f"/proc/{pid}") for pid in children(int(first_process(nested).name)) if pid != nested.pid)
    assert (command / "cmdline").read_bytes() == b"sleep\0infinity\0"
    for holder in (first_process(nested), command):
        fields = dict(line.split(":\t", 1) for line in (holder / "status").read_text().splitlines() if ":\t" in line)
        assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        assert str(nested.spec.workspace.stat().st_uid) not in fields["Uid"].split()
    assert "Permission" in str(await nested.ask("os.kill(2, 9)")) or "not permitted" in str(
        await nested.ask("os.kill(2, 9)")
    )
