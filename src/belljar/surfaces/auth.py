"""Who is calling over HTTP: API keys, OAuth 2.1 bearer tokens, and the principal that sessions belong to.

A key is known by its hash only, a token is verified and then forgotten: what handlers can see of a caller holds no
credential. Every refusal looks the same from outside. Knows nothing of binds, paths or sessions.
"""

import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

import anyio
import httpx2
from mcp.server.auth.middleware.auth_context import AuthContextMiddleware, get_access_token
from mcp.server.auth.middleware.bearer_auth import BearerAuthBackend, RequireAuthMiddleware
from mcp.server.auth.provider import AccessToken, TokenVerifier, principal_components
from mcp.server.auth.routes import build_resource_metadata_url, create_protected_resource_routes
from mcp.server.auth.settings import AuthSettings
from pydantic import AnyHttpUrl, SecretStr
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from belljar.errors import SettingsError
from belljar.settings import ApiKey, Settings, hash_key, parse_key, variable

logger = logging.getLogger(__name__)

LOCAL_PRINCIPAL: Final = "local"
"""The caller on stdio, and on loopback HTTP without keys."""

_WITHHELD: Final = "withheld"
_KEY_HINT: Final = "Make one with `belljar key` and list it in BELLJAR_API_KEYS as NAME:KEY or NAME:sha256:HEX"
_KEY_MIN_CHARS: Final = 16
_KEY_CHARS: Final = re.compile(r"[\x21-\x7e]+")

_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_KEY_TYPES: Final = ("RSA", "EC", "OKP")
_CLOCK_SKEW_S: Final = 30
_FETCH_TIMEOUT_S: Final = 5.0
_REFETCH_INTERVAL_S: Final = 30.0
_KEYS_FRESH_S: Final = 10 * 60.0
_KEYS_USABLE_S: Final = 60 * 60.0


def current_principal() -> str:
    """Who made the request being handled: "local", "key:NAME" or "jwt:ISSUER#SUBJECT"."""
    token = get_access_token()
    if token is None:
        return LOCAL_PRINCIPAL
    _, issuer, subject = principal_components(token)
    return f"key:{subject}" if issuer is None else f"jwt:{issuer}#{subject}"


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
        return AccessToken(token=_WITHHELD, client_id=name, subject=name, scopes=self._scopes, resource=self._resource)


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


class JwtVerifier(TokenVerifier):
    """Accepts tokens that the issuer signed for this server (OAuth 2.1 resource server, RFC 9068 and 8707)."""

    def __init__(
        self,
        *,
        issuer: str,
        audience: str,
        jwks_url: str | None = None,
        refetch_interval_s: float = _REFETCH_INTERVAL_S,
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._keys = IssuerKeys(issuer, jwks_url, refetch_interval_s=refetch_interval_s)

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return what the token grants; None for any other token, whatever is wrong with it."""
        # 90 ms of import that a server with keys alone, or on stdio, never needs.
        import jwt

        try:
            claims = await self._verified_claims(token)
        except jwt.PyJWTError as error:
            logger.info("Refused a bearer token: %s", type(error).__name__)
            return None
        if not claims or not claims["sub"]:
            return None
        return AccessToken(
            token=_WITHHELD,
            client_id=str(claims.get("client_id") or claims.get("azp") or claims["sub"]),
            subject=claims["sub"],
            scopes=_scopes(claims),
            expires_at=int(claims["exp"]),
            resource=self._audience,
            claims={"iss": self._issuer},
        )

    async def _verified_claims(self, token: str) -> dict[str, Any] | None:
        import jwt

        header = jwt.get_unverified_header(token)
        algorithm = header.get("alg")
        if algorithm not in _ALGORITHMS:
            return None
        key = await self._keys.find(header.get("kid"))
        if key is None or key.get("alg", algorithm) != algorithm:
            return None
        # Clients spell a resource without a path both ways, and the SDK compares the two as equal.
        audience = self._audience.rstrip("/")
        return jwt.decode(
            token,
            jwt.PyJWK(key, algorithm),
            algorithms=_ALGORITHMS,
            audience=[audience, f"{audience}/"],
            issuer=self._issuer,
            # For tokens dated ahead of our clock; past `exp` the SDK's middleware gives no leeway.
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
        # Anyone can send a token with an invented key id: the issuer must not feel it.
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
            document = await _get_json(client, self._jwks_url or await self._discover(client))
        keys = document.get("keys")
        if not isinstance(keys, list):
            raise ValueError("its key set has no list of keys")  # noqa: TRY004 - bad data, not a bad call
        return [key for key in cast("list[Any]", keys) if _is_signing_key(key)]

    async def _discover(self, client: httpx2.AsyncClient) -> str:
        for url in _metadata_urls(self._issuer):
            try:
                metadata = await _get_json(client, url)
            except httpx2.HTTPStatusError:
                continue
            jwks_url = metadata.get("jwks_uri")
            # RFC 8414, 3.3: metadata that names another issuer must not be used.
            if metadata.get("issuer") == self._issuer and isinstance(jwks_url, str) and is_safe_url(jwks_url):
                return jwks_url
        raise ValueError("no metadata of it names where its keys are")


async def _get_json(client: httpx2.AsyncClient, url: str) -> dict[str, Any]:
    response = await client.get(url, headers={"accept": "application/json"})
    response.raise_for_status()
    document = response.json()
    if not isinstance(document, dict):
        raise ValueError(f"{url} is not a JSON object")  # noqa: TRY004 - bad data, not a bad call
    return cast("dict[str, Any]", document)


def _is_signing_key(key: Any) -> bool:
    if not isinstance(key, dict):
        return False
    key = cast("dict[str, Any]", key)
    return key.get("kty") in _KEY_TYPES and key.get("use", "sig") == "sig"


def _metadata_urls(issuer: str) -> list[str]:
    """Return where RFC 8414 and OpenID Connect put an issuer's metadata, in the order of the MCP specification."""
    parts = urlsplit(issuer)
    origin, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    urls = [
        f"{origin}/.well-known/oauth-authorization-server{path}",
        f"{origin}/.well-known/openid-configuration{path}",
        f"{origin}{path}/.well-known/openid-configuration",
    ]
    return list(dict.fromkeys(urls))


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


class EitherVerifier(TokenVerifier):
    """Accepts what any of its verifiers accepts, asked in order."""

    def __init__(self, *verifiers: TokenVerifier) -> None:
        self._verifiers = verifiers

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return the first answer."""
        for verifier in self._verifiers:
            access = await verifier.verify_token(token)
            if access is not None:
                return access
        return None


@dataclass(frozen=True)
class AuthConfig:
    """How callers are told apart: made by `build_auth`, applied to each route by `guard`."""

    settings: AuthSettings
    verifier: TokenVerifier

    def guard(self, app: ASGIApp) -> ASGIApp:
        """Let only callers with credentials through to `app`, and let it know them."""
        settings = self.settings
        scopes = settings.required_scopes or []
        resource = settings.resource_server_url
        required = RequireAuthMiddleware(app, scopes, build_resource_metadata_url(resource) if resource else None)
        backend = BearerAuthBackend(
            self.verifier, resource_server_url=resource if settings.validate_token_resource else None
        )
        known = AuthenticationMiddleware(AuthContextMiddleware(required), backend=backend)
        return _ScopedChallenge(known, scopes) if scopes else known

    def metadata_routes(self) -> list[Route]:
        """Return the public route of RFC 9728 that tells clients where to get a token; none with keys alone."""
        if self.settings.resource_server_url is None:
            return []
        return create_protected_resource_routes(
            self.settings.resource_server_url, [self.settings.issuer_url], self.settings.required_scopes
        )


class _ScopedChallenge:
    """Adds to a challenge the scopes to ask for, which mcp 2.3 leaves out."""

    def __init__(self, app: ASGIApp, scopes: Sequence[str]) -> None:
        self._app = app
        self._parameter = f', scope="{" ".join(scopes)}"'.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_scopes(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (401, 403):
                message["headers"] = [
                    (name, value + self._parameter if name == b"www-authenticate" else value)
                    for name, value in message["headers"]
                ]
            await send(message)

        await self._app(scope, receive, send_with_scopes)


def build_auth(settings: Settings) -> AuthConfig | None:
    """Return the way callers are known by these settings, or None when anyone who can connect is "local"."""
    check_oauth(settings)
    issuer, audience, scopes = settings.oauth_issuer, settings.oauth_audience, list(settings.oauth_scopes)
    if not issuer or not audience:
        if not settings.api_keys:
            return None
        # The SDK wants an issuer even where there is no metadata to publish; nothing reads this one.
        nobody = AuthSettings(issuer_url=AnyHttpUrl("http://localhost"), resource_server_url=None)
        return AuthConfig(nobody, KeyVerifier(settings.api_keys))
    verifier: TokenVerifier = JwtVerifier(issuer=issuer, audience=audience, jwks_url=settings.oauth_jwks_url or None)
    if settings.api_keys:
        verifier = EitherVerifier(KeyVerifier(settings.api_keys, scopes=scopes, resource=audience), verifier)
    published = AuthSettings.model_validate(
        {
            "issuer_url": issuer,
            "resource_server_url": audience,
            "required_scopes": scopes or None,
            "validate_token_resource": True,
        }
    )
    return AuthConfig(published, verifier)


def check_oauth(settings: Settings) -> None:
    """Refuse OAuth settings that are half there, or whose answers could not be believed."""
    needed = {"oauth_issuer": settings.oauth_issuer, "oauth_audience": settings.oauth_audience}
    if not any((*needed.values(), settings.oauth_jwks_url, settings.oauth_scopes)):
        return
    missing = " and ".join(variable(name) for name, value in needed.items() if not value)
    if missing:
        raise SettingsError(f"OAuth is set up in part, without {missing}", hint=f"Set {missing}")
    for name, url in {**needed, "oauth_jwks_url": settings.oauth_jwks_url}.items():
        if url and not is_safe_url(url):
            raise SettingsError(
                f"{variable(name)} is {url}, neither an https: URL nor an http: URL of this machine",
                hint="Give the whole URL, starting with https://",
            )
