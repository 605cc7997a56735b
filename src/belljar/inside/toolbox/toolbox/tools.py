"""Tools as Python functions: bind the arguments, rename them to the server's names, and ask the host to call."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from .connection import host_connection
from .errors import ArgumentError, error_from
from .results import value_from


class ThreadImports(threading.local):
    """How this thread imports: whether an import waits for a server that is still connecting."""

    waits = True


thread_imports = ThreadImports()


class Tool:
    """A tool of a server: call it, or await its `aio`."""

    def __init__(self, server: str, tool: str, function: Any = None, names: Mapping[str, str] | None = None) -> None:
        self.server = server
        self.tool = tool
        self._names = dict(names or {})
        self.place: tuple[str, str] = ("", "")
        """Module and function name to get the signature from, for a tool that was restored without one."""
        if function is not None:
            functools.update_wrapper(self, function)

    @functools.cached_property
    def __signature__(self) -> inspect.Signature | None:
        """Return the signature, computed when needed: a server may have hundreds of tools, and a cell calls a few."""
        function = getattr(self, "__wrapped__", None)
        if function is None and self.place[1]:
            # Restored with a session while its server was still connecting.
            found = _find_tool(*self.place)
            self.place = ("", "")
            if found is not None:
                self._names, function = found._names, getattr(found, "__wrapped__", None)
        return inspect.signature(function) if function is not None else None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the tool and wait for its result."""
        __tracebackhide__ = True
        return value_from(_ask(self, self._arguments(args, kwargs)))

    async def aio(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the tool, and let other tasks run meanwhile."""
        __tracebackhide__ = True
        request = _request(self, self._arguments(args, kwargs))
        try:
            answer = await host_connection().ask_in_loop(request)
        except (TypeError, ValueError) as error:
            raise _not_json(self, error) from None
        return value_from(answer)

    @functools.cached_property
    def _by_name(self) -> tuple[set[str], set[str]]:
        """Return the parameters that can be passed by name, and those of them that have no default."""
        signature = self.__signature__
        known = signature.parameters.values() if signature is not None else ()
        named = [one for one in known if one.kind is not inspect.Parameter.VAR_KEYWORD]
        return {one.name for one in named}, {one.name for one in named if one.default is inspect.Parameter.empty}

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that were passed, under the server's names for them."""
        __tracebackhide__ = True
        known, needed = self._by_name
        if not args and known.issuperset(kwargs) and needed.issubset(kwargs):
            names = self._names
            return {names.get(name, name): value for name, value in kwargs.items()} if names else kwargs
        return self._bound(args, kwargs)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Bind the arguments with `inspect`, for calls by position, by the server's names, or with an error."""
        __tracebackhide__ = True
        signature = self.__signature__
        if signature is None:
            if args:
                raise ArgumentError("arguments are passed by name here", self.server, self.tool)
            return kwargs
        known = signature.parameters
        given = {wire: name for name, wire in self._names.items()}
        named = {name if name in known else given.get(name, name): value for name, value in kwargs.items()}
        try:
            bound = signature.bind(*args, **named)
        except TypeError as error:
            fault = _argument_fault(args, named, known) or str(error)
            raise ArgumentError(fault, self.server, self.tool, [*map(_parameter_source, known.values())]) from None
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if known[name].kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(value)
            else:
                arguments[self._names.get(name, name)] = value
        return arguments

    def __repr__(self) -> str:
        signature = self.__signature__
        taken = ", ".join(map(_parameter_source, signature.parameters.values())) if signature else "**arguments"
        return f"<tool {self.server}.{self.tool}({taken})>"

    def __reduce__(self) -> Any:
        module, function = self.place
        return _again, (
            self.server,
            self.tool,
            module or getattr(self, "__module__", ""),
            function or getattr(self, "__name__", ""),
        )


def _again(server: str, name: str, module: str, function: str) -> Tool:
    """Return a tool that was pickled with the session; one whose file is gone takes arguments by name only."""
    # Do not wait, because a server that hangs would keep the session from being restored.
    thread_imports.waits = False
    try:
        found = _find_tool(module, function)
    finally:
        thread_imports.waits = True
    if found is None:
        found = Tool(server, name)
        found.place = (module, function)
    return found


def _find_tool(module: str, function: str) -> Tool | None:
    try:
        found = getattr(importlib.import_module(module), function) if function else None
    except (ImportError, AttributeError):
        return None
    return found if isinstance(found, Tool) else None


def tool(server: str, name: str, *, names: Mapping[str, str] | None = None) -> Callable[[Any], Tool]:
    """Turn a function's signature into a tool; `names` maps parameters to the server's names where they differ."""
    return lambda function: Tool(server, name, function, names)


def get(server: str, name: str) -> Tool:
    """Return a tool by the names that its server uses; its arguments go by the server's names too."""
    return Tool(server, name)


class Found(list):  # pyright: ignore[reportMissingTypeArgument]  # Python 3.9 has no other way to say it
    """The tools that a search found, as dicts of `server`, `tool`, `import` and `description`; its repr is text."""

    text: str = ""

    def __repr__(self) -> str:
        return self.text


def search(query: str, *, detail: str = "signatures", limit: int = 5, server: str = "") -> Found:
    """Find tools for a purpose, best first; detail is `names`, `signatures` or `source`."""
    __tracebackhide__ = True
    answer = host_connection().ask({"op": "search", "query": query, "detail": detail, "limit": limit, "server": server})
    if answer.get("outcome") != "found":
        raise error_from(answer)
    found = Found(answer["tools"])
    found.text = str(answer["text"])
    return found


def _parameter_source(parameter: inspect.Parameter) -> str:
    """Return a parameter as its source has it; annotations are text in generated modules."""
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {parameter.annotation}{default}"


def _argument_fault(args: tuple[Any, ...], named: dict[str, Any], known: Mapping[str, inspect.Parameter]) -> str:
    """Return what is wrong with the arguments; empty where Python's own message says it as well."""
    by_position = [one for one in known.values() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(by_position):
        return f"{len(args)} arguments are passed by position, {len(by_position)} can be: pass the others by name"
    unknown = [name for name in named if name not in known]
    if not unknown or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
        return ""
    near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.7)
    guess = f", did you mean {near[0]!r}?" if near else ""
    return f"there is no parameter {', '.join(map(repr, unknown))}{guess}"


def _request(called: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"op": "call", "server": called.server, "tool": called.tool, "arguments": _plain(arguments)}


def _ask(called: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    __tracebackhide__ = True
    try:
        return host_connection().ask(_request(called, arguments))
    except (TypeError, ValueError) as error:
        raise _not_json(called, error) from None


def _not_json(called: Tool, error: Exception) -> ArgumentError:
    message = error.message if isinstance(error, ArgumentError) else f"an argument is nothing that JSON has: {error}"
    return ArgumentError(message, called.server, called.tool)


def _plain(value: Any) -> Any:
    """Convert paths, dates and numpy's numbers to the JSON that stands for them."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}  # pyright: ignore
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]  # pyright: ignore
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)  # pyright: ignore
    for way in ("isoformat", "tolist"):
        if hasattr(value, way):
            return _plain(getattr(value, way)())
    return value
