"""What the image's start chooses where nothing is set."""

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from belljar.cli import container, doctor
from belljar.cli.container import choose_sandbox, is_spoken_to, listening_flags
from belljar.cli.findings import HostFinding
from belljar.errors import SandboxUnavailable
from belljar.http.app import check_bind, transport_security
from belljar.sandboxes.base import HostCheck
from belljar.settings import Settings, load_settings

Run = Callable[..., Any]


def test_a_pipe_is_spoken_to_and_null_is_not() -> None:
    reading, writing = os.pipe()
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        assert is_spoken_to(reading)
        assert not is_spoken_to(null)
        assert not is_spoken_to(999)
    finally:
        for descriptor in (reading, writing, null):
            os.close(descriptor)


def test_a_key_is_made_and_shown_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(data_directory=place / "data")
    flags = listening_flags(settings)
    shown = capsys.readouterr().err
    key = shown.partition("Bearer ")[2].split()[0]
    assert len(key) > 40
    (entry,) = flags["api_keys"]
    assert entry.startswith("container:sha256:")
    assert key not in entry
    stored = place / "data" / container.KEY_FILE
    assert key not in stored.read_text()
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    # The next start of the same container accepts the same key, and does not show it.
    assert listening_flags(settings) == flags
    assert "Bearer" not in capsys.readouterr().err
    served = load_settings({"data_directory": place / "data", **flags})
    check_bind(served)
    assert "localhost:*" in transport_security(served).allowed_hosts


def test_keys_and_names_that_are_set_are_left_alone(place: Path) -> None:
    chosen = {"http": "0.0.0.0:9000", "api_keys": ["ada:secret-of-ada"], "allowed_hosts": ["belljar.example.com"]}
    assert listening_flags(Settings(data_directory=place / "data", **chosen)) == {"http": "0.0.0.0:9000"}
    assert not (place / "data").exists()


def test_behind_a_platform_that_checks_callers_none_are_asked_for_keys(place: Path) -> None:
    settings = Settings(data_directory=place / "data", trust_network=True)
    flags = listening_flags(settings)
    assert flags == {"http": container.ADDRESS}
    served = load_settings({"trust_network": True, **flags})
    check_bind(served)
    assert not transport_security(served).enable_dns_rebinding_protection


def test_where_nothing_seals_sessions_off_only_the_container_of_one_owner_will_do(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(container, "ask_checks", lambda _: [HostCheck("namespaces", False, "refused")])
    monkeypatch.setenv("container", "oci")
    assert choose_sandbox(Settings()) == "process"
    said = capsys.readouterr().err
    assert "The container is the only wall" in said
    assert "--security-opt seccomp=" in said
    # Not between owners, and not outside of containers.
    with pytest.raises(SandboxUnavailable, match="several people's sessions"):
        choose_sandbox(Settings(api_keys=["ada:secret-of-ada", "bob:secret-of-bob"]))
    monkeypatch.delenv("container")
    monkeypatch.setattr(container, "is_in_container", lambda: False)
    with pytest.raises(SandboxUnavailable, match="namespaces: refused") as refusal:
        choose_sandbox(Settings())
    assert "BELLJAR_SANDBOX=process" in refusal.value.hint
    # Who asks for no isolation gets none.
    monkeypatch.setenv("BELLJAR_SANDBOX", "process")
    assert choose_sandbox(load_settings()) == "process"


def test_doctor_examines_in_our_image_what_its_start_would_choose(
    belljar: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "ask_checks", lambda _: [HostCheck("namespaces", False, "refused")])
    monkeypatch.setenv("container", "oci")
    examined: list[str] = []

    def examine(settings: Settings) -> list[HostFinding]:
        examined.append(settings.sandbox)
        return []

    monkeypatch.setattr(doctor, "examine", examine)
    assert belljar("doctor").code == 0
    # Between several owners the container is no wall, and its start is refused.
    monkeypatch.setenv("BELLJAR_API_KEYS", "ada:secret-of-ada,bob:secret-of-bob")
    belljar("doctor")
    assert examined == ["process", "namespace"]


def test_the_rules_for_engines_are_those_in_the_kit(belljar: Run) -> None:
    kit = Path(__file__).parents[2] / "deploy" / "seccomp.json"
    printed = belljar("container", "--seccomp").out
    assert kit.read_text() == printed, "run: belljar container --seccomp > deploy/seccomp.json"
    names = json.loads(printed)["syscalls"][0]["names"]
    assert {"bpf", "kexec_load", "init_module", "keyctl"} <= set(names)
    assert not {"unshare", "mount", "pivot_root", "sethostname"} & set(names)


def test_the_compose_file_has_the_options_that_seal_sessions_off() -> None:
    kit = Path(__file__).parents[2] / "deploy"
    service = yaml.safe_load((kit / "compose.yaml").read_text())["services"]["belljar"]
    assert service["security_opt"] == ["seccomp=seccomp.json", "systempaths=unconfined"]
    assert (kit / "seccomp.json").is_file()
    arguments = re.findall(r"^ARG (\w+)", (kit.parent / "Dockerfile").read_text(), re.MULTILINE)
    assert set(service["build"]["args"]) <= set(arguments)


DOCKER = """#!/bin/sh\necho '{"ServerVersion": "28.1.0"}'\n"""
PODMAN = """#!/bin/sh\necho '{"host": {"security": {"rootless": true}}, "version": {"Version": "5.4.0"}}'\n"""
IS_SILENT = "#!/bin/sh\necho 'Cannot connect to the Docker daemon. Is it running?' >&2\nexit 1\n"


def engines(place: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Path:
    """Put engines on the PATH, and nothing else."""
    (tools := place / "bin").mkdir()
    for name, script in scripts.items():
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    return tools


def test_a_client_is_told_how_to_start_it_in_a_container(
    belljar: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = engines(place, monkeypatch, docker=DOCKER, podman=PODMAN)
    written = belljar("install", "--docker", "claude-code", "--write", "--image", "example/belljar:1")
    assert written.code == 0
    entry = json.loads((place.parent / ".claude.json").read_text())["mcpServers"]["belljar"]
    profile = place.parent / ".config" / "belljar" / "container-seccomp.json"
    assert entry["command"] == str(tools / "docker")
    sealed = ["--security-opt", f"seccomp={profile}", "--security-opt", "systempaths=unconfined"]
    assert entry["args"][:7] == ["run", "-i", "--rm", *sealed]
    assert entry["args"][-3:] == ["-v", "belljar:/data", "example/belljar:1"]
    assert json.loads(profile.read_text())["defaultAction"] == "SCMP_ACT_ALLOW"


def test_the_engine_that_answers_is_taken_and_silent_ones_are_quoted_with_what_to_do(
    belljar: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = engines(place, monkeypatch, docker=IS_SILENT, podman=PODMAN)
    entry = json.loads(belljar("install", "--docker", "cursor").out)["mcpServers"]["belljar"]
    assert entry["command"] == str(tools / "podman")
    # The option of docker's, without the file: podman's own rules for system calls allow namespaces.
    assert entry["args"][:5] == ["run", "-i", "--rm", "--security-opt", "systempaths=unconfined"]
    assert entry["args"][-3:] == ["-v", "belljar:/data", "belljar:latest"]
    (tools / "podman").unlink()
    refused = belljar("install", "--docker", "cursor")
    assert refused.code == 1
    assert "neither docker nor podman answers (docker: Cannot connect to the Docker daemon." in refused.err
    assert "hint: Start Docker Desktop" in refused.err
    (tools / "docker").unlink()
    refused = belljar("install", "--docker", "cursor")
    assert (refused.code, "neither docker nor podman answers" in refused.err) == (1, True)


def test_no_place_names_an_option_that_only_one_of_the_engines_has() -> None:
    root = Path(__file__).parents[2]
    places = [
        *(root / "docs").rglob("*.md"),
        *(root / "deploy").rglob("*"),
        *(root / "src").rglob("*.py"),
        root / "Dockerfile",
    ]
    texts = {path: path.read_text() for path in places if path.suffix != ".pyc" and path.is_file()}
    assert [path for path, text in texts.items() if "unmask=ALL" in text] == []
