"""Resolves names in code: follows aliases, from-imports and the usual detours to the dotted name behind them.

The resolution uses only the written code, without scopes, order or values, so it may find too much. It does not find a
name that the code puts together while it runs; against that there is the sandbox.
"""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field

ANY = "_"
MAX_NAMES = 5_000
MAX_CHARS = 200
MAX_ORIGINS = 16
# The depth within one expression. Each node resolves the nodes below it, so an endless chain would take its length
# squared.
MAX_LEVELS = 20
_BUILTIN = frozenset(dir(builtins))
_IMPORTERS = frozenset({"__import__", "importlib.import_module", "importlib.__import__"})
_MODULE_TABLES = frozenset({"sys.modules"})
_NAMESPACES = frozenset({"vars", "globals", "locals"})
_SHELLS = frozenset({"get_ipython", "IPython.get_ipython", "IPython.core.getipython.get_ipython"})
IPYTHON = "get_ipython()"
"""The dotted name that stands for IPython's shell, whatever variable it is bound to."""


@dataclass(slots=True)
class CodeNames:
    """What a session's names stand for, learned from the cells that it ran."""

    origins: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    starred: set[str] = field(default_factory=set[str])
    """Modules that were imported with `*`."""
    bound: set[str] = field(default_factory=set[str])
    """Names of variables, functions and classes."""
    _seen: dict[ast.AST, list[str]] = field(default_factory=dict[ast.AST, list[str]], repr=False, compare=False)
    """Answers of `of`, valid until `learn` is called."""

    def copy(self) -> "CodeNames":
        """Return a copy that can learn without changing this object."""
        return CodeNames(
            {name: set(origins) for name, origins in self.origins.items()}, set(self.starred), set(self.bound)
        )

    def learn(self, tree: ast.AST) -> None:
        """Learn what a cell imports, and which values it gives another name."""
        self._seen = {}
        for node in ast.walk(tree):
            match node:
                case ast.Import():
                    for alias in node.names:
                        # `import a.b` binds a, `import a.b as c` binds a.b.
                        self._bind(alias.asname or alias.name.partition(".")[0], _bound(alias))
                case ast.ImportFrom():
                    self._learn_from(node)
                case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    if len(self.bound) < MAX_NAMES:
                        self.bound.add(name)
                case _:
                    pass
        roots = (
            _BUILTIN | {IPYTHON} | {origin.partition(".")[0] for origins in self.origins.values() for origin in origins}
        )
        for target, value in _assignments(tree):
            if isinstance(target, ast.Name):
                for origin in self.of(value):
                    if origin.partition(".")[0] in roots:
                        self._bind(target.id, origin)
        self._seen = {}

    def of(self, node: ast.AST, levels: int = MAX_LEVELS) -> list[str]:
        """Return the dotted names that an expression may stand for; an unknown part is `_`."""
        if not levels:
            return [ANY]
        if (answer := self._seen.get(node)) is None:
            answer = self._resolve(node, levels)
            self._seen[node] = answer
        return answer

    def _resolve(self, node: ast.AST, levels: int) -> list[str]:
        match node:
            case ast.Name():
                found = [*self.origins.get(node.id, [node.id])]
                found += [f"{module}.{node.id}" for module in self.starred if node.id not in _BUILTIN]
                return [_plain(name) for name in found]
            case ast.Attribute():
                return [_plain(f"{base}.{node.attr}") for base in self.of(node.value, levels - 1)]
            case ast.Call():
                return self._of_call(node, levels - 1)
            case ast.Subscript():
                return self._of_item(node, levels - 1)
            case ast.NamedExpr():
                return self.of(node.value, levels - 1)
            case _:
                return [ANY]

    def imported_by_call(self, node: ast.Call, levels: int = MAX_LEVELS) -> tuple[bool, str | None]:
        """Return whether a call imports a module, and which one; None if its name is not a literal."""
        if not _IMPORTERS & {*self.of(node.func, levels)}:
            return False, None
        name = _text(node.args[0]) if node.args else _text(_keyword(node, "name"))
        return True, name

    def _learn_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        for alias in node.names:
            if alias.name == "*":
                if len(self.starred) < MAX_ORIGINS:
                    self.starred.add(module)
            else:
                self._bind(alias.asname or alias.name, f"{module}.{alias.name}")

    def _bind(self, name: str, origin: str) -> None:
        if len(self.origins) >= MAX_NAMES and name not in self.origins:
            return
        known = self.origins.setdefault(name, set())
        if len(known) < MAX_ORIGINS and origin != ANY:
            known.add(origin[:MAX_CHARS])

    def _of_call(self, node: ast.Call, levels: int) -> list[str]:
        is_import, module = self.imported_by_call(node, levels)
        if is_import and module:
            return [module]
        if _SHELLS & {*self.of(node.func, levels)}:
            return [IPYTHON]
        if "getattr" in self.of(node.func, levels) and len(node.args) >= 2 and (name := _text(node.args[1])):
            return [_plain(f"{base}.{name}") for base in self.of(node.args[0], levels)]
        return [ANY]

    def _of_item(self, node: ast.Subscript, levels: int) -> list[str]:
        """Resolve `sys.modules["os"]`, `vars(os)["system"]`, `os.__dict__["system"]`, `__builtins__["eval"]`."""
        key = _text(node.slice)
        if key is None:
            return [ANY]
        if isinstance(node.value, ast.Call) and _NAMESPACES & {*self.of(node.value.func, levels)}:
            within = node.value.args
            return [_plain(f"{base}.{key}") for base in self.of(within[0], levels)] if within else [key]
        bases = self.of(node.value, levels)
        if _MODULE_TABLES & {*bases}:
            return [key]
        spaces = [base.removesuffix(".__dict__") for base in bases if base.endswith(".__dict__") or base == "builtins"]
        return [_plain(f"{base}.{key}") for base in spaces] or [ANY]


def _plain(name: str) -> str:
    """Return a dotted name without `builtins.` in front of a built-in function."""
    name = name.replace("__builtins__", "builtins", 1) if name.startswith("__builtins__") else name
    return (name.removeprefix("builtins.") or name)[:MAX_CHARS]


def _bound(alias: ast.alias) -> str:
    return alias.name if alias.asname else alias.name.partition(".")[0]


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _keyword(node: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in node.keywords if keyword.arg == name), None)


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign():
                for target in node.targets:
                    yield from _pairs(target, node.value)
            case ast.NamedExpr() | ast.AnnAssign() if node.value is not None:
                yield node.target, node.value
            case _:
                pass


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        yield from zip(target.elts, value.elts, strict=False)
    else:
        yield target, value
