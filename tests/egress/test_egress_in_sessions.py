"""From inside real sandboxes: what is allowed is reached by untouched clients, everything else is refused in words."""

import logging
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from servers import certificate, serving_context

from belljar.environments import Environment
from belljar.models import ExecutionResult
from belljar.python.local import open_session
from belljar.python.session_handle import SessionHandle
from belljar.sandboxes import providers
from belljar.settings import Settings

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def isolated() -> None:
    for check in providers(Settings())["namespace"].check():
        if not check.is_ok:
            pytest.skip(f"{check.name}: {check.detail}")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class Site:
    def __init__(self, server: ThreadingHTTPServer, folder: Path) -> None:
        self.port: int = server.server_address[1]
        self.folder = folder


@pytest.fixture(params=["http", "https"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Site]]:
    with serving(tmp_path, is_tls=request.param == "https") as site:
        yield request.param, site


class serving:
    """A folder with one page, served from a thread: the session under test holds the loop."""

    def __init__(self, tmp_path: Path, *, is_tls: bool) -> None:
        self.folder = tmp_path / "site"
        self.folder.mkdir()
        (self.folder / "page.txt").write_text("the page\n")
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(self.folder)))
        if is_tls:
            context = serving_context(certificate(tmp_path))
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> Site:
        self.thread.start()
        return Site(self.server, self.folder)

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@asynccontextmanager
async def session(environment: Environment, folder: Path, *egress: str, **flags: Any) -> AsyncGenerator[SessionHandle]:
    async with open_session(
        str(environment.python),
        data_directory=folder / "data",
        egress=list(egress),
        egress_allow_private=True,
        fork_start=False,
        **flags,
    ) as handle:
        yield handle


async def said(handle: SessionHandle, code: str) -> str:
    result = await handle.execute(code, timeout_s=90)
    assert result.success, (result.error, result.output)
    return result.stdout + (result.result or "")


async def failure(handle: SessionHandle, code: str) -> ExecutionResult:
    result = await handle.execute(code, timeout_s=90)
    assert not result.success, result.output
    return result


URLLIB = "import ssl, urllib.request\nverify = ssl.create_default_context(cafile='cert.pem') if {tls} else None\n"


async def test_untouched_clients_reach_an_allowed_host_and_no_other(
    default_environment: Environment, tmp_path: Path, site: tuple[str, Site], caplog: pytest.LogCaptureFixture
):
    scheme, server = site
    is_tls = scheme == "https"
    url = f"{scheme}://localhost:{server.port}/page.txt"
    caplog.set_level(logging.WARNING)
    async with session(default_environment, tmp_path, f"localhost:{server.port}") as handle:
        if is_tls:
            await handle.upload("cert.pem", (tmp_path / "cert.pem").read_text())
        # Loopback is inside for NO_PROXY's sake; here it stands for a host outside.
        await said(handle, "import os\nfor name in ('NO_PROXY', 'no_proxy'): os.environ.pop(name)")
        verify = "'cert.pem'" if is_tls else "None"
        assert "the page" in await said(
            handle,
            URLLIB.format(tls=is_tls) + f"print(urllib.request.urlopen({url!r}, context=verify).read().decode())",
        )
        assert "the page" in await said(handle, f"import requests\nprint(requests.get({url!r}, verify={verify}).text)")
        flag = "--cacert cert.pem" if is_tls else ""
        assert "the page" in await said(handle, f"!curl -sS {flag} {url}")

        other = f"{scheme}://elsewhere.test:{server.port}/secret-path"
        place = f"elsewhere.test:{server.port}"
        refused = await failure(handle, f"import urllib.request\nurllib.request.urlopen({other!r})")
        assert f"belljar: egress to {place} is not allowed" in (refused.error or "")
        if is_tls:
            refused = await failure(handle, f"import requests\nrequests.get({other!r})")
            assert f"egress to {place} is not allowed" in "\n".join(refused.traceback)
        else:
            assert '"elsewhere.test' in await said(handle, f"import requests\nprint(requests.get({other!r}).text)")
    lines = [record.getMessage() for record in caplog.records if "egress to" in record.getMessage()]
    assert len(lines) == 1
    assert f"session {handle.id}: egress to {place} is not allowed" in lines[0]
    assert "secret-path" not in caplog.text


async def test_the_way_round_the_proxy_is_closed(default_environment: Environment, tmp_path: Path):
    with serving(tmp_path, is_tls=False) as site:
        async with session(default_environment, tmp_path, f"localhost:{site.port}") as handle:
            direct = f"import socket; socket.create_connection(('127.0.0.1', {site.port}), timeout=3)"
            assert "ConnectionRefused" in ((await failure(handle, direct)).error or "")
            outside = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=3)"
            assert "unreachable" in ((await failure(handle, outside)).error or "")
            name = "import socket; socket.getaddrinfo('example.com', 80)"
            assert "gaierror" in ((await failure(handle, name)).error or "")


async def test_the_relay_is_nobodys_child_and_holds_nothing(default_environment: Environment, tmp_path: Path):
    async with session(default_environment, tmp_path, "example.com:443") as handle:
        look = """
import os
from pathlib import Path
relays = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()
          and b"relay.py" in (entry / "cmdline").read_bytes() and b"bwrap" not in (entry / "cmdline").read_bytes()]
(relay,) = relays
parent = int((relay / "stat").read_text().rpartition(")")[2].split()[1])
held = sorted(os.readlink(each).split(":")[0] for each in (relay / "fd").iterdir())
print(parent != os.getpid(), held)
try:
    print(os.wait())
except ChildProcessError:
    print("no children")
"""
        answer = await said(handle, look)
        assert "True" in answer
        assert "no children" in answer
        assert "pipe" not in answer
        assert answer.count("socket") == 1


async def test_a_session_without_rules_has_no_proxy_and_no_network(default_environment: Environment, tmp_path: Path):
    async with session(default_environment, tmp_path) as handle:
        look = "import os; print([name for name in os.environ if 'proxy' in name.lower()])"
        assert "[]" in await said(handle, look)
        closed = "import socket; socket.create_connection(('127.0.0.1', 3128), timeout=3)"
        assert "ConnectionRefused" in ((await failure(handle, closed)).error or "")
        assert "egress" not in await said(handle, "import os; print(os.listdir('/run/belljar'))")


async def test_a_jupyter_kernel_gets_the_same_way_out(default_environment: Environment, tmp_path: Path):
    kernels = default_environment.python.parent.parent / "share" / "jupyter" / "kernels"
    if not (kernels / "python3").is_dir():
        pytest.skip("the default environment has no Jupyter kernel")
    with serving(tmp_path, is_tls=False) as site, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(kernels.parent))
        url = f"http://localhost:{site.port}/page.txt"
        async with open_session(
            data_directory=default_environment.python.parents[3],
            egress=[f"localhost:{site.port}"],
            egress_allow_private=True,
            environment="kernel:python3",
            fork_start=False,
        ) as handle:
            await said(handle, "import os\nfor name in ('NO_PROXY', 'no_proxy'): os.environ.pop(name)")
            code = f"import urllib.request; print(urllib.request.urlopen({url!r}).read())"
            assert "the page" in await said(handle, code)


async def test_the_process_provider_says_that_rules_do_not_hold():
    assert "egress rules are not enforced" in providers(Settings())["process"].warning


async def test_httpx_works_untouched(default_environment: Environment, tmp_path: Path):
    with serving(tmp_path, is_tls=True) as site:
        async with session(default_environment, tmp_path, f"localhost:{site.port}") as handle:
            (outcome,) = await handle.install(["httpx"])
            if outcome.error and "Failed to fetch" in outcome.error:
                pytest.skip(f"no package index in reach: {outcome.error}")
            await handle.upload("cert.pem", (tmp_path / "cert.pem").read_text())
            await said(handle, "import os, ssl, httpx\nfor name in ('NO_PROXY', 'no_proxy'): os.environ.pop(name)")
            await said(handle, "verify = ssl.create_default_context(cafile='cert.pem')")
            url = f"https://localhost:{site.port}/page.txt"
            assert "the page" in await said(handle, f"print(httpx.get({url!r}, verify=verify).text)")
            refused = await failure(handle, "httpx.get('https://elsewhere.test/')")
            assert "403 belljar: egress to elsewhere.test:443 is not allowed" in (refused.error or "")
