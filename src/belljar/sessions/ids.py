"""Ids of sessions and executions: nobody can guess one, and a model pays for it in every answer."""

import secrets
import string

_LENGTH = 17
"""Of 26 letters: 80 bits. As 32 hexadecimal digits an id was 19 tokens, so it is 9; no digits, so that nobody takes an
id for a number."""
_COUNT = len(string.ascii_lowercase) ** _LENGTH


def new_id() -> str:
    """Return an id that nobody can guess."""
    # One random number for all letters: each call of the system's generator takes 15 µs.
    number, letters = secrets.randbelow(_COUNT), ""
    for _ in range(_LENGTH):
        number, letter = divmod(number, len(string.ascii_lowercase))
        letters += string.ascii_lowercase[letter]
    return letters
