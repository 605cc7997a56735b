"""Requests of a front end that a session works on. Knows neither."""

import asyncio
from typing import Any

from belljar.attachments.messages import Ended


class Cell:
    """A cell of this front end, or its word to a widget, from its request to its end."""

    def __init__(self, parent: dict[str, Any], ident: Any, *, is_silent: bool) -> None:
        self.parent = parent
        self.ident = ident
        self.is_silent = is_silent
        self.error: dict[str, Any] | None = None
        self.question: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
