"""Finds plugins, calls their hooks, and keeps their failures from the server.

A plugin that cannot be loaded, or a hook that raises, takes too long or returns nonsense, is named in the log and in
`belljar plugins`; the server goes on. What each hook is for is in `hooks.py`.
"""

import asyncio
import difflib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

import pluggy

from belljar.errors import PluginFailed, SettingsError
from belljar.facts import PROJECT, CallEnd, CellFacts, ToolCallFacts, Verdict

ENTRY_POINTS: Final = "belljar"
"""The group of entry points that packages bring plugins by."""
CORE: Final = "belljar"
"""The origin of belljar's own plugins."""
_THREADS: Final = 8
"""Threads for the hooks that are no coroutines; they are the plugins' own, so a hook that hangs takes no other's."""
_MAX_FILES: Final = 200
_REASON_CHARS: Final = 300
HOOK_S: Final = 10.0
"""How long one hook of one plugin may take before it counts as failed."""
_SEVERITY: Final = ("allow", "warn", "ask", "deny")
WITHOUT: Final = "Do without it; only the operator can change the plugin"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PluginRecord:
    """One plugin as `belljar plugins` lists it."""

    name: str
    origin: str
    """`belljar` for its own, the package with its version, or the path of the file."""
    hooks: tuple[str, ...] = ()
    error: str = ""
    """Why it was not loaded, or what a hook of it last failed with."""

    @property
    def is_core(self) -> bool:
        """Return whether it is belljar's own."""
        return self.origin == CORE


@dataclass(frozen=True, slots=True)
class Implementation:
    """One plugin's function for one hook."""

    plugin: PluginRecord
    hook: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]

    def bind(self, given: Mapping[str, Any]) -> Callable[[], Any]:
        """Return the call of the function with those of the hook's arguments that it takes."""
        return partial(self.function, **{name: given[name] for name in self.arguments})


@dataclass(frozen=True, slots=True)
class HookAnswer:
    """What a plugin returned from a hook, or how it failed."""

    plugin: PluginRecord
    value: Any = None
    failure: str = ""


@dataclass(slots=True)
class Plugins:
    """The plugins of one runtime; `load_plugins` makes it and belljar's own are added by `add`."""

    specs: ModuleType | None = None
    """The module of the hooks that there are; without one there are none."""
    records: list[PluginRecord] = field(default_factory=list[PluginRecord])
    used_hooks: set[str] = field(default_factory=set[str])
    """The hooks that any plugin, ours included, implements."""
    _manager: pluggy.PluginManager = field(default_factory=lambda: pluggy.PluginManager(PROJECT))
    _known: dict[str, tuple[Implementation, ...]] = field(default_factory=dict[str, tuple[Implementation, ...]])
    _threads: ThreadPoolExecutor | None = None
    _telling: set[asyncio.Task[list[str]]] = field(default_factory=set[asyncio.Task[list[str]]])

    def __post_init__(self) -> None:
        if self.specs is not None:
            self._manager.add_hookspecs(self.specs)

    @property
    def hooks(self) -> tuple[str, ...]:
        """Return the names of the hooks that there are, in the order of their module."""
        specs = vars(self.specs) if self.specs is not None else {}
        return tuple(name for name, value in specs.items() if hasattr(value, f"{PROJECT}_spec"))

    # Registration

    def add(self, name: str, plugin: object, origin: str = CORE) -> PluginRecord:
        """Register a plugin; one that does not fit the hooks is recorded with its error, except belljar's own."""
        record = PluginRecord(name, origin)
        self.records.append(record)
        self._known.clear()
        try:
            self._register(record, plugin)
        except Exception as error:
            if record.is_core:
                raise
            self.fail(record, "", error)
        return record

    def _register(self, record: PluginRecord, plugin: object) -> None:
        if self.specs is None:
            raise ValueError("there are no hooks here: make these plugins with Plugins(belljar.hooks)")
        found = [name for name in dir(plugin) if self._manager.parse_hookimpl_opts(plugin, name) is not None]
        if not found:
            raise ValueError("it implements no hook: mark its functions with belljar.hooks.hookimpl")
        for name in found:
            if name not in self.hooks:
                close = difflib.get_close_matches(name, self.hooks, 1)
                raise ValueError(f"there is no hook {name}{f', only {close[0]}' if close else ''}")
            options = self._manager.parse_hookimpl_opts(plugin, name) or {}
            if options.get("wrapper") or options.get("hookwrapper"):
                raise ValueError(f"{name} is a hook wrapper, which belljar does not call")
            given = inspect.signature(getattr(self.specs, name)).parameters
            if unknown := [each for each in inspect.signature(getattr(plugin, name)).parameters if each not in given]:
                passed = f"only {', '.join(given)}" if given else "none"
                raise ValueError(f"{name} takes the argument {unknown[0]}, and the hook passes {passed}")
        if self._manager.has_plugin(record.name):
            raise ValueError("there is another plugin of that name")
        self._manager.register(plugin, record.name)
        record.hooks = tuple(name for name in self.hooks if name in found)
        self.used_hooks.update(record.hooks)

    def fail(self, record: PluginRecord, hook: str, error: BaseException | str) -> str:
        """Record and log a failure; return it in words."""
        said = error if isinstance(error, str) else f"{type(error).__name__}: {error}".rstrip(": ")
        where = f"{hook}: " if hook else ""
        record.error = f"{where}{said}"[:_REASON_CHARS]
        exception = error if isinstance(error, BaseException) and hook else None
        log.warning("plugin %s (%s) failed: %s", record.name, record.origin, record.error, exc_info=exception)
        return record.error

    def note(self, name: str, *taking_part: str) -> None:
        """List a part of belljar that takes part in hooks by an object for each session, not by a registered one."""
        self.records.append(PluginRecord(name, CORE, taking_part))

    # Calling

    def implementations(self, hook: str) -> tuple[Implementation, ...]:
        """Return who implements a hook, in the order of calls: the latest plugin first, belljar's own last."""
        if hook not in self._known:
            by_name = {record.name: record for record in self.records if record.hooks}
            caller: pluggy.HookCaller | None = getattr(self._manager.hook, hook, None)
            found = [
                Implementation(by_name[each.plugin_name], hook, each.function, (*each.argnames, *each.kwargnames))
                for each in reversed(caller.get_hookimpls() if caller else ())
            ]
            self._known[hook] = tuple(sorted(found, key=lambda each: each.plugin.is_core))
        return self._known[hook]

    async def ask(self, implementation: Implementation, **given: Any) -> HookAnswer:
        """Call one hook of one plugin within `HOOK_S`; a failure of ours is raised, another's is in the answer."""
        plugin, call = implementation.plugin, implementation.bind(given)
        if plugin.is_core:
            value = call()
            return HookAnswer(plugin, await value if inspect.isawaitable(value) else value)
        try:
            async with asyncio.timeout(HOOK_S):
                if inspect.iscoroutinefunction(implementation.function):
                    return HookAnswer(plugin, await call())
                self._threads = self._threads or ThreadPoolExecutor(_THREADS, "belljar-plugin")
                return HookAnswer(plugin, await asyncio.get_running_loop().run_in_executor(self._threads, call))
        except TimeoutError:
            return HookAnswer(plugin, failure=self.fail(plugin, implementation.hook, f"it took over {HOOK_S:g} s"))
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            return HookAnswer(plugin, failure=self.fail(plugin, implementation.hook, error))

    async def tell(self, hook: str, **given: Any) -> list[str]:
        """Call a hook whose result is ignored; return what the failures were."""
        failures: list[str] = []
        for implementation in self.implementations(hook):
            answer = await self.ask(implementation, **given)
            if answer.failure:
                failures.append(f"plugin {answer.plugin.name} failed: {answer.failure}")
        return failures

    def tell_aside(self, hook: str, **given: Any) -> None:
        """Call a hook whose result is ignored, in a task of its own that nobody waits for."""
        if self.implementations(hook):
            telling = asyncio.get_running_loop().create_task(self.tell(hook, **given))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    def collect(self, implementation: Implementation, **given: Any) -> Any:
        """Call a hook that is no coroutine now; None for one that fails. For what is asked once, at the start."""
        try:
            return implementation.bind(given)()
        except Exception as error:
            if implementation.plugin.is_core:
                raise
            self.fail(implementation.plugin, implementation.hook, error)
            return None

    def named(self, hook: str, **given: Any) -> dict[str, Any]:
        """Return what a hook's plugins bring, by name: pairs of a mapping, or objects with a `name`.

        A name belongs to whoever has it first, belljar before all others; a plugin that brings it again is named.
        """
        found: dict[str, Any] = {}
        owners: dict[str, PluginRecord] = {}
        for implementation in reversed(self.implementations(hook)):
            plugin = implementation.plugin
            try:
                brought = self.collect(implementation, **given)
                for name, value in _pairs(brought):
                    if name in owners:
                        whose = "belljar's own" if owners[name].is_core else f"of the plugin {owners[name].name}"
                        self.fail(plugin, hook, f"{name!r} is {whose} and cannot be replaced; choose another name")
                        continue
                    found[name], owners[name] = value, plugin
            except TypeError as error:
                self.fail(plugin, hook, error)
        return found

    # Guardrails

    async def judge_tool_call(
        self, call: ToolCallFacts, own: Callable[[], Awaitable[Verdict]] | None = None
    ) -> Verdict:
        """Return the strictest verdict on a call.

        The session's guard, `own`, takes part after all plugins, because it counts the calls that it allows.
        """
        strictest = Verdict("allow")
        for implementation in self.implementations("judge_tool_call"):
            strictest = _stricter(strictest, await self._verdict(implementation, call=call))
            if strictest.decision == "deny":
                return strictest
        return _stricter(strictest, await own()) if own is not None else strictest

    async def judge_code(self, cell: CellFacts) -> list[Verdict]:
        """Return the plugins' verdicts on a cell, until the first that refuses it."""
        verdicts: list[Verdict] = []
        for implementation in self.implementations("judge_code"):
            verdicts.append(await self._verdict(implementation, cell=cell))
            if verdicts[-1].decision == "deny":
                break
        return verdicts

    async def _verdict(self, implementation: Implementation, **given: Any) -> Verdict:
        answer = await self.ask(implementation, **given)
        plugin, value = answer.plugin, answer.value
        if not answer.failure and (nonsense := _no_verdict(value)):
            answer = replace(answer, failure=self.fail(plugin, implementation.hook, nonsense))
        if answer.failure:
            reason = f"the plugin {plugin.name} failed, and a guardrail that fails refuses: {answer.failure}. {WITHOUT}"
            return Verdict("deny", reason, f"plugin:{plugin.name}")
        if value is None:
            return Verdict("allow")
        if plugin.is_core:
            return value
        reason = str(value.reason)[:_REASON_CHARS] or "it gives no reason"
        shown = "" if value.decision == "allow" else f"the plugin {plugin.name}: {reason}"
        return Verdict(value.decision, shown, f"plugin:{plugin.name}")

    # Tool calls

    async def before_tool_call(self, call: ToolCallFacts) -> ToolCallFacts:
        """Return the call with the arguments that plugins want instead; raise PluginFailed where one fails."""
        for implementation in self.implementations("before_tool_call"):
            answer = await self.ask(implementation, call=call)
            failure, value = answer.failure, answer.value
            if not failure and value is not None and not isinstance(value, Mapping):
                said = f"it returned {type(value).__name__}, not arguments"
                failure = self.fail(answer.plugin, implementation.hook, said)
            if failure:
                raise PluginFailed(f"the plugin {answer.plugin.name} failed before the call: {failure}", hint=WITHOUT)
            if value is not None:
                call = replace(call, arguments=dict(cast("Mapping[str, Any]", value)))
        return call

    async def after_tool_call(self, call: ToolCallFacts, end: CallEnd) -> None:
        """Tell plugins how a call ended."""
        await self.tell("after_tool_call", call=call, end=end)

    async def aclose(self) -> None:
        """Let hooks whose result is ignored end, and drop the threads; a hook that hangs does not keep the server."""
        await asyncio.gather(*self._telling, return_exceptions=True)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


def load_plugins(specs: ModuleType, directory: str = "", *, with_packages: bool = True) -> Plugins:
    """Return the plugins of installed packages and of the files in a folder; each that fails is recorded as such."""
    plugins = Plugins(specs)
    if with_packages:
        _load_packages(plugins)
    for file in _files(directory) if directory else ():
        _load(plugins, file.stem, str(file), partial(_import_file, file))
    return plugins


def _load_packages(plugins: Plugins) -> None:
    from importlib.metadata import entry_points  # reading metadata takes 20 to 100 ms with a hundred packages

    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.name):
        origin = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
        _load(plugins, point.name, origin, point.load)


def _load(plugins: Plugins, name: str, origin: str, load: Callable[[], Any]) -> None:
    try:
        loaded = load()
        plugin = cast("Any", loaded)() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:  # noqa: BLE001 - importing runs other people's code
        record = PluginRecord(name, origin)
        plugins.records.append(record)
        plugins.fail(record, "", error)
    else:
        plugins.add(name, plugin, origin)


def _files(directory: str) -> list[Path]:
    """Return the files of a folder of plugins, in order of their names."""
    folder = Path(directory)
    try:
        if folder.stat().st_mode & 0o002:
            raise SettingsError(
                f"plugins_directory {folder} can be written by everybody, and its files run as the server",
                hint=f"Run chmod o-w {folder}",
            )
        files = sorted(path for path in folder.iterdir() if path.suffix == ".py" and path.name[0] not in "._")
    except OSError as error:
        raise SettingsError(
            f"plugins_directory {folder} cannot be read: {error.strerror}", hint="Make it, or name another folder"
        ) from error
    if len(files) > _MAX_FILES:
        raise SettingsError(
            f"plugins_directory {folder} has {len(files)} files of Python, the most is {_MAX_FILES}",
            hint="Name a folder that has plugins in it and nothing else",
        )
    return files


def _import_file(file: Path) -> ModuleType:
    if file.stat().st_mode & 0o002:
        raise PermissionError(f"everybody can write it: run chmod o-w {file}")
    name = f"belljar_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _pairs(brought: Any) -> Iterable[tuple[str, Any]]:
    """Return the pairs of a mapping, or the named objects of an iterable; TypeError for anything else."""
    if brought is None:
        return ()
    if isinstance(brought, Mapping):
        pairs = [*cast("Mapping[Any, Any]", brought).items()]
    else:
        pairs = [(getattr(each, "name", None), each) for each in brought]
    for name, value in pairs:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a {type(value).__name__} without a name")
    return cast("list[tuple[str, Any]]", pairs)


def _stricter(one: Verdict, other: Verdict) -> Verdict:
    """Return the stricter of two verdicts, the later one if they agree, with both reasons."""
    if _SEVERITY.index(other.decision) < _SEVERITY.index(one.decision):
        return one
    reasons = [each.reason for each in (one, other) if each.reason]
    return replace(other, reason="; ".join(reasons)) if one.decision == other.decision != "allow" else other


def _no_verdict(value: object) -> str:
    """Return what is wrong with what a guardrail returned; empty if nothing is."""
    if value is None or (isinstance(value, Verdict) and value.decision in _SEVERITY):
        return ""
    kind = f"a Verdict of {value.decision!r}" if isinstance(value, Verdict) else type(value).__name__
    return f"it returned {kind}; a Verdict is one of {', '.join(_SEVERITY)}"
