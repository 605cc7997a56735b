"""Finds out whether this host lets a process of one sandbox enter another, by trying it with a parent and one nested
in it."""

import asyncio
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError
from belljar.sandboxes.base import ForkableProvider, Sandbox, SandboxSpec
from belljar.sandboxes.child import wait_readable
from belljar.sandboxes.namespace.namespaces import find_tool

_TIMEOUT_S = 10.0
_PYTHON = os.path.realpath(sys.executable)
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
    thread = threading.Thread(target=run, name="fork-trial")
    thread.start()
    thread.join()
    return answers[0] if answers else "the trial failed"


def _answer(trial: Coroutine[Any, Any, str]) -> str:
    try:
        return asyncio.run(trial)
    except TimeoutError:
        return f"no answer from a nested sandbox in {_TIMEOUT_S:.0f} s"
    except (BelljarError, OSError) as error:
        return str(error)


async def _enter(provider: ForkableProvider) -> str:
    async with AsyncExitStack() as stack, asyncio.timeout(_TIMEOUT_S):
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
