"""Changes one entry of a configuration file as text: JSON with comments, TOML or YAML.

Everything else in the text stays as it is: comments, order, blank lines, indentation. The result is parsed again, and a
text whose meaning would not be exactly the wanted one is refused. Knows nothing of the programs that read the files.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

import yaml

Format = Literal["json", "toml", "yaml"]
Document = dict[str, Any]

_MAX_DEPTH = 100
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class UnreadableConfig(ValueError):
    """A text that cannot be read, or not be changed without a loss; the message says why."""


def parse(form: Format, text: str) -> Document:
    """Return what a text means; an empty one is an empty object."""
    document: Any
    try:
        match form:
            case "json":
                document = _JsonText(text).value() if text.strip() else {}
            case "toml":
                document = tomllib.loads(text)
            case "yaml":
                document = yaml.safe_load(text)
                document = cast("Document", {}) if document is None else document
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise UnreadableConfig(" ".join(str(error).split())) from error
    if not isinstance(document, dict):
        raise UnreadableConfig("it holds no object")
    return cast("Document", document)


def render(form: Format, document: Mapping[str, Any]) -> str:
    """Return a document as a text of its own."""
    match form:
        case "json":
            return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        case "toml":
            return "\n".join(_toml_tables(document))
        case "yaml":
            return _yaml_text(dict(document))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry is: in the object at `keys` under its name, or in a list there as the one that has that `name`."""

    keys: tuple[str, ...]
    name: str
    is_list: bool = False


def with_entry(form: Format, text: str, place: Place, entry: Mapping[str, Any]) -> str:
    """Return the text with the fields of `entry` at a place; fields there that `entry` lacks stay."""
    before = parse(form, text)
    wanted = merged(before, place, entry)
    if wanted == before:
        return text
    if not before and not text.strip():
        return render(form, wanted)
    after = _EDITORS[form](text, place, entry)
    if parse(form, after) != wanted:
        raise UnreadableConfig("its layout is too unusual to change")
    return after


def merged(document: Document, place: Place, entry: Mapping[str, Any]) -> Document:
    """Return the document with the entry, as a value."""
    first, *rest = place.keys
    inner, name = document.get(first), place.name
    if rest:
        deeper = Place(tuple(rest), name, place.is_list)
        return {**document, first: merged(_object(inner, first), deeper, entry)}
    if place.is_list:
        items = _list(inner, first)
        if not any(_is_named(item, name) for item in items):
            items = [{"name": name}, *items]
        return {**document, first: [{**item, **entry} if _is_named(item, name) else item for item in items]}
    servers = _object(inner, first)
    return {**document, first: {**servers, name: {**_object(servers.get(name), name), **entry}}}


def find_entry(document: Document, place: Place) -> Document:
    """Return the object at a place; an empty one if there is none."""
    *outer, last = place.keys
    for key in outer:
        document = _object(document.get(key), key)
    if place.is_list:
        items = _list(document.get(last), last)
        return next((item for item in items if _is_named(item, place.name)), cast("Document", {}))
    return _object(_object(document.get(last), last).get(place.name), place.name)


def _list(value: Any, key: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise UnreadableConfig(f'"{key}" is no list')
    return cast("list[Any]", value)


def _object(value: Any, key: str) -> Document:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnreadableConfig(f'"{key}" is no object')
    return cast("Document", value)


def _is_named(item: Any, name: str) -> bool:
    return isinstance(item, dict) and cast("Document", item).get("name") == name


# JSON with comments and trailing commas, as VS Code, Zed and opencode read it.

_JSON_TOKEN = re.compile(
    r'(?P<skip>(?:\s|//[^\n]*|/\*.*?(?:\*/|\Z))++)|(?P<string>"(?:\\.|[^"\\\n])*+(?:"|(?=[\n\\])|\Z))'
    r'|(?P<mark>[{}\[\]:,])|(?P<word>[^\s{}\[\]:,"/]++)',
    re.DOTALL,
)


@dataclass(slots=True)
class _JsonNode:
    start: int
    end: int = 0
    scalar: Any = None
    members: "dict[str, _JsonNode] | None" = None
    items: "list[_JsonNode] | None" = None

    def value(self) -> Any:
        if self.members is not None:
            return {name: node.value() for name, node in self.members.items()}
        return [node.value() for node in self.items] if self.items is not None else self.scalar


class _JsonText:
    """A parsed text, with the place of every value in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens = [*self._scan()]
        self._next = 0
        self.root = self._node(0)
        if self._next < len(self._tokens):
            self._refuse(self._tokens[self._next].start(), "there is more after its end")

    def value(self) -> Any:
        return self.root.value()

    def _scan(self) -> Iterator[re.Match[str]]:
        place = 0
        while place < len(self.text):
            token = _JSON_TOKEN.match(self.text, place)
            if token is None:
                self._refuse(place, "this is not JSON")
            if token.lastgroup != "skip":
                yield token
            place = token.end()

    def _refuse(self, place: int, reason: str) -> NoReturn:
        raise UnreadableConfig(f"line {self.text.count(chr(10), 0, place) + 1}: {reason}")

    def _take(self, wanted: str = "") -> re.Match[str]:
        if self._next >= len(self._tokens):
            self._refuse(len(self.text), "it ends too early")
        token = self._tokens[self._next]
        if wanted and token[0] != wanted:
            self._refuse(token.start(), f"{wanted} is missing")
        self._next += 1
        return token

    def _peek(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _node(self, depth: int) -> _JsonNode:
        token = self._take()
        node = _JsonNode(token.start(), token.end())
        if depth > _MAX_DEPTH:
            self._refuse(node.start, "it is nested too deeply")
        if token[0] == "{":
            node.members = {}
            while self._peek() != "}":
                name = self._take()
                if name.lastgroup != "string":
                    self._refuse(name.start(), "the name of a member is missing")
                self._take(":")
                if (key := self._scalar(name)) in node.members:
                    self._refuse(name.start(), f"the key {key!r} occurs twice in one object")
                node.members[key] = self._node(depth + 1)
                self._between("}")
            node.end = self._take("}").end()
        elif token[0] == "[":
            node.items = []
            while self._peek() != "]":
                node.items.append(self._node(depth + 1))
                self._between("]")
            node.end = self._take("]").end()
        else:
            node.scalar = self._scalar(token)
        return node

    def _between(self, close: str) -> None:
        if self._peek() != close:
            self._take(",")

    def _scalar(self, token: re.Match[str]) -> Any:
        try:
            return json.loads(token[0], parse_constant=self._no_constant)
        except ValueError:
            self._refuse(token.start(), f"{token[0][:40]} is no JSON value")

    def _no_constant(self, text: str) -> NoReturn:
        raise ValueError(text)


def _edit_json(text: str, place: Place, entry: Mapping[str, Any]) -> str:
    node, path = _JsonText(text).root, [*place.keys, place.name]
    while path and node.members is not None and path[0] in node.members:
        node = node.members[path.pop(0)]
    value: Any = dict(entry)
    if path:
        for key in reversed(path[1:]):
            value = {key: value}
        return _json_added(text, node, path[0], value)
    for key, wanted in entry.items():
        # Each change moves what comes after it, so the text is read again for the next one.
        here = _JsonText(text).root
        for step in (*place.keys, place.name):
            here = (here.members or {})[step]
        members = here.members or {}
        if key not in members:
            text = _json_added(text, here, key, wanted)
        elif members[key].value() != wanted:
            old = members[key]
            text = text[: old.start] + _json_value(text, wanted, _line_indent(text, old.start)) + text[old.end :]
    return text


def _json_added(text: str, node: _JsonNode, name: str, value: Any) -> str:
    """Return the text with one member more at the end of an object."""
    if node.members is None:
        raise UnreadableConfig(f"there is no object for {name!r}")
    close = node.end - 1
    outer = _line_indent(text, node.start)
    last = [*node.members.values()][-1] if node.members else None
    is_one_line = last is not None and "\n" not in text[node.start : close]
    inner = _line_indent(text, last.start) if last is not None and not is_one_line else outer + _indent_unit(text)
    line_end = "\r\n" if "\r\n" in text else "\n"
    content = text[node.start : close].rstrip()
    comma_at = node.start + len(content)
    if is_one_line:
        added = f"{'' if content.endswith(',') else ','} {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"
        return text[:comma_at] + added + text[comma_at:]
    member = f"{line_end}{inner}{json.dumps(name, ensure_ascii=False)}: {_json_value(text, value, inner)}"
    rest = text[comma_at:]
    if last is None:
        return text[:comma_at] + member + line_end + outer + text[close:]
    has_comma = any(token[0] == "," for token in _JSON_TOKEN.finditer(text[last.end : close]))
    return text[: last.end] + ("" if has_comma else ",") + text[last.end : comma_at] + member + rest


def _json_value(text: str, value: Any, indent: str) -> str:
    line_end = "\r\n" if "\r\n" in text else "\n"
    lines = json.dumps(value, indent=_indent_unit(text), ensure_ascii=False).split("\n")
    return f"{line_end}{indent}".join(lines)


def _indent_unit(text: str) -> str:
    found = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
    return found[1] if found else "  "


def _line_indent(text: str, place: int) -> str:
    line = text[text.rfind("\n", 0, place) + 1 : place]
    return line[: len(line) - len(line.lstrip())]


# TOML. A JSON string, number, boolean or list of them is the same in TOML.


@dataclass(slots=True)
class _TomlStatement:
    """A header, or a key with its value."""

    table: tuple[str, ...]
    """The table that it is in, or that a header opens."""
    key: tuple[str, ...] = ()
    start: int = 0
    end: int = 0
    """Where its line, or its last line, ends."""
    value: tuple[int, int] = field(default=(0, 0))


def _edit_toml(text: str, place: Place, entry: Mapping[str, Any]) -> str:
    path = (*place.keys, place.name)
    if not find_entry(parse("toml", text), place):
        joint = "" if text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
        return text + joint + "\n".join(_toml_table(path, entry))
    for key, value in entry.items():
        statements = [*_toml_statements(text)]
        found = next((each for each in statements if each.table == path and each.key == (key,)), None)
        header = next((each for each in statements if each.table == path and not each.key), None)
        if found is not None:
            text = text[: found.value[0]] + _toml_value(value) + text[found.value[1] :]
        elif header is not None:
            text = f"{text[: header.end].rstrip()}\n{_toml_key(key)} = {_toml_value(value)}\n{text[header.end :]}"
        else:
            raise UnreadableConfig(f"its {'.'.join(path)} is no table of its own")
    return text


def _toml_statements(text: str) -> Iterator[_TomlStatement]:
    table: tuple[str, ...] = ()
    place = 0
    while place < len(text):
        line_end = text.find("\n", place) + 1 or len(text)
        line = text[place:line_end].strip()
        if not line or line.startswith("#"):
            place = line_end
        elif line.startswith("["):
            end = _toml_value_end(text, place)
            table = _toml_path(text[place:end])
            yield _TomlStatement(table, start=place, end=line_end)
            place = line_end
        else:
            equals = _toml_equals(text, place)
            value_start = equals + 1 + len(text[equals + 1 :]) - len(text[equals + 1 :].lstrip(" \t"))
            value_end = _toml_value_end(text, value_start)
            end = text.find("\n", value_end) + 1 or len(text)
            yield _TomlStatement(table, _toml_path(f"{text[place:equals]}= 0"), place, end, (value_start, value_end))
            place = end


def _toml_path(text: str) -> tuple[str, ...]:
    """Return the path that a header or a key names."""
    path: list[str] = []
    value: Any = tomllib.loads(text)
    while isinstance(value, (dict, list)) and value:
        if isinstance(value, list):
            value = cast("list[Any]", value)[0]
            continue
        key, value = next(iter(cast("Document", value).items()))
        path.append(key)
    return tuple(path)


_TOML_STRING = re.compile(r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'', re.DOTALL)


def _toml_equals(text: str, place: int) -> int:
    while text[place] != "=":
        quoted = _TOML_STRING.match(text, place)
        place = quoted.end() if quoted else place + 1
    return place


def _toml_value_end(text: str, place: int) -> int:
    """Return where a value ends: before a comment or the line's end that is not within a string or a bracket."""
    depth, end = 0, place
    while place < len(text):
        quoted = _TOML_STRING.match(text, place)
        if quoted:
            place = end = quoted.end()
            continue
        character = text[place]
        if character == "#":
            place = text.find("\n", place) if "\n" in text[place:] else len(text)
            continue
        if character == "\n" and depth <= 0:
            break
        depth += character in "[{"
        depth -= character in "]}"
        place += 1
        end = end if character.isspace() else place
    return end


def _toml_tables(document: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    for key, value in document.items():
        if all(isinstance(each, Mapping) for each in cast("Document", value).values()):
            yield from _toml_tables(value, (*path, key))
        else:
            yield from _toml_table((*path, key), value)


def _toml_table(path: Sequence[str], entry: Mapping[str, Any]) -> Iterator[str]:
    yield f"[{'.'.join(map(_toml_key, path))}]"
    for key, value in entry.items():
        yield f"{_toml_key(key)} = {_toml_value(value)}"
    yield ""


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return "{ " + ", ".join(f"{_toml_key(key)} = {_toml_value(each)}" for key, each in pairs) + " }"
    return json.dumps(value, ensure_ascii=False)


# YAML. The parser tells where each value is; new ones are written in YAML's JSON form.


def _edit_yaml(text: str, place: Place, entry: Mapping[str, Any]) -> str:
    (key,), name, is_list = place.keys, place.name, place.is_list
    root = cast("Any", yaml.compose(text, yaml.SafeLoader))  # pyright: ignore[reportUnknownMemberType]
    if root is None or root.flow_style:
        raise UnreadableConfig("it is not laid out as a block")
    holder = _yaml_child(root, key)
    old = _yaml_child(holder, name, is_list=is_list)
    if old is not None:
        return _yaml_changed(text, old, entry)
    item = [{"name": name, **entry}] if is_list else {name: dict(entry)}
    if holder is None:
        joint = "" if text.endswith("\n") else "\n"
        return text + joint + render("yaml", {key: item})
    if isinstance(holder, yaml.ScalarNode) or not holder.value:
        block = render("yaml", {key: item}).partition("\n")[2]
        return f"{text[: holder.start_mark.index].rstrip(' ')}\n{block}{text[holder.end_mark.index :].lstrip()}"
    if holder.flow_style:
        raise UnreadableConfig(f'"{key}" is not laid out as a block')
    # Before the first one, because where the last one ends is not told apart from the comments after it.
    start = holder.start_mark
    lines = _yaml_text(item).splitlines()
    indented = "".join(f"{' ' * start.column}{line}\n" for line in lines)
    line_start = start.index - start.column
    return text[:line_start] + indented + text[line_start:]


def _yaml_text(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)


def _yaml_child(node: Any, name: str, *, is_list: bool = False) -> Any:
    if is_list and isinstance(node, yaml.SequenceNode):
        return next((item for item in node.value if getattr(_yaml_child(item, "name"), "value", None) == name), None)
    if not isinstance(node, yaml.MappingNode):
        return None
    pairs = cast("list[tuple[Any, Any]]", node.value)
    return next((value for key, value in pairs if key.value == name), None)


def _yaml_changed(text: str, node: Any, entry: Mapping[str, Any]) -> str:
    """Return the text with the fields of one entry changed, the last ones first, so that earlier places stay right."""
    edits: list[tuple[int, int, str]] = []
    column, first = node.start_mark.column, node.start_mark.index
    for key, value in entry.items():
        old = _yaml_child(node, key)
        shown = json.dumps(value, ensure_ascii=False)
        if old is None:
            edits.append((first, first, f"{key}: {shown}\n{' ' * column}"))
        elif yaml.safe_load(text[old.start_mark.index : _yaml_end(old)]) != value:
            edits.append((old.start_mark.index, _yaml_end(old), shown))
    for start, end, shown in sorted(edits, reverse=True):
        text = text[:start] + shown + text[end:]
    return text


def _yaml_end(node: Any) -> int:
    """Return where a value ends; the parser's own answer for a block includes the comments after it."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        return node.end_mark.index
    last = node.value[-1]
    return _yaml_end(last[1] if isinstance(last, tuple) else last)


_EDITORS = {"json": _edit_json, "toml": _edit_toml, "yaml": _edit_yaml}
