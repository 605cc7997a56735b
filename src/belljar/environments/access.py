"""How uv reaches the package index on this host, gathered so that uv can do the same from inside a sandbox.

Only what has to do with the index is taken: its places, its credentials, its certificates, and the operator's rules
for what may be chosen. The rest of the server's variables and files stay where they are. Starts nothing.
"""

import contextlib
import json
import netrc
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import platformdirs

from belljar.environments.base import would_bare
from belljar.environments.index import uv_files, uv_places
from belljar.errors import EnvironmentBroken

# By prefix: an index has variables of its own, such as UV_INDEX_MIRROR_PASSWORD.
_PASSED = (
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX", "UV_OFFLINE"),
    *("UV_INSECURE_HOST", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS", "UV_HTTP_", "UV_REQUEST_TIMEOUT", "UV_CONCURRENT_"),
    *("UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE", "UV_PRERELEASE", "UV_RESOLUTION", "UV_NO_CONFIG"),
    *("UV_TORCH_BACKEND", "UV_NO_BINARY", "UV_ONLY_BINARY"),
)
_LISTS = ("UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE")


@dataclass(frozen=True, slots=True)
class IndexAccess:
    """What uv has to be told and shown. Not for logs: it holds passwords."""

    variables: dict[str, str]
    files: dict[str, str] = field(repr=False)
    """Contents by path within a folder that only uv can read."""
    places: dict[str, str]
    """Variables whose value is a path within that folder."""
    readable: tuple[Path, ...]
    """Files and folders of the host that uv has to see at their own path: an index may be one."""


def read_access(hosts: Collection[str]) -> IndexAccess:
    """All of it, as it is now; credentials for other hosts than these are left out. Reads a few small files."""
    environ = os.environ
    variables = {name: value for name, value in environ.items() if name.startswith(_PASSED)}
    copied = [*_configuration(environ), *_certificates(environ), *_netrc(environ, hosts), *_store(environ, hosts)]
    return IndexAccess(
        variables=variables,
        files={each.path: each.content for each in copied},
        places={each.variable: each.place for each in copied},
        readable=tuple(dict.fromkeys(_readable(environ))),
    )


@dataclass(frozen=True, slots=True)
class _Copied:
    variable: str
    place: str
    path: str
    content: str = field(repr=False)


def _configuration(environ: Mapping[str, str]) -> Iterator[_Copied]:
    homes = {"system": "XDG_CONFIG_DIRS", "user": "XDG_CONFIG_HOME"}
    for level, file in uv_files(environ).items():
        if text := _text(file):
            if level == "chosen":
                yield _Copied("UV_CONFIG_FILE", "uv.toml", "uv.toml", text)
            else:
                yield _Copied(homes[level], level, f"{level}/uv/uv.toml", text)


def _certificates(environ: Mapping[str, str]) -> Iterator[_Copied]:
    for variable in ("SSL_CERT_FILE", "SSL_CLIENT_CERT"):
        if text := _text(Path(environ.get(variable, ""))):
            yield _Copied(variable, f"{variable}.pem", f"{variable}.pem", text)


def _netrc(environ: Mapping[str, str], hosts: Collection[str]) -> Iterator[_Copied]:
    chosen = environ.get("NETRC") or str(Path("~/.netrc").expanduser())
    try:
        known = netrc.netrc(chosen)
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return
    entries = {host: entry for host in hosts if (entry := known.authenticators(host))}
    lines = [f"machine {host} login {login} password {password}" for host, (login, _, password) in entries.items()]
    if lines:
        yield _Copied("NETRC", "netrc", "netrc", "\n".join(lines) + "\n")


def _store(environ: Mapping[str, str], hosts: Collection[str]) -> Iterator[_Copied]:
    """What `uv auth login` has kept."""
    chosen = environ.get("UV_CREDENTIALS_DIR")
    folder = Path(chosen) if chosen else platformdirs.user_data_path("uv") / "credentials"
    try:
        table = tomllib.loads(_text(folder / "credentials.toml"))
    except ValueError:
        return
    entries = cast("list[dict[str, Any]]", table.get("credential") or [])
    kept = [entry for entry in entries if urlsplit(str(entry.get("service", ""))).hostname in hosts]
    if kept:
        text = "\n".join("[[credential]]\n" + "".join(_line(*item) for item in entry.items()) for entry in kept)
        yield _Copied("UV_CREDENTIALS_DIR", "credentials", "credentials/credentials.toml", text)


def _line(name: str, value: object) -> str:
    # A string of JSON is one of TOML too.
    return f"{name} = {json.dumps(value)}\n"


def _readable(environ: Mapping[str, str]) -> Iterator[Path]:
    lists = [word for name in _LISTS for word in environ.get(name, "").split()]
    for place in (*uv_places(environ), *lists, environ.get("SSL_CERT_DIR", "")):
        path = Path(unquote(urlsplit(place).path)) if place.startswith("file:") else Path(place)
        if not path.is_absolute() or not path.exists():
            continue
        if would_bare(path):
            raise EnvironmentBroken(
                f"the package index needs {path}, which holds the whole home folder",
                hint="Give the files of the index a folder of their own",
            )
        yield path


def _text(file: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text("utf-8")
    return ""
