"""Warns where a proxy may stand before a server that knows no callers: everybody who comes through it is `local`.

A server on loopback without credentials trusts whoever reaches it, because that is a user of its machine. A proxy on
the same machine makes callers of all the world look like that.
"""

import logging
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from belljar.http.auth import is_loopback
from belljar.settings import Settings, variable

FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
"""Headers that proxies add to a request."""
PROXY_HINT: Final = (
    f"Make a key for each caller with `belljar key` and set {variable('api_keys')}, or set {variable('oauth_issuer')}"
)
_FORWARDED_BYTES: Final = frozenset(name.encode() for name in (*FORWARDED, "x-forwarded-host", "x-forwarded-proto"))
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]", "::1")

log = logging.getLogger(__name__)


def proxy_warning(settings: Settings) -> str:
    """Return what is wrong where the settings speak of a proxy before a server that knows no callers; else nothing."""
    host = settings.http.rpartition(":")[0].strip("[] ") or "127.0.0.1"
    names = [name for name in settings.allowed_hosts if name.partition(":")[0].lower() not in _LOCAL_NAMES]
    if not settings.http or not names or not is_loopback(host) or knows_callers(settings):
        return ""
    return (
        f"{settings.http} answers to {', '.join(names[:3])} without credentials: everybody who comes through a "
        "proxy of that name is `local`, with the same sessions and files"
    )


def knows_callers(settings: Settings) -> bool:
    """Return whether callers have to say who they are, or the operator has vouched for all of them."""
    return bool(settings.api_keys or settings.oauth_issuer or settings.trust_network)


class ProxyNotice:
    """Middleware that logs a warning with the first request that a proxy has forwarded."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._has_warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the request's headers, and pass it on."""
        if not self._has_warned and scope["type"] == "http":
            found = [name.decode() for name, _ in scope["headers"] if name in _FORWARDED_BYTES]
            if found:
                self._has_warned = True
                log.warning(
                    "a request came through a proxy (it has %s) and no credentials are set up: everybody who comes "
                    "that way is `local`, with the same sessions and files. %s",
                    found[0],
                    PROXY_HINT,
                )
        await self._app(scope, receive, send)
