"""JSON for the way into a session, as fast as it goes: results are large, and each is looked at for its size first."""

import json
from typing import Any

from pydantic_core import to_json


def encoded(value: Any) -> bytes:
    """A JSON value in one line."""
    try:
        return to_json(value, inf_nan_mode="constants")
    except ValueError:
        # Half a surrogate pair: no UTF-8, but JSON can say it.
        return json.dumps(value).encode()
