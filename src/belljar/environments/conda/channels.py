"""Conda channels: which ones the packages of an environment come from, and their URLs.

The operator's setting names them; without it, they come from the records that conda's tools left in the environment.
`CONDA_CHANNEL_ALIAS` names a mirror, as it does for those tools. This module fetches nothing.
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
from belljar.environments.base import exposes_home
from belljar.environments.conda.places import META

DEFAULT_CHANNELS = ("conda-forge",)
_ALIAS = "https://conda.anaconda.org"
_DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")
_RECORDS_LIMIT = 20_000
# Matches CHANNEL/SUBDIR/FILE. A regular expression instead of a JSON parser, because records hold long lists of files.
_URL = re.compile(rb'"url"\s*:\s*"([^"\s]+)/[^/"\s]+/[^/"\s]+"')

# Passwords before the host, or Anaconda's tokens in the path. Credentials that are needed belong in a netrc file,
# which only the solver gets.
_SECRETS = re.compile(r"(?<=://)[^/@]+@|/t/[^/]+(?=/)")


def channels_of(chosen: Sequence[str], prefix: Path) -> tuple[str, ...]:
    """Return the URLs of an environment's channels; if none are chosen, blocks while its records are read."""
    return channel_urls(chosen or recorded_channels(prefix) or DEFAULT_CHANNELS)


def channel_urls(names: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs of channels given by name, URL or folder, without passwords, because sessions could read them."""
    return tuple(dict.fromkeys(_SECRETS.sub("", url) for name in names for url in _urls(name)))


def channel_rules(urls: Sequence[str]) -> list[Rule]:
    """Return egress rules for the channels' hosts; they may have private addresses, because the operator chose them."""
    rules = (rule_of_url(url) for url in urls)
    return [replace(rule, is_configured=True) for rule in rules if rule is not None]


def channel_folders(urls: Sequence[str]) -> list[Path]:
    """Return the channels that are folders of this host and can be shown to the solver."""
    folders = (Path(unquote(urlsplit(url).path)) for url in urls if url.startswith("file:///"))
    return [folder for folder in folders if _has_index(folder) and not exposes_home(folder)]


def _has_index(folder: Path) -> bool:
    """Tell whether a folder is a channel, rather than a folder from which a single package was once installed."""
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
    """Return the channels that the packages of a prefix came from, the most frequent first."""
    found: Counter[str] = Counter()
    with suppress(OSError):
        for file in islice((prefix / META).glob("*.json"), _RECORDS_LIMIT):
            if match := _URL.search(file.read_bytes()):
                found[match[1].decode("utf-8", "replace")] += 1
    urls = [url for url, _ in found.most_common()]
    return [url for url in urls if url.startswith(("https://", "http://")) or channel_folders([url])]
