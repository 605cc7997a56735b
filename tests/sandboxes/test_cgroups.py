"""Groups: the v1 writer against this host where it can, the v2 writer against a made-up tree of files.

A folder is no cgroupfs: it tells which files are written with what, not whether a kernel obeys.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.base import Limits
from belljar.sandboxes.limits.cgroup_discovery import LEAF, ControlGroups
from belljar.sandboxes.limits.cgroups import ControlGroup, GroupV1
from belljar.sandboxes.limits.enforcement import Enforcer
from belljar.sandboxes.limits.server_groups import PREFIX, ServerGroups
from belljar.sandboxes.limits.systemd_scope import find_control_groups
from belljar.sandboxes.limits.trials import try_limits

LIMITS = Limits(memory_mb=100, cpus=1.5, processes=20)
FILES = {
    "cgroup.procs": "",
    "cgroup.subtree_control": "",
    "cgroup.kill": "",
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.peak": "0",
    "memory.events": "low 0\nmax 3\noom 2\noom_kill 1\n",
    "memory.stat": "anon 10\nfile 5000\nshmem 1000\n",
    "cpu.max": "max 100000",
    "cpu.stat": "usage_usec 5\nnr_periods 3\nnr_throttled 2\n",
    "pids.max": "max",
    "pids.events": "max 4\n",
}

pytestmark = pytest.mark.anyio


class FakeTree:
    """A folder whose new folders have the files that a kernel would put there, and can be removed with them."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch, lacking: frozenset[str] = frozenset()) -> None:
        self.top = top
        self._files = {name: text for name, text in FILES.items() if name not in lacking}
        make, remove = Path.mkdir, Path.rmdir
        self.fill(top)

        def mkdir(path: Path, *arguments: object, **options: object) -> None:
            make(path, *arguments, **options)  # pyright: ignore[reportArgumentType]
            if path.is_relative_to(top):
                self.fill(path)

        def rmdir(path: Path) -> None:
            if path.is_relative_to(top) and not any(below.is_dir() for below in path.iterdir()):
                for file in path.iterdir():
                    file.unlink()
            remove(path)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", rmdir)

    def change(self, name: str, text: str) -> None:
        self._files[name] = text

    def fill(self, folder: Path) -> None:
        for name, text in self._files.items():
            if not (folder / name).exists():
                (folder / name).write_text(text)

    def offer(self, *, has_tenants: bool = False) -> ControlGroups:
        places = dict.fromkeys(("memory", "cpu", "pids"), self.top)
        return ControlGroups("v2", places, is_unified=True, has_tenants=has_tenants)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTree:
    return FakeTree(tmp_path, monkeypatch)


def refused(*_: object) -> int:
    raise OSError(errno.EINVAL, "before Linux 6.12")


def only(group: ControlGroup) -> Path:
    (folder,) = set(group.folders.values())
    return folder


async def test_a_unified_group_is_written_with_its_limits_and_no_swap(tree: FakeTree) -> None:
    groups = ServerGroups(tree.offer())
    group = groups.make("ab-c", LIMITS)
    assert group is not None
    folder = only(group)
    assert (folder.parent.parent, folder.name) == (tree.top, "abc-1")
    written = {name: (folder / name).read_text() for name in ("memory.swap.max", "cpu.max", "pids.max")}
    assert written == {"memory.swap.max": "0ax", "cpu.max": "150000 100000", "pids.max": "20x"}, "written over in place"
    assert (folder / "memory.max").read_text() == str(100 << 20)
    assert (folder.parent / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    assert group.procs_files() == [str(folder / "cgroup.procs")]
    await groups.remove(group)
    assert [path for path in tree.top.iterdir() if path.is_dir()] == []


async def test_a_unified_group_tells_what_was_hit(tree: FakeTree) -> None:
    enforcement = Enforcer(tree.offer()).enforce("s", LIMITS)
    assert enforcement.group is not None
    folder = only(enforcement.group)
    (folder / "memory.peak").write_text(str(90 << 20))
    kinds = {incident.kind: incident.detail for incident in enforcement.incidents()}
    assert kinds["out_of_memory"] == "used 100 MB, the limit is 100 MB"
    assert "more than 20 processes" in kinds["too_many_processes"]
    assert enforcement.incidents() == []
    assert 99 < enforcement.memory_peak_mb() < 100, "without the file cache, which the kernel takes back"
    assert enforcement.memory_peak_mb() < 99, "nothing was killed since"
    (folder / "memory.events").write_text("oom 3\noom_kill 2\n")
    assert [incident.kind for incident in enforcement.incidents()] == ["out_of_memory"]
    await enforcement.release()


async def test_after_a_kill_the_figure_is_the_limit_also_where_a_peak_cannot_be_reset(
    tree: FakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    enforcement = Enforcer(tree.offer()).enforce("s", LIMITS)
    assert enforcement.group is not None
    folder = only(enforcement.group)
    monkeypatch.setattr(os, "pwrite", refused)
    (folder / "memory.peak").write_text(str(100 << 20))
    (folder / "memory.current").write_text(str(29 << 20))
    assert 99 < enforcement.memory_peak_mb() < 100, "a cell touches the limit and gives back what it held"
    assert enforcement.incidents()
    enforcement.memory_peak_mb()
    (folder / "memory.events").write_text("oom 3\noom_kill 2\n")
    assert 99 < enforcement.memory_peak_mb() < 100
    assert [incident.detail for incident in enforcement.incidents()] == ["used 100 MB, the limit is 100 MB"]
    await enforcement.release()


async def test_a_process_that_was_killed_for_a_limit_above_the_session_says_so(tree: FakeTree) -> None:
    enforcement = Enforcer(tree.offer()).enforce("s", LIMITS)
    assert enforcement.group is not None
    enforcement.incidents()
    enforcement.memory_peak_mb()
    folder = only(enforcement.group)
    (folder / "memory.peak").write_text(str(30 << 20))
    (folder / "memory.events").write_text("oom 2\noom_kill 2\n")
    assert 29 < enforcement.memory_peak_mb() < 30
    [incident] = enforcement.incidents()
    assert incident.detail == "used 30 MB of its 100 MB, and what it runs in (service, container, machine) had no more"
    await enforcement.release()


async def test_a_unified_group_is_killed_in_one_stroke(tree: FakeTree) -> None:
    groups = ServerGroups(tree.offer())
    group = groups.make("s", LIMITS)
    assert group is not None
    group.kill()
    assert (only(group) / "cgroup.kill").read_text() == "1"
    await groups.remove(group)


async def test_older_kernels_lack_files_and_a_group_is_made_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = frozenset({"memory.peak", "memory.swap.max", "cgroup.kill", "pids.events"})
    groups = ServerGroups(FakeTree(tmp_path, monkeypatch, lacking).offer())
    group = groups.make("s", LIMITS)
    assert group is not None
    assert (group.take_peak_bytes(), group.hits("pids"), group.hits("memory")) == (0, 0, 1)
    group.kill()
    assert not (only(group) / "cgroup.kill").exists()
    await groups.remove(group)


async def test_who_is_in_a_unified_group_moves_into_a_leaf_before_it_passes_controllers_on(tree: FakeTree) -> None:
    (tree.top / "cgroup.procs").write_text("71\n")
    groups = ServerGroups(tree.offer(has_tenants=True))
    group = groups.make("s", LIMITS)
    assert group is not None
    assert (tree.top / LEAF / "cgroup.procs").read_text() == "71"
    assert (tree.top / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    await groups.remove(group)


async def test_a_server_whose_group_is_removed_underneath_makes_it_again(tree: FakeTree) -> None:
    groups = ServerGroups(tree.offer())
    first = groups.make("s", LIMITS)
    assert first is not None
    run = only(first).parent
    only(first).rmdir()
    run.rmdir()
    second = groups.make("s", LIMITS)
    assert second is not None
    assert only(second).parent == run
    assert (run / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    await groups.remove(first)
    await groups.remove(second)
    assert not run.exists()


async def test_a_place_that_is_gone_altogether_is_an_error_and_not_waited_for(tree: FakeTree, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    places = dict.fromkeys(("memory", "cpu", "pids"), gone)
    enforcer = Enforcer(ControlGroups("v2", places, is_unified=True))
    enforcement = enforcer.enforce("s", LIMITS)
    assert enforcement.group is not None
    only(enforcement.group).rmdir()
    only(enforcement.group).parent.rmdir()
    gone.rmdir()
    with pytest.raises(SandboxUnavailable, match="control group of a session cannot be made"):
        enforcer.enforce("s", LIMITS)
    await enforcement.release()


async def test_a_peak_that_the_kernel_cannot_reset_is_told_once_and_then_what_is_used(
    tree: FakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = ServerGroups(tree.offer())
    group = groups.make("s", LIMITS)
    assert group is not None
    (only(group) / "memory.current").write_text("30")
    monkeypatch.setattr(os, "pwrite", refused)
    (only(group) / "memory.peak").write_text("70")
    assert [group.take_peak_bytes(), group.take_peak_bytes()] == [70, 30]
    (only(group) / "memory.peak").write_text("80")
    assert group.take_peak_bytes() == 80
    await groups.remove(group)


async def test_only_controllers_with_a_limit_get_a_group(tree: FakeTree) -> None:
    groups = ServerGroups(tree.offer())
    assert groups.make("s", Limits(disk_mb=1, open_files=1)) is None
    group = groups.make("s", Limits(processes=7))
    assert group is not None
    assert [*group.folders] == ["pids"]
    await groups.remove(group)


async def test_groups_of_a_server_that_was_killed_are_removed_and_those_of_a_living_one_stay(tree: FakeTree) -> None:
    dead, alive = tree.top / f"{PREFIX}1-dead", tree.top / f"{PREFIX}2-alive"
    (dead / "session-1").mkdir(parents=True)
    (alive / "session-1").mkdir(parents=True)
    (tree.top / "others").mkdir()
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    groups = ServerGroups(tree.offer())
    group = groups.make("s", LIMITS)
    assert group is not None
    assert (dead.exists(), (alive / "session-1").exists(), (tree.top / "others").exists()) == (False, True, True)
    await groups.remove(group)
    os.close(lock)


async def test_a_host_that_refuses_what_it_promised_is_one_without_groups(
    tree: FakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    (tree.top / "cgroup.subtree_control").unlink()
    (tree.top / "cgroup.subtree_control").mkdir()
    groups = ServerGroups(tree.offer(has_tenants=True))
    assert groups.make("s", LIMITS) is None
    assert groups.make("s", LIMITS) is None
    assert groups.controllers == []
    assert len(caplog.records) == 1


async def test_a_host_without_groups_makes_none_and_says_so() -> None:
    enforcer = Enforcer(ControlGroups("none"))
    enforcement = enforcer.enforce("s", LIMITS)
    assert (enforcement.group, enforcement.incidents(), enforcement.memory_peak_mb()) == (None, [], 0)
    assert enforcement.limited_command(["true"]) == ["true"]
    assert "per process only" in enforcer.warning
    assert enforcer.check().is_ok
    assert "per process only" in enforcer.check().detail
    await enforcement.release()


# The real thing


@pytest.fixture
def real() -> Iterator[ServerGroups]:
    offer = find_control_groups()
    if {*offer.usable()} != {"memory", "cpu", "pids"}:
        pytest.skip(f"control groups cannot be written here: {offer.kind}")
    before = _ours(offer)
    yield ServerGroups(offer)
    assert _ours(offer) - before == set()


def _ours(offer: ControlGroups) -> set[Path]:
    mine = f"{PREFIX}{os.getpid()}-"
    return {path for folder in offer.usable().values() for path in folder.glob(f"{mine}*")}


async def test_a_group_on_this_host_has_its_limits_and_is_removed(real: ServerGroups) -> None:
    group = real.make("s", LIMITS)
    assert group is not None
    if isinstance(group, GroupV1):
        read = {file: int((group.folders[name] / file).read_text()) for name, file in _V1.items()}
        assert read == {"memory.memsw.limit_in_bytes": 100 << 20, "cpu.cfs_quota_us": 150_000, "pids.max": 20}
    assert (group.hits("memory"), group.hits("pids"), group.members()) == (0, 0, set())
    await real.remove(group)
    assert group.folders == {}


async def test_every_limit_that_this_host_promises_holds_when_it_is_hit(real: ServerGroups) -> None:
    assert await try_limits(Enforcer(real.offer)) == dict.fromkeys(("memory", "cpu", "pids"), "")


async def test_a_limit_that_is_written_and_not_obeyed_is_told(tree: FakeTree) -> None:
    for name, text in {"memory.events": "oom_kill 0\n", "pids.events": "max 0\n", "cpu.stat": ""}.items():
        tree.change(name, text)
    complaints = await try_limits(Enforcer(tree.offer()))
    assert [*complaints] == ["memory", "cpu", "pids"]
    assert all(complaint.startswith("the limit was set and did not hold") for complaint in complaints.values())


_V1 = {"memory": "memory.memsw.limit_in_bytes", "cpu": "cpu.cfs_quota_us", "pids": "pids.max"}


async def test_two_groups_live_side_by_side_and_the_servers_own_goes_with_the_last(real: ServerGroups) -> None:
    one, two = real.make("s", LIMITS), real.make("s", LIMITS)
    assert one is not None
    assert two is not None
    run = one.folders["memory"].parent
    assert two.folders["memory"].parent == run
    await real.remove(one)
    assert run.exists()
    await real.remove(two)
    assert not run.exists()
