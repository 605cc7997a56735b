"""The caller of the request at hand, as sessions know their owner."""

from typing import Final

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
