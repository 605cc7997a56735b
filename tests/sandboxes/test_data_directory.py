"""What is in a data directory after a busy life: nobody but the server's user gets in, and nothing in it acts alone."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from imported_image import import_image
from mcp import Client
from trials import usable

from belljar.mcp.server import build_server
from belljar.runtime import Runtime, open_runtime
from belljar.settings import Settings
from local_index import LocalIndex

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

IS_ROOT = os.geteuid() == 0
WAY = 0o711 if IS_ROOT else 0o700
PROVIDERS = ["namespace", "gvisor", "container", "process"]
LIFE = """
import os, socket
def arm(path):
    open(path, 'w').close()
    try: os.chmod(path, 0o6755)
    except PermissionError: pass  # of the system call filter
os.mkdir('deep'); arm('deep/armed')
open('workspace/kept.txt', 'w').write('kept')
os.mkfifo('pipe')
end = socket.socket(socket.AF_UNIX); end.bind('end')
from IPython.display import display
display({'image/png': 'QUJD'}, raw=True)
x = 1
"""
# Where /tmp is not the host's.
SEALED = """
arm('/tmp/armed')
try: os.mknod('device', 0o20666, os.makedev(1, 3))
except OSError: pass
"""
WIDENED: list[str] = []
"""Folders that were made with too many rights, and files that lost rights after they were made."""
_watched: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    # In its thread, what is made is in a mount namespace of its own, not on the disk.
    if event not in ("os.mkdir", "os.chmod") or not _watched or threading.current_thread().name == "root-view":
        return
    path, mode = arguments[0], arguments[1]
    if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(_watched[0]):
        return
    if event == "os.mkdir":
        before = mode
        wanted = 0o711
    else:
        before, wanted = stat.S_IMODE(Path(path).stat().st_mode), mode
    if before & ~wanted & 0o077:
        WIDENED.append(f"{event} {path} {before:o} {mode:o}")


sys.addaudithook(_watch)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has IPython without an installation, for whichever user runs this."""
    folder = tmp_path_factory.mktemp("environment")
    folder.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "more.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return folder / "bin" / "python"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalIndex:
    folder = tmp_path / "index"
    folder.mkdir()
    folder.chmod(0o755)
    index = LocalIndex(folder)
    index.add_wheel("house", "1.0", {"house.py": "floors = 1\n"})
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_")) or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    return index


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """Where nothing is yet, for a process that restricts nothing by its umask."""
    before = os.umask(0)
    folder = tmp_path / "data"
    _watched[:] = [str(folder)]
    yield folder
    _watched.clear()
    WIDENED.clear()
    os.umask(before)


@asynccontextmanager
async def opened(data: Path, python: Path, sandbox: str, **chosen: Any) -> AsyncGenerator[Runtime]:
    image = {"container_image": import_image()} if sandbox == "container" else {}
    values: dict[str, Any] = {
        "sandbox": sandbox,
        "workspace": "on",
        "log_level": "ERROR",
        "preload": [],
        **image,
        **chosen,
    }
    async with open_runtime(Settings(data_directory=data, environment=str(python), **values)) as runtime:
        yield runtime


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await client.call_tool(tool, arguments, meta={"belljar/structured": "always"})
    assert answer.structured_content is not None, answer
    return answer.structured_content


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("sandbox", PROVIDERS)
async def test_after_a_busy_life_every_mode_is_the_narrowest(data: Path, python: Path, sandbox: str) -> None:
    usable(sandbox)
    async with opened(data, python, sandbox) as runtime:
        async with Client(build_server(runtime, ["interpreter"])) as client:
            first = await call(client, "execute_code", code=LIFE if sandbox == "process" else LIFE + SEALED)
            assert first["status"] == "ok", first["error"]
            if sandbox != "container":  # the image has none of the libraries that uv needs
                told = await call(client, "install_dependencies", session_id=first["session_id"], packages=["house"])
                assert "1.0" in str(told), told
            if sandbox == "namespace":
                fork = await call(client, "fork_session", session_id=first["session_id"])
                await call(client, "execute_code", session_id=fork["session_id"], code="import house; y = 2")
            check(data)
        async with Client(build_server(runtime, ["executor"])) as client:
            ran = await client.call_tool("execute_code", {"code": "open('mine', 'w').close(); print(1)"})
            assert not ran.is_error, ran
            check(data)
    check(data, is_asleep=True)
    async with opened(data, python, sandbox) as runtime, Client(build_server(runtime, ["interpreter"])) as client:
        woken = await call(client, "execute_code", session_id=first["session_id"], code="x + 1")
        assert woken["result"] == "2", woken
        check(data)
    assert not WIDENED, "\n".join(WIDENED)


async def test_what_outlives_its_server_is_as_closed(data: Path, python: Path) -> None:
    usable("namespace")
    for code in ("x = 1", "x + 1"):
        async with opened(data, python, "namespace", keep_alive=True, keep_alive_s=5) as runtime:  # noqa: SIM117
            async with Client(build_server(runtime, ["interpreter"])) as client:
                listed = await call(client, "list_sessions")
                known = {"session_id": listed["sessions"][0]["session_id"]} if listed["sessions"] else {}
                assert (await call(client, "execute_code", code=code, **known))["status"] == "ok"
                check(data)
                if known:
                    await call(client, "clear_session", **known)
        check(data)
    assert not WIDENED, "\n".join(WIDENED)


def check(data: Path, *, is_asleep: bool = False) -> None:
    """Look at every entry there is."""
    wrong: list[str] = []
    for folder, names, files in os.walk(data):
        for name in (".", *names, *files):
            path = Path(folder, name)
            status = path.lstat()
            if not stat.S_ISLNK(status.st_mode) and not _is_right(path.relative_to(data), status, is_asleep=is_asleep):
                wrong.append(f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid} {path}")
    assert wrong == []


def _is_right(path: Path, status: os.stat_result, *, is_asleep: bool) -> bool:
    mode, is_folder = stat.S_IMODE(status.st_mode), stat.S_ISDIR(status.st_mode)
    if stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode):
        return False
    match path.parts:
        case ("sessions",) | ("sessions" | "executor", _) if is_folder:
            return mode == WAY
        case ("sessions" | "executor", _, "workspace" | "scratch" | "home") | ("code",):
            return mode == 0o700
        case ("sessions" | "executor", _, "workspace" | "scratch" | "home", *_) | ("code", *_):
            return not (is_asleep and mode & 0o6000)
        case ("sessions" | "executor", _, part) if part in ("layer", "skills") or part.startswith("packages-"):
            has_user = status.st_gid != os.getegid()
            return mode == (0o750 if has_user else 0o700) and status.st_uid == os.geteuid()
        case ("sessions" | "executor", _, part, *_) if part in ("layer", "skills") or part.startswith("packages-"):
            return not mode & 0o6022 and (is_folder or stat.S_ISREG(status.st_mode))
        case ("sessions", _, "state"):
            return mode == 0o600
        case _:
            return mode == (0o700 if is_folder else 0o600) and status.st_uid == os.geteuid()


# A data directory that was there before


async def test_one_of_an_earlier_version_is_closed_and_that_is_said_once(
    data: Path, python: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _watched.clear()
    shown = data / "sessions" / ("0" * 32) / "displays" / "one"
    for folder in (shown, data / "toolbox" / "shapes", data / "environments" / "one", data / "others"):
        folder.mkdir(parents=True, mode=0o755)
    for file in (shown / "1.png", data / "toolbox" / "shapes" / "one.json", data / "others" / "file"):
        file.touch(0o644)
    for folder, names, _ in os.walk(data):
        for name in (".", *names):
            Path(folder, name).chmod(0o755)
    async with opened(data, python, "process", fork_start=False):
        pass
    assert "was open to other users of this machine" in caplog.text
    assert [stat.S_IMODE(path.stat().st_mode) for path in (data, shown.parent, shown, shown / "1.png")] == [
        *(0o700, 0o700, 0o700, 0o600)
    ]
    # What is the operator's own there stays as they chose it; nobody else gets to it.
    assert stat.S_IMODE((data / "others" / "file").stat().st_mode) == 0o644
    caplog.clear()
    async with opened(data, python, "process", fork_start=False):
        pass
    assert "was open" not in caplog.text
