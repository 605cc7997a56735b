"""Who gets which GPU: how many, where there is room, and what is known of the memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.errors import Busy, GpuUnavailable, InvalidArgument
from belljar.policy.guardrails import limited
from belljar.policy.rules import PolicyLimits
from belljar.provisioning.gpu_monitor import GpuMonitor, is_of_session
from belljar.provisioning.gpus import FILE, SessionGpus
from belljar.sandboxes.namespace.provider import NamespaceProvider
from belljar.settings import EnvironmentEntry, Settings
from made_up_gpus import Library, make_host, stand_on, uuid_of, write

pytestmark = pytest.mark.anyio

Make = Callable[..., SessionGpus]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    stand_on(make_host(tmp_path / "host"), monkeypatch)

    def build(library: Library | None = None, **settings: object) -> SessionGpus:
        chosen = Settings.model_validate({"data_directory": tmp_path, "gpus": "all", **settings})
        return SessionGpus(chosen, NamespaceProvider(), tmp_path, GpuMonitor(library or Library()))

    return build


def indices(gpus: SessionGpus, session_id: str) -> list[int]:
    return [gpu.index for gpu in gpus.of(session_id)]


async def test_sessions_go_where_the_most_memory_is_free_and_then_take_turns(make: Make) -> None:
    gpus = make(Library([40_000, 90_000]))
    await gpus.place("a", "default")
    assert indices(gpus, "a") == [1]
    even = make(Library([90_000, 90_010]))
    for name in "abcd":
        await even.place(name, "default")
    assert [indices(even, name) for name in "abcd"] == [[1], [0], [1], [0]]
    even.release("a")
    await even.place("e", "default")
    assert indices(even, "e") == [1]


async def test_without_the_library_sessions_are_spread_by_their_number(make: Make) -> None:
    library = Library()
    library.is_broken = True
    gpus = make(library)
    for name in "ab":
        await gpus.place(name, "default")
    assert [indices(gpus, name) for name in "ab"] == [[0], [1]]
    assert gpus.monitor.failure == "Driver/library version mismatch"
    library.is_broken = False
    assert gpus.monitor.memory()[uuid_of(0)].free_mb == 90_000


async def test_a_session_that_finds_no_room_is_refused_and_told_what_to_do(make: Make) -> None:
    gpus = make(Library([300, 900]))
    with pytest.raises(Busy, match="the best, GPU 1, has 900 of 100,000 MB free") as caught:
        await gpus.place("a", "default")
    assert "new_session(gpus=0)" in caught.value.hint
    assert gpus.of("a") == ()


async def test_how_many_a_session_gets_is_the_settings_the_environments_and_the_policys(make: Make) -> None:
    named = {"torch": EnvironmentEntry(kind="system", gpus=["1"]), "plain": EnvironmentEntry(kind="system", gpus=[])}
    gpus = make(environments=named, session_gpus=2)
    assert [gpus.default_count(name) for name in ("default", "torch", "plain")] == [2, 2, 0]
    assert (gpus.count("torch", 1), gpus.count("plain", 0), gpus.count("default", None)) == (1, 0, 2)
    with pytest.raises(InvalidArgument, match="gpus is 2, and there are 1 for sessions"):
        gpus.count("torch", 2)
    with pytest.raises(InvalidArgument, match="sessions of environment 'plain' get no GPU here"):
        gpus.count("plain", 1)
    await gpus.place("a", "plain")
    assert gpus.of("a") == ()
    with pytest.raises(GpuUnavailable, match="the session has 2 GPUs, and 1 are there"):
        await gpus.place("b", "torch")
    only = make(gpus="none", environments=named)
    assert (only.is_on, only.default_count("default"), only.default_count("torch")) == (True, 0, 1)
    off = make(gpus="none")
    assert (off.is_on, off.default_count("default")) == (False, 0)


def test_a_policy_can_only_lower_the_number(make: Make) -> None:
    settings = Settings(gpus=["all"], max_gpus=4)
    assert limited(settings, PolicyLimits(max_gpus=1)).max_gpus == 1
    assert limited(settings, PolicyLimits(max_gpus=8)).max_gpus == 4
    assert limited(Settings(gpus=["all"]), PolicyLimits(max_gpus=0)).max_gpus == 0
    assert make(max_gpus=0).default_count("default") == 0


async def test_what_a_session_has_is_in_its_folder_for_the_next_server(make: Make, tmp_path: Path) -> None:
    gpus = make()
    (tmp_path / "a").mkdir()
    gpus.request("a", 2)
    await gpus.place("a", "default")
    assert json.loads((tmp_path / "a" / FILE).read_text()) == {"count": 2, "uuids": [uuid_of(0), uuid_of(1)]}
    assert indices(make(), "a") == [0, 1]
    for text in ("", "[]", '{"count": "x", "uuids": []}', '{"count": 1, "uuids": 3}', "x" * 100_000):
        (tmp_path / "a" / FILE).write_text(text)
        assert indices(make(), "a") == []


async def test_partitions_are_places_of_their_own(make: Make, tmp_path: Path) -> None:
    for minor, name in ((30, "gi3"), (31, "gi3/ci0"), (40, "gi4"), (41, "gi4/ci0")):
        file = tmp_path / "host/proc/driver/nvidia/capabilities/gpu0/mig" / name / "access"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"DeviceFileMinor: {minor}\n")
        write(tmp_path / f"host/dev/nvidia-caps/nvidia-cap{minor}", "", 0o444)
    gpus = make(Library(instances=[("MIG-a", 3, 0), ("MIG-b", 4, 0)]), gpus=["MIG-a", "MIG-b"])
    for name in "ab":
        await gpus.place(name, "default")
    assert [gpu.uuid for name in "ab" for gpu in gpus.of(name)] == ["MIG-a", "MIG-b"]


def test_a_process_belongs_to_the_session_that_it_descends_from() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert is_of_session(child.pid, os.getpid())
        assert not is_of_session(os.getpid(), child.pid)
        assert not is_of_session(1, child.pid)
    finally:
        child.kill()
        child.communicate()


def test_doctor_tells_what_there_is_and_what_is_missing(make: Make, tmp_path: Path) -> None:
    assert make().check().detail == (f"0: NVIDIA H200 ({uuid_of(0)}), 1: NVIDIA H200 ({uuid_of(1)}), driver 580.159.04")
    assert make(gpus="none").check().hint == 'set gpus = "all" to give them'
    (tmp_path / "host/dev/nvidiactl").unlink()
    broken = make().check()
    assert (broken.is_ok, broken.detail) == (False, "device /dev/nvidiactl is not there")
