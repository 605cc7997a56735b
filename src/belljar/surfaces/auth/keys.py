"""API keys: listed in the settings, known by their hash only."""

import hmac
import re
from collections.abc import Sequence
from typing import Final

from mcp.server.auth.provider import AccessToken, TokenVerifier
from pydantic import SecretStr

from belljar.errors import SettingsError
from belljar.settings import ApiKey, hash_key, parse_key
from belljar.surfaces.auth.principals import WITHHELD

_KEY_HINT: Final = "Make one with `belljar key` and list it in BELLJAR_API_KEYS as NAME:KEY or NAME:sha256:HEX"
_KEY_MIN_CHARS: Final = 16
_KEY_CHARS: Final = re.compile(r"[\x21-\x7e]+")


class KeyVerifier(TokenVerifier):
    """Accepts the API keys of the settings: "KEY", "NAME:KEY" or "NAME:sha256:HEX" each."""

    def __init__(
        self, entries: Sequence[SecretStr], *, scopes: Sequence[str] = (), resource: str | None = None
    ) -> None:
        self._names: dict[str, str] = {}
        for number, entry in enumerate(entries, start=1):
            key = _read_key(entry.get_secret_value(), number)
            if self._names.setdefault(key.digest, key.name) != key.name:
                raise SettingsError(f"API key {number} is listed before under another name", hint=_KEY_HINT)
        self._scopes = list(scopes)
        self._resource = resource

    async def verify_token(self, token: str) -> AccessToken | None:
        """Say whose key this is, in the same time whichever key it is or is not."""
        presented = hash_key(token)
        name: str | None = None
        for digest, owner in self._names.items():
            if hmac.compare_digest(digest, presented):
                name = owner
        if name is None:
            return None
        return AccessToken(token=WITHHELD, client_id=name, subject=name, scopes=self._scopes, resource=self._resource)


def _read_key(entry: str, number: int) -> ApiKey:
    """Errors give the number of an entry, never its text."""
    try:
        key = parse_key(entry)
    except ValueError as error:
        raise SettingsError(f"API key {number} cannot be read: {error}", hint=_KEY_HINT) from None
    secret = entry.partition(":")[2] if ":" in entry else entry
    if secret.startswith("sha256:"):
        return key
    if len(secret) < _KEY_MIN_CHARS:
        fact = f"API key {number} has {len(secret)} characters, fewer than {_KEY_MIN_CHARS}"
        raise SettingsError(fact, hint=_KEY_HINT)
    if not _KEY_CHARS.fullmatch(secret):
        raise SettingsError(f"API key {number} has characters that no HTTP header can carry", hint=_KEY_HINT)
    return key
