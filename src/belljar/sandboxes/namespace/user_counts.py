"""Limits what Linux counts for a user of the host over all of its processes: the instances and watches of inotify.

Sessions of an ordinary user's server, and forks of one zygote, are counted as one user there, so that one of them could
take all. Linux also counts for each user namespace what is in it and below it, by limits of its own, which a process
with capabilities in that namespace may set. Each session gets a share of what the host lets a user have.
"""

import asyncio
import contextlib
import fcntl
import os
import subprocess
from functools import cache
from pathlib import Path

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.child import start_child
from belljar.sandboxes.namespace.namespaces import find_tool

_PARTS = 8
"""A session may have this part of what the host lets a user have: 16 instances of 128 that Linux allows by itself."""
_NS_GET_USERNS = 0xB701
_MAPPING_S, _RETRY_S = 10.0, 0.001
_TRIAL_S = 10


@cache
def session_counts() -> dict[str, int]:
    """Return the most that a session may have, by the name of the file in /proc/sys/user; empty on other systems."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for kind in ("instances", "watches"):
            of_user = int(Path(f"/proc/sys/fs/inotify/max_user_{kind}").read_text())
            found[f"max_inotify_{kind}"] = max(1, of_user // _PARTS)
    return found


async def limit_counts(pid: int) -> None:
    """Limit the sandbox that a first process is in, if this host lets us. Call it before its command may start.

    A sandbox without a user namespace of its own has a user of the host to itself, and needs no limit.
    """
    with contextlib.ExitStack() as stack:
        try:
            users = _open_owner(pid, stack)
            if users < 0:
                return
            async with asyncio.timeout(_MAPPING_S):
                while not _has_users(pid):  # noqa: ASYNC110 - Linux tells nobody
                    await asyncio.sleep(_RETRY_S)
        except (OSError, TimeoutError):
            return  # it has ended, and whoever waits for it finds out
        nowhere = subprocess.DEVNULL
        # As root there, because for any other user the shell would have no capabilities. Its groups stay, because Linux
        # may forbid to change them.
        entering = (f"--user=/proc/{os.getpid()}/fd/{users}", "--preserve-credentials", "--setuid=0", "--")
        with contextlib.suppress(SandboxUnavailable):
            child = start_child(
                [find_tool("nsenter"), *entering, *_writing()],
                environment={},
                folder="/",
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                pass_fds=(),
            )
            await child.reap()


def _open_owner(pid: int, stack: contextlib.ExitStack) -> int:
    """Return the user namespace that a process's pid namespace belongs to; -1 if it is ours.

    bubblewrap's own process may go on to another one below it, where nobody is root.
    """
    pids = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, pids)
    users = fcntl.ioctl(pids, _NS_GET_USERNS)
    stack.callback(os.close, users)
    return -1 if os.path.samestat(os.fstat(users), Path("/proc/self/ns/user").stat()) else users


def _has_users(pid: int) -> bool:
    """Return whether bubblewrap has mapped the users by now."""
    return bool(Path(f"/proc/{pid}/uid_map").read_text())


@cache
def why_uncounted() -> str:
    """Return why sessions are not limited on this host, tried in a user namespace; empty where they are."""
    if not find_tool("nsenter") or not find_tool("unshare"):
        return "nsenter and unshare are not installed (util-linux)"
    try:
        trial = subprocess.run(
            [find_tool("unshare"), "--user", "--map-root-user", "--", *_writing()],
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if trial.returncode == 0:
        return ""
    return trial.stderr.strip().rpartition("\n")[2] or f"status {trial.returncode}"


def _writing() -> list[str]:
    lines = [f"echo {most} > /proc/sys/user/{name}" for name, most in session_counts().items()]
    return ["/bin/sh", "-c", " && ".join(lines) or "false"]
