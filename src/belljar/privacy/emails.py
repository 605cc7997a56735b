"""E-mail addresses in a text: found at their @, so that no text makes the search slow."""

import re
from collections.abc import Iterator

from belljar.privacy.spans import Span

KIND = "email"
LONGEST_CHARS = 320
"""64 before the @ and 255 after it, as RFC 5321 has it."""

_LOCAL_CHARS = 64
# Letters of any script; what RFC 5322 calls atext, and dots.
_LOCAL = re.compile(r"[\w.!#$%&'*+/=?^`{|}~-]+\Z")
_DOMAIN = re.compile(r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,10}(?:xn--[a-z0-9-]{2,59}|[^\W\d_]{2,63})", re.IGNORECASE)
# Quotes and the like around an address are not part of it, though the grammar would let them.
_AROUND = "'`*{|=/."


def find_emails(text: str) -> Iterator[Span]:
    """Every address with a domain name."""
    at = text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at + 1)
        local = _LOCAL.search(text[max(0, at - _LOCAL_CHARS) : at])
        name = local.group().lstrip(_AROUND) if local else ""
        if domain and name:
            yield Span(at - len(name), domain.end(), KIND)
        at = text.find("@", at + 1)
