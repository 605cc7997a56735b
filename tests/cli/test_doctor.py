import base64
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from belljar.cli import doctor
from belljar.cli.doctor import examine_providers
from belljar.cli.findings import HostFinding, report
from belljar.environments import Environment
from belljar.errors import BelljarError, EnvironmentBroken, SettingsError
from belljar.sandboxes.base import HostCheck, Sandbox, SandboxSpec
from belljar.sandboxes.container.provider import ContainerProvider
from belljar.sandboxes.limits.cgroup_discovery import read_control_groups
from belljar.sandboxes.limits.enforcement import Enforcer
from belljar.sandboxes.namespace.provider import NamespaceProvider
from belljar.settings import Settings
from local_index import IndexedPackages
from provider_packages import packages_on_path

Run = Callable[..., Any]


class BrokenProvider:
    """A provider whose host lacks what it needs."""

    isolates = True
    warning = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def check(self) -> list[HostCheck]:
        return [HostCheck("kernel", False, "too old", "Get a newer one")]

    async def open(self, spec: SandboxSpec) -> Sandbox:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def quick_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test that is about all of them hits limits and asks for containers: each takes a second."""

    async def tried(enforcer: Enforcer) -> dict[str, str]:
        return dict.fromkeys(enforcer.groups.controllers, "")

    if "every_section" not in request.node.name:
        monkeypatch.setattr(doctor, "try_limits", tried)
        monkeypatch.setattr(ContainerProvider, "check", lambda _: [HostCheck("engine", False, "not asked")])


@pytest.fixture
def findings(
    belljar: Run, place: Path, monkeypatch: pytest.MonkeyPatch, indexed: IndexedPackages
) -> Callable[[], dict[str, Any]]:
    """Run the command where a plain process is enough, and give its findings by section and name."""
    monkeypatch.setenv("BELLJAR_SANDBOX", "process")
    for name, value in indexed.variables.items():
        monkeypatch.setenv(name, value)

    def run() -> dict[str, Any]:
        outcome = belljar("doctor", "--json")
        found = {f"{line['section']}/{line['name']}": line for line in json.loads(outcome.out)}
        return {"code": outcome.code, **found}

    return run


def test_every_section_is_there_and_a_host_that_has_what_is_needed_passes(
    findings: Callable[[], dict[str, Any]],
) -> None:
    found = findings()
    assert found.pop("code") == 0
    assert {name.partition("/")[0] for name in found} == {
        *("host", "sandbox", "limits", "gpus", "environments", "forks", "browser", "node")
    }
    assert {line["status"] for line in found.values()} <= {"ok", "warn"}
    assert found["environments/package index"]["status"] == "ok"
    assert found["sandbox/configured"]["status"] == "warn", "process does not isolate, and must say so"
    usable = read_control_groups().usable()
    for controller, name in {"memory": "memory", "cpu": "processors", "pids": "processes"}.items():
        row = found[f"limits/{name}"]
        if controller in usable:
            assert (row["status"], row["cost"], row["hint"]) == ("ok", "", "")
            assert row["detail"].startswith("held when hit: ")
        else:
            assert row["status"] == "warn"
            assert row["cost"]
            assert row["hint"]


def test_a_data_directory_that_cannot_be_made_fails_the_command(
    findings: Callable[[], dict[str, Any]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "file").touch()
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(place / "file" / "data"))
    found = findings()
    assert found["code"] == 1
    assert found["host/data"]["status"] == "fail"
    assert str(place / "file") in found["host/data"]["detail"]


def test_a_file_that_is_not_read_is_named(findings: Callable[[], dict[str, Any]], place: Path) -> None:
    for name, content in (("belljar.toml", "max_queue = 3"), (".env", "BELLJAR_MAX_QUEUE=3")):
        (place / name).write_text(content)
        finding = findings()[f"host/{name}"]
        assert (finding["status"], finding["hint"]) == ("warn", f"If you have read it: belljar trust {place / name}")


def test_looking_leaves_nothing_behind(findings: Callable[[], dict[str, Any]], place: Path) -> None:
    findings()
    assert list(place.iterdir()) == []
    assert [path for path in place.parent.rglob("*") if path != place] == []


def test_the_text_has_a_line_a_finding_and_what_to_do(belljar: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLJAR_ENVIRONMENT", "/nowhere/at/all")
    outcome = belljar("doctor")
    assert outcome.code == 1
    assert "\nenvironments\n" in outcome.out
    assert re.search(r"\n  fail  environment +no such environment: /nowhere/at/all\n", outcome.out)
    assert " without it: no session can start with these settings\n" in outcome.out
    assert " to get it: " in outcome.out
    assert "failed that these settings need" in outcome.err


def test_a_check_fails_for_the_configured_provider_and_warns_for_another() -> None:
    known = {name: BrokenProvider(name) for name in ("one", "two")}
    assert list(examine_providers(known, "two")) == [
        HostFinding("sandbox", "ok", "configured", "two"),
        HostFinding(
            *("sandbox", "fail", "two, kernel", "too old", "Get a newer one"),
            "no session can start with these settings",
        ),
        HostFinding(
            *("sandbox", "warn", "one, kernel", "too old", "Get a newer one"), "`--sandbox one` cannot be chosen"
        ),
    ]


def test_sessions_are_forked_and_timed_and_what_does_not_import_is_named(
    findings: Callable[[], dict[str, Any]],
    place: Path,
    default_environment: Environment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = NamespaceProvider()
    if gap := provider.no_nesting_reason() or next((check.detail for check in provider.check() if not check.is_ok), ""):
        pytest.skip(f"sessions cannot be forked here: {gap}")
    monkeypatch.setenv("BELLJAR_SANDBOX", "namespace")
    monkeypatch.setenv("BELLJAR_ENVIRONMENT", str(default_environment.python))
    # The second says at its import that it is for another system.
    monkeypatch.setenv("BELLJAR_PRELOAD", "json,asyncio.windows_events,nowhere.at_all")
    monkeypatch.setenv("TMPDIR", str(place))
    found = findings()
    assert found["code"] == 0
    assert found["forks/sessions"]["status"] == "ok"
    assert re.search(r"ready after \d+ ms; warming up took \d+\.\d s", found["forks/sessions"]["detail"])
    assert found["forks/preload"]["status"] == "warn"
    said = found["forks/preload"]["detail"]
    assert said.startswith("json; asyncio.windows_events does not import (ImportError: ")
    assert said.endswith("; nowhere.at_all is not installed")
    assert "preload" in found["forks/preload"]["hint"]
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        ({"sandbox": "process"}, "warn", "the sandbox process cannot fork them"),
        ({"fork_start": "false"}, "ok", "as fork_start says"),
        ({"environment": "kernel:python3"}, "ok", "Jupyter kernels are not forked"),
        ({"sandbox": "namespace"}, "warn", "no room here"),
    ],
)
def test_sessions_that_start_cold_are_told_with_the_reason(
    findings: Callable[[], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    status: str,
    said: str,
) -> None:
    monkeypatch.setattr(NamespaceProvider, "check", lambda _: [])
    monkeypatch.setattr(NamespaceProvider, "no_nesting_reason", lambda _: "no room here")
    for name, value in settings.items():
        monkeypatch.setenv(f"BELLJAR_{name.upper()}", value)
    found = findings()
    assert (found["code"], found["forks/sessions"]["status"]) == (0, status)
    assert said in found["forks/sessions"]["detail"]
    assert "start cold" in found["forks/sessions"]["detail"]


def test_a_section_that_breaks_is_a_finding_and_the_others_go_on(
    findings: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise EnvironmentBroken("it is gone", hint="Make it anew")

    monkeypatch.setattr(doctor, "_check_environments", broken)
    found = findings()
    assert found["environments/environments"] == {
        "section": "environments",
        "status": "fail",
        "name": "environments",
        "detail": "it is gone",
        "hint": "Make it anew",
        "cost": "",
    }
    assert "node/node" in found


@pytest.mark.parametrize(
    ("version", "status"), [("v22.1.0", "ok"), ("v20.20.2", "warn"), ("nonsense", "warn"), ("", "warn")]
)
def test_node_is_asked_for_its_version_and_neither_it_nor_a_browser_is_needed(
    findings: Callable[[], dict[str, Any]], place: Path, monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    folder = place.parent / "bin"
    folder.mkdir()
    script = folder / "node"
    script.write_text(f"#!/bin/sh\necho {version}\n")
    script.chmod(0o755)
    shutil.copy(script, folder / "chromium")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    found = findings()
    assert (found["code"], found["node/node"]["status"]) == (0, status)
    assert found["browser/browser"]["detail"].startswith(f"{folder}/chromium")


def test_another_projects_belljar_in_the_same_environment_is_noticed(
    findings: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "host/packages" not in findings()
    metadata = tmp_path / "foreign" / "belljar-4.2.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: belljar\nVersion: 4.2.0\n")
    (metadata / "RECORD").write_text("belljar/__init__.py,,\nbelljar/lib.py,,\n")
    monkeypatch.syspath_prepend(str(metadata.parent))
    found = findings()
    assert found["code"] == 1
    assert found["host/packages"]["status"] == "fail"
    assert "belljar 4.2.0 is another project" in found["host/packages"]["detail"]
    assert "pip uninstall belljar" in found["host/packages"]["hint"]


def test_report_groups_by_section() -> None:
    text = report(
        [
            HostFinding("a", "ok", "x", "1"),
            HostFinding("a", "warn", "yy", "2", "act", "loss"),
            HostFinding("b", "fail", "z", "3\n4"),
        ]
    )
    assert text.splitlines() == [
        "            what this host gives",
        "a",
        "  ok    x   1",
        "  warn  yy  2",
        "            without it: loss",
        "            to get it: act",
        "b",
        "  fail  z   3",
        "              4",
    ]


def test_a_narrow_report_is_wrapped_between_words_and_loses_none() -> None:
    finding = HostFinding(
        "a", "warn", "a name", "word " * 30 + "/a/path-that-is/longer-than-any-line", "act " * 30, "x\ny"
    )
    text, narrow = report([finding]), report([finding], 44)
    assert narrow.split() == text.split()
    assert max(len(line) for line in narrow.splitlines() if "longer" not in line) <= 44
    assert narrow.splitlines()[2].startswith("  warn  a name  word word ")
    assert all(line.startswith(" " * 16) for line in narrow.splitlines()[3:])
    assert "\n                  y\n" in narrow


def test_what_keeps_sessions_from_outliving_the_server_fails_where_they_shall(
    findings: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BELLJAR_KEEP_ALIVE", "true")
    found = findings()
    assert found["code"] == 1
    assert found["sandbox/keep_alive"]["status"] == "fail"
    assert "a sandbox of process cannot be handed on" in found["sandbox/keep_alive"]["detail"]


def test_a_policy_and_servers_that_are_not_in_order_fail(
    findings: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "servers.json").write_text('{"mcpServers": {"time": {"command": "true"}}}')
    (tmp_path / "policy.toml").write_text('default = "perhaps"')
    monkeypatch.setenv("BELLJAR_MCP_CONFIG", str(tmp_path / "servers.json"))
    monkeypatch.setenv("BELLJAR_POLICY", str(tmp_path / "policy.toml"))
    found = findings()
    assert (found["code"], found["guardrails/guardrails"]["status"]) == (1, "fail")
    assert found["toolbox/servers"]["detail"].startswith("time; ")


def test_each_folder_of_the_host_is_checked_and_whose_sessions_see_it_is_said(tmp_path: Path) -> None:
    for name in ("sales", "belljar"):
        (tmp_path / name).mkdir(mode=0o755)
    settings = Settings(
        data_directory=tmp_path / "belljar",
        sandbox="process",
        api_keys=["ann:sha256:" + "0" * 64],
        folders={
            "sales": {"path": str(tmp_path / "sales"), "owners": ["ann", "local"], "writable": True},
            "shared": str(tmp_path / "sales"),
            "lost": str(tmp_path / "nowhere"),
            "own": str(tmp_path / "belljar"),
            "theirs": {"path": str(tmp_path / "sales"), "owners": ["bob"]},
        },
    )  # pyright: ignore[reportArgumentType]
    found = {finding.name: finding for finding in doctor.check_folders(settings)}
    assert {name: finding.status for name, finding in found.items()} == {
        "sales": "ok", "shared": "ok", "lost": "fail", "own": "fail", "theirs": "warn",
    }  # fmt: skip
    assert found["sales"].detail.endswith("sales: the sessions of ann, local may read and write it")
    assert found["shared"].detail.endswith("sales: all sessions may read it")
    assert "No such file" in found["lost"].detail
    assert "belljar's own folder" in found["own"].detail
    assert "no key of api_keys is named bob" in found["theirs"].detail


def test_a_proxy_before_a_server_that_knows_no_callers_is_warned_of(tmp_path: Path) -> None:
    behind = {"data_directory": tmp_path, "http": "127.0.0.1:8000", "allowed_hosts": ["belljar.example.com"]}
    (found,) = doctor.check_http(Settings(**behind))  # pyright: ignore[reportArgumentType]
    assert (found.status, found.name) == ("warn", "callers")
    assert "belljar.example.com" in found.detail
    for fine in ({"allowed_hosts": ["localhost"]}, {"api_keys": ["ann:sha256:" + "0" * 64]}, {"http": ""}):
        assert [*doctor.check_http(Settings(**behind | fine))] == []  # pyright: ignore[reportArgumentType]


def test_providers_of_packages_are_named_but_not_imported_unless_they_are_configured(
    findings: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = packages_on_path(tmp_path / "packages", monkeypatch)
    packages.bring("acme", "raise AssertionError('it was imported')")
    packages.bring("gvisor", "raise AssertionError('it was imported')", package="false-friend")
    found = findings()
    assert found["code"] == 0
    assert found["sandbox/acme"]["status"] == "ok"
    assert found["sandbox/acme"]["detail"].startswith("brought by the package acme-sandbox 1.2; not checked")
    assert found["sandbox/gvisor"]["status"] == "warn"
    assert "false-friend 1.2 brings one of this name; it is ignored" in found["sandbox/gvisor"]["detail"]


def test_a_sandbox_of_a_plugin_is_checked_when_it_is_configured(tmp_path: Path) -> None:
    plugins, sales = tmp_path / "plugins", tmp_path / "sales"
    plugins.mkdir(mode=0o755)
    sales.mkdir(mode=0o755)
    (plugins / "house.py").write_text(
        "from belljar.hooks import hookimpl\n"
        "from belljar.sandboxes.process import ProcessProvider\n"
        "class House(ProcessProvider):\n    name, contract = 'house', 1\n"
        "@hookimpl\ndef sandbox_providers(settings): return {'house': House}\n"
    )
    folders: Any = {"sales": str(sales)}
    settings = Settings(
        sandbox="plugin:house", plugins_directory=str(plugins), folders=folders, data_directory=tmp_path / "own"
    )
    (finding,) = doctor.check_folders(settings)
    assert (finding.name, finding.status) == ("sales", "ok")


def test_the_webhook_of_the_inbox_is_connected_to_and_told_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as receiver:
        port = receiver.getsockname()[1]
        values: dict[str, Any] = {
            "data_directory": tmp_path,
            "inbox_webhook": f"http://127.0.0.1:{port}/hook",
            "inbox_webhook_secret": f"whsec_{base64.b64encode(bytes(32)).decode()}",
        }
        assert [*doctor.check_webhook(Settings(data_directory=tmp_path))] == []
        with pytest.raises(SettingsError, match="egress does not allow"):
            list(doctor.check_webhook(Settings(**values)))
        (found,) = doctor.check_webhook(Settings(**values, egress=[f"127.0.0.1:{port}"]))
        assert (found.status, found.name) == ("ok", "webhook")
        assert found.detail.startswith("127.0.0.1 can be reached")
        connection, _ = receiver.accept()
        with connection:
            assert connection.recv(1) == b""
    with pytest.raises(BelljarError, match=r"127\.0\.0\.1"):
        list(doctor.check_webhook(Settings(**values, egress=[f"127.0.0.1:{port}"])))
