"""OAuth 2.1 bearer tokens: their verification against the issuer's public keys, which are fetched and cached here.

No token is kept once it is verified.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import urlsplit

import anyio
import httpx2
from mcp.server.auth.provider import AccessToken, TokenVerifier

from belljar.http.auth.principals import WITHHELD, is_safe_url
from belljar.json_values import check_values

# The issuer's public keys


REFETCH_INTERVAL_S: Final = 30.0
_KEY_TYPES: Final = ("RSA", "EC", "OKP")
_FETCH_TIMEOUT_S: Final = 5.0
_KEYS_FRESH_S: Final = 10 * 60.0
_KEYS_USABLE_S: Final = 60 * 60.0


class IssuerKeys:
    """An issuer's public keys: fetched when first needed, when old, and when a token names one not seen yet."""

    def __init__(self, issuer: str, jwks_url: str | None, *, refetch_interval_s: float) -> None:
        self._issuer = issuer
        self._jwks_url = jwks_url
        self._refetch_interval_s = refetch_interval_s
        self._keys: list[dict[str, Any]] = []
        self._fetched_at = self._tried_at = float("-inf")
        self._lock = anyio.Lock()

    async def find(self, key_id: str | None) -> dict[str, Any] | None:
        """Return the key of that id; without an id, the issuer's key if it has only one."""
        if time.monotonic() - self._fetched_at > _KEYS_FRESH_S:
            await self._refresh()
        key = self._known(key_id)
        if key is None:
            await self._refresh()
            key = self._known(key_id)
        return key

    def _known(self, key_id: str | None) -> dict[str, Any] | None:
        if time.monotonic() - self._fetched_at > _KEYS_USABLE_S:
            return None
        matching = self._keys if key_id is None else [key for key in self._keys if key.get("kid") == key_id]
        return matching[0] if len(matching) == 1 else None

    async def _refresh(self) -> None:
        # Anyone can send a token with an invented key id, and the issuer must not feel it: so fetches are limited.
        async with self._lock:
            if time.monotonic() - self._tried_at < self._refetch_interval_s:
                return
            self._tried_at = time.monotonic()
            try:
                self._keys = await self._fetch()
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
                logger.warning("Cannot fetch the signing keys of %s: %s", self._issuer, error)
            else:
                self._fetched_at = time.monotonic()

    async def _fetch(self) -> list[dict[str, Any]]:
        async with httpx2.AsyncClient(timeout=_FETCH_TIMEOUT_S) as client:
            document = await get_json(client, self._jwks_url or await self._discover(client))
        keys = document.get("keys")
        if not isinstance(keys, list):
            raise ValueError("its key set has no list of keys")  # noqa: TRY004 - bad data, not a bad call
        return [key for key in cast("list[Any]", keys) if _is_signing_key(key)]

    async def _discover(self, client: httpx2.AsyncClient) -> str:
        for url in metadata_urls(self._issuer):
            try:
                metadata = await get_json(client, url)
            except httpx2.HTTPStatusError:
                continue
            jwks_url = metadata.get("jwks_uri")
            # RFC 8414, 3.3: metadata that names another issuer must not be used.
            if metadata.get("issuer") == self._issuer and isinstance(jwks_url, str) and is_safe_url(jwks_url):
                return jwks_url
        raise ValueError("no metadata of it names where its keys are")


async def get_json(client: httpx2.AsyncClient, url: str) -> dict[str, Any]:
    """Return the JSON object at a URL."""
    response = await client.get(url, headers={"accept": "application/json"})
    response.raise_for_status()
    check_values(response.content)
    document = response.json()
    if not isinstance(document, dict):
        raise ValueError(f"{url} is not a JSON object")  # noqa: TRY004 - bad data, not a bad call
    return cast("dict[str, Any]", document)


def _is_signing_key(key: Any) -> bool:
    if not isinstance(key, dict):
        return False
    key = cast("dict[str, Any]", key)
    return key.get("kty") in _KEY_TYPES and key.get("use", "sig") == "sig"


def metadata_urls(issuer: str) -> list[str]:
    """Return where RFC 8414 and OpenID Connect put an issuer's metadata, in the order of the MCP specification."""
    parts = urlsplit(issuer)
    origin, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    urls = [
        f"{origin}/.well-known/oauth-authorization-server{path}",
        f"{origin}/.well-known/openid-configuration{path}",
        f"{origin}{path}/.well-known/openid-configuration",
    ]
    return list(dict.fromkeys(urls))


logger = logging.getLogger(__name__)

_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_CLOCK_SKEW_S: Final = 30


class JwtVerifier(TokenVerifier):
    """Verifier of tokens that the issuer signed for this server (OAuth 2.1 resource server, RFC 9068 and 8707)."""

    def __init__(
        self,
        *,
        issuer: str,
        audience: str,
        jwks_url: str | None = None,
        refetch_interval_s: float = REFETCH_INTERVAL_S,
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._keys = IssuerKeys(issuer, jwks_url, refetch_interval_s=refetch_interval_s)

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return what the token grants; None for a token that is not accepted, whatever is wrong with it."""
        # Imported here, because it takes 90 ms and a server with API keys alone, or on stdio, never needs it.
        import jwt

        try:
            claims = await self._verify_claims(token)
        except jwt.PyJWTError as error:
            logger.info("Refused a bearer token: %s", type(error).__name__)
            return None
        if not claims or not claims["sub"]:
            return None
        return AccessToken(
            token=WITHHELD,
            client_id=str(claims.get("client_id") or claims.get("azp") or claims["sub"]),
            subject=claims["sub"],
            scopes=_scopes(claims),
            expires_at=int(claims["exp"]),
            resource=self._audience,
            claims={"iss": self._issuer},
        )

    async def _verify_claims(self, token: str) -> dict[str, Any] | None:
        import jwt

        header = jwt.get_unverified_header(token)
        algorithm = header.get("alg")
        if algorithm not in _ALGORITHMS:
            return None
        key = await self._keys.find(header.get("kid"))
        if key is None or key.get("alg", algorithm) != algorithm:
            return None
        # Clients write a resource without a path with or without a final slash, and the SDK compares the two as equal.
        audience = self._audience.rstrip("/")
        return jwt.decode(
            token,
            jwt.PyJWK(key, algorithm),
            algorithms=_ALGORITHMS,
            audience=[audience, f"{audience}/"],
            issuer=self._issuer,
            # The leeway is for tokens dated ahead of our clock; past `exp` the SDK's middleware gives none.
            leeway=_CLOCK_SKEW_S,
            options={"require": ["exp", "iss", "aud", "sub"], "enforce_minimum_key_length": True},
        )


def _scopes(claims: Mapping[str, Any]) -> list[str]:
    granted: object = claims.get("scope") or claims.get("scp")
    if isinstance(granted, str):
        return granted.split()
    if isinstance(granted, list):
        return [scope for scope in cast("list[object]", granted) if isinstance(scope, str)]
    return []
