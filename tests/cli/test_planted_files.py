"""What a session saves, and what anybody put into the working directory, changes nothing that runs next on the host."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from belljar.environments import Environment
from belljar.sandboxes import providers
from belljar.settings import load_settings
from live_server import clean_environment

Run = Callable[..., Any]

# Each is obeyed by some program in whose folder it lies.
NAMES = (
    *(
        "belljar.toml",
        "typer.py",
        "conftest.py",
        "sitecustomize.py",
        "uv.toml",
        "package.json",
        "Makefile",
        "servers.json",
    ),
    *(
        ".bashrc",
        ".env",
        ".envrc",
        ".mcp.json",
        ".vscode/tasks.json",
        ".git/hooks/post-checkout",
        "node_modules/.bin/npx",
    ),
)
WRITING = f"""
import pathlib
for name in {NAMES!r}:
    file = pathlib.Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('sandbox = "process"')
"""


MODULE = [sys.executable, "-m", "belljar"]


@pytest.fixture
def script() -> str:
    """The command as people start it."""
    return str(Path(sys.executable).with_name("belljar"))


@pytest.mark.parametrize("sandbox", ["process", "namespace", "gvisor", "container"])
def test_files_of_a_session_land_apart_and_the_next_command_obeys_none(
    belljar: Run, place: Path, default_environment: Environment, monkeypatch: pytest.MonkeyPatch, sandbox: str
) -> None:
    if not all(check.is_ok for check in providers(load_settings())[sandbox].check()):
        pytest.skip(f"this host has no {sandbox}")
    downloads = place.parent / "downloads"
    monkeypatch.setenv("BELLJAR_DATA_DIRECTORY", str(place.parent / "data"))
    monkeypatch.setenv("BELLJAR_DOWNLOAD_DIRECTORY", str(downloads))
    monkeypatch.setenv("BELLJAR_ENVIRONMENT", str(default_environment.python))
    (place / "conftest.py").write_text("mine")

    outcome = belljar("run", "--sandbox", sandbox, "-c", WRITING)

    assert outcome.code == 0, outcome.err
    assert [path.name for path in place.iterdir()] == ["conftest.py"]
    assert (place / "conftest.py").read_text() == "mine"
    (folder,) = downloads.iterdir()
    kept = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert kept == sorted(name for name in NAMES if not any(part.startswith(".") for part in Path(name).parts))
    assert f"saved in {folder}: " in outcome.err
    monkeypatch.delenv("BELLJAR_ENVIRONMENT")
    (place / "conftest.py").unlink()
    before = belljar("config").out
    monkeypatch.chdir(folder)
    after = belljar("config")
    assert after.out == before
    assert f"{folder / 'belljar.toml'}; belljar trust " in after.err


def _plant(folder: Path, names: set[str], marker: Path) -> None:
    """Modules of every name that an import could ask for, each of which says that it was imported."""
    for name in names - {"belljar"}:
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r} + ' ')")


STANDARD = set(sys.stdlib_module_names)
# Those with an underscore are what .pth files import, before Python comes to us.
INSTALLED = {name for name in packages_distributions() if name.isidentifier() and not name.startswith("_")}


@pytest.mark.parametrize(
    ("command", "names", "variables"),
    [
        (["script"], STANDARD | INSTALLED, {}),
        # What Python imports by itself it takes from where PYTHONPATH says, before it comes to us.
        (["script"], INSTALLED, {"PYTHONPATH": os.pathsep}),
        ([sys.executable, "-m", "belljar"], INSTALLED, {"PYTHONPATH": f"/nowhere{os.pathsep}."}),
        ([sys.executable, "-P", "-m", "belljar"], STANDARD | INSTALLED, {}),
    ],
)
def test_the_working_directory_is_on_no_import_path(
    place: Path, script: str, command: list[str], names: set[str], variables: dict[str, str]
) -> None:
    marker = place.parent / "imported"
    _plant(place, names, marker)
    answer = subprocess.run(
        [*(script if word == "script" else word for word in command), "sessions"],
        capture_output=True,
        text=True,
        env=clean_environment(**variables),
    )
    assert not marker.exists(), marker.read_text()
    assert answer.returncode == 0, answer.stderr


def test_a_relative_entry_of_the_path_starts_nothing_from_the_working_directory(place: Path, script: str) -> None:
    planted = place / "node"
    planted.write_text(f"#!/bin/sh\ntouch {place.parent / 'started'}\necho v99\n")
    planted.chmod(0o755)
    variables = {
        "PATH": f":{os.environ['PATH']}:.",
        "BELLJAR_FORK_START": "false",
        "BELLJAR_ENVIRONMENT": sys.executable,
    }
    subprocess.run([script, "doctor"], capture_output=True, env=clean_environment(**variables))
    assert not (place.parent / "started").exists()


def test_servers_of_the_toolbox_are_not_started_among_files_of_sessions(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "downloads" / "3f9c0000"
    folder.mkdir(parents=True)
    started = tmp_path / "started"
    config = tmp_path / "servers.json"
    config.write_text(f'{{"mcpServers": {{"x": {{"command": "/bin/sh", "args": ["-c", "pwd > {started}"]}}}}}}')
    for work in (place, folder):
        subprocess.run(
            [*MODULE, "toolbox", "list", "--mcp-config", str(config)],
            capture_output=True,
            cwd=work,
            env=clean_environment(BELLJAR_DOWNLOAD_DIRECTORY=tmp_path / "downloads"),
        )
        assert Path(started.read_text().strip()) == (work if work == place else Path.home())
