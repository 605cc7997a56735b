"""Tools as text for a model: their names, their signatures, or the whole files, each with what to import."""

from collections.abc import Sequence
from typing import Literal

from belljar.toolbox.base import JsonObject, ToolDefinition
from belljar.toolbox.code_generation import ShapeOf, signature, source
from belljar.toolbox.names import PythonNames
from belljar.toolbox.texts import first_sentence, one_line

Detail = Literal["names", "signatures", "source"]

_LINE_CHARS = 120


def show(tools: Sequence[ToolDefinition], detail: Detail, names: PythonNames, shape_of: ShapeOf) -> str:
    """The text; one tool after the other, grouped by nothing: the best stands first."""
    if not tools:
        return "No tool fits. `ls servers/` lists the servers."
    return "\n".join(_shown(tool, detail, names, shape_of) for tool in tools)


def import_line(tool: ToolDefinition, names: PythonNames) -> str:
    """What makes a tool a function."""
    return f"from servers.{names.package(tool.server)} import {names.function(tool.server, tool.name)}"


def as_fields(tool: ToolDefinition, detail: Detail, names: PythonNames, shape_of: ShapeOf) -> JsonObject:
    """A tool for programs, and for clients that show a model nothing but these: as much as the text says."""
    function, shape = names.function(tool.server, tool.name), shape_of(tool.server, tool.name)
    told: JsonObject = {"server": tool.server, "tool": tool.name, "import": import_line(tool, names)}
    if detail == "source":
        return {**told, "source": source(tool, shape, function)}
    if detail == "signatures":
        told["signature"] = signature(tool, shape, function)
    return {**told, "description": one_line(tool.description or tool.title, 1_000)}


def _shown(tool: ToolDefinition, detail: Detail, names: PythonNames, shape_of: ShapeOf) -> str:
    function = names.function(tool.server, tool.name)
    shape = shape_of(tool.server, tool.name)
    if detail == "source":
        return f"# {import_line(tool, names)}\n{source(tool, shape, function)}"
    about = first_sentence(tool.description or tool.title, _LINE_CHARS)
    package = names.package(tool.server)
    if detail == "names":
        return f"servers.{package}.{function}{f': {about}' if about else ''}"
    return f"servers.{package}.{signature(tool, shape, function)}{f'  # {about}' if about else ''}"
