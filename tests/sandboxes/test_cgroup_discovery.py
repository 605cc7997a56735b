"""Where groups can be made, told from made-up hosts: a folder for /proc/self, and folders for the mounts."""

import os
from pathlib import Path

import pytest

from belljar.sandboxes.limits.cgroup_discovery import LEAF, ControlGroups, read_control_groups


def process(tmp_path: Path, mounts: list[str], membership: str) -> Path:
    folder = tmp_path / "proc" / "self"
    folder.mkdir(parents=True)
    (folder / "mountinfo").write_text("".join(f"{line}\n" for line in ["1 0 0:1 / / rw - ext4 /dev/vda rw", *mounts]))
    (folder / "cgroup").write_text(membership)
    (folder / "stat").write_text("70 (bell jar) S 60 70 70")
    (folder.parent / "60").mkdir()
    (folder.parent / "60" / "stat").write_text("60 (uv (run)) S 1 60 60")
    return folder


def unified(tmp_path: Path, *, controllers: str, passed_on: str = "", tenants: str = "70\n60\n") -> tuple[Path, Path]:
    """A host of the new kind whose process 70 is in `app.slice/ours`: that folder, and its /proc/self."""
    mount = tmp_path / "cgroup"
    own = mount / "app.slice" / "ours"
    own.mkdir(parents=True)
    for folder in (mount, own.parent, own):
        (folder / "cgroup.procs").write_text("")
        # The root of the hierarchy is the only group without a type.
        (folder / "cgroup.type").write_text("domain\n")
    (own / "cgroup.controllers").write_text(controllers)
    (own / "cgroup.subtree_control").write_text(passed_on)
    (own / "cgroup.procs").write_text(tenants)
    line = f"2 1 0:2 / {mount} rw shared:4 - cgroup2 cgroup2 rw"
    return own, process(tmp_path, [line], "0::/app.slice/ours\n")


def test_a_unified_group_of_our_own_can_pass_its_controllers_on_once_we_leave_it(tmp_path: Path) -> None:
    own, proc = unified(tmp_path, controllers="cpuset memory pids\n")
    groups = read_control_groups(proc)
    assert groups == ControlGroups("v2", {"memory": own, "pids": own}, is_unified=True, has_tenants=True)
    assert groups.usable() == {"memory": own, "pids": own}
    assert [groups.is_writable(name) for name in ("memory", "cpu")] == [True, False]


def test_a_unified_group_that_passes_them_on_already_is_used_as_it_is(tmp_path: Path) -> None:
    own, proc = unified(tmp_path, controllers="memory pids cpu", passed_on="cpu memory pids")
    assert read_control_groups(proc) == ControlGroups("v2", dict.fromkeys(("memory", "cpu", "pids"), own), True)


def test_a_server_that_has_moved_into_its_leaf_finds_the_same_group_again(tmp_path: Path) -> None:
    own, proc = unified(tmp_path, controllers="memory pids", passed_on="memory pids", tenants="")
    (own / LEAF).mkdir()
    (proc / "cgroup").write_text(f"0::/app.slice/ours/{LEAF}\n")
    assert read_control_groups(proc).usable() == {"memory": own, "pids": own}


def test_a_group_shared_with_strangers_is_left_alone_for_one_above_that_passes_on(tmp_path: Path) -> None:
    own, proc = unified(tmp_path, controllers="memory pids", tenants="70\n99\n")
    (own.parent / "cgroup.subtree_control").write_text("memory pids")
    assert read_control_groups(proc) == ControlGroups("v2", dict.fromkeys(("memory", "pids"), own.parent), True)


def test_a_group_without_controllers_is_left_for_the_root_that_has_them_all(tmp_path: Path) -> None:
    own, proc = unified(tmp_path, controllers="")
    top = own.parent.parent
    (top / "cgroup.type").unlink()
    (top / "cgroup.procs").write_text("1\n2\n")
    (top / "cgroup.controllers").write_text("cpuset cpu io memory pids")
    assert read_control_groups(proc) == ControlGroups("v2", dict.fromkeys(("memory", "cpu", "pids"), top), True)


def test_a_group_above_that_holds_processes_is_used_only_for_what_it_passes_on(tmp_path: Path) -> None:
    own, proc = unified(tmp_path, controllers="")
    (own.parent / "cgroup.controllers").write_text("cpu memory pids")
    (own.parent / "cgroup.procs").write_text("99")
    assert read_control_groups(proc).usable() == {}
    (own.parent / "cgroup.procs").write_text("")
    assert read_control_groups(proc).usable() == dict.fromkeys(("memory", "cpu", "pids"), own.parent)


def test_all_processes_of_a_container_may_leave_its_group(tmp_path: Path) -> None:
    own, _ = unified(tmp_path, controllers="memory pids", tenants="1\n70\n99\n")
    line = f"2 1 0:2 / {own} rw - cgroup2 cgroup rw"
    proc = process(tmp_path / "contained", [line], "0::/\n")
    groups = read_control_groups(proc)
    assert groups == ControlGroups("v2", {"memory": own, "pids": own}, is_unified=True, has_tenants=True)
    (own / "cgroup.procs").write_text("0\n70\n")
    assert read_control_groups(proc).usable() == {}, "those shown as 0 are outside it"


def test_a_group_shared_with_strangers_and_nothing_above_it_cannot_be_used(tmp_path: Path) -> None:
    _, proc = unified(tmp_path, controllers="memory pids", tenants="70\n99\n")
    groups = read_control_groups(proc)
    assert groups.folders.keys() == {"memory", "pids"}
    assert groups.usable() == {}


def test_the_old_hierarchy_is_used_from_our_own_group_so_that_its_limits_hold_for_sessions(tmp_path: Path) -> None:
    memory, cpu = tmp_path / "memory", tmp_path / "cpu"
    (memory / "ours").mkdir(parents=True)
    cpu.mkdir()
    mounts = [
        f"2 1 0:2 / {memory} rw - cgroup cgroup rw,memory",
        f"3 1 0:3 / {cpu} rw - cgroup cgroup rw,cpu,cpuacct",
        f"4 1 0:4 / {tmp_path / 'gone'} rw - cgroup cgroup rw,pids",
    ]
    groups = read_control_groups(process(tmp_path, mounts, "3:cpu,cpuacct:/not/in/here\n2:memory:/ours\n1:pids:/\n"))
    own = memory / "ours"
    assert groups == ControlGroups("v1", {"memory": own, "cpu": cpu, "pids": tmp_path / "gone"}), (
        "in a container: the top"
    )
    assert [*groups.usable()] == ["memory", "cpu"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_the_old_hierarchy_is_used_from_its_top_where_our_own_group_is_not_ours_to_divide(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    (memory / "ours").mkdir(parents=True)
    (memory / "ours").chmod(0o555)
    mounts = [f"2 1 0:2 / {memory} rw - cgroup cgroup rw,memory"]
    groups = read_control_groups(process(tmp_path, mounts, "2:memory:/ours\n"))
    assert groups.usable() == {"memory": memory}


def test_both_at_once_are_called_hybrid_and_the_old_controllers_count(tmp_path: Path) -> None:
    (tmp_path / "unified").mkdir()
    (tmp_path / "memory").mkdir()
    (tmp_path / "unified" / "cgroup.controllers").write_text("\n")
    mounts = [
        f"2 1 0:2 / {tmp_path / 'unified'} rw - cgroup2 cgroup2 rw",
        f"3 1 0:3 / {tmp_path / 'memory'} rw - cgroup cgroup rw,memory",
    ]
    groups = read_control_groups(process(tmp_path, mounts, "1:memory:/\n0::/\n"))
    assert groups == ControlGroups("hybrid", {"memory": tmp_path / "memory"})


@pytest.mark.parametrize("has_proc", [True, False])
def test_a_host_without_any_has_none(tmp_path: Path, has_proc: bool) -> None:
    folder = process(tmp_path, [], "") if has_proc else tmp_path
    assert read_control_groups(folder) == ControlGroups("none")
