"""Where sessions of the environment `azure` live: the endpoint of a session pool of Azure Container Apps.

It is either given as a whole (`azure_endpoint`), or by the four names that Azure's own code interpreter server takes
from its variables. Only the form is checked here; nothing is connected to.
"""

import re
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from belljar.errors import SettingsError

if TYPE_CHECKING:
    from belljar.settings.table import Settings

AZURE = "azure"
"""The environment whose sessions live in the pool."""

DEFAULT_SCOPE = "https://dynamicsessions.io/.default"

VARIABLES = {
    "azure_subscription": "AZURE_SUBSCRIPTION_ID",
    "azure_resource_group": "AZURE_RESOURCE_GROUP",
    "azure_session_pool": "AZURE_SESSION_POOL",
    "azure_region": "AZURE_REGION",
}
"""The four settings that name a pool together, and Azure's variables for them."""

_PART = re.compile(r"[\w.()-]{1,90}", re.ASCII)
_REGION = re.compile(r"[a-z0-9-]{1,60}")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def pool_endpoint(settings: "Settings") -> str:
    """Return the address of the configured pool; empty if there is none, or if only some of its names are set."""
    if settings.azure_endpoint:
        return settings.azure_endpoint
    if missing_names(settings) or not settings.azure_region:
        return ""
    subscription, group, pool = (
        quote(name, safe="")
        for name in (settings.azure_subscription, settings.azure_resource_group, settings.azure_session_pool)
    )
    path = f"subscriptions/{subscription}/resourceGroups/{group}/sessionPools/{pool}"
    return f"https://{settings.azure_region}.dynamicsessions.io/{path}"


def missing_names(settings: "Settings") -> list[str]:
    """Return those of the four variables that are not set although others are; none where none is needed."""
    lacking = [variable for name, variable in VARIABLES.items() if not getattr(settings, name)]
    return [] if settings.azure_endpoint or len(lacking) == len(VARIABLES) else lacking


def check_pool_names(settings: "Settings") -> None:
    """Refuse settings that name a pool only in part. Called where sessions are to live in one."""
    if missing := missing_names(settings):
        raise SettingsError(
            f"the Azure session pool is named only in part: {', '.join(missing)} {_are(missing)} not set",
            hint=f"Set {_all_of(missing)}, or unset the others and let sessions live on this machine",
        )


def checked_endpoint(value: str) -> str:
    """Return the address of a pool without its last slash, or refuse it."""
    if not value:
        return ""
    try:
        parts = urlsplit(value)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError("it is not a URL") from None
    if parts.scheme not in ("https", "http") or not host or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("it is not the URL of a pool, like https://westus2.dynamicsessions.io/subscriptions/…")
    if parts.scheme == "http" and host not in _LOOPBACK:
        raise ValueError("a token is sent to it, so it must be https, or http on this machine")
    return value.rstrip("/")


def checked_part(value: str) -> str:
    """Refuse what cannot be a part of a pool's address."""
    if value and not _PART.fullmatch(value):
        raise ValueError("it has letters, digits and ._()- alone, 90 at most")
    return value


def checked_region(value: str) -> str:
    """Return a region as addresses spell it, or refuse it."""
    region = value.lower().replace(" ", "")
    if region and not _REGION.fullmatch(region):
        raise ValueError("it is not a region, like westus2")
    return region


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _all_of(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
