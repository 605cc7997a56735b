from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from typing_extensions import ParamSpec

P = ParamSpec("P")
R = TypeVar("R")

class ToolError(Exception):
    server: str
    tool: str
    message: str
    parameters: list[str]

class ArgumentError(ToolError, TypeError): ...
class ToolMissing(ToolError, ImportError): ...
class ToolRefused(ToolError): ...

class Tool(Generic[P, R]):
    server: str
    tool: str
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def aio(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

def tool(
    server: str, name: str, *, names: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def get(server: str, name: str) -> Tool[..., Any]: ...

class Found(list[dict[str, Any]]):
    text: str

def search(
    query: str, *, detail: Literal["names", "signatures", "source"] = "signatures", limit: int = 5, server: str = ""
) -> Found: ...

class Media:
    kind: str
    mime: str
    uri: str
    name: str
    path: Path | None
    @property
    def data(self) -> bytes: ...
    @property
    def text(self) -> str: ...
    def save(self, path: str | Path) -> Path: ...

class LargeResult:
    path: Path
    size: int
    def load(self) -> Any: ...

class Answer(dict[str, Any]):
    media: list[Media]
