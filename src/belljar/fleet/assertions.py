"""How machines of a fleet know each other: each request says, under the key that all have, whose it is and for whom.

An assertion is for one method, path and server, and for half a minute. It covers every header in which a server says
something of a request that it passes on. What a server says of itself is proved with the same key, so that neither
side trusts an address because somebody listens there.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable
from typing import Final

from belljar.errors import EngineError
from belljar.request_headers import ASSERTION_HEADER, FLEET_HEADERS, SPEAKER_HEADERS

Headers = list[tuple[bytes, bytes]]
ASSERTION: Final = ASSERTION_HEADER.lower().encode()
PROOF: Final = b"belljar-proof"
VALID_S: Final = 30.0
_COVERED: Final = frozenset(name.lower().encode() for name in (*FLEET_HEADERS, *SPEAKER_HEADERS)) - {ASSERTION}
_FORM: Final = re.compile(rb"([0-9]{1,16}) ([0-9a-f]{32}) ([0-9a-f]{64})")
_FOR_REQUESTS: Final = b"belljar-request-1"
_FOR_ANSWERS: Final = b"belljar-answer-1"


class UnprovedRequest(EngineError):
    """A request without an assertion that holds."""

    code = "no-assertion"


class ClocksApart(EngineError):
    """A request with an assertion that would hold at another time."""

    code = "clocks-apart"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the clocks of two machines are {abs(seconds):,.0f} s apart", hint="Set them by NTP")
        self.seconds = seconds


class FleetKey:
    """Signs what this server sends to others of its fleet, and checks what they send."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def assertion(self, tag: str, method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the header's value for a request to the server with this tag; no tag while it is not known."""
        expiry, nonce = b"%d" % (time.time() + VALID_S), secrets.token_hex(16).encode()
        mac = self._mac(_FOR_REQUESTS, tag.encode(), method, target, expiry, nonce, *_covered(headers))
        return b" ".join((expiry, nonce, mac))

    def check(self, tag: str, method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the assertion of a request to the server with this tag; raise `UnprovedRequest` or `ClocksApart`."""
        headers = [*headers]
        said = [value for name, value in headers if name == ASSERTION]
        found = _FORM.fullmatch(said[0]) if len(said) == 1 else None
        if found is None:
            raise UnprovedRequest("a request has no assertion")
        expiry, nonce, mac = found.groups()
        wanted = self._mac(_FOR_REQUESTS, tag.encode(), method, target, expiry, nonce, *_covered(headers))
        if not hmac.compare_digest(mac, wanted):
            raise UnprovedRequest("a request has an assertion of another key, or for another request")
        apart = int(expiry) - VALID_S - time.time()
        if abs(apart) > VALID_S:
            raise ClocksApart(apart)
        return said[0]

    def proof(self, assertion: bytes, content: bytes) -> bytes:
        """Return the header's value that proves an answer to the request with this assertion."""
        return self._mac(_FOR_ANSWERS, assertion, content)

    def is_proved(self, proof: bytes, assertion: bytes, content: bytes) -> bool:
        """Return whether an answer is of a server with the same key."""
        return hmac.compare_digest(proof, self.proof(assertion, content))

    def digest(self, text: str) -> str:
        """Return what compares a text with that of another server, and tells nobody else what it is."""
        return hmac.new(self._key, text.encode(errors="replace"), hashlib.sha256).hexdigest()

    def _mac(self, *parts: bytes) -> bytes:
        # The length of each part is in it, so that no part can end in what the next begins with.
        whole = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self._key, whole, hashlib.sha256).hexdigest().encode()


def _covered(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the headers that an assertion is also for, in one order."""
    said = sorted((name.lower(), value) for name, value in headers if name.lower() in _COVERED)
    return [part for pair in said for part in pair]
