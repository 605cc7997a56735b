"""A Bicep template compared with the types of Azure's resources, as Bicep's own compiler has them.

No package index carries the compiler. Its types can be had: Microsoft's MCP server for Azure (`msmcp-azure` on PyPI)
brings them and prints those of one resource; `tree-sitter-bicep` has the language's grammar. Both are in an
environment of their own, whose Python parses the template in a process apart. What remains unchecked is what functions
return.
"""

import json
import os
import re
import subprocess
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

Properties = dict[str, dict[str, Any]]

REQUIREMENTS: Final = ("tree-sitter", "tree-sitter-bicep", "msmcp-azure")
FUNCTIONS: Final = {
    *("any", "empty", "guid", "resourceGroup", "subscriptionResourceId", "uniqueString"),
    *("description", "minLength", "maxLength", "minValue", "maxValue", "allowed"),
}
"""The functions and decorators of Bicep that the template uses."""
OF_BICEP: Final[Properties] = {name: {"type": "any"} for name in ("parent", "scope", "dependsOn")}
"""Properties of every resource that are the language's own, not the service's."""
_PARSE: Final = """
import json, sys, tree_sitter, tree_sitter_bicep

def plain(node):
    if node.type == "comment":
        return None
    line, is_wrong = node.start_point[0] + 1, node.type == "ERROR" or node.is_missing
    parts = [part for child in node.named_children if (part := plain(child)) is not None]
    return {"type": "ERROR" if is_wrong else node.type, "line": line, "text": node.text.decode(), "parts": parts}

language = tree_sitter.Language(tree_sitter_bicep.language())
print(json.dumps(plain(tree_sitter.Parser(language).parse(sys.stdin.buffer.read()).root_node)))
"""
_LITERALS: Final = {"string": "string", "number": "int", "boolean": "bool", "null": "null"}


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of the template."""

    type: str
    line: int
    text: str
    parts: "list[Node]"

    def walk(self) -> "Generator[Node]":
        """Return this piece and all in it."""
        yield self
        for part in self.parts:
            yield from part.walk()

    @property
    def literal(self) -> str | None:
        """Return the value of a string without expressions in it."""
        is_plain = self.type == "string" and all(part.type == "string_content" for part in self.parts)
        return self.text[1:-1] if is_plain else None


@dataclass(slots=True)
class Types:
    """The types of one resource in its latest version that is not a preview."""

    name: str
    """Type and version, as a template names them."""
    top: Properties
    objects: dict[str, Properties]
    open_objects: set[str]
    """Those that take any names."""

    def of(self, name: str) -> Properties | None:
        """Return the properties of an object type; None for a type that is none or takes any names."""
        return None if name in self.open_objects else self.objects.get(name)


@cache
def published(programs: Path, resource: str) -> Types:
    """Return what is published of a type of resources."""
    # Kept beside the environment: the program takes seven seconds for each.
    kept = programs.parent / f"{resource.replace('/', '-')}.json"
    if not kept.exists():
        command = [str(programs / "azmcp"), "bicepschema", "get", "--resource-type", resource]
        variables = {**os.environ, "AZURE_MCP_COLLECT_TELEMETRY": "false", "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT": "1"}
        answer = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=True)
        kept.write_text(answer.stdout)
    entries: list[dict[str, Any]] = json.loads(kept.read_text())["results"]["BicepSchemaResult"]
    (whole,) = [entry for entry in entries if entry["$type"] == "Resource"]
    objects = {entry["name"]: _properties(entry) for entry in entries if entry["$type"] == "Object"}
    unchecked = {entry["name"] for entry in entries if entry["$type"] == "DiscriminatedObject"}
    takes_any = {entry["name"] for entry in entries if "additionalPropertiesType" in entry}
    return Types(whole["name"], _properties(whole["bodyType"]), objects, takes_any | unchecked)


def _properties(entry: Mapping[str, Any]) -> Properties:
    return {each["name"]: each for each in cast("list[dict[str, Any]]", entry.get("properties") or [])}


@dataclass(slots=True)
class Template:
    """A template and what is wrong with it."""

    programs: Path
    """The folder of the environment's programs."""
    root: Node
    complaints: list[str] = field(default_factory=list[str])
    resources: dict[str, str] = field(default_factory=dict[str, str])
    parameters: dict[str, str] = field(default_factory=dict[str, str])
    names: set[str] = field(default_factory=set[str])

    def check(self) -> list[str]:
        """Return what is wrong, a line each."""
        for node in self.root.walk():
            if node.type == "ERROR":
                self._complain(node, f"is no Bicep: {node.text[:60]!r}")
        if self.complaints:
            return self.complaints
        for declared in self.root.parts:
            if (name := _name_of(declared)) is not None:
                self.names.add(name.text)
            if declared.type == "resource_declaration":
                self.resources[declared.parts[0].text] = declared.parts[1].literal or ""
            if declared.type == "parameter_declaration":
                name, kind = (part for part in declared.parts if part.type in ("identifier", "type"))
                self.parameters[name.text] = kind.text
        for declared in self.root.parts:
            self._check_names(declared)
            if declared.type == "resource_declaration":
                self._check_resource(declared)
        self._check_use()
        return self.complaints

    def _complain(self, node: Node, text: str) -> None:
        self.complaints.append(f"line {node.line}: {text}")

    def _check_use(self) -> None:
        unnamed = [part for node in self.root.walk() for part in node.parts if part is not _name_of(node)]
        used = {part.text for part in unnamed if part.type == "identifier"}
        self.complaints += [f"nothing uses the parameter {name}" for name in sorted(set(self.parameters) - used)]

    def _check_names(self, node: Node) -> None:
        """Complain of names that nothing declares, and of properties that a resource does not have."""
        if node.type == "member_expression":
            self._check_access(node)
        for part in node.parts:
            if part is _name_of(node):
                continue
            if part.type == "identifier" and part.text not in self.names | FUNCTIONS:
                self._complain(part, f"{part.text} is not declared")
            self._check_names(part)

    def _check_access(self, node: Node) -> None:
        path = node.text.split(".")
        if path[0] not in self.resources or not all(part.isidentifier() for part in path):
            return
        types = published(self.programs, self.resources[path[0]].partition("@")[0])
        known: Properties | None = types.top
        for name in path[1:]:
            if known is not None and name not in known:
                self._complain(node, f"{path[0]} has no {'.'.join(path[1:])}")
                return
            known = types.of(known[name]["type"]) if known is not None else None

    def _check_resource(self, declared: Node) -> None:
        kind, _, version = (declared.parts[1].literal or "").partition("@")
        types = published(self.programs, kind)
        body = next(node for node in declared.walk() if node.type == "object")
        if f"{kind}@{version}" != types.name and not version.endswith("-preview"):
            self._complain(declared, f"{kind}@{version} is not {types.name}, the version whose types are published")
        self._check_object(body, kind, {**OF_BICEP, **types.top}, types)

    def _check_object(self, body: Node, where: str, known: Properties, types: Types) -> None:
        given = {_key(part): part for part in body.parts}
        for name, part in given.items():
            if name not in known:
                self._complain(part, f"{where} has no {name}")
            elif "ReadOnly" in str(known[name].get("flags")):
                self._complain(part, f"{where}.{name} is read-only")
            else:
                self._check_value(part.parts[-1], f"{where}.{name}", known[name]["type"], types)
        for name, entry in known.items():
            if "Required" in str(entry.get("flags")) and name not in given:
                self._complain(body, f"{where} needs {name}")

    def _check_value(self, node: Node, where: str, kind: str, types: Types) -> None:
        match node.type:
            case "ternary_expression":
                for part in node.parts[1:]:
                    if part.type != "null":
                        self._check_value(part, where, kind, types)
            case "array" if kind != "any":
                if not kind.endswith("[]"):
                    self._complain(node, f"{where} is {kind}, not an array")
                for part in node.parts:
                    self._check_value(part, where, kind.removesuffix("[]"), types)
            case "object":
                if kind not in types.objects and kind not in types.open_objects:
                    self._complain(node, f"{where} is {kind}, not an object")
                elif (known := types.of(kind)) is not None:
                    self._check_object(node, where, known, types)
            case "identifier":
                given = self.parameters.get(node.text)
                if given is not None and given not in _words(kind):
                    self._complain(node, f"{where} is {kind}, and {node.text} is {given}")
            case "string" | "number" | "boolean":
                words = _words(kind)
                if _LITERALS[node.type] not in words and node.literal not in words:
                    self._complain(node, f"{where} is {kind}, not {node.text}")
            case _:
                pass  # an expression, whose type only the compiler knows


def _name_of(node: Node) -> Node | None:
    """Return the part that says what is declared or set here, which uses nothing."""
    if node.type == "object_property":
        return node.parts[0] if node.parts[0].type == "identifier" else None
    if node.type.endswith("_declaration"):
        return next(part for part in node.parts if part.type == "identifier")
    return None


def _key(node: Node) -> str:
    key = node.parts[0]
    return key.literal or key.text


def _words(kind: str) -> set[str]:
    return {"string", "int", "bool"} if kind == "any" else set(re.split(r" \| ", kind))


def read_template(programs: Path, text: str) -> Template:
    """Parse a template."""
    command = [str(programs / "python"), "-c", _PARSE]
    answer = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=True)
    return Template(programs, _node(json.loads(answer.stdout)))


def _node(value: dict[str, Any]) -> Node:
    parts = [_node(part) for part in cast("list[dict[str, Any]]", value["parts"])]
    return Node(value["type"], value["line"], value["text"], parts)
