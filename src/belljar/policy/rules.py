"""The models of the policy file's tables. How the file is read and how its rules are applied is known elsewhere.

A pattern for code is a Python expression. `_` stands for any expression, `...` among arguments for any further
arguments, and `*` and `?` in a string for characters. Names are compared by what they stand for, not by what the code
calls them.
"""

import ast
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from belljar.egress.rules import parse_rule
from belljar.policy.code_names import ANY, CodeNames
from belljar.policy.expressions import Expression, compiled
from belljar.policy.schemas import ArgumentSchema

MAX_RULES = 1_000
_PERIODS_S = {"second": 1.0, "minute": 60.0, "hour": 3_600.0, "day": 86_400.0}
_RATE = re.compile(r"(\d{1,9})\s*/\s*(\w+)")
_DOTTED = re.compile(r"[\w*?]+(\.[\w*?]+)*")
MAX_TEXT_CHARS = 10_000


class PolicyTable(BaseModel):
    """A table of the file. An unknown key is an error, because it is probably a mistake."""

    # The validators are built when there is a file to check, because most servers have none.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def _listed(value: Any) -> Any:
    """Return a list, because a single value may be written without brackets."""
    return [value] if isinstance(value, str | dict) else value


def parse_rate(value: str) -> tuple[int, float]:
    """Return the number and the period in seconds of a rate such as `10/minute`."""
    found = _RATE.fullmatch(value.strip())
    if found is None or found[2] not in _PERIODS_S or int(found[1]) == 0:
        raise ValueError(f"{value!r} is no rate: write a number and {', '.join(_PERIODS_S)}, like 10/minute")
    return int(found[1]), _PERIODS_S[found[2]]


def _readable_by(read: Callable[[Any], object]) -> AfterValidator:
    """Return the check that `read` takes a value, which stays as it was written."""

    def check(value: Any) -> Any:
        read(value)
        return value

    return AfterValidator(check)


def _checked_match(value: str) -> str:
    server, dot, tool = value.partition(".")
    if value != "*" and not (server and dot and tool):
        raise ValueError(f"{value!r} names no tool: write SERVER.TOOL, * and ? allowed, like github.delete_*")
    return value


def _checked_name(value: str) -> str:
    if not _DOTTED.fullmatch(value):
        raise ValueError(f"{value!r} is no dotted name, like os.system or socket.*")
    return value


def _checked_network(value: str) -> str:
    """Return a checked network rule; a host without a port means its HTTPS port."""
    has_port = re.search(r":\d+$", value) is not None
    return str(parse_rule(value if has_port else f"{value}:443"))


Names = Annotated[list[Annotated[str, AfterValidator(_checked_name)]], BeforeValidator(_listed)]
Cel = Annotated[str, _readable_by(Expression)]


class Requirement(PolicyTable):
    """An expression that must be true of a call, and the reason to give if it is not."""

    expression: Cel
    reason: str = ""


def _as_requirement(value: object) -> object:
    return {"expression": value} if isinstance(value, str) else value


class ToolRule(PolicyTable):
    """A rule for the tools that it matches."""

    match: Annotated[
        list[Annotated[str, AfterValidator(_checked_match)]], BeforeValidator(_listed), Field(min_length=1)
    ]
    when: Cel = "true"
    """The rule applies only to calls for which this expression is true."""
    decision: Literal["allow", "ask", "deny"] | None = None
    reason: str = ""
    read_only: bool = False
    """Allow only tools that declare themselves read-only."""
    arguments: Annotated[dict[str, Any], _readable_by(ArgumentSchema)] = {}
    require: Annotated[
        list[Annotated[Requirement, BeforeValidator(_as_requirement)]],
        BeforeValidator(_listed),
    ] = []
    max_calls: int | None = Field(None, ge=0)
    """The most calls in one session."""
    rate: Annotated[str, _readable_by(parse_rate)] | None = None
    """The most calls of one principal over all of their sessions in a period, like `10/minute`."""
    ask_once: bool = False
    """An approval holds for the rest of the session."""
    answered_in: Literal["anywhere", "console"] = "anywhere"
    """`console`: the question is never put to the client, only to people at the server's inbox."""


class CodeRule(PolicyTable):
    """A rule about what code must not contain."""

    decision: Literal["deny", "ask", "warn"] = "deny"
    reason: str = ""
    answered_in: Literal["anywhere", "console"] = "anywhere"
    """`console`: the question is never put to the client, only to people at the server's inbox."""
    imports: Names = []
    only_imports: Names = []
    """Every import that is not listed is a finding."""
    calls: Names = []
    patterns: Annotated[list[Annotated[str, _readable_by(lambda text: Template(text))]], BeforeValidator(_listed)] = []
    magics: Names = []
    shell: bool = False

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not any((self.imports, self.only_imports, self.calls, self.patterns, self.magics, self.shell)):
            raise ValueError("the rule blocks nothing: give it imports, only_imports, calls, patterns, magics or shell")
        return self


class OutputRule(PolicyTable):
    """A rule about output that callers do not get to see."""

    text: str = Field("", max_length=10_000)
    pattern: Annotated[str, _readable_by(compiled), Field(max_length=10_000)] = ""
    """A regular expression in RE2's syntax; streams are searched line by line."""
    replace: str = "[removed]"
    withhold: bool = False
    """Withhold all output from the match on."""
    reason: str = ""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if bool(self.text) == bool(self.pattern):
            raise ValueError("give either text or pattern")
        return self


class PolicyLimits(PolicyTable):
    """Limits of every session; they can only make the settings stricter."""

    max_execution_time: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds that a cell may take."""
    max_memory_mb: int | None = Field(None, ge=64)
    max_gpus: int | None = Field(None, ge=0)
    """GPUs that a session may have; 0 for none."""
    allow_network_access: bool | None = None
    allowed_networks: list[Annotated[str, AfterValidator(_checked_network)]] | None = None
    """Replaces the setting `egress`."""


class Policy(PolicyTable):
    """The whole policy file."""

    default: Literal["allow", "ask", "deny"] | None = None
    """The decision for tools that no rule decides on. If it is not given: allow, or deny when strict."""
    strict: bool = False
    read_only: bool = False
    destructive: Literal["allow", "ask", "deny"] = "allow"
    """The decision for tools that are marked destructive and not read-only, unless a rule decides on them."""
    other_kernels: Literal["deny", "allow"] = "deny"
    """Whether sessions of `kernel:NAME` may run code when there are rules for code, which read all code as Python."""
    limits: PolicyLimits = Field(default_factory=lambda: PolicyLimits.model_validate({}))
    tools: list[ToolRule] = Field([], max_length=MAX_RULES)
    code: list[CodeRule] = Field([], max_length=MAX_RULES)
    output: list[OutputRule] = Field([], max_length=MAX_RULES)
    privacy: dict[str, Any] = {}
    """Validated by `belljar.privacy`."""


class Template:
    """One pattern, parsed."""

    def __init__(self, text: str) -> None:
        try:
            parsed = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ValueError(f"{text!r} is no expression of Python: {reason}") from None
        if _is_any(parsed) or _is_rest(parsed):
            raise ValueError(f"{text!r} matches everything")
        self.text = text
        self._expression = parsed

    @property
    def kind(self) -> type[ast.expr]:
        """Return the type of the syntax nodes that can match."""
        return type(self._expression)

    def matches(self, node: ast.AST, names: CodeNames) -> bool:
        """Return whether a node of a syntax tree matches the pattern."""
        return type(node) is type(self._expression) and _same(self._expression, node, names)


def _same(wanted: object, found: object, names: CodeNames) -> bool:
    if isinstance(wanted, ast.AST) and _is_any(wanted):
        return isinstance(found, ast.expr)
    if isinstance(wanted, ast.Name | ast.Attribute) and isinstance(found, ast.AST):
        return _same_name(wanted, found, names)
    if isinstance(wanted, ast.Constant):
        return isinstance(found, ast.Constant) and _same_value(wanted.value, found.value)
    if isinstance(wanted, ast.Call):
        return isinstance(found, ast.Call) and _same_call(wanted, found, names)
    if isinstance(wanted, ast.AST):
        return type(found) is type(wanted) and all(
            _same(getattr(wanted, name), getattr(found, name), names) for name in wanted._fields if name != "ctx"
        )
    if isinstance(wanted, list):
        left, right = cast("list[object]", wanted), cast("list[object]", found)
        return (
            isinstance(found, list)
            and len(left) == len(right)
            and all(_same(one, other, names) for one, other in zip(left, right, strict=True))
        )
    return wanted == found


def _same_name(wanted: ast.Name | ast.Attribute, found: ast.AST, names: CodeNames) -> bool:
    written = _dotted(wanted)
    if written is not None and written in names.of(found):
        return True
    return (
        isinstance(wanted, ast.Attribute)
        and isinstance(found, ast.Attribute)
        and wanted.attr == found.attr
        and _same(wanted.value, found.value, names)
    )


def _same_value(wanted: object, found: object) -> bool:
    if isinstance(wanted, str) and isinstance(found, str):
        return fnmatchcase(found[:MAX_TEXT_CHARS], wanted)
    return type(wanted) is type(found) and wanted == found


def _same_call(wanted: ast.Call, found: ast.Call, names: CodeNames) -> bool:
    if not _same(wanted.func, found.func, names):
        return False
    is_open = any(_is_rest(argument) for argument in wanted.args)
    positional = [argument for argument in wanted.args if not _is_rest(argument)]
    if len(found.args) < len(positional) or (len(found.args) > len(positional) and not is_open):
        return False
    if not all(_same(one, other, names) for one, other in zip(positional, found.args, strict=False)):
        return False
    given = {keyword.arg: keyword.value for keyword in found.keywords}
    asked = {keyword.arg: keyword.value for keyword in wanted.keywords}
    if not is_open and given.keys() != asked.keys():
        return False
    return all(name in given and _same(value, given[name], names) for name, value in asked.items())


def _dotted(node: ast.expr) -> str | None:
    match node:
        case ast.Name():
            return None if node.id == ANY else node.id
        case ast.Attribute():
            base = _dotted(node.value)
            return None if base is None else f"{base}.{node.attr}"
        case _:
            return None


def _is_any(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == ANY


def _is_rest(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis
