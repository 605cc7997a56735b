"""Ray's own processes on this machine: how they are started for a fleet, with what must not be forgotten, and ended.

Whoever reaches Ray's ports with its token runs code on every machine as the user that started it, and Ray listens on
all interfaces whatever it is told. So it is never started off loopback without a token, which stays in a file of the
data directory: Ray's processes get its path, and none of belljar's variables.
"""

import hashlib
import ipaddress
import json
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from belljar.distribution import install_extra
from belljar.errors import BelljarError, InvalidArgument, SettingsError
from belljar.files.private import make_folder, replace_file
from belljar.fleet.ray.actors import FOLDER_VARIABLE, RESOURCE

DEFAULT_ADDRESS: Final = "127.0.0.1:6379"
DEFAULT_PORTS: Final = 6380
OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024
"""Ray's least, because nothing of ours is in it."""
_TOKEN, _TOKEN_PATH, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"
_OUR_VARIABLES: Final = "BELLJAR_"
_TUNED: Final = {
    # A dead machine is known after a second and a half, and no sooner than a busy one answers.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # What workers start inherits these, our servers included.
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    # A server is nobody's child here, and stays when whoever started it goes.
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "false",
    "RAY_process_group_cleanup_enabled": "false",
    # How long machines wait for a head that is started again; what it knew is on its disk.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_PORTS: Final = (
    "--node-manager-port",
    "--object-manager-port",
    "--runtime-env-agent-port",
    "--dashboard-agent-grpc-port",
    "--dashboard-agent-listen-port",
    "--metrics-export-port",
)
_WORKER_PORTS: Final = 20
_RAYLET, _GCS = "raylet", "gcs_server"
_LOOK_S: Final = 0.1
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Node:
    """This machine as a node of a cluster of Ray."""

    folder: Path
    """Of its host."""
    url: str
    """At which the server here answers the others: the node's name, by which it is known even when it is dead."""
    ip: str
    head: str
    """The address of the cluster, as IP:PORT."""
    ports: int
    """The first of those at which it is reached by other nodes."""
    is_head: bool = False
    autoscaling: str = ""
    """The file that tells Ray's autoscaler how machines are had; empty where their number is fixed."""

    def command(self) -> list[str]:
        """Return the command that starts Ray here."""
        first_worker = self.ports + len(_PORTS)
        options = [
            f"--node-name={self.url}",
            f"--node-ip-address={self.ip}",
            "--num-cpus=0",
            "--num-gpus=0",
            f"--temp-dir={ray_folder(self.folder)}",
            f"--resources={json.dumps({RESOURCE: 1})}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            *(f"{option}={self.ports + number}" for number, option in enumerate(_PORTS)),
            f"--min-worker-port={first_worker}",
            f"--max-worker-port={first_worker + _WORKER_PORTS - 1}",
        ]
        if self.is_head:
            options += ["--head", f"--port={self.head.rpartition(':')[2]}", "--include-dashboard=false"]
            options += [f"--autoscaling-config={self.autoscaling}"] if self.autoscaling else ["--no-monitor"]
        else:
            options.append(f"--address={self.head}")
        return [sys.executable, "-m", "ray.scripts.scripts", "start", *options]

    def variables(self) -> dict[str, str]:
        """Return the environment of Ray's processes: ours without belljar's variables, and with what Ray needs."""
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(_OUR_VARIABLES)}
        token = token_file(self.folder)
        secured = {_MODE: "token", _TOKEN_PATH: str(token)} if token.exists() else {_MODE: "disabled"}
        inherited.pop(_TOKEN, None)
        storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.folder / "gcs")}
        return {
            **_TUNED,
            **(storage if self.is_head else {}),
            **inherited,
            **secured,
            FOLDER_VARIABLE: str(self.folder),
        }


def check_installed() -> None:
    """Raise an error where Ray is not installed."""
    if find_spec("ray") is None:
        raise InvalidArgument("Ray is not installed beside belljar", hint=f"Run: {install_extra('ray')}")


def checked_address(text: str) -> tuple[str, int]:
    """Return the IP address and the port of HOST:PORT; Ray itself would take names, and mean all interfaces by some."""
    host, _, port = text.rpartition(":")
    try:
        ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        ip = None
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if ip is None or ip.is_unspecified or not is_port:
        raise InvalidArgument(
            f"{text!r} is not the address of a cluster",
            hint=f"Write the IP address and the port at which the other machines reach it, like 10.0.0.5:6379, or "
            f"{DEFAULT_ADDRESS} for this machine alone",
        )
    return str(ip), int(port)


def provide_token(folder: Path, ip: str, named_file: Path | None, *, is_head: bool) -> None:
    """Put the token of the cluster where Ray's processes here find it; a head without one makes one."""
    make_folder(folder)
    path = token_file(folder)
    if os.environ.get(_MODE, "").lower() == "disabled":
        if not ipaddress.ip_address(ip).is_loopback:
            raise SettingsError(
                f"{_MODE} is disabled, and whoever reaches {ip} could run code on every machine",
                hint=f"Leave {_MODE} out; belljar makes a token",
            )
        path.unlink(missing_ok=True)
        return
    given = named_file or (Path(named) if (named := os.environ.get(_TOKEN_PATH)) else None)
    try:
        token = given.read_text().strip() if given else os.environ.get(_TOKEN, "").strip()
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"the token in {given} cannot be read: {error}") from None
    if not token and not path.exists():
        if not is_head:
            raise InvalidArgument(
                "there is no token for the cluster",
                hint=f"Copy {path} from the machine where `belljar fleet up` was run to a file here, and give it with "
                f"--token-file, or set {_TOKEN}",
            )
        token = secrets.token_hex(32)
    if token:
        replace_file(path, token)


def start_ray(node: Node) -> None:
    """Start Ray on this machine; raise an error with what it has said where it does not start."""
    _make_ray_folder(ray_folder(node.folder))
    # Its processes keep what they print to, so a pipe would never end.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command, variables = node.command(), node.variables()
        done = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=False)
        said: list[str] = []
        for file in (out, err):
            file.seek(0)
            said += file.read().strip().splitlines()[-1:]
    if done.returncode:
        raise BelljarError(
            f"Ray did not start: {said[-1] if said else f'status {done.returncode}'}",
            hint=f"See the logs in {ray_folder(node.folder)}; `belljar fleet down` ends what is left of an earlier one",
        )


def end_ray(folder: Path) -> bool:
    """End Ray's processes that belong to this host's folder, and nobody else's; return whether there were any."""
    found = ray_processes(folder)
    # A raylet says goodbye to the head's processes, so these come after it.
    heads = {pid for pid, name in found.items() if name == _GCS}
    for pids, number in (
        (found.keys() - heads, signal.SIGTERM),
        (heads, signal.SIGTERM),
        (found.keys(), signal.SIGKILL),
    ):
        for pid in pids & ray_processes(folder, found).keys():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _END_S
        while pids & ray_processes(folder, found).keys() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
    return bool(found)


def has_died(folder: Path, *, is_head: bool) -> bool:
    """Return whether one of the processes that make a node of this machine is gone."""
    return not {_RAYLET, *([_GCS] if is_head else [])} <= set(ray_processes(folder).values())


def ray_processes(folder: Path, known: Mapping[int, str] = {}) -> dict[int, str]:
    """Return the names of Ray's processes on this machine that belong to this host's folder, by their numbers.

    They have the folder in their environment, or a parent that does; those that renamed themselves have none to read.
    """
    mark = f"{FOLDER_VARIABLE}={folder}".encode()
    found: dict[int, str] = {}
    parents: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            if state == "Z":
                continue
            pid = int(path.name)
            parents[pid] = (int(parent), name)
            if known.get(pid) == name or mark in (path / "environ").read_bytes().split(b"\0"):
                found[pid] = name
    while added := {pid: name for pid, (parent, name) in parents.items() if parent in found and pid not in found}:
        found |= added
    found.pop(os.getpid(), None)
    return found


def token_file(folder: Path) -> Path:
    """Return the file with the token of the cluster, as this machine has it."""
    return folder / "ray-token"


def ray_folder(folder: Path) -> Path:
    """Return where Ray has its logs and sockets, whose paths have to be short."""
    name = hashlib.blake2b(os.fsencode(folder), digest_size=4).hexdigest()
    return Path(tempfile.gettempdir()) / f"belljar-ray-{name}"


def _make_ray_folder(path: Path) -> None:
    """Make Ray's folder, in one that everybody may write, ours alone."""
    make_folder(path)
    status = path.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        raise SettingsError(f"{path} belongs to user {status.st_uid}", hint="Have them remove it, or set TMPDIR")
