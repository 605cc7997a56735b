"""Caddy and nginx with the configurations of deploy/, before one server or, as the guide says, before several."""

import re
import shutil
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from certificates import CertificateFiles

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guides" / "several-machines.md"
NAME = "belljar.example.com"
Proxy = Callable[[Path, list[str], CertificateFiles, int], list[str]]
"""Returns its command, by its folder, the addresses of the servers behind it, its certificate and its port."""


def adapted(name: str, **changes: str) -> str:
    text = (ROOT / "deploy" / name).read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def told(beginning: str, behind: list[str]) -> str:
    """The part of the guide's configuration that begins so, for these servers."""
    found = re.search(rf"```\n(\s*{re.escape(beginning)}.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    text = found[1]
    for number, address in enumerate(behind, 5):
        assert f"10.0.0.{number}:8000" in text
        text = text.replace(f"10.0.0.{number}:8000", address)
    return text


def caddy(folder: Path, behind: list[str], files: CertificateFiles, port: int) -> list[str]:
    """Caddy would ask an authority for the certificate: here it is given one, and a port."""
    site = f"https://localhost:{port} {{\n\ttls {files.certificate} {files.key}"
    one = "\treverse_proxy 127.0.0.1:8000\n"
    servers = f"\treverse_proxy {behind[0]}\n" if len(behind) == 1 else told("reverse_proxy", behind)
    text = adapted("Caddyfile", **{f"\n{NAME} {{": f"\n{site}", one: servers})
    (folder / "Caddyfile").write_text("{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + text)
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


def nginx(folder: Path, behind: list[str], files: CertificateFiles, port: int) -> list[str]:
    """The file stands in the `http` part of nginx's own configuration."""
    live = f"/etc/letsencrypt/live/{NAME}"
    text = adapted(
        "nginx.conf",
        **{
            f"{live}/fullchain.pem": str(files.certificate),
            f"{live}/privkey.pem": str(files.key),
            "listen 443": f"listen 127.0.0.1:{port}",
            "proxy_pass http://127.0.0.1:8000": f"proxy_pass http://{behind[0] if len(behind) == 1 else 'belljar'}",
        },
    )
    if len(behind) > 1:
        text = told("upstream belljar", behind) + text
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{places}{text}}}\n"
    )
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]


@contextmanager
def started(proxy: Proxy, folder: Path, files: CertificateFiles, port: int, *behind: str) -> Generator[str]:
    """The address of a proxy before these servers."""
    if shutil.which(proxy.__name__) is None:
        pytest.skip(f"there is no {proxy.__name__} here")
    folder.chmod(0o755)
    with (
        (folder / "said.txt").open("w") as said,
        subprocess.Popen(proxy(folder, [*behind], files, port), stderr=said) as process,
    ):
        try:
            yield f"https://localhost:{port}"
        finally:
            process.terminate()
