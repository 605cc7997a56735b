"""Trials of what this host allows: a sandbox by bubblewrap, and a process that enters another sandbox.

Also advice for a host that refuses bubblewrap.
"""

import asyncio
import contextlib
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError
from belljar.sandboxes.base import ForkableProvider, Sandbox, SandboxSpec
from belljar.sandboxes.child import ProgramSilent, run_program, wait_readable
from belljar.sandboxes.namespace.bwrap_args import BwrapCommand, bubblewrap_command, user_map_of
from belljar.sandboxes.namespace.hardening import Hardening
from belljar.sandboxes.namespace.user_namespaces import find_tool

TRIAL_TIMEOUT_S = 10


def try_bubblewrap(bubblewrap: Path, hardening: Hardening) -> str:
    """Make a sandbox like a session's, run `true` in it, and return bubblewrap's complaint, or nothing."""
    with open_trial(hardening) as (spec, stack):
        bwrap = bubblewrap_command(
            hardening, spec, user_map_of(spec.identity), ["true"], {"PATH": "/usr/bin:/bin"}, stack
        )
        return try_command(bubblewrap, bwrap)


@contextlib.contextmanager
def open_trial(hardening: Hardening) -> Generator[tuple[SandboxSpec, contextlib.ExitStack]]:
    """Yield the spec of a made-up session, to try a sandbox with."""
    with tempfile.TemporaryDirectory(prefix="belljar-") as folder, contextlib.ExitStack() as stack:
        spec = SandboxSpec("trial", workspace=Path(folder), scratch=Path(folder), home=Path(folder))
        if hardening.identities:
            identity = hardening.identities.take()
            stack.callback(hardening.identities.release, identity)
            spec = replace(spec, identity=identity)
        yield spec, stack


def try_command(bubblewrap: Path, bwrap: BwrapCommand) -> str:
    """Run bubblewrap once and return its complaint, or nothing."""
    command = [str(bubblewrap), *bwrap.command]
    try:
        answer = run_program(command, timeout_s=TRIAL_TIMEOUT_S, environment={}, pass_fds=bwrap.descriptors)
    except ProgramSilent as silence:
        return str(silence)
    return "" if answer.status == 0 else answer.errors.strip() or f"bwrap: status {answer.status}"


def advice() -> str:
    """Return what the operator can do on a host where bubblewrap is refused."""
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that allows bwrap"
    if _setting("user/max_user_namespaces") == "0":
        return "sysctl -w user.max_user_namespaces=10000"
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "start the container with --security-opt seccomp=FILE --security-opt systempaths=unconfined, docker's and "
            "podman's alike; `belljar container --seccomp` prints the FILE"
        )
    return "`--sandbox process` does not isolate: choose it knowingly"


def _setting(name: str) -> str:
    try:
        return (Path("/proc/sys") / name).read_text().strip()
    except OSError:
        return ""


# Whether a process of one sandbox may enter another, tried with a parent and a sandbox nested in it

_PYTHON = os.path.realpath(sys.executable)
NO_ANSWER = f"no answer from a nested sandbox in {TRIAL_TIMEOUT_S} s"
"""What is wrong where the host was too busy for the trial, which says nothing of the host itself."""
_FIRST_KERNEL = (5, 8)  # the first whose setns(2) takes a pidfd for all namespaces of a process at once
# Holds the sandbox open as a zygote does, and enters the nested sandbox whose pidfd it receives, as every session will.
_FORKER = """
import ctypes, os, socket, sys
if os.fork():
    os.execvp("sleep", ["sleep", "infinity"])
peer = socket.socket(fileno=int(sys.argv[1]))
words, (holder,), _, _ = socket.recv_fds(peer, 100, 1)
flags, uid, gid = map(int, words.split())
libc = ctypes.CDLL(None, use_errno=True)
if libc.setns(holder, flags):
    said = "setns: " + os.strerror(ctypes.get_errno())
else:
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if os.fork():
        os._exit(0)
    said = "entered" if os.path.exists("/mnt/data/nested") else "the folder is another's"
peer.send(said.encode())
"""


def gap_of_host() -> str:
    """Return what the host lacks, as far as that can be told without trying."""
    for tool in ("nsenter", "unshare"):
        if not find_tool(tool):
            return f"{tool} is not installed (util-linux)"
    numbers = platform.release().split(".")[:2]
    if all(number.isdecimal() for number in numbers) and tuple(map(int, numbers)) < _FIRST_KERNEL:
        return f"Linux {platform.release()} is older than {_FIRST_KERNEL[0]}.{_FIRST_KERNEL[1]}"
    return ""


def try_nested(provider: ForkableProvider) -> str:
    """Open a parent and a nested sandbox, have a process enter, and return what went wrong, or nothing. Blocks."""
    answers: list[str] = []

    def run() -> None:
        answers.append(_answer(_enter(provider)))

    # In a thread with its own loop, because the caller may be in one.
    thread = threading.Thread(target=run, name="fork-trial", daemon=True)
    thread.start()
    thread.join()
    return answers[0] if answers else "the trial failed"


def _answer(trial: Coroutine[Any, Any, str]) -> str:
    try:
        return asyncio.run(trial)
    except TimeoutError:
        return NO_ANSWER
    except (BelljarError, OSError) as error:
        return str(error)


async def _enter(provider: ForkableProvider) -> str:
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(TRIAL_TIMEOUT_S):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="belljar-")))
        ours, theirs = socket.socketpair()
        stack.callback(ours.close)
        stack.callback(theirs.close)
        parent = await provider.open_forkable(_spec(folder, "parent"))
        stack.push_async_callback(parent.aclose)
        await _spawn(parent, [_PYTHON, "-I", "-S", "-c", _FORKER, str(theirs.fileno())], theirs.fileno())
        nested = await provider.open_nested(_spec(folder, "nested"), parent)
        stack.push_async_callback(nested.aclose)
        await _spawn(nested, ["sleep", "infinity"])
        entry = nested.entry()
        words = f"{entry.flags} {entry.identity.uid} {entry.identity.gid}"
        socket.send_fds(ours, [words.encode()], [entry.holder])
        theirs.close()
        await wait_readable(ours.fileno())
        answer = ours.recv(1000).decode() or "the process that was to enter died"
        return "" if answer == "entered" else answer


async def _spawn(sandbox: Sandbox, command: list[str], *pass_fds: int) -> None:
    nowhere = subprocess.DEVNULL
    environment = {"PATH": "/usr/bin:/bin"}
    await sandbox.spawn(command, environment=environment, stdout=nowhere, stderr=nowhere, pass_fds=pass_fds)


def _spec(folder: Path, name: str) -> SandboxSpec:
    place = folder / "sessions" / name
    for each in (place / "workspace", place / "scratch", place / "home"):
        each.mkdir(parents=True)
    for each in (place.parent, place):
        each.chmod(0o711)
    (place / "workspace" / name).touch()
    trees = [Path(sys.prefix), Path(sys.base_prefix)]
    return SandboxSpec(name, place / "workspace", place / "scratch", place / "home", trees)
