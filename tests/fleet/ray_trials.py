"""What is tried with Ray, in namespaces of network and processes that the caller has made: `ray_trials.py NAME FOLDER`.

Two machines are two addresses of loopback, each with a folder and processes of its own. It ends with a message where
something is not so; what it leaves behind ends with its namespace.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx2
from calls import Caller
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from belljar.fleet.ray.cluster import ray_folder, ray_processes
from belljar.fleet.ray.host import NodeHost
from waiting import until, until_blocking

KEY = "key-of-a-fleet-0123456789-0123456789"
HEAD = "127.0.0.1:6379"
# What a session can find of Ray: its ports, its files, its processes, and the key, which is written here from its end.
SPY = f"""
import os, pathlib, socket
found = []
for port in [6379, 8100, *range(6380, 6410)]:
    for ip in ("127.0.0.1", "127.0.0.2"):
        try:
            socket.create_connection((ip, port), 0.5).close()
            found.append((ip, port))
        except OSError:
            pass
found += [name for name in os.listdir("/tmp") if name.startswith("belljar-ray")]
for path in pathlib.Path("/proc").glob("[0-9]*/*"):
    if path.name in ("cmdline", "environ") and os.access(path, os.R_OK):
        text = path.read_bytes()
        found += [str(path) for sign in (b"raylet", b"RAY_", {KEY[::-1].encode()!r}[::-1]) if sign in text]
"""


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Machine:
    """A machine of the fleet."""

    def __init__(self, folder: Path, name: str, ip: str, ports: int) -> None:
        self.ip, self.ports = ip, ports
        self.data_directory = folder / name
        self.host = NodeHost(self.data_directory / "fleet")
        self.url, self.address = f"http://{ip}:8000/mcp", f"http://{ip}:8100"
        self.variables = {
            **{name: text for name, text in os.environ.items() if not name.startswith(("BELLJAR_", "RAY_", "PYTHON"))},
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "BELLJAR_ENVIRONMENT": os.environ["BELLJAR_ENVIRONMENT"],
            "BELLJAR_DATA_DIRECTORY": str(self.data_directory),
            "BELLJAR_HTTP": f"{ip}:8000",
            "BELLJAR_FLEET_KEY": KEY,
            "BELLJAR_FORK_START": "false",
            "BELLJAR_PRELOAD": "json",
        }
        self.folder = folder
        # Ray looks for its head among the processes of a machine.
        self._init = subprocess.Popen(["unshare", "-p", "-f", "--mount-proc", "--kill-child", "sleep", "infinity"])
        self._inside = until_blocking(lambda: children_of(self._init.pid))[0]

    def run(self, *arguments: str, **more: str) -> str:
        done = subprocess.run(
            ["nsenter", "-t", str(self._inside), "-p", "-m", sys.executable, "-m", "belljar", "fleet", *arguments],
            env={**self.variables, **more},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr[-3000:]}"
        return done.stderr + done.stdout

    def up(self, *arguments: str) -> str:
        return self.run("up", *arguments)

    def join(self, head: "Machine") -> str:
        token = head.host.folder / "ray-token"
        return self.run("join", HEAD, "--ip", self.ip, "--ports", str(self.ports), "--token-file", str(token))

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process(b"belljar\0serve\0")

    @property
    def keeper(self) -> int:
        """The process that starts it again."""
        return self._process(b"belljar.fleet.ray.host\0")

    def _process(self, sign: bytes) -> int:
        mark = f"BELLJAR_DATA_DIRECTORY={self.data_directory}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_ours = mark in (path / "environ").read_bytes().split(b"\0")
                if is_ours and sign in (path / "cmdline").read_bytes():
                    return int(path.name)
        return 0

    def ray(self, name: str) -> int:
        """One of Ray's processes here."""
        return next(pid for pid, known in ray_processes(self.host.folder).items() if known == name)

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Caller]:
        async with (
            httpx2.AsyncClient(timeout=60) as http,
            Client(streamable_http_client(self.url, http_client=http)) as client,
        ):
            yield Caller(client)


class Calls:
    """Somebody who goes on calling a session of one machine over another, and notes what was not answered."""

    def __init__(self, machine: Machine, over: Machine) -> None:
        self.machine, self.over = machine, over
        self.answered = 0
        self.failed: list[str] = []
        self.longest_s = 0.0

    async def run(self) -> None:
        async with self.machine.client() as caller:
            session_id = await caller.new_session()
            await caller.execute("kept = 41", session_id)
        async with self.over.client() as caller:
            while True:
                began = time.monotonic()
                try:
                    result = await caller.execute("kept + 1", session_id)
                    assert result.result == "42", result
                    self.answered += 1
                except Exception as error:
                    self.failed.append(repr(error))
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                await anyio.sleep(0.1)

    async def more(self) -> None:
        """Wait for further answers."""
        before = self.answered
        await until(lambda: self.answered > before + 2)


def pair(folder: Path) -> tuple[Machine, Machine]:
    return Machine(folder, "a", "127.0.0.1", 6380), Machine(folder, "b", "127.0.0.2", 7380)


def kill_actor(name: str) -> None:
    """Kill the process of an actor that calls itself so."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if path.read_bytes().startswith(f"ray::{name}".encode()):
            os.kill(int(path.parent.name), signal.SIGKILL)
            return
    raise AssertionError(f"there is no {name}")


def has_actor(name: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(f"ray::{name}".encode()):
                return True
        except OSError:
            continue
    return False


async def one_machine(folder: Path) -> None:
    """A fleet of one machine: what its server inherits, what a session sees, and that all of it ends."""
    machine, _ = pair(folder)
    said = machine.up()
    assert f"belljar fleet join {HEAD}" in said, said
    await until(lambda: has_actor("NodeAgent"))
    variables = Path(f"/proc/{machine.pid}/environ").read_text().split("\0")
    assert not [line for line in variables if line.startswith(("RAY_", "BELLJAR_FLEET_FOLDER"))]
    assert Path(f"/proc/{machine.pid}/oom_score_adj").read_text().strip() == "0"
    assert os.getpriority(os.PRIO_PROCESS, machine.pid) == 0
    for pid in ray_processes(machine.host.folder):
        assert KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes(), pid
    token = machine.host.folder / "ray-token"
    assert token.stat().st_mode & 0o77 == 0
    # Without the token, nobody gets in.
    stranger = {name: text for name, text in machine.variables.items() if not name.startswith("RAY_")}
    code = f"import ray; ray.init({HEAD!r}, logging_level='CRITICAL'); print('in')"
    tried = subprocess.run(
        [sys.executable, "-c", code], env=stranger, cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert tried.returncode, tried.stdout
    assert "in" not in tried.stdout.split()
    assert "authentication" in tried.stderr.lower(), tried.stderr[-500:]
    async with machine.client() as caller:
        result = await caller.execute(f"{SPY}\nfound, pathlib.Path({str(token)!r}).exists()")
        assert result.result == "([], False)", result
    machine.up()  # once more changes nothing for the server
    pid = machine.pid
    await until(lambda: has_actor("NodeAgent"))
    assert machine.pid == pid
    machine.run("down")
    assert not machine.host.is_running()
    left = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [line for line in left if b"ray" in line and b"ray_trials" not in line], left


async def killed(folder: Path) -> None:
    """Everything of Ray is killed, one after another, while sessions of both machines are called."""
    a, b = pair(folder)
    a.up()
    b.join(a)
    both = [a.address, b.address]
    await until(lambda: a.host.read_peers() == both and b.host.read_peers() == both)
    await until(lambda: b.address in a.run("status", "--json"))
    callers = [Calls(a, a), Calls(b, b), Calls(b, a)]
    work = [asyncio.create_task(calls.run()) for calls in callers]

    async def answers() -> None:
        for calls in callers:
            await calls.more()

    await answers()
    pids = a.pid, b.pid
    for name in ("NodeAgent", "Controller", "NodeAgent"):
        kill_actor(name)
        await answers()
    await until(lambda: has_actor("Controller") and has_actor("NodeAgent"))
    assert a.host.read_peers() == both == b.host.read_peers()

    began = time.monotonic()
    os.kill(b.ray("raylet"), signal.SIGKILL)
    await until(lambda: f"{b.address} gone" in a.host.read_peers())
    told_s = time.monotonic() - began
    await answers()
    b.join(a)
    await until(lambda: a.host.read_peers() == both == b.host.read_peers())
    await answers()

    os.kill(a.ray("gcs_server"), signal.SIGKILL)
    await answers()
    a.up()  # what it knew is on its disk, and b's node waits for it
    await answers()
    kill_actor("Controller")
    await until(lambda: has_actor("Controller"))
    await answers()
    assert (a.pid, b.pid) == pids, "a server was started where one was to be adopted"

    for process in ("raylet", "gcs_server"):
        os.kill(a.ray(process), signal.SIGKILL)
    await answers()
    a.up()
    await until(lambda: a.host.read_peers() == both == b.host.read_peers())
    for task in work:
        task.cancel()
    failed = [calls.failed for calls in callers]
    assert failed == [[], [], []], failed

    # A server that dies is started again: by its keeper, and by Ray's agent where the keeper is dead, too.
    os.kill(pids[0], signal.SIGKILL)
    again = await until(lambda: a.pid != pids[0] and a.pid)
    await until(a.host.is_ready)
    for pid in (a.keeper, again):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: a.pid not in (0, again))
    await until(a.host.is_ready)
    async with a.client() as caller:
        assert (await caller.execute("6 * 7")).result == "42"
    print(
        f"gone told after {told_s:.1f} s; {[calls.answered for calls in callers]} calls answered, "
        f"the longest in {max(calls.longest_s for calls in callers):.2f} s"
    )
    b.run("down")
    await until(lambda: a.host.read_peers() == [a.address])
    assert b.host.has_ended
    a.run("down")


async def scaled(folder: Path) -> None:
    """A machine comes when sessions need it, and goes when they do not, its server in good order first."""
    a, b = pair(folder)
    wanted, config = folder / "cloud.json", folder / "autoscaling.json"
    machine: dict[str, Any] = {"resources": {"belljar_host": 1}, "node_config": {}}
    provider = {"type": "external", "module": "trial_cloud.TrialCloud", "file": str(wanted)}
    kinds = {"head": {**machine, "max_workers": 0}, "machine": {**machine, "min_workers": 0, "max_workers": 1}}
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    cluster = {
        **{f"{name}_commands": [] for name in commands},
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "cluster_name": "trial",
        "provider": {**provider, "disable_node_updaters": True, "disable_launch_config_check": True},
        "max_workers": 1,
        "available_node_types": kinds,
        "head_node_type": "head",
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 1.0,
    }
    config.write_text(json.dumps(cluster))
    both = [a.address, b.address]
    for each in (a, b):
        each.variables["BELLJAR_MAX_SESSIONS"] = "2"
    own = str(Path(__file__).parent)
    a.run("up", "--autoscaling-config", str(config), "--spare", "1", "--idle-s", "5", PYTHONPATH=own)
    assert not wanted.exists()
    async with a.client() as caller:
        sessions = [await caller.new_session() for _ in range(2)]
        began = time.monotonic()
        await until(lambda: wanted.exists() and b.ip in wanted.read_text())
        asked_s = time.monotonic() - began
        b.join(a)
        await until(lambda: a.host.read_peers() == both)
        up_s = time.monotonic() - began
        for session_id in sessions:
            await caller.fields("clear_session", session_id=session_id)
        began = time.monotonic()
        await until(lambda: b.host.has_ended)
        await until(lambda: a.host.read_peers() == [a.address])
        drained_s = time.monotonic() - began
        await until(lambda: b.ip not in wanted.read_text())
        let_go_s = time.monotonic() - began
        assert a.host.is_running()
        assert not b.host.is_running()
        # Needed again before the cloud has taken it away, it returns; here another one is asked for.
        sessions = [await caller.new_session() for _ in range(2)]
        await until(lambda: b.ip in wanted.read_text() or b.host.is_ready())
    print(
        f"a machine was asked for after {asked_s:.0f} s, and there after {up_s:.0f} s; it was drained after "
        f"{drained_s:.0f} s, 5 of them idle, and let go after {let_go_s:.0f} s"
    )


TRIALS = {"scaled": scaled, "one_machine": one_machine, "killed": killed}

if __name__ == "__main__":
    try:
        anyio.run(TRIALS[sys.argv[1]], Path(sys.argv[2]))
    except BaseException:
        for log in Path(sys.argv[2]).glob("*/fleet/host.log"):
            print(f"{log}:\n{log.read_text()[-3000:]}", file=sys.stderr)
        for name in "ab":
            for log in (ray_folder(Path(sys.argv[2]) / name / "fleet") / "session_latest/logs").glob("worker-*.err"):
                print(f"{log}:\n{log.read_text()[-1500:]}", file=sys.stderr)
        raise
