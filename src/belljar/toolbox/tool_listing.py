"""Shows tools to a model or a program: their names, signatures or whole files, each with its import."""

from collections.abc import Sequence
from typing import Literal

from belljar.toolbox.base import JsonObject, ToolDefinition
from belljar.toolbox.code_generation import ShapeOf, signature, source
from belljar.toolbox.names import PythonNames
from belljar.toolbox.texts import first_sentence, one_line

Detail = Literal["names", "signatures", "source"]

_LINE_CHARS = 120


def show(tools: Sequence[ToolDefinition], detail: Detail, names: PythonNames, shape_of: ShapeOf) -> str:
    """Return the tools as text, one after the other in the given order, the best first."""
    if not tools:
        return "No tool fits. `ls servers/` lists the servers."
    return "\n".join(_shown(tool, detail, names, shape_of) for tool in tools)


def import_line(tool: ToolDefinition, names: PythonNames) -> str:
    """Return the line that imports a tool as a function."""
    return f"from servers.{names.package(tool.server)} import {names.function(tool.server, tool.name)}"


def as_fields(tool: ToolDefinition, detail: Detail, names: PythonNames, shape_of: ShapeOf) -> JsonObject:
    """Return a tool as JSON with as much as the text says, because some clients show a model only this."""
    function, shape = names.function(tool.server, tool.name), shape_of(tool.server, tool.name)
    fields: JsonObject = {"server": tool.server, "tool": tool.name, "import": import_line(tool, names)}
    if detail == "source":
        return {**fields, "source": source(tool, shape, function)}
    if detail == "signatures":
        fields["signature"] = signature(tool, shape, function)
    return {**fields, "description": one_line(tool.description or tool.title, 1_000)}


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
