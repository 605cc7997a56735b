"""What systemd is asked for, and when: a made-up tree of groups, and a `busctl` that moves us in it.

That a real systemd obeys was tried in a machine of its own; docs/concepts/hosts.md has what came of it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from belljar.errors import SandboxUnavailable
from belljar.sandboxes.limits import systemd_scope
from belljar.sandboxes.limits.cgroup_discovery import LEAF, ControlGroups
from belljar.sandboxes.limits.enforcement import Enforcer
from belljar.sandboxes.limits.systemd_scope import groups_advice, request_scope, supervisor_groups

BUSCTL = """#!/bin/sh
echo "$@" >> {log}
unit=$(echo "$@" | sed 's/.* ssa(sv)a(sa(sv)) \\([^ ]*\\) .*/\\1/')
pid=$(echo "$@" | sed 's/.* PIDs au 1 \\([0-9]*\\) .*/\\1/')
[ -e {refusal} ] && {{ cat {refusal} >&2; exit 1; }}
mkdir -p {slice}/$unit && touch {slice}/$unit/cgroup.procs && echo {slice}/$unit > {places}/$pid
"""


@dataclass(frozen=True)
class Systemd:
    """A host on which systemd runs, and which group we are in there."""

    folder: Path

    def group_of(self, process: Path = Path("/proc/self")) -> Path:
        pid = os.getpid() if process.name == "self" else int(process.name)
        return Path((self.folder / "places" / str(pid)).read_text().strip())

    def place(self, group: Path, pid: int = 0) -> None:
        (self.folder / "places").mkdir(exist_ok=True)
        (self.folder / "places" / str(pid or os.getpid())).write_text(str(group))

    @property
    def own(self) -> Path:
        return self.group_of()

    @property
    def calls(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []

    def refuse(self, words: str) -> None:
        (self.folder / "refusal").write_text(words)


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    host = Systemd(tmp_path)
    service = tmp_path / "system.slice" / "ours.service"
    service.mkdir(parents=True)
    host.place(service)
    busctl = tmp_path / "busctl"
    names = {name: tmp_path / name for name in ("log", "refusal", "places")}
    busctl.write_text(BUSCTL.format(**names, slice=service.parent))
    busctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(systemd_scope, "_BOOTED", tmp_path)
    monkeypatch.setattr(systemd_scope, "read_own_group", host.group_of)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    request_scope.cache_clear()
    yield host
    request_scope.cache_clear()


def test_systemd_is_asked_once_for_a_delegated_scope_in_the_slice_we_are_in(systemd: Systemd) -> None:
    assert [request_scope(), request_scope()] == ["", ""]
    (call,) = systemd.calls
    assert "--system call org.freedesktop.systemd1 " in call
    assert f"Delegate b true PIDs au 1 {os.getpid()} " in call
    assert "Slice s system.slice" in call
    assert (systemd.own / LEAF / "cgroup.procs").read_text() == str(os.getpid()), "children are born in the leaf"


def test_the_limits_of_the_service_go_with_us(systemd: Systemd) -> None:
    for name, text in {"memory.max": "700\n", "pids.max": "max\n", "cpu.max": "150000 100000\n"}.items():
        (systemd.own / name).write_text(text)
    assert request_scope() == ""
    (call,) = systemd.calls
    assert "MemoryMax t 700 CPUQuotaPerSecUSec t 1500000" in call
    assert "TasksMax" not in call


def test_a_refusal_is_quoted_and_told_with_what_to_do(systemd: Systemd) -> None:
    systemd.refuse("Call failed: Access denied\n")
    refusal = request_scope()
    assert refusal == "systemd refuses a scope: Call failed: Access denied"
    assert (
        groups_advice(refusal) == "Write `Delegate=yes` into its section [Service]: `sudo systemctl edit ours.service`"
    )


def test_a_service_without_delegate_is_told_so_before_it_leaves_the_unit_whose_journal_has_the_line(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places: list[Path] = []
    caplog.handler.addFilter(lambda _: places.append(systemd.own) or True)
    service = systemd.own
    assert request_scope() == ""
    assert places == [service]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage()
    assert said.startswith("ours.service lacks Delegate=yes, ")
    assert f"not in `journalctl -u ours.service`, but in `journalctl _PID={os.getpid()}`" in said
    assert said.endswith("Write `Delegate=yes` into its section [Service]: `sudo systemctl edit ours.service`")
    assert systemd.own != service


def test_a_service_of_a_user_is_told_the_commands_of_that_users_manager(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    systemd.place(systemd.folder / "user.slice" / "user@4000000.service" / "app.slice" / "ours.service")
    refusal = request_scope()
    (said,) = caplog.messages
    assert "not in `journalctl --user -u ours.service`, but in `journalctl --user _PID=" in said
    assert said.endswith("`systemctl --user edit ours.service`")
    assert groups_advice(refusal).endswith("`systemctl --user edit ours.service`")


def test_a_service_that_its_users_manager_delegates_is_left_where_it_is(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A user's manager does not mark what it delegates: it has to be asked.
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    systemctl = systemd.folder / "systemctl"
    systemctl.write_text(
        "#!/bin/sh\n"
        '[ "$*" = "--user show --property=Delegate --value -- ours.service" ] || exit 1\n'
        '[ "$XDG_RUNTIME_DIR" = /run/user/4000000 ] && echo yes\n'
    )
    systemctl.chmod(0o755)
    service = systemd.folder / "user.slice" / "user@4000000.service" / "app.slice" / "ours.service"
    systemd.place(service)
    assert request_scope() == ""
    assert caplog.messages == []
    assert (systemd.own, systemd.calls) == (service, [])


def test_nothing_is_said_of_delegate_at_a_login_or_where_it_is_there(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = systemd.own
    systemd.place(systemd.folder / "user.slice" / "session-1.scope")
    request_scope()
    request_scope.cache_clear()
    systemd.place(service)
    delegate(monkeypatch)
    request_scope()
    assert caplog.messages == []


def test_nothing_is_asked_where_systemd_does_not_run_or_has_delegated_already(
    systemd: Systemd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getxattr", lambda *_: b"1")
    assert request_scope() == ""
    request_scope.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(systemd_scope, "_BOOTED", tmp_path / "nowhere")
    assert request_scope() == ""
    assert systemd.calls == []


def test_nobody_is_advised_to_run_the_server_as_root(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd_scope, "read_own_group", lambda: None)
    assert "as root" not in groups_advice()
    assert "podman run --security-opt" in groups_advice()


def test_a_user_without_a_manager_is_told_how_to_get_one(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    session = systemd.folder / "user.slice" / "session-1.scope"
    systemd.place(session)
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    refusal = request_scope()
    assert refusal == "/run/user/4000000/bus is not there: systemd runs no manager for this user"
    assert "loginctl enable-linger" in groups_advice(refusal)
    assert systemd.calls == []


def test_a_service_whose_unit_hides_its_users_manager_is_told_which_line_does(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hidden(type(Path())):
        def stat(self, **_: object) -> os.stat_result:
            raise PermissionError(13, "Permission denied")

    delegate(monkeypatch)
    systemd.place(systemd.own, SUPERVISOR)
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    monkeypatch.setattr(systemd_scope, "_runtime_folder", lambda: Hidden("/run/user/4000000"))
    with pytest.raises(SandboxUnavailable, match=r"bus is hidden from this process: .*`ProtectHome=read-only`"):
        supervisor_groups(SUPERVISOR, asks_systemd=True)


def test_the_servers_warning_has_the_reason(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    systemd.refuse("Call failed: Access denied\n")
    monkeypatch.setattr(systemd_scope, "read_control_groups", lambda: ControlGroups("v2", is_unified=True))
    assert Enforcer(asks_systemd=True).warning.endswith("(systemd refuses a scope: Call failed: Access denied)")
    assert len(systemd.calls) == 1


SUPERVISOR = 4_000_001


def delegate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getxattr", lambda *_: b"1")


def test_a_supervisor_gets_a_scope_of_its_own_once_so_that_its_sessions_do_not_bar_the_service(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    delegate(monkeypatch)
    service = systemd.own
    systemd.place(service / LEAF, SUPERVISOR)
    assert supervisor_groups(SUPERVISOR, asks_systemd=True) is not None
    (call,) = systemd.calls
    assert f"Delegate b true PIDs au 1 {SUPERVISOR} " in call
    scope = systemd.group_of(Path(f"/proc/{SUPERVISOR}"))
    assert (scope / LEAF / "cgroup.procs").read_text() == str(SUPERVISOR)
    assert systemd.own == service, "the server stays where its log is the service's"
    systemd.place(scope / LEAF, SUPERVISOR)
    assert supervisor_groups(SUPERVISOR, asks_systemd=True) is not None, "the next server finds it there"
    assert len(systemd.calls) == 1


def test_a_supervisor_stays_where_systemd_places_the_server_in_a_subgroup_or_delegates_nothing(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemd.place(systemd.own, SUPERVISOR)
    assert supervisor_groups(SUPERVISOR, asks_systemd=True) is None
    delegate(monkeypatch)
    systemd.place(systemd.own / LEAF)
    assert supervisor_groups(SUPERVISOR, asks_systemd=True) is None
    assert systemd.calls == []


def test_keep_alive_is_refused_where_the_service_could_not_start_again(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    delegate(monkeypatch)
    systemd.place(systemd.own, SUPERVISOR)
    systemd.refuse("Call failed: Access denied\n")
    with pytest.raises(SandboxUnavailable, match=r"could not start ours\.service again .* Access denied") as refused:
        supervisor_groups(SUPERVISOR, asks_systemd=True)
    assert "DelegateSubgroup=belljar-server" in (refused.value.hint or "")
    with pytest.raises(SandboxUnavailable, match="systemd_scope is off"):
        supervisor_groups(SUPERVISOR, asks_systemd=False)
