"""Packages from the request to the proof, in real sessions, against an index of our own on loopback."""

import json
import threading
import zipfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from belljar.egress.rules import Rule
from belljar.environments import Environment
from belljar.environments.installs import InstallOutcome
from belljar.environments.package_index import find_index_hosts, index_variables
from belljar.errors import TooLarge
from belljar.files import disk_usage
from belljar.files.disk_usage import FolderUsage
from belljar.python.local import open_engine, open_session
from belljar.python.session_handle import SessionHandle
from belljar.runtime import open_runtime
from belljar.sandboxes import providers
from belljar.sessions.history import read_notebook
from belljar.sessions.packages import install_packages
from belljar.settings import Settings
from local_index import LocalIndex
from shared_environment import settings_with

pytestmark = pytest.mark.anyio


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def town(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an index, which pip and uv are configured for."""
    folder = tmp_path / "index"
    folder.mkdir()
    index = LocalIndex(folder)
    index.add_wheel("house", "1.0", {"house.py": "floors = 1\n"})
    index.add_wheel("house", "2.0", {"house.py": "floors = 2\n"})
    index.add_wheel("loud", "1.0", {"loud/__init__.py": "print('LOUD')\n"})
    index.add_wheel("ruin", "1.0", {"ruin.py": "raise RuntimeError('fell down')\n"})
    index.add_wheel("bomb", "1.0", {"bomb.py": "import os; os._exit(3)\n"})
    index.add_wheel("odd-name", "1.0", {"space/thing/__init__.py": "", "tests/__init__.py": "1/0"})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://localhost:{server.server_address[1]}"
        for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS", "UV_INDEX", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@asynccontextmanager
async def session(environment: Environment, folder: Path, **flags: Any) -> AsyncGenerator[SessionHandle]:
    for check in providers(Settings())["namespace"].check():
        if not check.is_ok:
            pytest.skip(f"{check.name}: {check.detail}")
    # Without a warm process, unless it is asked for: that costs more than a session that starts cold.
    chosen: dict[str, Any] = {"fork_start": False, "preload": [], **flags}
    settings = settings_with(environment=str(environment.python), data_directory=folder / "data", **chosen)
    async with open_engine(settings) as engine, engine.open_session() as handle:
        yield handle


async def said(handle: SessionHandle, code: str) -> str:
    result = await handle.execute(code, timeout_s=100)
    assert result.success, (result.error, result.output)
    return "".join(result.output) + (result.result or "")


@pytest.mark.parametrize("is_forked", [True, False], ids=["forked", "cold"])
async def test_a_package_is_installed_proven_and_at_hand_in_the_same_session(
    town: int, default_environment: Environment, tmp_path: Path, is_forked: bool
):
    async with session(default_environment, tmp_path, fork_start=is_forked) as handle:
        assert await said(handle, "answer = 42; answer") == "42"

        outcomes = await handle.install(["house", "loud", "nowhere-to-be-found"])

        assert outcomes[:2] == [
            InstallOutcome("house", "2.0", None, imported=True),
            InstallOutcome("loud", "1.0", None, imported=True),
        ]
        assert "nowhere-to-be-found was not found" in (outcomes[2].error or "")
        assert outcomes[2].imported is None
        # What the package printed is not the next cell's output; variables and the count of cells are as they were.
        result = await handle.execute("import house; house.floors + answer")
        assert (result.output, result.result, result.execution_count) == ([], "44", 2)
        # And the session is sealed as before.
        direct = await handle.execute(f"import socket; socket.create_connection(('127.0.0.1', {town}), timeout=3)")
        assert "ConnectionRefused" in (direct.error or "")


async def test_a_package_that_does_not_import_is_told(town: int, default_environment: Environment, tmp_path: Path):
    async with session(default_environment, tmp_path) as handle:
        (ruin, odd) = await handle.install(["ruin", "odd-name"])

        assert ruin == InstallOutcome("ruin", "1.0", None, False, "ruin: RuntimeError: fell down")
        assert odd.imported is True


async def test_a_package_that_ends_the_kernel_is_told_and_the_session_goes_on(
    town: int, default_environment: Environment, tmp_path: Path
):
    async with session(default_environment, tmp_path) as handle:
        (bomb,) = await handle.install(["bomb"])

        assert bomb.imported is False
        assert "ended the kernel" in (bomb.import_error or "")
        result = await handle.execute("1 + 1")
        assert (result.result, result.state) == ("2", "lost")


async def test_packages_that_changed_under_a_kernel_are_named(
    town: int, default_environment: Environment, tmp_path: Path
):
    settings = settings_with(
        environment=str(default_environment.python), data_directory=tmp_path / "data", fork_start=False
    )
    async with open_runtime(settings) as runtime:
        session = runtime.sessions.create("local")
        first = await install_packages(runtime.starter, session, ["house==1.0"])
        second = await install_packages(runtime.starter, session, ["house==2.0"])

    assert first.restart_needed == []
    assert second.restart_needed == ["house 1.0 → 2.0"]


async def test_an_exported_notebook_installs_what_its_session_had_installed(
    town: int, default_environment: Environment, tmp_path: Path
):
    async with session(default_environment, tmp_path) as handle:
        await handle.execute("before = 1")
        await handle.install(["house<2", "nowhere-to-be-found", "loud"])
        await handle.execute("import house")
        await handle.install(["nowhere-to-be-found"])
        notebook = json.loads(read_notebook(tmp_path / "data", handle.id, lambda _: None))
    said = ["".join(cell["source"]) for cell in notebook["cells"]]
    assert said == ["before = 1", "%pip install 'house<2' loud", "import house"]


async def test_a_jupyter_kernel_installs_and_proves_too(town: int, default_environment: Environment):
    if not (default_environment.python.parents[1] / "share" / "jupyter" / "kernels" / "python3").is_dir():
        pytest.skip("the default environment has no Jupyter kernel")
    data = default_environment.python.parents[3]
    async with open_session("kernel:python3", settings_with(data_directory=data, fork_start=False)) as handle:
        assert await handle.install(["house==1.0", "ruin"]) == [
            InstallOutcome("house", "1.0", None, imported=True),
            InstallOutcome("ruin", "1.0", None, False, "ruin: RuntimeError: fell down"),
        ]
        result = await handle.execute("%pip install loud\nimport house, loud; house.floors", timeout_s=100)
        assert "loud 1.0 is installed" in result.stdout
        assert (result.result, result.execution_count) == ("1", 1)


async def test_pip_in_a_cell_asks_the_host(town: int, default_environment: Environment, tmp_path: Path):
    async with session(default_environment, tmp_path) as handle:
        assert "house 1.0 is installed" in await said(handle, "!pip install 'house<2'")
        assert "loud 1.0 is installed" in await said(handle, "%pip install -q loud")
        assert "house 2.0 is installed\nhouse changed from 1.0 to 2.0: restart needed" in await said(
            handle, "!uv pip install house==2.0"
        )
        module = (
            "import subprocess, sys; subprocess.run([sys.executable, '-m', 'pip', 'install', 'odd_name']).returncode"
        )
        assert (await said(handle, module)).endswith("0")
        assert await said(handle, "import house, loud, space.thing; house.floors") == "LOUD\n2"


VENV = """
import pip, subprocess, sys
def told(*words): return subprocess.run(words, capture_output=True, text=True, check=True).stdout
made = told(sys.executable, "-m", "venv", "v")
own = told("v/bin/python", "-c", "import pip, sys; print(pip.__file__.startswith(sys.prefix))")
print(pip.__file__.startswith(sys.prefix), pip.__version__ in told(sys.executable, "-m", "pip", "--version"))
print(own.strip(), told("v/bin/pip", "--version").startswith("pip "), "/v/" in told("v/bin/python", "-m", "pip", "-V"))
there = subprocess.run(["v/bin/python", "-m", "pip", "install", "--no-index", "house"], capture_output=True, text=True)
print("No matching distribution" in there.stderr)
print("/v/" in told("bash", "-c", ". v/bin/activate; pip --version"))
print([path for path in sys.path if path.endswith("commands")], "sitecustomize" in sys.modules)
"""
BARE = """
import subprocess, sys
subprocess.run([sys.executable, "-m", "venv", "--without-pip", "bare"], check=True)
there = subprocess.run(["bare/bin/python", "-c", "import pip"], capture_output=True, text=True)
there.stderr.splitlines()[-1]
"""
WAYS = ("-m pip", "-I -m pip", "-umpip", "-W ignore -X utf8 -m pip", "-m uv pip")


async def test_pip_is_the_environments_own_and_only_its_command_is_caught(
    town: int, default_environment: Environment, tmp_path: Path
):
    async with session(default_environment, tmp_path) as handle:
        told, _, _ = (await said(handle, VENV)).partition("[belljar: ")
        assert told == "True True\nTrue True True\nTrue\nTrue\n[] False\n"
        assert "No module named 'pip'" in await said(handle, BARE)
        for way in WAYS:
            assert "house 2.0 is" in await said(handle, f"import sys\n!{{sys.executable}} {way} install house"), way
        # What the session itself runs when Python starts is run, and a program that has a word like ours is left alone.
        await handle.upload("own/sitecustomize.py", "print('own')")
        assert (
            await said(handle, "!PYTHONPATH=$PYTHONPATH:own python -c 'import sys; print(len(sys.argv))'") == "own\n1\n"
        )
        assert await said(handle, "!python -c 'print(1)' -m pip install castle") == "1\n"


async def test_a_requirements_file_is_read_inside(town: int, default_environment: Environment, tmp_path: Path):
    async with session(default_environment, tmp_path) as handle:
        await handle.upload("requirements.txt", "# what we need\nhouse==1.0  # old\n\nloud\n")
        assert "house 1.0 is installed\nloud 1.0 is installed" in await said(handle, "!pip install -r requirements.txt")
        await handle.upload("requirements.txt", "--index-url http://evil.test\nhouse\n")
        assert "has an option" in await said(handle, "!pip install -r requirements.txt")


REFUSED = [
    ("castle", 1, "castle was not found"),
    ("ruin", 1, "ruin is installed but does not import: RuntimeError: fell down"),
    ("--index-url http://evil.test house", 2, "the option --index-url cannot be used"),
    ("--extra-index-url=http://evil.test house", 2, "the option --extra-index-url=http://evil.test cannot be used"),
    ("-e .", 2, "the option -e cannot be used"),
    ("--no-deps house", 2, "the option --no-deps cannot be used"),
    ("./house", 1, "not a package to install: './house'"),
    ("git+https://evil.test/house", 1, "not a package to install"),
    ("'house @ https://evil.test/house.whl'", 1, "not a package to install"),
    ("'house --pre'", 1, "not a package to install"),
    ("", 2, "nothing to install"),
    ("-r missing.txt", 2, "missing.txt cannot be read"),
]


async def test_pip_in_a_cell_says_what_it_cannot_do(town: int, default_environment: Environment, tmp_path: Path):
    async with session(default_environment, tmp_path) as handle:
        for arguments, status, words in REFUSED:
            answer = await said(handle, f"!pip install {arguments}\n_exit_code")
            assert words in answer
            assert answer.endswith(str(status)), arguments


async def test_requests_at_the_desk_may_be_hostile(town: int, default_environment: Environment, tmp_path: Path):
    async with session(default_environment, tmp_path) as handle:
        attack = """
import json, os, socket
def ask(content):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(os.environ["BELLJAR_PACKAGES"])
        try:
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        try:
            answer = json.loads(sock.makefile("rb").read() or b'{"errors": ["cut off"], "lines": []}')
        except ConnectionResetError:
            return True
        return bool(answer["errors"]) and not answer["lines"]
line = lambda value: json.dumps(value).encode() + b"\\n"
print([ask(each) for each in (
    b"", b"\\n", b"{", b"[" * 100_000 + b"\\n", b"x" * 10_000_000, b"\\xff\\xfe\\n", line([]), line({}),
    line({"requirements": []}),
    line({"requirements": "house"}), line({"requirements": [1]}), line({"requirements": ["house"] * 101}),
    line({"requirements": ["h" * 501]}), line({"requirements": ["house"], "layer": "/etc"}),
    line({"requirements": ["--target=/etc"]}), line({"requirements": ["house\\n--pre"]}),
    line({"requirements": ["\\ud800"]}),
)])
"""
        assert "False" not in await said(handle, attack)
        assert "house 2.0" in await said(handle, "!pip install house")


async def test_pip_and_uv_of_the_session_work_through_the_proxy(
    town: int, default_environment: Environment, tmp_path: Path
):
    async with session(default_environment, tmp_path, egress=["packages"], egress_allow_private=True) as handle:
        # Loopback is inside for NO_PROXY's sake; here it stands for a host outside.
        await said(handle, "import os, sys\nfor name in ('NO_PROXY', 'no_proxy'): os.environ.pop(name)")
        assert "Successfully installed house-2.0" in await said(handle, "!pip install --target there house 2>&1")
        await handle.upload("bin/uv", Path(find_uv_bin()).read_bytes())
        uv = "!chmod +x bin/uv; ./bin/uv --no-cache pip install --python {sys.executable} --target here loud 2>&1"
        assert "+ loud==1.0" in await said(handle, uv)
        assert await said(handle, "sys.path.append('there'); import house; house.floors") == "2"


async def test_the_alias_means_what_pip_and_uv_are_told(town: int):
    assert (await find_index_hosts()).rules == [Rule("localhost", town)]
    assert index_variables() == {
        "PIP_INDEX_URL": f"http://localhost:{town}",
        "UV_DEFAULT_INDEX": f"http://localhost:{town}",
    }


async def test_the_alias_covers_the_hosts_that_the_index_sends_one_to(
    town: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = LocalIndex(tmp_path / "index")
    files.add_wheel("ipython", "9.0", {"IPython/__init__.py": ""})
    page = tmp_path / "index" / "ipython" / "index.html"
    page.write_text(page.read_text().replace('href="', f'href="http://127.0.0.1:{town}/ipython/'))

    assert (await find_index_hosts()).rules == [Rule("localhost", town), Rule("127.0.0.1", town)]


async def test_an_index_with_a_password_is_not_told_to_sessions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://user:secret@mirror.test/simple")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.test/simple")

    assert index_variables() == {"PIP_INDEX_URL": "https://mirror.test/simple"}


async def test_configuration_files_count_too(town: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pip.conf").write_text(
        f"[global]\nindex-url = http://localhost:{town}\nextra-index-url =\n  https://a.test/x\n  file:///b\n"
    )
    (tmp_path / "uv.toml").write_text(
        'find-links = ["https://links.test/"]\n[[index]]\nurl = "https://uv.test:8443/s"\n'
    )
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "uv.toml"))

    assert {str(rule) for rule in (await find_index_hosts()).rules} == {
        *(f"localhost:{town}", "a.test:443", "links.test:443", "uv.test:8443")
    }
    assert index_variables()["PIP_INDEX_URL"] == f"http://localhost:{town}"


def add_bombs(folder: Path) -> None:
    """Wheels that are small to fetch and large on disk: 300 MB of zeros in one file, and 5,000 empty files."""
    for name, files in (("swell", {"swell/zeros.bin": 300}), ("swarm", {f"swarm/{n}": 0 for n in range(5_000)})):
        information = f"{name}-1.0.dist-info"
        (folder / name).mkdir()
        wheel = f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(folder / name / wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for path, megabytes in files.items():
                with archive.open(path, "w") as file:
                    for _ in range(megabytes):
                        file.write(bytes(1 << 20))
            archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(
                f"{information}/WHEEL",
                "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            record = "".join(f"{path},,\n" for path in (*files, f"{information}/METADATA", f"{information}/WHEEL"))
            archive.writestr(f"{information}/RECORD", record)
        (folder / name / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>\n')


@pytest.mark.parametrize("provider", ["namespace", "process"])
async def test_packages_that_unpack_to_more_than_there_is_room_for_end_the_installation(
    town: int, default_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str
):
    # Fewer than anyone would want, because making files is slow.
    monkeypatch.setattr(disk_usage, "_FEWEST_FILES", 2_000)
    monkeypatch.setattr(disk_usage, "_FILES_PER_MB", 1)
    monkeypatch.setattr(disk_usage, "_BESIDE", FolderUsage(64 << 20, 1_000))
    add_bombs(tmp_path / "index")
    flags = {"disk_mb": 50, "sandbox": provider}
    async with session(default_environment, tmp_path, **flags) as handle:
        await said(handle, "answer = 42")
        for name in ("swell", "swarm"):
            (outcome,) = await handle.install([name])
            assert outcome.installed_version is None
            assert "the packages need more than what is left of disk_mb = 50: " in (outcome.error or ""), outcome
        told = await said(handle, "%pip install swell")
        assert "the packages need more than what is left of disk_mb = 50: " in told
        (folder,) = (tmp_path / "data" / "sessions").glob(handle.id)
        assert {path.name for path in folder.iterdir() if path.name.startswith(".")} <= {".layer.lock"}
        assert not any((folder / "layer").rglob("sw*"))
        assert (await handle.install(["house"]))[0].imported is True
        assert await said(handle, "import house; house.floors + answer") == "44"


async def test_no_packages_are_fetched_for_a_session_that_is_full(
    town: int, default_environment: Environment, tmp_path: Path
):
    async with session(default_environment, tmp_path, disk_mb=5) as handle:
        await handle.execute("with open('full', 'wb') as file:\n  for _ in range(6): file.write(bytes(1 << 20))")
        with pytest.raises(TooLarge, match="disk_full: nothing is left of disk_mb = 5 for packages"):
            await handle.install(["house"])
        assert "nothing is left of disk_mb = 5 for packages" in await said(handle, "%pip install house")
