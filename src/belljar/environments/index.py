"""Where the package index is, as pip and uv are told on this host, and as the index itself answers.

No host is written down here: mirrors work because uv is asked what it would fetch, and pip's configuration is read.
"""

import configparser
import contextlib
import itertools
import logging
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import platformdirs

from belljar.egress.rules import Rule, rule_of_url
from belljar.environments.uv import run_uv

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
