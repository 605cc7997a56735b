"""An engine elsewhere: every verb of the contract is one call, made by its name. How is up to who extends it."""

import inspect
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar, cast

from belljar.engine.contract import Access, Engine

_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def _called(verb: _Verb) -> _Verb:
    """Return the method of a verb, with the contract's types, that passes its name and arguments on."""
    signature, way = inspect.signature(verb), "_call" if inspect.iscoroutinefunction(verb) else "_stream"

    def method(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        return getattr(bound.arguments.pop("self"), way)(verb.__name__, **bound.arguments)

    return cast("_Verb", method)


class CalledEngine:
    """An `Engine` each of whose verbs is one call, with all its arguments by name."""

    async def _call(self, verb: str, access: Access, **arguments: Any) -> Any:
        raise NotImplementedError

    def _stream(self, verb: str, access: Access, **arguments: Any) -> AsyncGenerator[Any]:
        raise NotImplementedError

    health = _called(Engine.health)
    servers = _called(Engine.servers)
    console_link = _called(Engine.console_link)
    usage = _called(Engine.usage)
    sessions = _called(Engine.sessions)
    search = _called(Engine.search)
    live_sessions = _called(Engine.live_sessions)
    session = _called(Engine.session)
    executions = _called(Engine.executions)
    blocks = _called(Engine.blocks)
    execution = _called(Engine.execution)
    result = _called(Engine.result)
    output = _called(Engine.output)
    excerpt = _called(Engine.excerpt)
    event = _called(Engine.event)
    lines = _called(Engine.lines)
    display = _called(Engine.display)
    calls = _called(Engine.calls)
    decisions = _called(Engine.decisions)
    notebook = _called(Engine.notebook)
    files = _called(Engine.files)
    read_part = _called(Engine.read_part)
    complete = _called(Engine.complete)
    variables = _called(Engine.variables)
    rows = _called(Engine.rows)
    packages = _called(Engine.packages)
    questions = _called(Engine.questions)
    runs = _called(Engine.runs)
    run = _called(Engine.run)
    server_events = _called(Engine.server_events)
    follow = _called(Engine.follow)
    create = _called(Engine.create)
    open_session = _called(Engine.open_session)
    rename = _called(Engine.rename)
    submit = _called(Engine.submit)
    wait = _called(Engine.wait)
    reply = _called(Engine.reply)
    install = _called(Engine.install)
    queue_install = _called(Engine.queue_install)
    interrupt = _called(Engine.interrupt)
    fork = _called(Engine.fork)
    map = _called(Engine.map)
    rewind = _called(Engine.rewind)
    end = _called(Engine.end)
    write_file = _called(Engine.write_file)
    rename_file = _called(Engine.rename_file)
    delete_file = _called(Engine.delete_file)
    answer = _called(Engine.answer)
    steer_run = _called(Engine.steer_run)
    note_presence = _called(Engine.note_presence)
