"""Tools as functions: what is passed to them goes to the host under the names that the server has for it."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from .connection import own
from .errors import ArgumentError, error_from
from .results import value_from


class Patience(threading.local):
    """Whether this thread waits for a server that is still connecting when it imports it."""

    waits = True


patience = Patience()


class Tool:
    """A tool of a server: call it, or await its `aio`."""

    def __init__(self, server: str, tool: str, function: Any = None, names: Mapping[str, str] | None = None) -> None:
        self.server = server
        self.tool = tool
        self._names = dict(names or {})
        self.place: tuple[str, str] = ("", "")
        """Where its signature is to be found, for one that was kept without it."""
        if function is not None:
            functools.update_wrapper(self, function)

    @functools.cached_property
    def __signature__(self) -> inspect.Signature | None:
        """Found out when it is needed: a server may have hundreds of tools, and a cell calls a few."""
        function = getattr(self, "__wrapped__", None)
        if function is None and self.place[1]:
            # Kept with a session, and its server was still connecting when the session woke.
            found = _imported(*self.place)
            self.place = ("", "")
            if found is not None:
                self._names, function = found._names, getattr(found, "__wrapped__", None)
        return inspect.signature(function) if function is not None else None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call it and wait."""
        __tracebackhide__ = True
        return value_from(_ask(self, self._arguments(args, kwargs)))

    async def aio(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call it, and let other tasks run meanwhile."""
        __tracebackhide__ = True
        request = _request(self, self._arguments(args, kwargs))
        try:
            answer = await own().ask_in_loop(request)
        except (TypeError, ValueError) as error:
            raise _not_json(self, error) from None
        return value_from(answer)

    @functools.cached_property
    def _by_name(self) -> tuple[set[str], set[str]]:
        """The parameters that can be passed by name, and those of them that must be."""
        signature = self.__signature__
        known = signature.parameters.values() if signature is not None else ()
        named = [one for one in known if one.kind is not inspect.Parameter.VAR_KEYWORD]
        return {one.name for one in named}, {one.name for one in named if one.default is inspect.Parameter.empty}

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """By the server's names, and only what was passed."""
        __tracebackhide__ = True
        known, needed = self._by_name
        if not args and known.issuperset(kwargs) and needed.issubset(kwargs):
            names = self._names
            return {names.get(name, name): value for name, value in kwargs.items()} if names else kwargs
        return self._bound(args, kwargs)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The same as Python does it, with its errors."""
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
            misfit = _misfit(args, named, known) or str(error)
            raise ArgumentError(misfit, self.server, self.tool, [*map(_told, known.values())]) from None
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if known[name].kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(value)
            else:
                arguments[self._names.get(name, name)] = value
        return arguments

    def __repr__(self) -> str:
        signature = self.__signature__
        taken = ", ".join(map(_told, signature.parameters.values())) if signature else "**arguments"
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
    """A tool that was kept with the session; one whose file is gone takes arguments by name."""
    # A session that wakes waits for no server.
    patience.waits = False
    try:
        found = _imported(module, function)
    finally:
        patience.waits = True
    if found is None:
        found = Tool(server, name)
        found.place = (module, function)
    return found


def _imported(module: str, function: str) -> Tool | None:
    try:
        found = getattr(importlib.import_module(module), function) if function else None
    except (ImportError, AttributeError):
        return None
    return found if isinstance(found, Tool) else None


def tool(server: str, name: str, *, names: Mapping[str, str] | None = None) -> Callable[[Any], Tool]:
    """Makes a tool of its signature; `names` are those that the server has for arguments that are called otherwise."""
    return lambda function: Tool(server, name, function, names)


def get(server: str, name: str) -> Tool:
    """A tool by the names that its server uses; arguments are passed by theirs."""
    return Tool(server, name)


class Found(list):  # pyright: ignore[reportMissingTypeArgument]  # Python 3.9 has no other way to say it
    """What a search found: `server`, `tool`, `import` and `description` of each; printed, what a model reads."""

    text: str = ""

    def __repr__(self) -> str:
        return self.text


def search(query: str, *, detail: str = "signatures", limit: int = 5, server: str = "") -> Found:
    """Tools for something, best first; detail is `names`, `signatures` or `source`."""
    __tracebackhide__ = True
    answer = own().ask({"op": "search", "query": query, "detail": detail, "limit": limit, "server": server})
    if answer.get("outcome") != "found":
        raise error_from(answer)
    found = Found(answer["tools"])
    found.text = str(answer["text"])
    return found


def _told(parameter: inspect.Parameter) -> str:
    """A parameter as its source has it; annotations are text there."""
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {parameter.annotation}{default}"


def _misfit(args: tuple[Any, ...], named: dict[str, Any], known: Mapping[str, inspect.Parameter]) -> str:
    """What is wrong with arguments, where Python would name a consequence of it; empty where it names that itself."""
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
        return own().ask(_request(called, arguments))
    except (TypeError, ValueError) as error:
        raise _not_json(called, error) from None


def _not_json(called: Tool, error: Exception) -> ArgumentError:
    said = error.message if isinstance(error, ArgumentError) else f"an argument is nothing that JSON has: {error}"
    return ArgumentError(said, called.server, called.tool)


def _plain(value: Any) -> Any:
    """Paths, dates and numpy's numbers as the JSON that is meant."""
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
