"""What a request to the pool carries in `Authorization`: a key, or a token of `azure-identity` that is still good.

Nothing of either is ever logged or part of an error.
"""

import asyncio
import time
from importlib.util import find_spec
from typing import Any, Protocol, cast

from belljar.distribution import install_extra
from belljar.errors import PoolUnavailable
from belljar.settings import Settings

# Refreshed this long before they end, so that no token ends on its way.
_MARGIN_S = 300
_MAX_CHARACTERS = 300
_EXTRA_HINT = f"{install_extra('azure')}, or set BELLJAR_AZURE_KEY where the endpoint takes keys"
_TOKEN_HINT = "Sign in with `az login`, or give this machine a managed identity; `belljar doctor` tries it again"  # noqa: S105


class Credential(Protocol):
    """Proves to the pool who we are."""

    async def bearer(self) -> str:
        """Return the key or a token that is good for some minutes; raise `PoolUnavailable` where none can be had."""
        ...

    def forget(self) -> None:
        """Forget the token, because the pool has refused it."""
        ...


def check_credential(settings: Settings) -> None:
    """Refuse settings with which no token can be had, before a session is made; asks nobody for one."""
    if not settings.azure_key.get_secret_value() and not _has_identity():
        raise PoolUnavailable("azure-identity is not installed, so no token can be had", hint=_EXTRA_HINT)


def open_credential(settings: Settings) -> Credential:
    """Return the credential that the settings call for."""
    check_credential(settings)
    key = settings.azure_key.get_secret_value()
    return KeyCredential(key) if key else TokenCredential(_default_credential(), settings.azure_scope)


class KeyCredential:
    """A key that does not change."""

    def __init__(self, key: str) -> None:
        self._key = key

    async def bearer(self) -> str:
        """See `Credential`."""
        return self._key

    def forget(self) -> None:
        """Do nothing, because there is no other key."""


class TokenCredential:
    """Tokens of a credential of `azure-identity`, which blocks, so it is asked in a thread."""

    def __init__(self, source: Any, scope: str) -> None:
        self._source = source
        self._scope = scope
        self._token = ""
        self._ends_at = 0.0
        self._lock = asyncio.Lock()

    async def bearer(self) -> str:
        """See `Credential`."""
        async with self._lock:
            if not self._token or time.time() > self._ends_at - _MARGIN_S:
                self._token, self._ends_at = await asyncio.to_thread(self._fetch)
            return self._token

    def forget(self) -> None:
        """See `Credential`."""
        self._token = ""

    def _fetch(self) -> tuple[str, float]:
        try:
            token = self._source.get_token(self._scope)
        except Exception as error:
            # Each kind of credential has exceptions of its own. The first line says which of them failed and why.
            first = str(error).strip().partition("\n")[0][:_MAX_CHARACTERS] or type(error).__name__
            raise PoolUnavailable(f"no token could be had for the Azure pool: {first}", hint=_TOKEN_HINT) from error
        return cast("str", token.token), float(token.expires_on)


def _has_identity() -> bool:
    try:
        return find_spec("azure.identity") is not None
    except ModuleNotFoundError:  # nothing of Azure's is installed
        return False


def _default_credential() -> Any:
    # azure-identity takes 0.3 s to import, and only sessions in a pool need it.
    from azure.identity import DefaultAzureCredential  # pyright: ignore

    return cast("Any", DefaultAzureCredential())
