"""What `belljar doctor` says about the package index, from real answers of real indexes."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from belljar.environments.package_index import check_index
from certificates import make_certificate
from local_index import LocalIndex, add_support

pytestmark = pytest.mark.anyio


class Refusing(BaseHTTPRequestHandler):
    """Wants credentials that nobody has."""

    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def http_index(context: ssl.SSLContext | None = None) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"{'https' if context else 'http'}://somebody:secret@127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def nothing_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_INDEX", "UV_FIND_LINKS", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "uv.toml").write_text("")
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "uv.toml"))


async def test_an_index_that_answers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").mkdir()
    add_support(LocalIndex(tmp_path / "index"))
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "index").as_uri())
    check = await check_index()
    assert check.is_ok
    assert check.detail.startswith(f"file://{tmp_path}/index answered in ")


async def test_a_folder_of_files_is_not_taken_for_an_index_that_was_never_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index").mkdir()
    add_support(LocalIndex(tmp_path / "index"))
    folder = tmp_path / "files"
    folder.mkdir()
    for wheel in (tmp_path / "index").rglob("*.whl"):
        wheel.rename(folder / wheel.name)
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    for name, value in {"UV_NO_INDEX": "1", "UV_OFFLINE": "1", "UV_FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(name, value)
    check = await check_index()
    assert check.is_ok
    assert check.detail.startswith(f"{folder} answered in ")


async def test_what_is_wrong_is_said_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    with http_index() as refusing, http_index(context) as unknown:
        wrong = {
            refusing: "it refuses our credentials",
            unknown: "its certificate is signed by an authority that uv does not trust",
            "http://somebody:secret@127.0.0.1:9/simple": "nothing answers at its address",
            "https://somebody:secret@index.invalid/simple": "its name cannot be resolved",
            (tmp_path / "none").as_uri(): "it does not have ipython",
        }
        for url, reason in wrong.items():
            monkeypatch.setenv("UV_DEFAULT_INDEX", url)
            check = await check_index()
            assert (check.is_ok, reason in check.detail) == (False, True), check
            assert "secret" not in check.detail + check.hint
            assert check.hint
        monkeypatch.setenv("UV_OFFLINE", "1")
        assert "uv is told to stay offline" in (await check_index()).detail
