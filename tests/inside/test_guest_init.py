"""A command's descriptors, carried over plain connections between two processes that share nothing else."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from belljar.inside import guest_init
from belljar.sandboxes.microvm import DescriptorBridge

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="descriptors are passed by exec")

ECHO = """
import os, socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
print('out', os.getcwd(), sorted(os.environ), flush=True)
print('err', file=sys.stderr, flush=True)
while chunk := peer.recv(1 << 16):
    peer.sendall(chunk.upper())
sys.exit(7)
"""


class Trial:
    """A command behind guest_init, and the host's ends of its three streams."""

    def __init__(self, folder: Path, stack: ExitStack, code: str = ECHO) -> None:
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self.ours, theirs = socket.socketpair()
        self.out, self.err = stack.enter_context(os.fdopen(out)), stack.enter_context(os.fdopen(err))
        stack.enter_context(self.ours)
        self.ours.settimeout(20)
        number = theirs.fileno()
        given = {1: out_end, 2: err_end, number: number}
        self.bridges = {n: DescriptorBridge(folder / str(n), descriptor) for n, descriptor in given.items()}
        for descriptor in (out_end, err_end):
            os.close(descriptor)
        theirs.close()
        order = {
            "command": [sys.executable, "-ISc", code, str(number)],
            "environment": {"LC_ALL": "C.UTF-8", "ONLY": "1"},
            "folder": "/",
            "descriptors": {n: f"unix:{bridge.path}" for n, bridge in self.bridges.items()},
        }
        # Its own streams go nowhere: whatever is heard came over a connection.
        self.process = subprocess.Popen(
            [sys.executable, "-IS", guest_init.__file__, json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(self.end)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for bridge in self.bridges.values():
            bridge.close()
            bridge.close()


def test_three_streams_cross_with_their_order_and_their_ends(tmp_path: Path) -> None:
    with ExitStack() as stack:
        trial = Trial(tmp_path, stack)
        assert trial.out.readline() == "out / ['LC_ALL', 'ONLY']\n"
        assert trial.err.readline() == "err\n"
        for word in (b"one", b"two"):
            trial.ours.sendall(word)
            assert trial.ours.recv(3) == word.upper()
        trial.ours.shutdown(socket.SHUT_WR)
        assert trial.process.wait(20) == 7
        assert (trial.out.read(), trial.err.read(), trial.ours.recv(1)) == ("", "", b"")


def test_megabytes_cross_whole(tmp_path: Path) -> None:
    content = os.urandom(1 << 20).hex().encode()
    code = (
        "import socket, sys\npeer = socket.socket(fileno=int(sys.argv[1]))\nsize = 0\n"
        f"while size < {len(content)}:\n    size += len(peer.recv(1 << 16))\n"
        "print(size, flush=True); sys.stdout.write('x' * 3_000_000)"
    )
    with ExitStack() as stack:
        trial = Trial(tmp_path, stack, code)
        trial.ours.sendall(content)
        assert trial.out.readline() == f"{len(content)}\n"
        assert len(trial.out.read()) == 3_000_000
        assert trial.process.wait(20) == 0


def test_a_command_that_is_killed_ends_its_streams(tmp_path: Path) -> None:
    with ExitStack() as stack:
        trial = Trial(tmp_path, stack)
        trial.out.readline()
        trial.process.send_signal(signal.SIGKILL)
        assert (trial.out.read(), trial.ours.recv(1)) == ("", b"")


def test_a_bridge_that_nobody_came_to_closes(tmp_path: Path) -> None:
    before = _descriptors()
    reading, writing = os.pipe()
    bridge = DescriptorBridge(tmp_path / "socket", writing)
    os.close(writing)
    bridge.close()
    assert os.read(reading, 1) == b""
    os.close(reading)
    assert _descriptors() == before


def test_an_address_that_is_taken_is_refused_and_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="in use"):
        DescriptorBridge(tmp_path / "taken", writing)
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)


def _descriptors() -> set[str]:
    folder = Path("/proc/self/fd")
    return {entry.name for entry in folder.iterdir()} if folder.exists() else set()
