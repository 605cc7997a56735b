"""What an operation of the HTTP API is: its line in the table, the parameters in its query, one call of it."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from belljar.errors import InvalidArgument
from belljar.models import Model
from belljar.monitor.base import MOST_ITEMS, Access


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter in the query of an operation."""

    meaning: str
    default: str | int = ""
    least: int = 0
    most: int = 2**31

    def read(self, name: str, text: str | None) -> str | int:
        """Return the value, or refuse one of another form."""
        if text is None or (text == "" and isinstance(self.default, int)):
            return self.default
        if isinstance(self.default, str):
            return text
        if not re.fullmatch(r"-?[0-9]{1,12}", text) or not self.least <= int(text) <= self.most:
            raise InvalidArgument(
                f"{name} is {text[:64]!r}", hint=f"Pass a whole number from {self.least} to {self.most}"
            )
        return int(text)

    @property
    def schema(self) -> dict[str, Any]:
        """Return its JSON Schema."""
        if isinstance(self.default, str):
            return {"type": "string", "default": self.default}
        return {"type": "integer", "default": self.default, "minimum": self.least, "maximum": self.most}


LIMIT: Final = Parameter("How many items at most", 50, 1, MOST_ITEMS)
CURSOR: Final = Parameter("The `next` of the page before")


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request, checked as far as its operation says."""

    request: Request
    access: Access
    query: dict[str, Any]
    body: Any = None

    def path(self, name: str) -> str:
        """Return a part of the path."""
        return str(self.request.path_params[name])


Handler = Callable[[ApiCall], Awaitable[Model | Response]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the table."""

    method: str
    path: str
    summary: str
    handler: Handler
    answer: type[BaseModel] | None = None
    query: dict[str, Parameter] = field(default_factory=dict[str, Parameter])
    body: type[BaseModel] | None = None
    status: int = 200
    media: str = "application/json"
