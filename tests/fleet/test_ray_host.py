"""The server of a node, which goes on whatever becomes of Ray; and what `belljar fleet` refuses before it starts it."""

import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from belljar.cli import main
from belljar.fleet.ray import cluster
from belljar.fleet.ray.host import NodeHost
from waiting import until_blocking

# In place of a server: it says who it is, and ends in good order when it is told to.
SERVER = """
import os, signal, sys, pathlib
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
signal.pause()
"""
KEY = "k" * 40


@pytest.fixture
def host(tmp_path: Path) -> Generator[NodeHost]:
    (tmp_path / "servers").mkdir()
    host = NodeHost(tmp_path / "fleet")
    command = [sys.executable, "-c", SERVER, str(tmp_path / "servers")]
    host.prepare(command, {"PATH": os.environ["PATH"]}, {"data_directory": str(tmp_path)})
    yield host
    host.stop()
    until_blocking(lambda: not host.is_running())


def newest(host: NodeHost, count: int) -> int:
    """The last one of so many servers that were started."""
    folder = host.folder.parent / "servers"
    until_blocking(lambda: len([*folder.iterdir()]) == count)
    return int(max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns).name)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_whoever_comes_next_adopts_the_server_that_runs(host: NodeHost) -> None:
    assert host.start()
    pid = newest(host, 1)
    assert parent_of(parent_of(pid)) != os.getpid()
    assert not NodeHost(host.folder).start()
    assert newest(host, 1) == pid


def test_a_server_that_is_killed_starts_again_and_one_that_ends_in_good_order_stays_ended(host: NodeHost) -> None:
    host.start()
    pid = newest(host, 1)
    os.kill(pid, signal.SIGKILL)
    again = newest(host, 2)
    assert host.is_running()
    assert host.has_failed()
    assert f"(pid {pid}) was ended by signal 9" in host.log_tail()
    os.kill(again, signal.SIGTERM)
    until_blocking(lambda: not host.is_running())
    assert host.has_ended
    assert host.start()
    newest(host, 3)
    assert not host.has_ended


def test_a_server_whose_keeper_is_killed_is_adopted_and_started_again_once_it_is_dead(host: NodeHost) -> None:
    host.start()
    pid = newest(host, 1)
    os.kill(parent_of(pid), signal.SIGKILL)
    until_blocking(lambda: parent_of(pid) == 1 or Path(f"/proc/{parent_of(pid)}/comm").read_text() != "python\n")
    assert not host.start()
    os.kill(pid, signal.SIGKILL)
    until_blocking(lambda: not host.is_running())
    assert not host.has_ended
    assert host.start()
    newest(host, 2)


def test_the_list_of_machines_is_replaced_as_a_whole_and_only_when_it_says_something_else(host: NodeHost) -> None:
    host.write_peers(["http://10.0.0.1:8100", "http://10.0.0.2:8100 gone"])
    before = host.peers.stat()
    host.write_peers(["http://10.0.0.1:8100", "http://10.0.0.2:8100 gone"])
    assert host.peers.stat().st_ino == before.st_ino
    assert host.read_peers() == ["http://10.0.0.1:8100", "http://10.0.0.2:8100 gone"]
    assert host.peers.stat().st_mode & 0o77 == 0


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings with which a fleet starts."""
    for name in [name for name in os.environ if name.startswith(("BELLJAR_", "RAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(tmp_path / "data"))
    monkeypatch.setenv("BELLJAR_HTTP", "127.0.0.1:8000")
    monkeypatch.setenv("BELLJAR_FLEET_KEY", KEY)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["fleet", *arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["", "10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "0.0.0.0:6379", "[::]:6379", "head:6379"]
)
def test_an_address_that_is_none_is_refused(address: str, fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "join", address)
    assert f"{address!r} is not the address of a cluster" in said
    assert refused(capsys, "up", "--address", address) == said


def test_ray_is_not_started_off_loopback_without_a_token(
    fleet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("BELLJAR_TRUST_NETWORK", "true")
    assert "could run code on every machine" in refused(capsys, "up", "--address", "10.0.0.1:6379")


def test_whoever_joins_needs_the_token_of_the_cluster(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no token for the cluster" in refused(capsys, "join", "127.0.0.1:6379")
    missing = refused(capsys, "join", "127.0.0.1:6379", "--token-file", "nowhere")
    assert "the token in nowhere cannot be read" in missing


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FLEET_KEY", "", "fleet_key"),
        ("FLEET_KEY", "short", "has 5 bytes"),
        ("SANDBOX", "process", "cannot be used in a fleet"),
        ("HTTP", "", "stdio"),
        ("FLEET_PEERS", "dns:hosts:8100", "under Ray belljar keeps that list itself"),
    ],
)
def test_settings_that_make_no_fleet_are_refused(
    name: str,
    value: str,
    said: str,
    fleet: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(f"BELLJAR_{name}", value)
    assert said in refused(capsys, "up")


def test_a_server_that_other_machines_cannot_reach_is_refused(
    fleet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BELLJAR_FLEET_ADDRESS", "127.0.0.1:8100")
    assert "cannot be reached from other machines" in refused(capsys, "up", "--address", "10.0.0.1:6379")


def test_a_machine_in_no_fleet_has_nothing_to_leave(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "this machine is in no fleet" in refused(capsys, "down")


def test_rays_processes_get_the_path_of_the_token_and_nothing_of_belljars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BELLJAR_FLEET_KEY", KEY)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 40)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    cluster.provide_token(tmp_path, "10.0.0.1", None, is_head=False)
    node = cluster.Node(tmp_path, "http://10.0.0.1:8100", "10.0.0.1", "10.0.0.2:6379", 6380)
    variables = node.variables()
    assert cluster.token_file(tmp_path).read_text() == "t" * 40
    assert variables["RAY_AUTH_TOKEN_PATH"] == str(cluster.token_file(tmp_path))
    assert variables["RAY_AUTH_MODE"] == "token"
    assert not [name for name in variables if name.startswith("BELLJAR_") and name != "BELLJAR_FLEET_FOLDER"]
    assert KEY not in variables.values()
    assert "t" * 40 not in [*variables.values(), *node.command()]


def test_processes_of_a_cluster_are_told_by_their_folder(tmp_path: Path) -> None:
    assert cluster.ray_processes(tmp_path) == {}
    assert not cluster.end_ray(tmp_path)
