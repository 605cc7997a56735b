"""Ids of sessions and executions: nobody can guess one, and a model pays for it in every answer."""

import secrets
import string

_LENGTH = 17
"""Of 26 letters: 80 bits. As 32 hexadecimal digits an id was 19 tokens, so it is 9; no digits, so that nobody takes an
id for a number."""


def new_id() -> str:
    """Return an id that nobody can guess."""
    return "".join(secrets.choice(string.ascii_lowercase) for _ in range(_LENGTH))
