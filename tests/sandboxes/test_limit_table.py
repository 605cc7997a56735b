"""Each limit of a session and all that follows from it: files of control groups, rlimits, engines' options, words."""

import json
import os
import resource
from dataclasses import fields
from pathlib import Path

import pytest

from belljar.cli import doctor
from belljar.provisioning.sandbox_specs import limits_of
from belljar.sandboxes.base import Identity, Limits, SandboxSpec
from belljar.sandboxes.container.engines import ContainerEngine
from belljar.sandboxes.container.process import limiting
from belljar.sandboxes.container.run_arguments import RunArguments
from belljar.sandboxes.gvisor import OciConfig, configuration
from belljar.sandboxes.limits.cgroup_discovery import ControlGroups
from belljar.sandboxes.limits.cgroups import GroupV1, GroupV2
from belljar.sandboxes.limits.enforcement import Enforcement, Enforcer
from belljar.sandboxes.limits.table import CONTROLLERS, LIMITS
from belljar.settings import Settings

ONE_EACH = {
    "memory_mb": Limits(memory_mb=100),
    "cpus": Limits(cpus=0.5),
    "max_processes": Limits(processes=20),
    "disk_mb": Limits(disk_mb=30),
    "temporary_mb": Limits(temporary_mb=40),
    "max_open_files": Limits(open_files=64),
}
"""By setting; each value is that of the setting."""
VALUES = {"memory_mb": 100, "cpus": 0.5, "max_processes": 20, "disk_mb": 30, "temporary_mb": 40, "max_open_files": 64}
GROUPED = ("memory", "cpu", "pids")
V1 = {
    "memory_mb": {"memory.limit_in_bytes": str(100 << 20), "memory.memsw.limit_in_bytes": str(100 << 20)},
    "cpus": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"},
    "max_processes": {"pids.max": "20"},
}
V2 = {
    "memory_mb": {"memory.max": str(100 << 20), "memory.swap.max": "0"},
    "cpus": {"cpu.max": "50000 100000"},
    "max_processes": {"pids.max": "20"},
}
OF_A_PROCESS = {
    "memory_mb": {"RLIMIT_DATA": 100 << 20},
    "max_processes": {"RLIMIT_NPROC": 20},
    "disk_mb": {"RLIMIT_FSIZE": 30 << 20},
    "max_open_files": {"RLIMIT_NOFILE": 64},
}
OF_AN_ENGINE = {
    "memory_mb": ["--memory", "100m", "--memory-swap", "100m"],
    "cpus": ["--cpus", "0.5"],
    "max_processes": ["--pids-limit", "20"],
    "temporary_mb": ["--shm-size", "40m"],
}


def test_every_limit_has_a_row_and_some_are_told_by_the_console() -> None:
    assert {limit.field for limit in LIMITS} == {field.name for field in fields(Limits)}
    assert {limit.setting for limit in LIMITS} == ONE_EACH.keys()
    assert [limit.setting for limit in LIMITS if limit.is_shown] == ["memory_mb", "cpus", "disk_mb", "max_processes"]
    assert tuple(CONTROLLERS) == GROUPED


def test_a_setting_gives_its_limit_and_none_gives_no_limit() -> None:
    unlimited = Settings(**dict.fromkeys(ONE_EACH, None))
    assert limits_of(unlimited) == Limits()
    for setting, limits in ONE_EACH.items():
        assert limits_of(unlimited.model_copy(update={setting: VALUES[setting]})) == limits


@pytest.mark.parametrize("setting", ONE_EACH)
@pytest.mark.parametrize("kind", [GroupV1, GroupV2])
def test_a_control_group_is_written(kind: type[GroupV1 | GroupV2], setting: str, tmp_path: Path) -> None:
    wanted = (V1 if kind is GroupV1 else V2).get(setting, {})
    for name in wanted:
        (tmp_path / name).touch()
    offer = ControlGroups("v2", dict.fromkeys(GROUPED, tmp_path))
    governed = Enforcer(offer).groups._governed(ONE_EACH[setting])  # pyright: ignore[reportPrivateUsage]
    assert len(governed) == (setting in V1)
    group = kind(governed)
    group.limit(ONE_EACH[setting])
    group.release()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == wanted


@pytest.mark.parametrize("kind", [GroupV1, GroupV2])
def test_a_kernel_that_does_not_count_swap_lacks_a_file(kind: type[GroupV1 | GroupV2], tmp_path: Path) -> None:
    first = next(iter((V1 if kind is GroupV1 else V2)["memory_mb"]))
    (tmp_path / first).touch()
    group = kind({"memory": tmp_path})
    group.limit(ONE_EACH["memory_mb"])
    group.release()
    assert [path.name for path in tmp_path.iterdir()] == [first]
    for setting, controller in (("cpus", "cpu"), ("max_processes", "pids")):
        with pytest.raises(FileNotFoundError):
            kind({controller: tmp_path}).limit(ONE_EACH[setting])


@pytest.mark.parametrize("setting", ONE_EACH)
def test_each_process_is_limited_where_no_control_group_is(setting: str, tmp_path: Path) -> None:
    groups = Enforcer(ControlGroups("none")).groups

    def chosen(group: GroupV2 | None, *, is_alone: bool = True) -> dict[int, int]:
        return Enforcement(groups, group, ONE_EACH[setting], None).process_limits(is_alone=is_alone)

    own = {getattr(resource, name): most for name, most in OF_A_PROCESS.get(setting, {}).items()}
    always = {resource.RLIMIT_CORE: 0}
    assert chosen(None) == always | own
    assert chosen(None, is_alone=False) == always | ({} if setting == "max_processes" else own)
    grouped = GroupV2(dict.fromkeys(GROUPED, tmp_path))
    assert chosen(grouped) == always | ({} if setting in ("memory_mb", "max_processes") else own)


def test_a_file_may_be_as_large_as_a_temporary_folder_or_the_session_folder() -> None:
    enforcer = Enforcer(ControlGroups("none"))
    for disk, temporary in ((30, 40), (40, 30)):
        enforcement = enforcer.enforce("s", Limits(disk_mb=disk, temporary_mb=temporary))
        assert enforcement.process_limits(is_alone=True)[resource.RLIMIT_FSIZE] == 40 << 20


def test_gvisor_is_told_the_limits_of_each_process_by_name() -> None:
    wanted = {"RLIMIT_CORE": 0} | {name: most for each in OF_A_PROCESS.values() for name, most in each.items()}
    numbers = {getattr(resource, name): most for name, most in wanted.items()}
    config = OciConfig(numbers, 0, [], [], {}, is_read_only=True)
    told = json.loads(configuration(["true"], {}, config))["process"]["rlimits"]
    assert told == [{"type": name, "hard": most, "soft": most} for name, most in wanted.items()]


@pytest.mark.parametrize("kind", ["docker", "podman"])
@pytest.mark.parametrize("setting", ONE_EACH)
def test_an_engine_is_given_options(kind: str, setting: str, tmp_path: Path) -> None:
    def options(limits: Limits, controllers: tuple[str, ...]) -> list[str]:
        engine = ContainerEngine(kind, kind, "5", is_rootless=False, controllers=frozenset(controllers))  # pyright: ignore[reportArgumentType]
        spec = SandboxSpec("s", tmp_path, tmp_path, tmp_path, limits=limits, identity=Identity(1, 1))
        arguments = RunArguments(engine, "image", spec, "name", []).arguments("python3", [], [])
        flags = ("--memory", "--memory-swap", "--cpus", "--pids-limit", "--shm-size")
        return [word for flag in flags if flag in arguments for word in (flag, arguments[arguments.index(flag) + 1])]

    unlimited = options(Limits(), GROUPED)
    assert unlimited[:-1] == ["--pids-limit", "-1", "--shm-size"]
    given = options(ONE_EACH[setting], GROUPED)
    assert given == [
        *(OF_AN_ENGINE.get(setting, []) if setting != "temporary_mb" else []),
        *(["--pids-limit", "-1"] if setting != "max_processes" else []),
        *(OF_AN_ENGINE["temporary_mb"] if setting == "temporary_mb" else unlimited[-2:]),
    ]
    assert [word for word in options(ONE_EACH[setting], ()) if word.startswith("--")] == ["--shm-size"]


def test_an_engine_is_not_asked_for_more_processors_than_there_are(tmp_path: Path) -> None:
    engine = ContainerEngine("docker", "docker", "28", is_rootless=False, controllers=frozenset({"cpu"}))
    spec = SandboxSpec("s", tmp_path, tmp_path, tmp_path, limits=Limits(cpus=9999))
    arguments = RunArguments(engine, "image", spec, "name", []).arguments("python3", [], [])
    assert arguments[arguments.index("--cpus") + 1] == str(os.cpu_count())


@pytest.mark.parametrize("is_unified", [True, False])
def test_of_a_container_the_groups_are_read_whose_limits_are_told_when_hit(*, is_unified: bool, tmp_path: Path) -> None:
    every = Limits(memory_mb=100, cpus=0.5, processes=20)
    for name, text in [pair for files in (V2 if is_unified else V1).values() for pair in files.items()]:
        (tmp_path / name).write_text(f"{text}\n")
    offer = ControlGroups("v2", dict.fromkeys(GROUPED, tmp_path), is_unified=is_unified)
    assert limiting(offer, every) == {"memory": tmp_path, "pids": tmp_path}
    assert limiting(offer, Limits(memory_mb=100)) == {"memory": tmp_path}
    assert limiting(offer, Limits(memory_mb=101)) == {}


def test_what_is_limited_is_told_in_words(tmp_path: Path) -> None:
    def told(*controllers: str) -> str:
        return Enforcer(ControlGroups("v1", dict.fromkeys(controllers, tmp_path))).check().detail

    assert told(*GROUPED) == "control groups bound the memory, CPU and processes of a session"
    only_per_process = (
        "Control groups cannot be written here: memory is limited per process only, not for a whole session"
    )
    assert told() == f"memory, CPU and processes: {only_per_process}"
    assert told("memory", "cpu") == f"processes: {only_per_process}"
    assert told("cpu", "pids") == f"memory: {only_per_process}"
    assert told("memory", "pids") == (
        "CPU: CPU time is not limited here: sessions are only placed on as many processors"
    )


def test_doctor_tells_the_proof_of_each_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def held(_: Enforcer) -> dict[str, str]:
        return dict.fromkeys(GROUPED, "")

    monkeypatch.setattr(doctor, "try_limits", held)
    _, *found = doctor.check_limits(Settings(sandbox="process"))
    assert {check.name: (check.is_ok, check.detail, check.hint) for check in found} == {
        "memory": (True, "held when hit: a program that wanted 96 MB was killed at 48 MB", ""),
        "processors": (True, "held when hit: a busy program was stopped after 10% of each period", ""),
        "processes": (True, "held when hit: a program that wanted 16 processes was refused them at 8", ""),
    }


def test_doctor_names_each_limit_and_what_its_want_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "Enforcer", lambda **_: Enforcer(ControlGroups("none")))
    found = {check.name: (check.is_ok, check.cost) for check in doctor.check_limits(Settings(sandbox="process"))}
    assert found == {
        "control groups": (False, ""),
        "memory": (
            False,
            "each process of a session is limited by itself: many together can use up the machine's memory",
        ),
        "processors": (False, "a session is only placed on as many processors, which its code can undo"),
        "processes": (
            False,
            "processes are counted for each user, where sessions have users of their own, or else not at all",
        ),
    }
