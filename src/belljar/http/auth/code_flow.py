"""Signing in to the console at an OAuth issuer: the authorisation code flow with PKCE.

The access token that the flow gives is verified as one that a client sends, and not kept. Nothing is stored but the
state of flows that are under way, in memory.
"""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlencode, urlsplit

import httpx2

from belljar.errors import InvalidArgument, IssuerUnreachable
from belljar.http.auth.principals import is_safe_url
from belljar.http.auth.tokens import get_json, metadata_urls
from belljar.json_values import check_values

CALLBACK: Final = "/console/oauth/callback"
FLOW_S: Final = 10 * 60.0
_MAX_FLOWS: Final = 1_000
_TIMEOUT_S: Final = 10.0
_MAX_CHARS: Final = 4_096


@dataclass(frozen=True, slots=True)
class _Flow:
    verifier: str
    browser: bytes
    """The hash of a cookie that only the browser has which began the flow."""
    wanted: str
    expires_at: float


class CodeFlow:
    """The flows of one server with its issuer. `audience` is this server's own URL, which tokens are meant for."""

    def __init__(
        self,
        *,
        issuer: str,
        audience: str,
        client_id: str,
        scopes: Sequence[str] = (),
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._client_id = client_id
        self._scopes = " ".join(scopes)
        self._flows: dict[str, _Flow] = {}
        parts = urlsplit(audience)
        self.redirect_uri = f"{parts.scheme}://{parts.netloc}{CALLBACK}"

    async def begin(self, wanted: str) -> tuple[str, str]:
        """Return the issuer's address to send the browser to, and a cookie that binds the flow to that browser."""
        endpoint = (await self._endpoints())[0]
        state, cookie, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        self._flows[state] = _Flow(verifier, _digest(cookie), wanted, time.monotonic() + FLOW_S)
        while len(self._flows) > _MAX_FLOWS:
            del self._flows[next(iter(self._flows))]
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")
        query = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": self.redirect_uri,
            "state": state,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
            "resource": self._audience,
            **({"scope": self._scopes} if self._scopes else {}),
        }
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}", cookie

    async def finish(self, query: dict[str, str], cookie: str) -> tuple[str, str]:
        """Return the access token for what the issuer sent the browser back with, and the page that was wanted."""
        flow = self._flows.pop(query.get("state", "")[:_MAX_CHARS], None)
        is_ours = flow is not None and hmac.compare_digest(flow.browser, _digest(cookie))
        if flow is None or not is_ours or time.monotonic() >= flow.expires_at:
            raise InvalidArgument("this sign-in was not begun in this browser, or too long ago", hint="Sign in again")
        # RFC 9207: an answer that names another issuer is not for us.
        if query.get("iss", self._issuer) != self._issuer:
            raise InvalidArgument("another issuer answered", hint="Sign in again")
        code = query.get("code", "")
        if not 0 < len(code) <= _MAX_CHARS:
            raise InvalidArgument("the issuer did not let you in", hint="Sign in again, or ask who runs the issuer")
        return await self._exchange(code, flow.verifier), flow.wanted

    async def _exchange(self, code: str, verifier: str) -> str:
        endpoint = (await self._endpoints())[1]
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.redirect_uri,
            "client_id": self._client_id,
            "code_verifier": verifier,
            "resource": self._audience,
        }
        try:
            async with httpx2.AsyncClient(timeout=_TIMEOUT_S) as client:
                answer = await client.post(endpoint, data=form, headers={"accept": "application/json"})
                answer.raise_for_status()
                check_values(answer.content)
                document = answer.json()
        except httpx2.HTTPStatusError as error:
            if error.response.status_code >= 500:
                raise self._away() from error
            raise InvalidArgument("the issuer gave no token for this sign-in", hint="Sign in again") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._away() from error
        except ValueError as error:
            raise InvalidArgument("the issuer gave no token for this sign-in", hint="Sign in again") from error
        token = cast("dict[str, Any]", document).get("access_token") if isinstance(document, dict) else None
        if not isinstance(token, str):
            raise InvalidArgument("the issuer gave no access token", hint="Sign in again")
        return token

    async def _endpoints(self) -> tuple[str, str]:
        """Return where the issuer asks people, and where it gives tokens."""
        async with httpx2.AsyncClient(timeout=_TIMEOUT_S) as client:
            for url in metadata_urls(self._issuer):
                try:
                    metadata = await get_json(client, url)
                except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
                    continue
                found = (metadata.get("authorization_endpoint"), metadata.get("token_endpoint"))
                is_its_own = metadata.get("issuer") == self._issuer
                if is_its_own and all(isinstance(one, str) and is_safe_url(one) for one in found):
                    return cast("tuple[str, str]", found)
        raise self._away()

    def _away(self) -> IssuerUnreachable:
        # The address of an issuer is no secret: everybody who signs in is sent there.
        return IssuerUnreachable(
            f"The issuer {self._issuer} cannot be reached from this server, or does not say where to sign in",
            hint="Try again in a minute. If it stays so, tell who runs this server: the setting oauth_issuer names the "
            "issuer, which has to answer at /.well-known/oauth-authorization-server or openid-configuration",
        )


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode(errors="replace")).digest()
