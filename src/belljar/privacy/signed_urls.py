"""Signatures in URLs: whoever has such a URL may read or write what it names, until the signature ends.

The code that an agent writes has them in plain text, because that is how data comes in and goes out. They are taken out
of the code that is kept in the journal, and out of what cells print.
"""

import re
from collections.abc import Iterable
from urllib.parse import quote, unquote

HIDDEN = "[signature]"
MAX_KEPT = 100
LEAST_CHARS = 8
"""A shorter value is no signature, and would be found in other text."""
# Azure's SAS, Amazon's and Google's signed URLs, and others that call it by its name.
_SIGNED = re.compile(
    r"(?P<name>[?&;](?:amp;)?(?:sig|signature|x-amz-signature|x-amz-security-token|x-goog-signature)=)"
    r"(?P<value>[^&\s'\"<>\\)#]+)",
    re.IGNORECASE,
)


def without_signatures(text: str) -> str:
    """Return a text with each signature in a URL replaced."""
    return _SIGNED.sub(rf"\g<name>{HIDDEN}", text) if _may_have(text) else text


def signatures_in(text: str) -> list[str]:
    """Return the signatures of the URLs in a text, in every spelling that code may print."""
    if not _may_have(text):
        return []
    found = (match["value"] for match in _SIGNED.finditer(text))
    spellings = (each for value in found for each in (value, unquote(value), quote(unquote(value), safe="")))
    return [each for each in dict.fromkeys(spellings) if len(each) >= LEAST_CHARS][:MAX_KEPT]


def _may_have(text: str) -> bool:
    # Most code has none of these, and this check takes less than a microsecond.
    return "=" in text and any(word in text for word in ("sig=", "ignature=", "ecurity-", "SIG="))


class KnownSignatures:
    """The signatures that the code of one session has had, the latest of them."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}

    def learn(self, texts: Iterable[str]) -> None:
        """Remember signatures."""
        for text in texts:
            self._known.pop(text, None)
            self._known[text] = None
        while len(self._known) > MAX_KEPT:
            del self._known[next(iter(self._known))]

    def all(self) -> list[str]:
        """Return them, the longest first, because one may be a part of another."""
        return sorted(self._known, key=len, reverse=True)
