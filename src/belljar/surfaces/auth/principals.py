"""The caller of the request at hand, as sessions know their owner."""

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import principal_components

LOCAL_PRINCIPAL: Final = "local"
"""The caller on stdio, and on loopback HTTP without keys."""

WITHHELD: Final = "withheld"
"""What stands where handlers could otherwise see a credential."""


def current_principal() -> str:
    """Who made the request being handled: "local", "key:NAME" or "jwt:ISSUER#SUBJECT"."""
    token = get_access_token()
    if token is None:
        return LOCAL_PRINCIPAL
    _, issuer, subject = principal_components(token)
    return f"key:{subject}" if issuer is None else f"jwt:{issuer}#{subject}"


# Which addresses only this machine can reach, and which can be believed.


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_safe_url(url: str) -> bool:
    """Whether what the URL returns can be believed: https, or http to this machine."""
    parts = urlsplit(url)
    if not parts.hostname:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname))
