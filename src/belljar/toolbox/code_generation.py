"""Generates the Python tree that sessions import: `servers/<server>/__init__.py`, and a file for each tool.

The same catalogue gives the same bytes. Everything a server says becomes data: texts in docstrings and comments, names
as string literals. This module writes no files. It also shows tools to a model or a program as text: their names,
signatures or whole files, each with its import.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from belljar.toolbox.answer_values import result_schema
from belljar.toolbox.base import AWAY, Catalogue, JsonObject, ServerCatalogue, ToolDefinition
from belljar.toolbox.names import PythonNames, names_of, parameter_names
from belljar.toolbox.schemas import ANY, TypeWriter, as_schema, camel, defaults_of, properties_of, required_of, resolved
from belljar.toolbox.server_text import docstring, first_sentence, one_line, visible

ShapeOf = Callable[[str, str], JsonObject | None]
"""Returns the learned shape of a tool's results, a schema of names and types, for tools without an output schema."""

_DESCRIPTION_CHARS = 4_000
_LINE_CHARS = 100
_PARAMETER_CHARS = 300
_DEFAULT_CHARS = 60
_INDENT = "    "
Detail = Literal["names", "signatures", "source"]

_LISTED_CHARS = 120


def generate(catalogue: Catalogue, shape_of: ShapeOf) -> dict[str, str]:
    """Return the text of every file of the tree by its path, `servers/…`."""
    names = names_of(catalogue)
    files = {"servers/__init__.py": _root(catalogue, names)}
    for server in catalogue.servers.values():
        package = f"servers/{names.packages[server.server]}"
        files[f"{package}/__init__.py"] = _package(server, names)
        for tool in server.tools:
            shape = None if tool.output_schema else shape_of(server.server, tool.name)
            function = names.functions[server.server, tool.name]
            files[f"{package}/{names.modules[server.server, tool.name]}.py"] = source(tool, shape, function)
    return files


def _root(catalogue: Catalogue, names: PythonNames) -> str:
    lines = ["Tools of other servers as functions: `from servers.SERVER import TOOL`, then `TOOL(…)`."]
    listed = [_server_line(server, names.packages[server.server]) for server in catalogue.servers.values()]
    # Importing `toolbox` installs the finder that explains imports of servers and tools that are not there.
    about = docstring("\n".join([*lines, *(["", *listed] if listed else [])]), "")
    return f"{about}\n# pyright: reportUnusedImport=false\n\nfrom toolbox import ToolMissing\n"


def _server_line(server: ServerCatalogue, package: str) -> str:
    if server.is_connecting:
        return f"{package}: still connecting; importing it waits for it"
    if server.error:
        return f"{package}: not reachable ({one_line(_without_name(server), _LINE_CHARS)})"
    about = first_sentence(server.instructions, _LINE_CHARS)
    return f"{package}: {len(server.tools)} tool{'' if len(server.tools) == 1 else 's'}{f'. {about}' if about else ''}"


def _package(server: ServerCatalogue, names: PythonNames) -> str:
    """Return a server's `__init__.py`, with its tools sorted, so that their order at the server does not matter."""
    if server.is_connecting:
        text = f"{one_line(server.server, _LINE_CHARS)}: still connecting; importing it waits for it, for a while"
        return f"{docstring(text, '')}\n\nfrom toolbox import connect\n\nconnect({server.server!r}, __name__)\n"
    about = visible(server.instructions, _DESCRIPTION_CHARS)
    if server.error:
        about = f"not reachable: {_why(server)}"
    title = one_line(server.server, _LINE_CHARS)
    lines = [docstring(f"{title}: {about}" if about else title, "")]
    if server.error:
        lines += ["", f"UNREACHABLE = {_why(server)!r}"]
    tools = sorted(server.tools, key=lambda tool: names.functions[server.server, tool.name])
    if tools:
        lines += ["# pyright: reportUnusedImport=false", ""]
    for tool in tools:
        function, module = (one[server.server, tool.name] for one in (names.functions, names.modules))
        about = first_sentence(tool.description or tool.title, _LINE_CHARS)
        lines.append(f"from .{module} import {function}{f'  # {about}' if about else ''}")
    return "\n".join(lines) + "\n"


def _why(server: ServerCatalogue) -> str:
    """Return why a server is not reachable, for code that asks for its tools."""
    return f"the server {one_line(_without_name(server), _PARAMETER_CHARS)}. {AWAY}"


def _without_name(server: ServerCatalogue) -> str:
    """Return a server's error without the server's name, which is shown beside it."""
    return server.error.removeprefix(f"MCP server {server.server} ")


def source(tool: ToolDefinition, shape: JsonObject | None, function: str) -> str:
    """Return the text of one tool's file."""
    writer = TypeWriter(taken=(function, "tool"))
    signature = _Signature(tool, writer, camel(function))
    returned = _returned(tool, shape, writer, f"{camel(function)}Result")
    parts = [_imports(writer.used), *writer.classes]
    names = f", names={signature.renamed!r}" if signature.renamed else ""
    parts.append(
        f"@tool({tool.server!r}, {tool.name!r}{names})\n"
        f"{_head(function, signature.parameters, returned)}\n"
        f"{docstring(_about(tool, shape, signature), _INDENT)}\n"
        f"{_INDENT}..."
    )
    return "\n\n\n".join(parts) + "\n"


def _head(function: str, parameters: list[str], returned: str) -> str:
    line = f"def {function}({', '.join(parameters)}) -> {returned}:"
    if len(line) <= _LINE_CHARS:
        return line
    return "\n".join([f"def {function}(", *(f"{_INDENT}{one}," for one in parameters), f") -> {returned}:"])


def signature(tool: ToolDefinition, shape: JsonObject | None, function: str) -> str:
    """Return a tool's parameters and the fields of its result in one line."""
    writer = TypeWriter(taken=(function, "tool"))
    parameters = ", ".join(_Signature(tool, writer, "").briefly())
    schema = result_schema(tool.output_schema) or as_schema(shape)
    return f"{function}({parameters}) -> {brief(schema, schema)}"


def parameters(tool: ToolDefinition) -> list[str]:
    """Return a tool's parameters in short, for the error message of a wrong call."""
    return _Signature(tool, TypeWriter(), "").briefly()


class _Signature:
    """The parameters of a tool in the server's order, required ones first."""

    def __init__(self, tool: ToolDefinition, writer: TypeWriter, prefix: str) -> None:
        self._root = root = tool.input_schema
        schema = resolved(root, root)
        self.fields = properties_of(schema)
        # A parameter with a default need not be passed, even if the server also says that it is required.
        required = required_of(schema).difference(defaults_of(schema, root))
        self._given = parameter_names(self.fields)
        self.renamed = {given: wire for wire, given in self._given.items() if given != wire}
        self.required = [wire for wire in self.fields if wire in required]
        self.optional = [wire for wire in self.fields if wire not in required]
        self.is_open = takes_more(schema)
        if not prefix:
            return
        self._writer, self._prefix = writer, prefix
        needed = [f"{self.name(wire)}: {self._type(wire)}" for wire in self.required]
        choices = [self._choice(wire) for wire in self.optional]
        if self.is_open:
            writer.used.add(ANY)
        self.parameters = [
            *needed,
            *(["*", *choices] if choices else []),
            *([f"**{self._rest()}: {ANY}"] if self.is_open else []),
        ]

    def _rest(self) -> str:
        return [*parameter_names([*self._given.values(), "more "]).values()][-1]

    def name(self, wire: str) -> str:
        """Return the Python name of a parameter."""
        return self._given[wire]

    def _type(self, wire: str) -> str:
        return self._writer.write(self.fields[wire], self._root, f"{self._prefix}{camel(wire)}")

    def _choice(self, wire: str) -> str:
        written = self._type(wire)
        default = _default(self.fields[wire], written)
        if default is not None:
            return f"{self.name(wire)}: {written} = {default}"
        is_whole = written in (ANY, "None") or written.endswith("| None")
        return f"{self.name(wire)}: {written if is_whole else f'{written} | None'} = None"

    def briefly(self) -> list[str]:
        """Return the parameters with their types in short."""
        writer = TypeWriter()
        needed = [f"{self.name(wire)}: {brief(self.fields[wire], self._root, writer)}" for wire in self.required]
        choices = [f"{self.name(wire)}?: {brief(self.fields[wire], self._root, writer)}" for wire in self.optional]
        return [*needed, *choices, *(["**more"] if self.is_open else [])]


def takes_more(schema: Mapping[str, Any]) -> bool:
    """Return whether undeclared arguments may be passed: if the schema allows them, or declares none and is silent."""
    more = schema.get("additionalProperties")
    return bool(more) or isinstance(more, dict) or (more is None and "properties" not in schema)


def _default(schema: JsonObject, written: str) -> str | None:
    """Return the server's default as Python source if it is short and of the right type; it is only shown, not sent."""
    default = schema.get("default")
    kinds: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
    text = repr(default)
    if len(text) > _DEFAULT_CHARS or default is None or default != default or text in ("inf", "-inf"):
        return None
    if written.startswith("Literal["):
        return text if text in written.removeprefix("Literal[").removesuffix("]").split(", ") else None
    return text if type(default) is kinds.get(written) else None


def _returned(tool: ToolDefinition, shape: JsonObject | None, writer: TypeWriter, name: str) -> str:
    schema = result_schema(tool.output_schema) or as_schema(shape)
    # A reference is resolved from the root of the schema that contains it.
    return writer.write(schema, tool.output_schema or schema, name)


def _imports(used: set[str]) -> str:
    lines = ["from __future__ import annotations", ""]
    plain = sorted(used - {"NotRequired"})
    if "NotRequired" in used:
        plain = sorted({*plain, "TYPE_CHECKING"})
    if plain:
        lines += [f"from typing import {', '.join(plain)}", ""]
    lines.append("from toolbox import tool")
    if "NotRequired" in used:
        lines += ["", "if TYPE_CHECKING:", f"{_INDENT}from typing_extensions import NotRequired"]
    return "\n".join(lines)


def _about(tool: ToolDefinition, shape: JsonObject | None, signature: _Signature) -> str:
    lines = [visible(tool.description or tool.title, _DESCRIPTION_CHARS) or one_line(tool.name, _LINE_CHARS)]
    listed = [line for wire in (*signature.required, *signature.optional) if (line := _parameter_line(wire, signature))]
    if listed:
        lines += ["", *listed]
    if tool.annotations.read_only:
        lines += ["", "Only reads."]
    if not tool.output_schema:
        lines += ["", "The result was learnt from earlier ones." if shape else "What it returns is not known yet."]
    return "\n".join(lines)


def _parameter_line(wire: str, signature: _Signature) -> str:
    about = one_line(signature.fields[wire].get("description"), _PARAMETER_CHARS)
    name = signature.name(wire)
    sent = f" (sent as {wire!r})" if name != wire else ""
    return f"{name}{sent}: {about}" if about else f"{name}{sent}" if sent else ""


def brief(schema: JsonObject, root: JsonObject, writer: TypeWriter | None = None, depth: int = 0) -> str:
    """Return a schema in a few characters: `{name: str, tags: [str]}`; `?` marks fields that may be missing."""
    schema = resolved(schema, root)
    writer = writer or TypeWriter()
    writer.steps_left -= 1
    if depth > 3 or writer.steps_left < 0:
        return "…"
    if schema.get("type") == "array":
        return f"[{brief(as_schema(schema.get('items')), root, writer, depth + 1)}]"
    fields = properties_of(schema)
    if fields:
        required = required_of(schema)
        shown = [
            f"{one_line(name, 40)}{'' if name in required else '?'}: {brief(field, root, writer, depth + 1)}"
            for name, field in list(fields.items())[:20]
        ]
        return f"{{{', '.join([*shown, *(['…'] if len(fields) > 20 else [])])}}}"
    known = len(writer.classes)
    written = writer.write(schema, root, "Value")
    return written if len(writer.classes) == known else "dict"


def show(tools: Sequence[ToolDefinition], detail: Detail, names: PythonNames, shape_of: ShapeOf) -> str:
    """Return the tools as text, one after the other in the given order, the best first."""
    if not tools:
        return "No tool fits. `ls servers/` lists the servers."
    return "\n".join(_shown(tool, detail, names, shape_of) for tool in tools)


def import_line(tool: ToolDefinition, names: PythonNames) -> str:
    """Return the line that imports a tool as a function."""
    return f"from servers.{names.packages[tool.server]} import {names.functions[tool.server, tool.name]}"


def as_fields(tool: ToolDefinition, detail: Detail, names: PythonNames, shape_of: ShapeOf) -> JsonObject:
    """Return a tool as JSON with as much as the text says, because some clients show a model only this."""
    function, shape = names.functions[tool.server, tool.name], shape_of(tool.server, tool.name)
    fields: JsonObject = {"server": tool.server, "tool": tool.name, "import": import_line(tool, names)}
    if detail == "source":
        return {**fields, "source": source(tool, shape, function)}
    if detail == "signatures":
        fields["signature"] = signature(tool, shape, function)
    return {**fields, "description": one_line(tool.description or tool.title, 1_000)}


def _shown(tool: ToolDefinition, detail: Detail, names: PythonNames, shape_of: ShapeOf) -> str:
    function = names.functions[tool.server, tool.name]
    shape = shape_of(tool.server, tool.name)
    if detail == "source":
        return f"# {import_line(tool, names)}\n{source(tool, shape, function)}"
    about = first_sentence(tool.description or tool.title, _LISTED_CHARS)
    package = names.packages[tool.server]
    if detail == "names":
        return f"servers.{package}.{function}{f': {about}' if about else ''}"
    return f"servers.{package}.{signature(tool, shape, function)}{f'  # {about}' if about else ''}"
