from pathlib import Path

import pytest

from belljar.cli.cgroups import ControlGroups, read_control_groups


def process(tmp_path: Path, mounts: list[str], membership: str) -> Path:
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "mountinfo").write_text("".join(f"{line}\n" for line in ["1 0 0:1 / / rw - ext4 /dev/vda rw", *mounts]))
    (folder / "cgroup").write_text(membership)
    return folder


def test_the_unified_hierarchy_offers_what_it_delegates_to_our_group(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    own = mount / "user.slice" / "ours"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpuset memory pids\n")
    groups = read_control_groups(
        process(tmp_path, [f"2 1 0:2 / {mount} rw shared:4 - cgroup2 cgroup2 rw"], "0::/user.slice/ours\n")
    )
    assert groups == ControlGroups("v2", {"memory": own, "pids": own})
    assert [groups.is_writable(name) for name in ("memory", "cpu")] == [True, False]


def test_the_old_hierarchy_has_a_folder_a_controller(tmp_path: Path) -> None:
    memory, cpu = tmp_path / "memory", tmp_path / "cpu"
    (memory / "ours").mkdir(parents=True)
    cpu.mkdir()
    mounts = [
        f"2 1 0:2 / {memory} rw - cgroup cgroup rw,memory",
        f"3 1 0:3 / {cpu} rw - cgroup cgroup rw,cpu,cpuacct",
        f"4 1 0:4 / {tmp_path / 'gone'} rw - cgroup cgroup rw,pids",
    ]
    groups = read_control_groups(process(tmp_path, mounts, "3:cpu,cpuacct:/not/in/here\n2:memory:/ours\n1:pids:/\n"))
    assert groups == ControlGroups("v1", {"memory": memory / "ours", "cpu": cpu, "pids": tmp_path / "gone"})
    assert not groups.is_writable("pids")


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
