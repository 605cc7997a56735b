"""The principal of the current request, which owns the sessions it makes; and which hosts and URLs can be trusted."""

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken, principal_components

from belljar.settings.keys import LOCAL_PRINCIPAL

WITHHELD: Final = "withheld"
"""Stands in place of the credential in what handlers can see."""


def current_principal() -> str:
    """Return who made the current request: "local", "key:NAME" or "jwt:ISSUER#SUBJECT"."""
    token = get_access_token()
    return LOCAL_PRINCIPAL if token is None else principal_of(token)


def principal_of(token: AccessToken) -> str:
    """Return whom a verified token stands for."""
    _, issuer, subject = principal_components(token)
    return f"key:{subject}" if issuer is None else f"jwt:{issuer}#{subject}"


# Hosts and URLs


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_safe_url(url: str) -> bool:
    """Return whether the URL's answers can be trusted: it is https, or http to this machine."""
    parts = urlsplit(url)
    if not parts.hostname:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname))
