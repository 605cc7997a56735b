"""An engine over the operator's socket: the server's end, and the form of what is sent.

A connection carries one call. Whoever can open the socket is the server's own user, so they say themselves for whom
they ask; the form of what they send is checked all the same.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, Final, Protocol, cast

from pydantic import ConfigDict, JsonValue, TypeAdapter

from belljar import ipc
from belljar.engine.contract import Access, Engine, SessionFilter
from belljar.engine.models import (
    CallEntry,
    EntryPage,
    ExecutionEntry,
    FileListing,
    FilePart,
    Followed,
    Health,
    NameCompletion,
    OutputLines,
    ServerEvent,
    SessionDetail,
    SessionEntry,
    SessionPage,
    UsageHistory,
)
from belljar.engine.packages import PackageList
from belljar.engine.variables import TableRows, VariableList
from belljar.errors import BelljarError
from belljar.executions.inbox import InboxQuestion
from belljar.models import ExecutionResult, Model, OutputEvent, Rewinding, SessionFork

_BYTES: Final = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
bytes_form: Final[TypeAdapter[bytes]] = TypeAdapter(bytes, config=_BYTES)


def _answers() -> dict[str, TypeAdapter[Any]]:
    """Return what each method answers with. Built at the first call, because it takes some milliseconds."""
    kinds: dict[str, Any] = {
        "health": Health,
        "usage": UsageHistory,
        "sessions": SessionPage,
        "session": SessionDetail,
        "executions": EntryPage[ExecutionEntry],
        "blocks": list[str],
        "execution": ExecutionEntry,
        "result": ExecutionResult,
        "output": tuple[list[OutputEvent], bool],
        "excerpt": list[OutputEvent],
        "event": OutputEvent,
        "lines": OutputLines,
        "calls": list[CallEntry],
        "decisions": list[dict[str, JsonValue]],
        "files": FileListing,
        "read_part": FilePart,
        "complete": NameCompletion,
        "variables": VariableList,
        "rows": TableRows,
        "packages": PackageList,
        "questions": list[InboxQuestion],
        "create": SessionEntry,
        "run_cell": str,
        "install": str,
        "interrupt": list[str],
        "fork": SessionFork,
        "rewind": Rewinding,
        "end": None,
        "write_file": None,
        "delete_file": None,
        "answer": InboxQuestion,
        "note_presence": None,
    }
    forms: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in kinds.items()}
    return forms | dict.fromkeys(("display", "notebook"), bytes_form)


_forms: dict[str, TypeAdapter[Any]] = {}
STREAMS: Final[dict[str, type[ServerEvent | Followed]]] = {"server_events": ServerEvent, "follow": Followed}


def answer_form(method: str) -> TypeAdapter[Any] | None:
    """Return the form of what a method answers with; None for a method that there is not."""
    if not _forms:
        _forms.update(_answers())
    return _forms.get(method)


class EngineCall(Model):
    """One call of a method."""

    method: str
    principal: str
    is_operator: bool
    name: str
    arguments: dict[str, JsonValue]


class EngineReply(Model):
    """What a method answered, or one item of a stream; with `error`, why it did not."""

    value: JsonValue = None
    error: str = ""
    hint: str = ""
    is_end: bool = False


class ServedEngine(Engine, Protocol):
    """An engine of this process."""

    def start(self) -> None:
        """Begin to sample usage, unless it does already."""
        ...


async def serve_engine(engine: ServedEngine, stream: ipc.MessageStream) -> None:
    """Answer a connection with one call of this engine."""
    engine.start()
    call = await stream.receive(EngineCall.model_validate_json)
    # A peer that hangs up wants no answer any more, and above all no more of a stream.
    serving = asyncio.ensure_future(_serve(engine, call, stream))
    watching = asyncio.ensure_future(_until_gone(stream))
    try:
        await asyncio.wait([serving, watching], return_when=asyncio.FIRST_COMPLETED)
    finally:
        serving.cancel()
        watching.cancel()
        await asyncio.gather(serving, watching, return_exceptions=True)


async def _until_gone(stream: ipc.MessageStream) -> None:
    with suppress(OSError, ipc.Malformed):
        await stream.receive(EngineCall.model_validate_json)


async def _serve(engine: Engine, call: EngineCall, stream: ipc.MessageStream) -> None:
    access = Access(call.principal, is_operator=call.is_operator, name=call.name)
    try:
        arguments = read_arguments(call.arguments)
        if call.method in STREAMS:
            happened = cast("AsyncGenerator[Model]", getattr(engine, call.method)(access, **arguments))
            async with aclosing(happened):
                async for item in happened:
                    await stream.send(EngineReply(value=item.model_dump(mode="json")).model_dump())
            await stream.send(EngineReply(is_end=True).model_dump())
            return
        if (form := answer_form(call.method)) is not None:
            found = await getattr(engine, call.method)(access, **arguments)
            reply = EngineReply(value=form.dump_python(found, mode="json"))
        else:
            reply = EngineReply(error=f"error: this server's engine has no method {call.method[:64]!r}")
    except BelljarError as error:
        reply = EngineReply(error=f"{error.code}: {error.message}", hint=error.hint)
    await stream.send(reply.model_dump())


# Arguments that are no JSON


def sent_arguments(arguments: dict[str, Any]) -> dict[str, JsonValue]:
    """Return arguments as they are sent."""
    sent = dict(arguments)
    if isinstance(wanted := sent.get("wanted"), SessionFilter):
        sent["wanted"] = {"state": wanted.state, "owner": wanted.owner, "text": wanted.text}
    if isinstance(content := sent.get("content"), bytes):
        sent["content"] = bytes_form.dump_python(content, mode="json")
    return sent


def read_arguments(sent: dict[str, JsonValue]) -> dict[str, Any]:
    """Return arguments as methods take them."""
    arguments: dict[str, Any] = dict(sent)
    if isinstance(wanted := arguments.get("wanted"), dict):
        arguments["wanted"] = TypeAdapter(SessionFilter).validate_python(wanted)
    if isinstance(content := arguments.get("content"), str):
        arguments["content"] = bytes_form.validate_json(f'"{content}"')
    return arguments
