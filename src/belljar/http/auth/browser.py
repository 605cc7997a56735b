"""How a person signs in with a browser: links that work once, keys, and the cookies that follow from them.

Everything here lives in memory and only as hashes, so a restart signs everybody out. Knows no pages and no sessions of
code; `console/middleware.py` puts it in front of the console and the API.
"""

import getpass
import hashlib
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from mcp.server.auth.provider import AccessToken, TokenVerifier
from starlette.requests import Request

from belljar.engine.contract import Access
from belljar.http.auth.principals import principal_of
from belljar.outputs.terminal_text import printable
from belljar.settings.keys import LOCAL_PRINCIPAL

LINK_S: Final = 10 * 60.0
SIGNED_IN_S: Final = 12 * 60 * 60.0
WRONG_PER_MINUTE: Final = 10
_MAX_LINKS: Final = 100
_MAX_SIGNED_IN: Final = 10_000
_MAX_ADDRESSES: Final = 10_000
_TOKEN_BYTES: Final = 32
_MAX_TOKEN_CHARS: Final = 8_192
_MINUTE_S: Final = 60.0


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()


class OneTimeLinks:
    """Tokens that sign an operator in, once each and for ten minutes; all begin with `mark`."""

    def __init__(self, mark: str = "") -> None:
        self._mark = mark
        self._expiries: dict[bytes, float] = {}

    def make(self) -> str:
        """Return a new token."""
        token = self._mark + secrets.token_urlsafe(_TOKEN_BYTES)
        self._expiries[_digest(token)] = time.monotonic() + LINK_S
        while len(self._expiries) > _MAX_LINKS:
            del self._expiries[next(iter(self._expiries))]
        return token

    def redeem(self, token: str) -> bool:
        """Return whether the token is good, which it is then no longer."""
        expires_at = self._expiries.pop(_digest(token), None)
        return expires_at is not None and time.monotonic() < expires_at


@dataclass(frozen=True, slots=True)
class _SignedIn:
    access: Access
    expires_at: float


class SignedInBrowsers:
    """Who is signed in, by the hash of the cookie; all cookies begin with `mark`."""

    def __init__(self, mark: str = "") -> None:
        self._mark = mark
        self._known: dict[bytes, _SignedIn] = {}

    def sign_in(self, access: Access, for_s: float = SIGNED_IN_S) -> str:
        """Return the cookie of somebody who has just shown who they are."""
        cookie = self._mark + secrets.token_urlsafe(_TOKEN_BYTES)
        self._known[_digest(cookie)] = _SignedIn(access, time.monotonic() + min(for_s, SIGNED_IN_S))
        while len(self._known) > _MAX_SIGNED_IN:
            del self._known[next(iter(self._known))]
        return cookie

    def find(self, cookie: str) -> Access | None:
        """Return whose cookie this is; None if nobody's, or no longer."""
        found = self._known.get(_digest(cookie)) if cookie else None
        if found is None or time.monotonic() >= found.expires_at:
            self._known.pop(_digest(cookie), None)
            return None
        return found.access

    def sign_out(self, cookie: str) -> None:
        """Forget everybody who is signed in as the owner of this cookie."""
        known = self._known.get(_digest(cookie))
        if known is not None:
            self._known = {digest: one for digest, one in self._known.items() if one.access != known.access}


class FailedSignIns:
    """Counts wrong keys and links by the address that they came from."""

    def __init__(self) -> None:
        self._wrong: dict[str, deque[float]] = {}

    def wait_s(self, address: str) -> float:
        """Return how long an address has to wait before its next guess; 0 if it need not."""
        wrong, now = self._wrong.get(address, deque[float]()), time.monotonic()
        while wrong and wrong[0] <= now - _MINUTE_S:
            wrong.popleft()
        return wrong[0] + _MINUTE_S - now if len(wrong) >= WRONG_PER_MINUTE else 0.0

    def add(self, address: str) -> None:
        """Count a wrong guess."""
        self._wrong.setdefault(address, deque(maxlen=WRONG_PER_MINUTE)).append(time.monotonic())
        while len(self._wrong) > _MAX_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]


class BrowserSignIn:
    """The ways in of one server: `verifier` is None where it has neither keys nor OAuth.

    `mark` names it to others that share its address, in its links and cookies.
    """

    def __init__(
        self,
        *,
        verifier: TokenVerifier | None = None,
        scopes: Sequence[str] = (),
        operators: Sequence[str] = (),
        gives_links: bool = True,
        public_url: str = "",
        mark: str = "",
    ) -> None:
        self._verifier = verifier
        self._scopes = frozenset(scopes)
        self._operators = frozenset(operators)
        self.gives_links = gives_links
        self._public = urlsplit(public_url)
        self.links = OneTimeLinks(mark)
        self.browsers = SignedInBrowsers(mark)
        self.failures = FailedSignIns()

    def is_secure(self, request: Request) -> bool:
        """Return whether the browser reaches us over HTTPS: ours, or that of the proxy at the public address.

        What a request says of the way it came (`X-Forwarded-Proto`) is not believed, because anybody can send it.
        """
        is_public = self._public.scheme == "https" and request.headers.get("host", "").lower() == self._public.netloc
        return request.url.scheme == "https" or is_public

    def cookie_name(self, request: Request) -> str:
        """Return the name of our cookie, with the port in it because browsers send cookies to every port of a host."""
        is_secure = self.is_secure(request)
        port = request.url.port or (443 if is_secure else 80)
        return f"{'__Host-' if is_secure else ''}belljar-{port}"

    @property
    def takes_keys(self) -> bool:
        """Return whether a key can be pasted."""
        return self._verifier is not None

    def access_of(self, principal: str, name: str = "") -> Access:
        """Return what a principal may see."""
        return Access(principal, is_operator=principal in self._operators, name=name)

    async def with_key(self, key: str) -> str | None:
        """Return the cookie for the owner of a key or a token; None if it is not accepted. The key is not kept."""
        token = await self._verify(key)
        if token is None:
            return None
        return self.browsers.sign_in(self.access_of(principal_of(token), _person(token)), _left_s(token))

    async def with_bearer(self, token: str) -> Access | None:
        """Return who a script is by the key or the token that it sends; its acts have no person's name."""
        verified = await self._verify(token)
        return self.access_of(principal_of(verified)) if verified is not None else None

    async def _verify(self, secret: str) -> AccessToken | None:
        if self._verifier is None or not 0 < len(secret) <= _MAX_TOKEN_CHARS or not secret.isascii():
            return None
        token = await self._verifier.verify_token(secret)
        is_good = token is not None and self._scopes <= set(token.scopes) and _left_s(token) > 0
        return token if is_good else None

    def with_link(self, token: str) -> str | None:
        """Return the cookie of an operator for a token that works once; None if it does not, or no longer."""
        if not self.gives_links or len(token) > _MAX_TOKEN_CHARS or not self.links.redeem(token):
            return None
        return self.browsers.sign_in(Access(LOCAL_PRINCIPAL, is_operator=True, name=_user()))


def _left_s(token: AccessToken) -> float:
    return SIGNED_IN_S if token.expires_at is None else token.expires_at - time.time()


def _person(token: AccessToken) -> str:
    # It is told to agents within notices of ours, which a name must not be able to end.
    name = " ".join(printable(token.subject or token.client_id or "").split())
    return name.replace("[", "(").replace("]", ")")[:100] or "somebody"


def _user() -> str:
    """Return the name of the user who runs this process, and who alone can read its links."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "the operator"


# Requests that a browser makes


def is_same_origin(request: Request) -> bool:
    """Return whether a page of ours made the request: what the browser says of it, else its Origin."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    return _is_own_origin(request)


def is_foreign(request: Request) -> bool:
    """Return whether a browser says that a page of another origin made the request."""
    return request.headers.get("sec-fetch-site") in ("cross-site", "same-site")


def _is_own_origin(request: Request) -> bool:
    origin = urlsplit(request.headers.get("origin", ""))
    return bool(origin.netloc) and origin.netloc == request.headers.get("host")
