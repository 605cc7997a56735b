"""What uv can do in the sandbox that packages are fetched in: reach the index, and nothing else of the host's.

Where uv itself will not misbehave, a script takes its place that runs the code it is given.
"""

import base64
import logging
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest

from belljar.environments.base import Environment
from belljar.environments.installs import InstallOutcome, install
from belljar.environments.package_index import read_access
from belljar.environments.uv import UvAnswer, open_uv_on_host
from belljar.errors import EnvironmentBroken
from belljar.files.fd_walk import remove_tree
from belljar.provisioning import confined_uv
from belljar.provisioning.confined_uv import UvSandbox
from belljar.sandboxes.process import ProcessProvider
from local_index import LocalIndex
from shared_environment import settings_with
from uv_sandboxes import open_uv_sandbox
from waiting import until

pytestmark = pytest.mark.anyio

RunInside = Callable[[str], Any]


class Site(SimpleHTTPRequestHandler):
    """Files of a folder; asks for a password where there is one, and sends some paths elsewhere."""

    asked: list[str]
    password = ""
    elsewhere: dict[str, str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        expected = "Basic " + base64.b64encode(f"user:{self.password}".encode()).decode()
        if self.password and self.headers.get("Authorization") != expected:
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif target := self.elsewhere.get(self.path):
            self.send_response(302)
            self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def site(folder: Path, **attributes: Any) -> Generator[tuple[int, type[Site]]]:
    """Its port, and the class that remembers what it was asked for."""
    kind = type("OneSite", (Site,), {"asked": [], "elsewhere": {}, **attributes})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1], kind
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the user's own configuration counts."""
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_")) or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "uv.toml"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "uv.toml").touch()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the index's files."""
    (tmp_path / "index").mkdir()
    index = LocalIndex(tmp_path / "index")
    index.add_wheel("lamp", "1.0", {"lamp.py": "watts = 1\n"})
    index.add_wheel("ipython", "9.0", {"IPython.py": ""})
    return tmp_path / "index"


@pytest.fixture
def index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Site]]:
    """An index on loopback, which the operator's configuration names."""
    with site(folder) as (port, kind):
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://localhost:{port}")
        yield kind


@pytest.fixture
def inside(small_environment: Environment, layer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunInside:
    """Runs code where uv would run."""
    stand_in(small_environment, tmp_path, monkeypatch, "exec(sys.argv[-1])")

    async def run(code: str, *, timeout_s: float = 30, uv_sandbox: UvSandbox | None = None) -> UvAnswer:
        (staging := layer.parent / "staging").mkdir(exist_ok=True)
        async with (uv_sandbox or open_uv_sandbox()).uv_for("s1")(small_environment, staging) as uv:
            return await uv([code], timeout_s=timeout_s)

    return run


def stand_in(environment: Environment, folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    script = folder / "uv-stand-in"
    script.write_text(f"#!{environment.python}\nimport os, sys\n{code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(confined_uv, "find_uv", lambda: str(script))


async def test_the_servers_variables_are_not_there_but_the_indexs_are(
    index: type[Site], inside: RunInside, monkeypatch: pytest.MonkeyPatch
):
    for name in ("API_TOKEN", "UV_PUBLISH_TOKEN", "PIP_INDEX_URL", "BELLJAR_API_KEYS"):
        monkeypatch.setenv(name, "https://a-secret.test")
    monkeypatch.setenv("UV_INDEX_MIRROR_PASSWORD", "for the index")

    words = (await inside("print(dict(os.environ), os.listdir(os.environ['HOME']))")).output

    assert "secret" not in words
    assert "for the index" in words
    assert os.environ["UV_DEFAULT_INDEX"] in words


async def test_the_hosts_files_are_not_there(index: type[Site], inside: RunInside, tmp_path: Path, layer: Path):
    layer.mkdir()
    (tmp_path / "secret.txt").write_text("precious")
    hidden = [tmp_path / "secret.txt", layer, Path("/etc/shadow"), Path("/proc/1/root/etc/shadow")]

    code = f"print([os.path.exists(path) for path in {[*map(str, hidden)]}], sorted(os.listdir('/')), os.getcwd())"
    words = (await inside(code)).output

    assert words.startswith(f"{[False] * len(hidden)} ")
    assert "'mnt'" in words
    assert words.endswith("/mnt/data")


async def test_there_is_no_way_to_a_host_but_through_the_proxy_and_not_to_others(
    index: type[Site], inside: RunInside, tmp_path: Path
):
    code = """
import socket, urllib.request, urllib.error
def attempt(way):
    try:
        return way()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode().splitlines()[0]}"
    except OSError as error:
        return f"{type(error).__name__} {error}"
INDEX = os.environ["UV_DEFAULT_INDEX"]
print(attempt(lambda: socket.create_connection(("127.0.0.1", int(INDEX.rpartition(":")[2])), timeout=5)))
print(attempt(lambda: socket.create_connection(("192.0.2.1", 443), timeout=5)))
print(attempt(lambda: urllib.request.urlopen("http://localhost:PORT/x", timeout=5).read()))
print(attempt(lambda: urllib.request.urlopen("http://169.254.169.254/latest", timeout=5).read()))
print(attempt(lambda: urllib.request.urlopen(INDEX + "/lamp/", timeout=5).status))
"""
    with site(tmp_path) as (port, other):
        answer = await inside(code.replace("PORT", str(port)))
    direct, far, forbidden, metadata, allowed = answer.output.splitlines()

    assert "ConnectionRefused" in direct
    assert "unreachable" in far
    assert f"403 belljar: egress to localhost:{port} is not allowed" in forbidden
    assert "403 belljar: egress to 169.254.169.254:80 is not allowed" in metadata
    assert allowed == "200"
    assert other.asked == []


@pytest.mark.parametrize("way", ["link", "redirect"])
async def test_an_index_that_leads_elsewhere_is_not_followed(
    index: type[Site], folder: Path, tmp_path: Path, small_environment: Environment, layer: Path, way: str
):
    wheel = "/lamp/lamp-1.0-py3-none-any.whl"
    with site(folder) as (port, other):
        if way == "link":
            page = folder / "lamp" / "index.html"
            page.write_text(page.read_text().replace('href="', f'href="http://127.0.0.1:{port}/lamp/'))
        else:
            index.elsewhere[wheel] = f"http://127.0.0.1:{port}{wheel}"
        (outcome,) = await install(small_environment, layer, ["lamp"], open_uv=open_uv_sandbox().uv_for("s1"))

    assert outcome.installed_version is None
    assert f"egress to 127.0.0.1:{port} is not allowed" in (outcome.error or "")
    assert other.asked == []
    assert not layer.exists()


async def test_where_an_answer_leads_to_a_private_address_is_refused_though_it_is_of_the_index(
    index: type[Site], folder: Path, small_environment: Environment, layer: Path
):
    """The index says of every package that its files are at 127.0.0.2, which nobody has configured."""
    page = folder / "ipython" / "index.html"
    with site(folder) as (port, other):
        page.write_text(page.read_text().replace('href="', f'href="http://127.0.0.2:{port}/ipython/'))
        page = folder / "lamp" / "index.html"
        page.write_text(page.read_text().replace('href="', f'href="http://127.0.0.2:{port}/lamp/'))
        (outcome,) = await install(small_environment, layer, ["lamp"], open_uv=open_uv_sandbox().uv_for("s1"))

    assert f"egress to 127.0.0.2:{port} is not allowed: it resolves to a private address" in (outcome.error or "")
    assert other.asked == []


@pytest.mark.parametrize("way", ["url", "named", "netrc", "file", "store"])
async def test_the_indexs_password_reaches_uv(
    folder: Path, tmp_path: Path, small_environment: Environment, layer: Path, monkeypatch: pytest.MonkeyPatch, way: str
):
    with site(folder, password="opensesame") as (port, kind):
        plain, full = f"http://localhost:{port}", f"http://user:opensesame@localhost:{port}"
        monkeypatch.setenv("UV_DEFAULT_INDEX", {"url": full, "named": f"mine={plain}", "file": ""}.get(way, plain))
        if way == "named":
            monkeypatch.setenv("UV_INDEX_MINE_USERNAME", "user")
            monkeypatch.setenv("UV_INDEX_MINE_PASSWORD", "opensesame")
        elif way == "netrc":
            (tmp_path / "netrc").write_text("machine localhost login user password opensesame\n")
            (tmp_path / "netrc").chmod(0o600)
        elif way == "file":
            monkeypatch.delenv("UV_DEFAULT_INDEX")
            (tmp_path / "uv.toml").write_text(f'[[index]]\nurl = "{full}"\ndefault = true\n')
            (tmp_path / "uv.toml").chmod(0o600)
        elif way == "store":
            monkeypatch.setenv("UV_CREDENTIALS_DIR", str(tmp_path / "store"))
            (tmp_path / "store").mkdir(mode=0o700)
            (tmp_path / "store" / "credentials.toml").write_text(
                f'[[credential]]\nservice = "{plain}"\nusername = "user"\nscheme = "basic"\npassword = "opensesame"\n'
            )
        outcomes = await install(small_environment, layer, ["lamp"], open_uv=open_uv_sandbox().uv_for("s1"))

    assert outcomes == [InstallOutcome("lamp", "1.0", None)]
    assert "/lamp/lamp-1.0-py3-none-any.whl" in kind.asked


async def test_passwords_for_other_hosts_stay_with_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "netrc").write_text(
        "machine mine.test login me password mine\nmachine other.test login me password others\n"
    )
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("UV_CREDENTIALS_DIR", str(tmp_path))
    (tmp_path / "credentials.toml").write_text(
        '[[credential]]\nservice = "https://other.test/x"\npassword = "others"\n\n'
        '[[credential]]\nservice = "https://mine.test/x"\npassword = "mi\\"ne"\n'
    )

    access = read_access({"mine.test"})

    assert access.files == {
        "netrc": "machine mine.test login me password mine\n",
        "credentials/credentials.toml": '[[credential]]\nservice = "https://mine.test/x"\npassword = "mi\\"ne"\n',
    }
    assert access.places == {"NETRC": "netrc", "UV_CREDENTIALS_DIR": "credentials"}
    assert "ne" not in repr(access).replace("netrc", "").replace("None", "")


async def test_an_index_that_is_the_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UV_FIND_LINKS", str(Path.home()))

    with pytest.raises(EnvironmentBroken, match="holds the whole home folder"):
        read_access(set())


async def test_a_folder_of_wheels_is_shown_and_cannot_be_written(
    folder: Path, inside: RunInside, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("UV_FIND_LINKS", f"{folder / 'lamp'} {(folder / 'ipython').as_uri()}")
    monkeypatch.setenv("UV_NO_INDEX", "1")

    code = f"print(sorted(os.listdir({str(folder)!r})))\nopen({str(folder / 'lamp' / 'planted')!r}, 'w')"
    answer = await inside(code)

    assert answer.output.startswith("['ipython', 'lamp']\n")
    assert "Read-only file system" in answer.output
    assert answer.status == 1


async def test_nothing_of_it_is_left_when_its_time_is_over(index: type[Site], inside: RunInside, layer: Path):
    mark = secrets.token_hex(8)

    answer = await inside(f"if not os.fork(): os.setsid()\nimport time; time.sleep(999) # {mark}", timeout_s=1)

    assert answer.complaint == "error: uv was stopped after 1 s"
    assert processes_with(mark) == []
    assert [path.name for path in layer.parent.iterdir()] == ["staging"]


async def test_nothing_of_it_is_left_when_its_caller_is_cancelled(index: type[Site], inside: RunInside, layer: Path):
    mark = secrets.token_hex(8)
    code = f"open('here', 'w'); import time; time.sleep(999) # {mark}"

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(inside, code)
            await until((layer.parent / "staging" / "here").exists)
            assert processes_with(mark) != []
            tasks.cancel_scope.cancel()

    assert processes_with(mark) == []
    assert [path.name for path in layer.parent.iterdir()] == ["staging"]


def processes_with(mark: str) -> list[str]:
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


async def test_its_memory_is_limited_and_it_is_said(index: type[Site], inside: RunInside):
    uv_sandbox = open_uv_sandbox(memory_mb=64)
    answer = await inside("hog = b'x' * 3_000_000_000; print(len(hog))", uv_sandbox=uv_sandbox)

    assert answer.status != 0
    assert "out_of_memory" in answer.output or "MemoryError" in answer.output


def states(*paths: Path) -> dict[Path, tuple[int, ...]]:
    """All that a change of a file or of its rights would show in; anybody may read it meanwhile."""
    found = {path: path.stat() for path in paths}
    return {
        path: (each.st_ino, each.st_mode, each.st_uid, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
        for path, each in found.items()
    }


HOSTILE = """
if "--dry-run" in sys.argv:
    print(" + lamp==1.0", file=sys.stderr)
    {planning}
else:
    {fetching}
"""


@pytest.mark.parametrize(
    ("planning", "fetching"),
    [
        ("pass", "os.symlink(VICTIM, 'tree')"),
        ("pass", "os.makedirs('tree/lamp'); os.symlink(VICTIM, 'tree/lamp/notes'); os.symlink(VICTIM, 'tree/victim')"),
        ("pass", "os.makedirs('tree'); os.mkfifo('tree/lamp-1.0.dist-info')"),
        ("pass", 'exec(\'os.mkdir("tree"); os.chdir("tree")\\nfor _ in range(1500): os.mkdir("d"); os.chdir("d")\')'),
        ("pass", "os.makedirs('tree/lamp'); os.chmod('tree/lamp', 0)"),
        ("pass", "pass"),
        ("[os.replace(name, 'x') or os.symlink(VICTIM + '/keep.txt', name) for name in os.listdir('.')]", "pass"),
    ],
)
async def test_what_a_subverted_uv_leaves_harms_nothing_of_the_hosts(
    index: type[Site],
    small_environment: Environment,
    layer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    planning: str,
    fetching: str,
):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "keep.txt").write_text("precious")
    before = states(victim, victim / "keep.txt")
    code = f"VICTIM = {str(victim)!r}\n" + HOSTILE.format(planning=planning, fetching=fetching)
    stand_in(small_environment, tmp_path, monkeypatch, code)

    try:
        outcomes = await install(small_environment, layer, ["lamp"], open_uv=open_uv_sandbox().uv_for("s1"))
    except EnvironmentBroken as broken:
        outcomes = broken

    assert isinstance(outcomes, EnvironmentBroken) or outcomes[0].installed_version is None
    assert states(*before) == before
    assert (victim / "keep.txt").read_text() == "precious"
    assert {path.name for path in layer.parent.iterdir()} <= {"layer", ".layer.lock"}
    # Deeper than pytest can remove.
    remove_tree(layer)


async def test_packages_belong_to_the_server_and_everyone_may_read_them(
    index: type[Site], small_environment: Environment, layer: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    await install(small_environment, layer, ["lamp"], open_uv=open_uv_sandbox().uv_for("s1"))

    told = [record for record in caplog.records if record.getMessage().startswith("session s1: packages ")]
    assert {vars(record)["session_id"] for record in told} == {"s1"}

    assert {path.lstat().st_uid for path in layer.rglob("*")} == {os.geteuid()}
    assert all(path.stat().st_mode & stat.S_IROTH for path in layer.rglob("*"))


async def test_a_provider_that_does_not_isolate_leaves_uv_on_the_host():
    assert UvSandbox(settings_with(), ProcessProvider()).uv_for("s1") is open_uv_on_host


async def test_a_server_behind_a_proxy_leaves_uv_on_the_host_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("https_proxy", "http://proxy.test:3128")
    uv_sandbox = open_uv_sandbox()

    with caplog.at_level(logging.WARNING):
        assert uv_sandbox.uv_for("s1") is open_uv_on_host
        assert uv_sandbox.uv_for("s2") is open_uv_on_host

    assert [record.message for record in caplog.records] == [
        "packages are fetched outside the sandbox: the server itself is behind HTTPS_PROXY"
    ]


async def test_an_index_that_did_not_answer_is_asked_again_and_one_that_did_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(confined_uv, "_ASK_AGAIN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://localhost:{port}")
    uv_sandbox = open_uv_sandbox()
    assert [str(rule) for rule in await uv_sandbox.index_rules()] == [f"localhost:{port}"]

    with site(folder) as (port, kind):
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://localhost:{port}")
        first = await uv_sandbox.index_rules()
        asked = len(kind.asked)
        assert await uv_sandbox.index_rules() == first
        assert [str(rule) for rule in first] == [f"localhost:{port}"]
        assert len(kind.asked) == asked > 0
