import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from belljar.environments.managed import (
    DEFAULT,
    BuildProgress,
    Recipe,
    compile_packages,
    interpreter_path,
    is_compiled,
    is_ready,
    prepare,
    recipe_folder,
)
from belljar.environments.uv import certificate_variables
from belljar.errors import EnvironmentBroken
from belljar.file_lock import open_lock
from belljar.settings import Settings
from shared_environment import settings_with

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("index")]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_with(data_directory=tmp_path / "data")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "lock.txt").write_text("house==1.0\n")
    return Recipe("small", tmp_path / "lock.txt")


def run(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=True).stdout


async def test_an_environment_is_made_from_its_lock_and_compiled_when_it_is_ready(
    settings: Settings, recipe: Recipe
) -> None:
    python = await prepare(settings, recipe)
    root = recipe_folder(settings, recipe)
    lines: list[str] = []

    assert python == interpreter_path(root)
    assert not list(root.glob("lib/*/site-packages/__pycache__/house.*.pyc"))
    assert not is_compiled(root)
    await compile_packages(root, on_progress=lines.append)
    assert run(python, "import house; print(house.floors)") == "1\n"
    assert list(root.glob("lib/*/site-packages/__pycache__/house.*.pyc"))
    assert is_compiled(root)
    assert re.fullmatch(r"compiled (\d+) of \1 files", lines[-1])
    await compile_packages(root, on_progress=lines.append)
    assert len([line for line in lines if line == lines[-1]]) == 1


async def test_packages_are_compiled_by_one_server_and_a_broken_one_stops_nothing(
    settings: Settings, recipe: Recipe
) -> None:
    python = await prepare(settings, recipe)
    root = recipe_folder(settings, recipe)
    packages = next(root.glob("lib/*/site-packages"))
    (packages / "template.py").write_text("def {{ name }}")
    async with open_lock(root.with_name(f".{root.name}.lock")):
        await compile_packages(root, is_aside=True)
        assert not is_compiled(root)
    await compile_packages(root, is_aside=True)
    assert is_compiled(root)
    assert run(python, "import house") == ""


def test_progress_counts_packages_and_megabytes() -> None:
    lines: list[str] = []
    progress = BuildProgress(lines.append)
    for line in (
        "Resolved 70 packages in 2.37s",
        "Downloading numpy (16.1MiB)",
        "Downloading pip (512.0KiB)",
        "Downloaded pip",
        "Downloaded numpy",
        "Prepared 70 packages in 18s",
        "+ numpy==2.1",
    ):
        progress.on_line(line)
    assert lines == [
        "Resolved 70 packages in 2.37s",
        "fetching numpy, 17 MB: 0 of 17 MB of 70 packages",
        "fetching pip, 1 MB: 0 of 17 MB of 70 packages",
        "fetched pip: 1 of 17 MB of 70 packages",
        "fetched numpy: 17 of 17 MB of 70 packages",
        "Prepared 70 packages in 18s",
        "+ numpy==2.1",
    ]


def test_uv_trusts_whom_the_system_trusts_unless_somebody_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tmp_path / "uv.toml"
    chosen.write_text("")
    monkeypatch.setattr("belljar.environments.uv._CERTIFICATE_PLACES", (str(chosen),))
    ours = {"UV_CONFIG_FILE": str(chosen)}
    assert certificate_variables(ours) == {"UV_SYSTEM_CERTS": "1"}
    for name in ("UV_SYSTEM_CERTS", "UV_NATIVE_TLS", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        assert certificate_variables({**ours, name: "0"}) == {}
    chosen.write_text("native-tls = false\n")
    assert certificate_variables(ours) == {}
    monkeypatch.setattr("belljar.environments.uv._CERTIFICATE_PLACES", (str(tmp_path / "none"),))
    assert sys.platform == "darwin" or certificate_variables({"UV_CONFIG_FILE": str(tmp_path / "none")}) == {}


async def test_a_prepared_environment_needs_no_installer(
    settings: Settings, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    first = await prepare(settings, recipe)
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_NO_CACHE", "1")

    assert await prepare(settings, recipe, on_progress=lines.append) == first
    assert lines == []


async def test_progress_is_told_and_stdout_stays_clean(
    settings: Settings, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []

    await prepare(settings, recipe, on_progress=lines.append)

    assert lines[0].startswith("preparing the small environment")
    assert "+ house==1.0" in lines
    assert lines[-1] == "the small environment is ready"
    assert capfd.readouterr() == ("", "")


async def test_shown_progress_goes_to_stderr_only(
    settings: Settings, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    await prepare(settings, recipe, show=True)

    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert "house==1.0" in stderr


async def test_one_left_half_built_is_made_anew(settings: Settings, recipe: Recipe) -> None:
    leftover = recipe_folder(settings, recipe) / "lib" / "leftover"
    leftover.mkdir(parents=True)

    assert run(await prepare(settings, recipe), "import house") == ""
    assert not leftover.exists()


async def test_one_whose_base_interpreter_went_away_is_made_anew(settings: Settings, recipe: Recipe) -> None:
    python = await prepare(settings, recipe)
    python.unlink()
    python.symlink_to("/no/such/python")
    assert not is_ready(recipe_folder(settings, recipe))

    assert run(await prepare(settings, recipe), "import house") == ""


async def test_two_at_once_build_it_once(settings: Settings, recipe: Recipe) -> None:
    lines: list[str] = []

    async def prepare_once() -> None:
        await prepare(settings, recipe, on_progress=lines.append)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prepare_once)
        tasks.start_soon(prepare_once)

    assert sum(line.startswith("preparing") for line in lines) == 1
    assert lines.count("another server is preparing the small environment: waiting for it") == 1


async def test_a_failure_quotes_uv_and_leaves_nothing_ready(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "lock.txt").write_text("castle-in-the-air==1.0\n")
    recipe = Recipe("small", tmp_path / "lock.txt")

    with pytest.raises(EnvironmentBroken) as caught:
        await prepare(settings, recipe)

    assert caught.value.message.startswith("the small environment could not be made: ")
    assert "No solution found" in caught.value.message
    assert "castle-in-the-air" in caught.value.message
    assert "Using Python" not in caught.value.message
    assert "UV_DEFAULT_INDEX" in caught.value.hint
    assert not is_ready(recipe_folder(settings, recipe))


async def test_cancelling_ends_the_installer_and_frees_the_lock(
    settings: Settings, recipe: Recipe, silent_index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, anyio.CancelScope() as scope:
        patch.setenv("UV_DEFAULT_INDEX", silent_index)
        await prepare(
            settings, recipe, on_progress=lambda line: scope.cancel() if line.startswith("Using Python") else None
        )
    assert scope.cancelled_caught

    assert run(await prepare(settings, recipe), "import house") == ""


async def test_a_data_directory_that_cannot_be_written_is_named(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(EnvironmentBroken, match="cannot be written: Not a directory"):
        await prepare(settings_with(data_directory=tmp_path / "file" / "data"), recipe)


async def test_another_lock_gets_another_folder(settings: Settings, recipe: Recipe) -> None:
    before = recipe_folder(settings, recipe)
    recipe.lock.write_text("house==2.0\n")

    assert recipe_folder(settings, recipe) != before
    assert recipe_folder(settings).name.startswith("default-")


async def test_the_lock_of_the_default_environment_has_what_is_promised() -> None:
    pinned = {line.partition("==")[0] for line in DEFAULT.lock.read_text().splitlines()}

    wanted = "ipython pandas numpy matplotlib seaborn plotly kaleido sympy scipy scikit-learn pillow openpyxl requests"
    assert set(f"{wanted} pyarrow tqdm jinja2 tabulate".split()) <= pinned


async def test_a_silent_index_is_given_up_after_the_time_limit(
    settings: Settings, recipe: Recipe, silent_index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", silent_index)
    monkeypatch.setattr("belljar.environments.managed._BUILD_TIMEOUT_S", 1.5)

    with pytest.raises(EnvironmentBroken, match=r"uv was stopped after 1.5 s"):
        await prepare(settings, recipe)


KILLED_SERVER = """
import os, signal, sys
from pathlib import Path
import anyio
from belljar.environments.managed import Recipe, prepare
from belljar.settings import Settings

def on_progress(line):
    if line.startswith("Using Python"):  # uv is past making the folder and about to ask the index
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    settings = Settings(data_directory=Path(sys.argv[1]))
    await prepare(settings, Recipe("small", Path(sys.argv[2])), on_progress=on_progress)

anyio.run(main)
"""


async def test_the_installer_of_a_killed_server_ends_with_it_and_the_next_one_goes_on(
    settings: Settings, recipe: Recipe
) -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        variables = {**os.environ, "UV_DEFAULT_INDEX": silent, "UV_HTTP_RETRIES": "0"}
        command = [sys.executable, "-c", KILLED_SERVER, str(settings.data_directory), str(recipe.lock)]
        killed = await anyio.run_process(command, env=variables, check=False)
        assert killed.returncode == -signal.SIGKILL
        begun = (recipe_folder(settings, recipe) / "pyvenv.cfg").stat().st_ino
        # The silent index stays open: only an installer that ended with its server lets the lock go.
        with anyio.fail_after(60):
            python = await prepare(settings, recipe, on_progress=lines.append)

    assert (recipe_folder(settings, recipe) / "pyvenv.cfg").stat().st_ino == begun
    assert run(python, "import house") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sessions have users of their own")
async def test_the_users_of_sessions_can_read_it_whatever_the_umask_is(settings: Settings, recipe: Recipe) -> None:
    before = os.umask(0o077)
    try:
        await prepare(settings, recipe)
    finally:
        os.umask(before)

    (package,) = recipe_folder(settings, recipe).glob("lib/*/site-packages/house.py")
    assert all(path.stat().st_mode & 0o004 for path in (package, package.parent, recipe_folder(settings, recipe)))
