"""API keys, and the guard before each request: which credentials the settings ask for, and what a refusal says."""

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mcp.server.auth.middleware.auth_context import AuthContextMiddleware
from mcp.server.auth.middleware.bearer_auth import BearerAuthBackend, RequireAuthMiddleware
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.auth.routes import build_resource_metadata_url, create_protected_resource_routes
from mcp.server.auth.settings import AuthSettings
from pydantic import AnyHttpUrl, SecretStr
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from belljar.errors import SettingsError
from belljar.http.auth.principals import WITHHELD, is_safe_url
from belljar.http.auth.tokens import JwtVerifier
from belljar.settings import ApiKey, Settings, hash_key, parse_key, variable

KEY_HEADER: Final = b"x-ms-apikey"
"""A second header for the credentials that `Authorization` carries after `Bearer`."""


class EitherVerifier(TokenVerifier):
    """Verifier that accepts what any of its verifiers accepts, asked in order."""

    def __init__(self, *verifiers: TokenVerifier) -> None:
        self._verifiers = verifiers

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return the first answer that is not None."""
        for verifier in self._verifiers:
            access = await verifier.verify_token(token)
            if access is not None:
                return access
        return None


@dataclass(frozen=True)
class AuthConfig:
    """How callers are authenticated: made by `build_auth`, applied to each route by `require_credentials`."""

    settings: AuthSettings
    verifier: TokenVerifier

    def require_credentials(self, app: ASGIApp) -> ASGIApp:
        """Return `app` behind a check: only callers with credentials reach it, and it can see who they are."""
        settings = self.settings
        scopes = settings.required_scopes or []
        resource = settings.resource_server_url
        required = RequireAuthMiddleware(app, scopes, build_resource_metadata_url(resource) if resource else None)
        backend = BearerAuthBackend(
            self.verifier, resource_server_url=resource if settings.validate_token_resource else None
        )
        known = _KeyHeader(AuthenticationMiddleware(AuthContextMiddleware(required), backend=backend))
        return _ScopedChallenge(known, scopes) if scopes else known

    def metadata_routes(self) -> list[Route]:
        """Return the public route of RFC 9728 that tells clients where to get a token; none with API keys alone."""
        if self.settings.resource_server_url is None:
            return []
        return create_protected_resource_routes(
            self.settings.resource_server_url, [self.settings.issuer_url], self.settings.required_scopes
        )


class _KeyHeader:
    """Middleware that reads `x-ms-apikey`, in which Azure's clients send keys, as a bearer token."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: list[tuple[bytes, bytes]] = scope["headers"]
            key = next((value for name, value in headers if name == KEY_HEADER), b"")
            if key and all(name != b"authorization" for name, _ in headers):
                kept = [(name, value) for name, value in headers if name != KEY_HEADER]
                scope = {**scope, "headers": [*kept, (b"authorization", b"Bearer " + key)]}
        await self._app(scope, receive, send)


class _ScopedChallenge:
    """Middleware that adds to a challenge the scopes to ask for, because mcp 2.3 leaves them out."""

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
    """Return how these settings authenticate callers, or None when anyone who can connect is "local"."""
    check_oauth(settings)
    issuer, audience, scopes = settings.oauth_issuer, settings.oauth_audience, list(settings.oauth_scopes)
    if not issuer or not audience:
        if not settings.api_keys:
            return None
        # The SDK requires an issuer even where there is no metadata to publish; nothing reads this one.
        unpublished = AuthSettings(issuer_url=AnyHttpUrl("http://localhost"), resource_server_url=None)
        return AuthConfig(unpublished, KeyVerifier(settings.api_keys))
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
    """Raise SettingsError for OAuth settings that are incomplete, or with URLs whose answers cannot be trusted."""
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


# API keys: listed in the settings, stored only as hashes

_KEY_HINT: Final = "Make one with `belljar key` and list it in BELLJAR_API_KEYS as NAME:KEY or NAME:sha256:HEX"
_KEY_MIN_CHARS: Final = 16
_KEY_CHARS: Final = re.compile(r"[\x21-\x7e]+")


class KeyVerifier(TokenVerifier):
    """Verifier of the API keys in the settings: "KEY", "NAME:KEY" or "NAME:sha256:HEX" each."""

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
        """Return whose key this is, in the same time for every token, so that the time tells nothing about the keys."""
        presented = hash_key(token)
        name: str | None = None
        for digest, owner in self._names.items():
            if hmac.compare_digest(digest, presented):
                name = owner
        if name is None:
            return None
        return AccessToken(token=WITHHELD, client_id=name, subject=name, scopes=self._scopes, resource=self._resource)


def _read_key(entry: str, number: int) -> ApiKey:
    """Parse an entry of the setting. Errors give the number of the entry, never its text."""
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
