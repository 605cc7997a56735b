"""Where the package index is, as pip and uv are told on this host, and as the index itself answers.

No host is written down here: mirrors work because uv is asked what it would fetch, and pip's configuration is read.
"""

import configparser
import contextlib
import itertools
import json
import logging
import netrc
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import platformdirs

from belljar.egress.rules import Rule, rule_of_url
from belljar.environments.base import would_bare
from belljar.environments.uv import run_uv
from belljar.errors import EnvironmentBroken

_PROBE_TIMEOUT_S = 15
# Every index that serves our sessions has it: their kernel is made of it.
_PROBE = "ipython"
_PIP_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
_UV_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
_PIP_OPTIONS = ("index-url", "extra-index-url", "find-links")
_FETCHED = re.compile(r"https?://[^\s'\"<>`\\]+")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IndexHosts:
    """Where packages come from; incomplete when an index did not tell where its files are."""

    rules: list[Rule]
    is_complete: bool


async def find_index_hosts() -> IndexHosts:
    """Find the hosts that pip and uv would fetch from: their indexes, and wherever those say that the files are."""
    told: list[str] = []
    chosen: list[str] = []
    is_complete = True
    with tempfile.TemporaryDirectory(prefix="belljar-index-") as folder:
        # uv's own configuration first, with the default that is built into it; then each index of pip's.
        for index in ("", *dict.fromkeys(_pip_indexes(os.environ))):
            pages, files, has_answered = await _asked(index, Path(folder))
            # The first page is looked for before anything was heard: its host is uv's own default, if no other.
            chosen += pages[:1]
            told += [*pages, *files]
            is_complete = is_complete and has_answered
    named = _rules([*configured_places(os.environ), *chosen])
    configured = [replace(rule, is_configured=True) for rule in named]
    return IndexHosts(list(dict.fromkeys([*configured, *_rules(told)])), is_complete)


def _rules(urls: Iterable[str]) -> Iterator[Rule]:
    return (rule for url in urls if (rule := rule_of_url(url)) is not None)


def index_variables() -> dict[str, str]:
    """Variables that tell a session's own pip and uv of the index; a URL with a password in it stays here."""
    kept = {name: value for name in (*_PIP_VARIABLES[:2], *_UV_VARIABLES[:4]) if (value := os.environ.get(name))}
    indexes = list(dict.fromkeys(_pip_settings("index-url")))
    if indexes:
        kept.setdefault("PIP_INDEX_URL", indexes[-1])
    return {name: value for name, value in kept.items() if all(_is_open(url) for url in _split(value))}


def _is_open(url: str) -> bool:
    return rule_of_url(url) is not None and "@" not in urlsplit(url).netloc


async def _asked(index: str, folder: Path) -> tuple[list[str], list[str], bool]:
    """The URLs that uv looks at to find one package, in order; those of its files; and whether it was found."""
    wanted, plan = folder / "wanted.in", folder / "pylock.toml"
    wanted.write_text(_PROBE)
    plan.unlink(missing_ok=True)
    chosen = ("--default-index", index) if index else ()
    options = ("--no-deps", "--only-binary", ":all:", "--no-header", "--format", "pylock.toml", "-o", str(plan))
    command = ("--no-cache", "-v", "pip", "compile", *chosen, *options, str(wanted))
    # The first session waits for this: an index that is down now may be asked again by the next server.
    patience = {"UV_HTTP_RETRIES": "0"}
    answer = await run_uv(command, directory=folder, timeout_s=_PROBE_TIMEOUT_S, variables=patience)
    if answer.status:
        log.warning("packages: an index did not tell where its files are, only its own host is allowed")
    told = plan.read_text("utf-8") if plan.exists() else ""
    return [*_index_pages(answer.words)], _FETCHED.findall(told), not answer.status


def _index_pages(words: str) -> Iterator[str]:
    """The pages of the package that uv says it fetched: nothing else it mentions is an index."""
    for line in words.splitlines():
        for url in _FETCHED.findall(line):
            if f"/{_PROBE}/" in url:
                yield url


def configured_places(variables: Mapping[str, str]) -> Iterator[str]:
    """URLs and paths of every index and folder of files that pip and uv are told of."""
    for name in _PIP_VARIABLES:
        yield from _split(variables.get(name, ""))
    for option in _PIP_OPTIONS:
        yield from _pip_settings(option)
    yield from uv_places(variables)


def uv_places(variables: Mapping[str, str]) -> Iterator[str]:
    """Those of uv alone."""
    for name in _UV_VARIABLES:
        yield from _split(variables.get(name, ""))
    for file in uv_files(variables).values():
        with contextlib.suppress(OSError, ValueError):
            yield from _uv_settings(tomllib.loads(file.read_text("utf-8")))


def _pip_indexes(variables: Mapping[str, str]) -> Iterator[str]:
    for option, variable in zip(_PIP_OPTIONS[:2], _PIP_VARIABLES[:2], strict=True):
        for url in (*_split(variables.get(variable, "")), *_pip_settings(option)):
            if rule_of_url(url):
                yield url


def _split(value: str) -> list[str]:
    """URLs between blanks, without the names that uv lets them have; a comma joins uv's find-links."""
    return [re.sub(r"^[\w.-]+=", "", word) for word in re.split(r"[\s,]+", value) if word]


def _pip_settings(option: str) -> Iterator[str]:
    for file in _pip_files(os.environ):
        settings = configparser.RawConfigParser()
        with contextlib.suppress(OSError, UnicodeDecodeError, configparser.Error):
            settings.read_string(file.read_text("utf-8"))
            for section in ("global", "install"):
                yield from _split(settings.get(section, option, fallback=""))


def _pip_files(variables: Mapping[str, str]) -> Iterator[Path]:
    """In pip's own order: the system's, the user's, the environment's, and the one that a variable names."""
    chosen = variables.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:
        return
    system = platformdirs.site_config_dir("pip", multipath=True).split(os.pathsep)
    yield from (Path(folder) / "pip.conf" for folder in system)
    yield Path("/etc/pip.conf")
    yield Path("~/.pip/pip.conf").expanduser()
    yield platformdirs.user_config_path("pip") / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if chosen:
        yield Path(chosen)


def uv_files(variables: Mapping[str, str]) -> dict[str, Path]:
    """uv's own configuration files, whether or not they are there: the one that a variable names, or two by level."""
    if chosen := variables.get("UV_CONFIG_FILE"):
        return {"chosen": Path(chosen)}
    return {"system": Path("/etc/uv/uv.toml"), "user": platformdirs.user_config_path("uv") / "uv.toml"}


def _uv_settings(table: Mapping[str, Any]) -> Iterator[str]:
    for settings in (table, cast("Mapping[str, Any]", table.get("pip") or {})):
        values = (settings.get(name) for name in ("index-url", "extra-index-url", "find-links"))
        named = (entry.get("url") for entry in cast("list[dict[str, Any]]", settings.get("index") or []))
        for value in itertools.chain(values, named):
            yield from _split(value) if isinstance(value, str) else map(str, cast("list[Any]", value or []))


# How uv reaches the package index on this host, gathered so that uv can do the same from inside a sandbox.
# Only what has to do with the index is taken: its places, its credentials, its certificates, and the operator's rules
# for what may be chosen. The rest of the server's variables and files stay where they are. Starts nothing.

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
