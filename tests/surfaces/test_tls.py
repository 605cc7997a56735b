import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from belljar.cli import doctor
from belljar.environments import Environment
from belljar.errors import SettingsError
from belljar.http.app import check_bind
from belljar.settings import Settings
from certificates import CertificateFiles, make_certificate
from live_server import READY, clean_environment
from serving_process import COLD, http_server, serve_over_http
from waiting import until, until_blocking

KEY = "key-of-ada-0123456789"
MOST = 16
IDENTIFIER = "a-sensitive-identifier"


@pytest.fixture
def only_our_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def settings_with(files: CertificateFiles) -> Settings:
    return Settings(http="127.0.0.1:0", tls_certificate=str(files.certificate), tls_key=str(files.key))


@pytest.mark.anyio
async def test_a_server_speaks_tls_itself_and_logs_no_identifier(
    default_environment: Environment, tmp_path: Path
) -> None:
    files = make_certificate(tmp_path / "tls")
    data = tmp_path / "data"
    data.mkdir(mode=0o711)
    tmp_path.chmod(0o711)
    variables = {
        "BELLJAR_DATA_DIRECTORY": data,
        "BELLJAR_ENVIRONMENT": default_environment.python,
        "BELLJAR_FORK_START": "false",
        "BELLJAR_SURFACES": "foundry",
        "BELLJAR_API_KEYS": f"ada:{KEY}",
        "BELLJAR_TLS_CERTIFICATE": files.certificate,
        "BELLJAR_TLS_KEY": files.key,
        "BELLJAR_LOG_LEVEL": "DEBUG",
    }
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "belljar", "serve", "--http", "127.0.0.1:0"],
            stderr=errors,
            env=clean_environment(**variables),
        )
    try:
        url = await _ready_url(log)
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(files.certificate))
        headers = {"x-ms-apikey": KEY}
        async with httpx.AsyncClient(verify=context, headers=headers, timeout=60) as client:
            query = {"api-version": "2025-10-02-preview", "identifier": IDENTIFIER}
            answer = await client.post(f"{url}/executions", params=query, json={"code": "1 + 1"})
            assert answer.json()["result"]["executionResult"] == 2
            assert answer.headers["operation-location"].startswith("https://")
            await client.post(f"{url}/executions", params={**query, "identifier": f"{IDENTIFIER}\n"}, json={})
            await client.get(f"{url}/files/{IDENTIFIER}", params=query)
    finally:
        process.terminate()
        process.wait(20)
    assert IDENTIFIER not in log.read_text()


async def _ready_url(log: Path) -> str:
    line = await until(lambda: next((line for line in log.read_text().splitlines() if line.startswith(READY)), ""))
    return line.removeprefix(READY).removesuffix("/mcp")


@pytest.mark.usefixtures("only_our_settings")
def test_tls_that_cannot_be_spoken_stops_the_start_and_says_why(tmp_path: Path) -> None:
    good, other = make_certificate(tmp_path / "good"), make_certificate(tmp_path / "other")
    locked = make_certificate(tmp_path / "locked", password=b"secret")
    check_bind(settings_with(good))
    for files, said in [
        (CertificateFiles(good.certificate, other.key), "cannot be used together"),
        (CertificateFiles(good.certificate, tmp_path / "missing.pem"), "cannot be read"),
        (CertificateFiles(good.key, good.key), "cannot be used together"),
        (locked, "without a password"),
    ]:
        with pytest.raises(SettingsError, match=said):
            check_bind(settings_with(files))
    with pytest.raises(SettingsError, match="without BELLJAR_TLS_KEY"):
        check_bind(Settings(http="127.0.0.1:0", tls_certificate=str(good.certificate)))


@pytest.mark.usefixtures("only_our_settings")
@pytest.mark.parametrize(
    ("days", "status", "said"), [(300, "ok", "ends on"), (5, "warn", "in 5 days"), (-2, "fail", "ended on")]
)
def test_the_doctor_says_when_a_certificate_ends(tmp_path: Path, days: float, status: str, said: str) -> None:
    findings = [*doctor._check_tls(settings_with(make_certificate(tmp_path / "tls", days=days + 0.1)))]
    assert [(finding.status, finding.section) for finding in findings] == [(status, "tls")]
    assert said in findings[0].detail
    assert not [*doctor._check_tls(Settings())]


def _sockets(pid: int) -> int:
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += str(link.readlink()).startswith("socket:")
    return found


@pytest.mark.parametrize("beginning", [b"", bytes.fromhex("1603010200010001fc0303")], ids=["silent", "half a hello"])
def test_200_handshakes_that_do_not_end_hold_no_more_sockets_than_connections_are_allowed(
    beginning: bytes, default_environment: Environment, tmp_path: Path
) -> None:
    """At the port for clients and at the one for other machines, whose servers are answered beside them."""
    files = make_certificate(tmp_path / "tls")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        fleet = probe.getsockname()[1]
    (tmp_path / "peers").write_text(f"https://127.0.0.1:{fleet}\n")
    chosen = {
        **COLD,
        "BELLJAR_TLS_CERTIFICATE": str(files.certificate),
        "BELLJAR_TLS_KEY": str(files.key),
        "BELLJAR_MAX_CONNECTIONS": str(MOST),
        "BELLJAR_FLEET_ADDRESS": f"127.0.0.1:{fleet}",
        "BELLJAR_FLEET_PEERS": f"file:{tmp_path / 'peers'}",
        "BELLJAR_FLEET_KEY": "f" * 32,
    }
    context = ssl.create_default_context(cafile=str(files.certificate))
    with (
        http_server(serve_over_http(default_environment), tmp_path, **chosen) as (url, process),
        httpx.Client(verify=context, timeout=20) as client,
        ExitStack() as stack,
    ):
        for asked, status in ((f"{url}/health", 200), (f"https://127.0.0.1:{fleet}/fleet/about", 403)):
            assert client.get(asked).status_code == status
            before, port = _sockets(process.pid), httpx.URL(asked).port
            for _ in range(200):
                opened = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
                opened.sendall(beginning)
            # Connections are accepted in their order: all those before this one were.
            assert client.get(asked, headers={"connection": "close"}).status_code == status
            until_blocking(lambda before=before: _sockets(process.pid) <= before + MOST, limit_s=8)
