"""Conda's channels: which ones an environment's packages come from, and where those are.

The operator's setting says, or else the records that conda's tools left in the environment. `CONDA_CHANNEL_ALIAS` leads
to a mirror, as it does for those tools. Fetches nothing.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

from belljar.egress.rules import Rule, rule_of_url
from belljar.environments.base import would_bare

DEFAULT_CHANNELS = ("conda-forge",)
_ALIAS = "https://conda.anaconda.org"
_DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")
_RECORDS_LIMIT = 20_000
# CHANNEL/SUBDIR/FILE. Records hold long lists of files: this finds the line without reading them as JSON.
_URL = re.compile(rb'"url"\s*:\s*"([^"\s]+)/[^/"\s]+/[^/"\s]+"')

# Before the host, or of Anaconda's in the path. What has to be is in a netrc file, and is told to the solver alone.
_SECRETS = re.compile(r"(?<=://)[^/@]+@|/t/[^/]+(?=/)")


def channels_of(chosen: Sequence[str], prefix: Path) -> tuple[str, ...]:
    """The URLs of the channels for an environment; blocks while its records are looked at, where none are chosen."""
    return channel_urls(chosen or recorded_channels(prefix) or DEFAULT_CHANNELS)


def channel_urls(names: Sequence[str]) -> tuple[str, ...]:
    """Where channels are that are given by name, URL or folder; without passwords, which sessions could read."""
    return tuple(dict.fromkeys(_SECRETS.sub("", url) for name in names for url in _urls(name)))


def channel_rules(urls: Sequence[str]) -> list[Rule]:
    """The hosts of channels. They are the operator's choice, wherever their addresses are."""
    rules = (rule_of_url(url) for url in urls)
    return [replace(rule, is_configured=True) for rule in rules if rule is not None]


def channel_folders(urls: Sequence[str]) -> list[Path]:
    """Channels that are folders of this host, and can be shown to the solver."""
    folders = (Path(unquote(urlsplit(url).path)) for url in urls if url.startswith("file:///"))
    return [folder for folder in folders if _has_index(folder) and not would_bare(folder)]


def _has_index(folder: Path) -> bool:
    """Whether it is a channel, rather than where a single package was once installed from."""
    return any((folder / "noarch").glob("repodata*"))


def _urls(name: str) -> Iterator[str]:
    alias = os.environ.get("CONDA_CHANNEL_ALIAS", "").rstrip("/") or _ALIAS
    if name == "defaults":
        yield from _DEFAULTS
    elif name.startswith(("/", "~")):
        yield Path(name).expanduser().as_uri()
    elif "://" not in name:
        yield f"{alias}/{name.strip('/')}"
    else:
        yield re.sub(rf"^{re.escape(_ALIAS)}(?=/)", lambda _: alias, name.rstrip("/"))


def recorded_channels(prefix: Path) -> list[str]:
    """The channels that its packages came from, those of most packages first."""
    found: Counter[str] = Counter()
    with suppress(OSError):
        for file in islice((prefix / "conda-meta").glob("*.json"), _RECORDS_LIMIT):
            if match := _URL.search(file.read_bytes()):
                found[match[1].decode("utf-8", "replace")] += 1
    urls = [url for url, _ in found.most_common()]
    return [url for url in urls if url.startswith(("https://", "http://")) or channel_folders([url])]
