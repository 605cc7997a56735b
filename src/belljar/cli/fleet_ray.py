"""`belljar fleet up`, `join` and `down`: this machine as one of a fleet that Ray watches.

The server of this machine is started first, by itself, so that what is wrong with its settings is said before anything
joins anything; Ray's agent here adopts it.
"""

import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from belljar.errors import BelljarError, InvalidArgument, SettingsError
from belljar.fleet.addresses import check_fleet
from belljar.fleet.ray import cluster
from belljar.fleet.ray.host import NodeHost
from belljar.fleet.ray.membership import IDLE_S
from belljar.http.app import check_bind, parse_bind
from belljar.settings import Settings, load_command_settings, variable

FLEET_PORT: Final = 8100
"""Of `fleet_address`, where it is not set."""
_LOOK_S: Final = 0.1
_BLOCK_LOOK_S: Final = 1.0
_STOP_S: Final = 300.0
_FORGET_S: Final = 5.0

_TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the token of the cluster.")]
_Ports = Annotated[int, typer.Option("--ports", min=1024, max=65000, help="First of the ports of Ray on this machine.")]
_Block = Annotated[bool, typer.Option("--block", help="Stay, and exit with 1 when Ray dies: for a service manager.")]


def up_command(
    address: Annotated[
        str, typer.Option(help="IP:PORT of Ray's head on this machine, which the others join.")
    ] = cluster.DEFAULT_ADDRESS,
    ports: _Ports = cluster.DEFAULT_PORTS,
    spare: Annotated[int, typer.Option(min=0, help="Sessions that there is to be room for beyond the open ones.")] = 0,
    idle_s: Annotated[int, typer.Option(min=1, help="How long there are too many machines before one goes.")] = IDLE_S,
    autoscaling_config: Annotated[
        Path | None, typer.Option(help="File of Ray's autoscaler, by which machines come and go with demand.")
    ] = None,
    token_file: _TokenFile = None,
    block: _Block = False,
) -> None:
    """Start a fleet on this machine: its server, and the head of a cluster of Ray."""
    ip, port = cluster.checked_address(address)
    if autoscaling_config is not None and not autoscaling_config.is_file():
        raise InvalidArgument(f"{autoscaling_config} is no file", hint="Name the file of Ray's autoscaler")
    scaling = str(autoscaling_config.absolute()) if autoscaling_config else ""
    head = f"{_in_address(ip)}:{port}"
    host, settings = _checked_settings(ip)
    url = _url(settings, ip)
    node = cluster.Node(host.folder, url, ip, head, ports, is_head=True, autoscaling=scaling)
    _start(node, host, settings, token_file)
    # Imported here, where Ray is known to be installed.
    from belljar.fleet.ray.actors import start_controller

    os.environ.update(node.variables())
    start_controller(head, spare, idle_s, is_scaling=bool(scaling))
    _note(f"Ray's head listens at {head}. On each other machine, with the same settings and {variable('fleet_key')}:")
    _note(f"  belljar fleet join {head} --token-file FILE        # a copy of {cluster.token_file(node.folder)}")
    if block:
        _stay(node)


def join_command(
    address: Annotated[str, typer.Argument(help="IP:PORT of Ray's head, as `belljar fleet up` printed it.")],
    ip: Annotated[str, typer.Option(help="IP address at which the other machines reach this one.")] = "",
    ports: _Ports = cluster.DEFAULT_PORTS,
    token_file: _TokenFile = None,
    block: _Block = False,
) -> None:
    """Make this machine one of a fleet: start its server, and join the cluster of Ray."""
    head_ip, port = cluster.checked_address(address)
    own_ip = cluster.checked_address(f"{ip}:{port}")[0] if ip else _own_address(head_ip, port)
    host, settings = _checked_settings(own_ip)
    head = f"{_in_address(head_ip)}:{port}"
    node = cluster.Node(host.folder, _url(settings, own_ip), own_ip, head, ports)
    _start(node, host, settings, token_file)
    _note(f"this machine has joined the cluster at {node.head}")
    if block:
        _stay(node)


def down_command() -> None:
    """Take this machine out of its fleet: end its server in good order, then Ray here."""
    host = NodeHost(_folder())
    if not host.folder.is_dir():
        raise InvalidArgument("this machine is in no fleet", hint="`belljar fleet up` and `join` make it one")
    was_running = host.is_running()
    host.stop()
    deadline = time.monotonic() + _STOP_S
    while host.is_running():
        if time.monotonic() > deadline:
            raise BelljarError(f"the server has not ended after {_STOP_S:.0f} s", hint=f"See {host.log}, and try again")
        time.sleep(_LOOK_S)
    # While Ray's agent here is there, the others learn that nobody has to wait for this machine.
    deadline = time.monotonic() + (_FORGET_S if was_running and cluster.ray_processes(host.folder) else 0)
    while host.told["url"] in host.read_peers() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    was_joined = cluster.end_ray(host.folder)
    host.write_peers([])
    _note(f"the server {'has ended' if was_running else 'was not running'}, Ray {'too' if was_joined else 'neither'}")


def _folder() -> Path:
    return load_command_settings().data_directory.absolute() / "fleet"


def _start(node: cluster.Node, host: NodeHost, settings: Settings, token_file: Path | None) -> None:
    """Start the server of this machine, then Ray; what was left of Ray here ends first."""
    cluster.provide_token(node.folder, node.ip, token_file, is_head=node.is_head)
    cluster.check_installed()
    if host.is_running():
        _note("the server of this machine runs already and stays as it is; `belljar fleet down` ends it")
    else:
        _start_host(host, settings, node.url)
    if cluster.end_ray(node.folder):
        _note("what was left of Ray here has ended")
    cluster.start_ray(node)


def _checked_settings(ip: str) -> tuple[NodeHost, Settings]:
    """Return the server of this machine and its settings, with those that make it one of a fleet."""
    own, host = load_command_settings(), NodeHost(_folder())
    peers = f"file:{host.peers}"
    if own.fleet_peers not in ("", peers):
        raise SettingsError(
            f"fleet_peers is {own.fleet_peers}, and under Ray belljar keeps that list itself",
            hint="Leave fleet_peers out, or start the servers without `belljar fleet`",
        )
    address = own.fleet_address or f"{_in_address(ip)}:{FLEET_PORT}"
    settings = load_command_settings({"fleet_peers": peers, "fleet_address": address})
    check_fleet(settings)
    check_bind(settings)
    if not _is_loopback(ip) and _is_loopback(parse_bind(address)[0]):
        raise SettingsError(
            f"fleet_address {address} cannot be reached from other machines, which know this one as {ip}",
            hint=f"Set {variable('fleet_address')} to an address of this machine that they reach",
        )
    return host, settings


def _start_host(host: NodeHost, settings: Settings, url: str) -> None:
    """Start the server and wait until it answers; raise an error with what it said where it cannot."""
    own = {name: getattr(settings, name) for name in ("fleet_peers", "fleet_address", "data_directory")}
    own["data_directory"] = settings.data_directory.absolute()
    variables = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    variables |= {variable(name): str(value) for name, value in own.items()}
    told: dict[str, Any] = {"url": url, "data_directory": str(own["data_directory"])}
    told |= {"capacity": settings.max_sessions, "has_store": bool(settings.store)}
    host.prepare([sys.executable, "-P", "-m", "belljar", "serve"], variables, told)
    host.write_peers([url])
    host.start()
    _note(f"the server starts; its log is {host.log}")
    try:
        _wait_until_ready(host)
    except BaseException:
        host.stop()
        raise
    _note(f"the server of this machine answers the others at {url}")


def _wait_until_ready(host: NodeHost) -> None:
    while not host.is_ready():
        if host.has_failed() or not host.is_running():
            raise BelljarError(f"the server cannot start:\n{host.log_tail()}", hint="Mend it, then run this again")
        time.sleep(_LOOK_S)


def _stay(node: cluster.Node) -> None:
    """Wait until Ray dies here, or a signal ends it; the server goes on in both cases."""
    stopping = threading.Event()

    def stop(*_: object) -> None:
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while not stopping.wait(_BLOCK_LOOK_S):
        if cluster.has_died(node.folder, is_head=node.is_head):
            cluster.end_ray(node.folder)
            raise BelljarError("Ray has died on this machine; the server goes on", hint="Run this again")
    cluster.end_ray(node.folder)


def _url(settings: Settings, ip: str) -> str:
    """Return the address at which the other machines reach this one."""
    host, port = parse_bind(settings.fleet_address)
    host = ip if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
    return f"{'https' if settings.tls_certificate else 'http'}://{_in_address(host)}:{port}"


def _own_address(head_ip: str, port: int) -> str:
    """Return the address of this machine from which it reaches the head."""
    family = socket.AF_INET6 if ":" in head_ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((head_ip, port))  # sends nothing
        except OSError as error:
            raise InvalidArgument(f"there is no way to {head_ip}: {error.strerror}", hint="Give --ip") from None
        return probe.getsockname()[0]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_address(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
