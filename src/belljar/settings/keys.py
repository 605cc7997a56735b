"""Bearer keys in the settings: parsing, hashing and masking their entries."""

import hashlib
import re
from dataclasses import dataclass

from pydantic import SecretStr

HASH_MARK = "sha256:"
MASK = "********"
LOCAL_PRINCIPAL = "local"
"""The principal of callers without credentials: on stdio, on loopback HTTP, in Python and on the command line."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A bearer key as the server keeps it: the name of its user, and its hash."""

    name: str
    digest: str


def hash_key(key: str) -> str:
    """Return the hexadecimal SHA-256 of a key; our keys are 256 random bits, so a slow hash would add nothing."""
    return hashlib.sha256(key.encode()).hexdigest()


def parse_key(entry: str) -> ApiKey:
    """Parse `KEY`, `NAME:KEY` or `NAME:sha256:HEX`; a key without a name is named after its hash."""
    name, colon, secret = entry.partition(":")
    if not colon:
        digest = hash_key(entry)
        return ApiKey(f"key-{digest[:8]}", digest)
    # `sha256` is refused as a name, because `sha256:HEX`, a hash without a name, would become a plain key that anyone
    # who has read the file knows.
    if not is_key_name(name):
        raise ValueError("the part before the colon is no name for a key")
    if not secret:
        raise ValueError(f"there is no key after {name}:")
    if not secret.startswith(HASH_MARK):
        return ApiKey(name, hash_key(secret))
    digest = secret.removeprefix(HASH_MARK).lower()
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"the hash of {name} is not 64 hexadecimal digits")
    return ApiKey(name, digest)


def is_key_name(name: str) -> bool:
    """Tell whether a key may have that name."""
    return re.fullmatch(r"[A-Za-z0-9._@-]{1,64}", name) is not None and f"{name}:" != HASH_MARK


def checked_key(entry: SecretStr) -> SecretStr:
    """Return the entry if it can be parsed."""
    parse_key(entry.get_secret_value())
    return entry


def is_hashed(entry: str) -> bool:
    """Tell whether an entry contains the hash of its key rather than the key."""
    return entry.partition(":")[2].startswith(HASH_MARK)


def masked(entry: str) -> str:
    """Return an entry as it may be printed, without its key or hash."""
    name, colon, _ = entry.partition(":")
    if not colon:
        return MASK
    return f"{name}:{HASH_MARK}{MASK}" if is_hashed(entry) else f"{name}:{MASK}"
