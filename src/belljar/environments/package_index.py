"""Where the package index is on this host, and what uv needs in order to reach it from inside a sandbox.

The hosts come from pip's and uv's configuration and from a trial run of uv. No host is written down here, so mirrors
work. Credentials of the index are read here and are not for logs.
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
import time
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import platformdirs
from anyio import to_thread

from belljar.egress.rules import Rule, rule_of_url
from belljar.environments.base import exposes_home
from belljar.environments.uv import UvAnswer, certificate_variables, run_uv, uv_files
from belljar.errors import EnvironmentBroken
from belljar.sandboxes.base import HostCheck

_PROBE_TIMEOUT_S = 15
# Every index that serves our sessions has this package, because their kernel needs it.
_PROBE = "ipython"
_PIP_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
_UV_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
_PIP_OPTIONS = ("index-url", "extra-index-url", "find-links")
_FETCHED = re.compile(r"https?://[^\s'\"<>`\\]+")

_URL_PASSWORD = re.compile(r"(\b\w++://)[^/@\s]++@")
# What uv says, what that means, and what to do about it.
_INDEX_FAULTS = (
    (
        r"certificate",
        "its certificate is signed by an authority that uv does not trust",
        "Set SSL_CERT_FILE to a file that has the authority, or UV_SYSTEM_CERTS=1 if the system trusts it",
    ),
    (
        r"dns error|failed to lookup|resolve host",
        "its name cannot be resolved",
        "See that this host has a network; behind a proxy set HTTPS_PROXY; for a mirror set UV_DEFAULT_INDEX",
    ),
    (
        r"connection refused|unreachable",
        "nothing answers at its address",
        "See that it runs; behind a proxy set HTTPS_PROXY; for a mirror set UV_DEFAULT_INDEX",
    ),
    (
        r"timed out|was stopped after",
        f"it did not answer in {_PROBE_TIMEOUT_S} s",
        "Behind a firewall set HTTPS_PROXY, or UV_DEFAULT_INDEX to a mirror that can be reached",
    ),
    (
        r"\b40[13]\b|unauthorized|forbidden",
        "it refuses our credentials, or wants some",
        "Run `uv auth login`, or put them into the URL of UV_DEFAULT_INDEX or into ~/.netrc",
    ),
    (
        r"network was disabled|offline",
        "uv is told to stay offline",
        "Unset UV_OFFLINE, or set environment to the path of an environment that is there",
    ),
    (
        r"not found in the|no solution found",
        f"it does not have {_PROBE}, which sessions need",
        "Set UV_DEFAULT_INDEX to an index that mirrors PyPI",
    ),
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IndexHosts:
    """Egress rules for the hosts that packages come from; not complete if an index did not say where its files are."""

    rules: list[Rule]
    is_complete: bool


async def find_index_hosts() -> IndexHosts:
    """Find the hosts that pip and uv would fetch from: their indexes, and wherever those say that the files are."""
    urls: list[str] = []
    chosen: list[str] = []
    is_complete = True
    with tempfile.TemporaryDirectory(prefix="belljar-index-") as folder:
        # uv's own configuration first, with the default that is built into it; then each index of pip's.
        for index in ("", *dict.fromkeys(_pip_indexes(os.environ))):
            pages, files, has_answered = await _probe_index(index, Path(folder))
            # uv requests the first page before any index has answered, so its host is configured or uv's default.
            chosen += pages[:1]
            urls += [*pages, *files]
            is_complete = is_complete and has_answered
    named = _rules([*configured_places(os.environ), *chosen])
    configured = [replace(rule, is_configured=True) for rule in named]
    return IndexHosts(list(dict.fromkeys([*configured, *_rules(urls)])), is_complete)


async def check_index() -> HostCheck:
    """Ask uv's index for one package, as the making of an environment would, and say what is wrong if it fails."""
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="belljar-index-") as folder:
        answer, plan = await _ask_index("", Path(folder))
        pages, planned = [*_index_pages(answer.output)], await to_thread.run_sync(_text, plan)
    urls: list[str] = _FETCHED.findall(planned)
    places = [*uv_places(os.environ)]
    if not answer.status and not urls:
        # It was found in a folder. With UV_NO_INDEX and UV_OFFLINE uv still names the page that it did not ask for.
        pages, places = [], [place for place in places if not _FETCHED.match(place)]
    where = _shown(pages[0]) if pages else next(iter(map(_shown, places)), "the index")
    if not answer.status:
        files = {host for url in urls if (host := urlsplit(url).hostname) and host != urlsplit(where).hostname}
        elsewhere = f", with files at {', '.join(sorted(files))}" if files else ""
        return HostCheck("package index", True, f"{where} answered in {time.monotonic() - began_at:.1f} s{elsewhere}")
    complaint = answer.complaint
    reason, hint = next(
        ((reason, hint) for pattern, reason, hint in _INDEX_FAULTS if re.search(pattern, complaint, re.IGNORECASE)),
        (_URL_PASSWORD.sub(r"\1***@", complaint.splitlines()[-1].strip()), "See that it can be reached from here"),
    )
    return HostCheck("package index", False, f"{where}: {reason}", hint)


def _shown(url: str) -> str:
    """Return the part of a URL that says which index it is, without credentials."""
    parts = urlsplit(url)
    if not parts.hostname:
        return _URL_PASSWORD.sub(r"\1***@", url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}{parts.path.partition(f'/{_PROBE}/')[0]}"


def _rules(urls: Iterable[str]) -> Iterator[Rule]:
    return (rule for url in urls if (rule := rule_of_url(url)) is not None)


def index_variables() -> dict[str, str]:
    """Return the variables that point a session's own pip and uv to the index, without URLs that contain a password."""
    kept = {name: value for name in (*_PIP_VARIABLES[:2], *_UV_VARIABLES[:4]) if (value := os.environ.get(name))}
    indexes = list(dict.fromkeys(_pip_settings("index-url")))
    if indexes:
        kept.setdefault("PIP_INDEX_URL", indexes[-1])
    return {name: value for name, value in kept.items() if all(_is_open(url) for url in _split(value))}


def _is_open(url: str) -> bool:
    return rule_of_url(url) is not None and "@" not in urlsplit(url).netloc


async def _probe_index(index: str, folder: Path) -> tuple[list[str], list[str], bool]:
    """Let uv resolve one package; return the pages it requested in order, the files' URLs, and whether it succeeded."""
    answer, plan = await _ask_index(index, folder)
    if answer.status:
        log.warning("packages: an index did not tell where its files are, only its own host is allowed")
    planned = await to_thread.run_sync(_text, plan)
    return [*_index_pages(answer.output)], _FETCHED.findall(planned), not answer.status


async def _ask_index(index: str, folder: Path) -> tuple[UvAnswer, Path]:
    """Let uv resolve one package with an index, uv's own if it is empty; return its answer and the file of its plan."""
    wanted, plan = folder / "wanted.in", folder / "pylock.toml"
    wanted.write_text(_PROBE)
    plan.unlink(missing_ok=True)
    chosen = ("--default-index", index) if index else ()
    options = ("--no-deps", "--only-binary", ":all:", "--no-header", "--format", "pylock.toml", "-o", str(plan))
    command = ("--no-cache", "-v", "pip", "compile", *chosen, *options, str(wanted))
    # No retries, because the first session waits for this; the next server tries an index again that is down now.
    patience = {"UV_HTTP_RETRIES": "0"}
    return await run_uv(command, directory=folder, timeout_s=_PROBE_TIMEOUT_S, variables=patience), plan


def _index_pages(output: str) -> Iterator[str]:
    """Yield the pages of the probed package in uv's output; other URLs in it are not of an index."""
    for line in output.splitlines():
        for url in _FETCHED.findall(line):
            if f"/{_PROBE}/" in url:
                yield url


def configured_places(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the URLs and paths of every index and folder of files that pip and uv are configured with."""
    for name in _PIP_VARIABLES:
        yield from _split(variables.get(name, ""))
    for option in _PIP_OPTIONS:
        yield from _pip_settings(option)
    yield from uv_places(variables)


def uv_places(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the URLs and paths that uv alone is configured with."""
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
    """Split a value into URLs at blanks and at the commas of uv's find-links, without the names that uv allows."""
    return [re.sub(r"^[\w.-]+=", "", word) for word in re.split(r"[\s,]+", value) if word]


def _pip_settings(option: str) -> Iterator[str]:
    for file in _pip_files(os.environ):
        settings = configparser.RawConfigParser()
        with contextlib.suppress(OSError, UnicodeDecodeError, configparser.Error):
            settings.read_string(file.read_text("utf-8"))
            for section in ("global", "install"):
                yield from _split(settings.get(section, option, fallback=""))


def _pip_files(variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield pip's configuration files in pip's order: system, user, environment, and the one that a variable names."""
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


def _uv_settings(table: Mapping[str, Any]) -> Iterator[str]:
    for settings in (table, cast("Mapping[str, Any]", table.get("pip") or {})):
        values = (settings.get(name) for name in ("index-url", "extra-index-url", "find-links"))
        named = (entry.get("url") for entry in cast("list[dict[str, Any]]", settings.get("index") or []))
        for value in itertools.chain(values, named):
            yield from _split(value) if isinstance(value, str) else map(str, cast("list[Any]", value or []))


# What uv needs in order to reach the index from inside a sandbox: URLs and folders, credentials, certificates, and the
# operator's rules for which versions may be chosen. No other variable or file of the server is passed on.

# Matched as prefixes, because an index has variables of its own, such as UV_INDEX_MIRROR_PASSWORD.
_PASSED = (
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX", "UV_OFFLINE"),
    *("UV_INSECURE_HOST", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS", "UV_HTTP_", "UV_REQUEST_TIMEOUT", "UV_CONCURRENT_"),
    *("UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE", "UV_PRERELEASE", "UV_RESOLUTION", "UV_NO_CONFIG"),
    *("UV_TORCH_BACKEND", "UV_NO_BINARY", "UV_ONLY_BINARY"),
)
_LISTS = ("UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE")


@dataclass(frozen=True, slots=True)
class IndexAccess:
    """The variables and files that uv needs to reach the index. Not for logs, because it holds passwords."""

    variables: dict[str, str]
    files: dict[str, str] = field(repr=False)
    """Contents of files, by their path within a folder that only uv can read."""
    places: dict[str, str]
    """Variables whose value is a path within that folder, with that path."""
    readable: tuple[Path, ...]
    """Files and folders of the host that uv has to see at their own path, because an index may be a folder."""


def read_access(hosts: Collection[str]) -> IndexAccess:
    """Read the present configuration from variables and a few small files, with credentials for these hosts only."""
    environ = os.environ
    variables = {name: value for name, value in environ.items() if name.startswith(_PASSED)}
    copied = [*_configuration(environ), *_certificates(environ), *_netrc(environ, hosts), *_store(environ, hosts)]
    return IndexAccess(
        variables={**certificate_variables(environ), **variables},
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
    """Yield the credentials that `uv auth login` stored for these hosts."""
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
    # A JSON string is a TOML string too.
    return f"{name} = {json.dumps(value)}\n"


def _readable(environ: Mapping[str, str]) -> Iterator[Path]:
    lists = [word for name in _LISTS for word in environ.get(name, "").split()]
    for place in (*uv_places(environ), *lists, environ.get("SSL_CERT_DIR", "")):
        path = Path(unquote(urlsplit(place).path)) if place.startswith("file:") else Path(place)
        if not path.is_absolute() or not path.exists():
            continue
        if exposes_home(path):
            raise EnvironmentBroken(
                f"the package index needs {path}, which holds the whole home folder",
                hint="Give the files of the index a folder of their own",
            )
        yield path


def _text(file: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text("utf-8")
    return ""
