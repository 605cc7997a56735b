"""`belljar inbox`: what waits for a person on the servers of this data directory, and the way to answer it."""

import asyncio
import getpass
import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from belljar import ipc
from belljar.attachments.messages import InboxReply, InboxRequest
from belljar.cli.sessions import duration
from belljar.cli.streams import columns
from belljar.control import MAX_MESSAGE_BYTES, TIMEOUT_S, server_sockets
from belljar.errors import InvalidArgument, QuestionClosed, QuestionNotFound
from belljar.executions.inbox import InboxQuestion
from belljar.settings import load_command_settings

LOOK_S = 2.0
MAX_LINE_CHARS = 80
_TITLES = ("question", "waits", "left", "owner", "asks")
_ENDED_TITLES = ("question", "state", "by", "in", "asked")
Id = Annotated[str, typer.Argument(help="The question's id, or enough of its beginning.", metavar="ID")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_command(as_json: Json = False) -> None:
    """List what waits for a person, and what was answered lately."""
    reply = asyncio.run(_ask(_folder(), InboxRequest()))
    if as_json:
        print(json.dumps([each.model_dump(mode="json") for each in [*reply.waiting, *reply.ended]], indent=2))
        return
    if reply.waiting:
        print(columns([_TITLES, *map(_row, reply.waiting)]))
        print("hint: belljar inbox show ID, belljar inbox answer ID", file=sys.stderr)
    else:
        print("nothing waits for a person", file=sys.stderr)
    if reply.ended:
        print(columns([_ENDED_TITLES, *map(_ended_row, reply.ended[:10])]))


def show_command(question_id: Id, as_json: Json = False) -> None:
    """Show a question whole, with the fields of its answer."""
    question = _find(asyncio.run(_ask(_folder(), InboxRequest())), question_id)
    if as_json:
        print(question.model_dump_json(indent=2))
        return
    print(f"{question.id}: {question.state}, asked {_age(question)} ago by the session {question.session_id}")
    print(f"owner: {question.owner}{', execution ' + question.execution_id if question.execution_id else ''}\n")
    print(question.message)
    for name, line in _fields(question):
        print(f"  {name}: {line}")
    if question.state == "waiting":
        values = " ".join(f"{name}=…" for name, _ in _fields(question))
        print(f"\nbelljar inbox answer {question.id} {values}".rstrip() + ", or with --decline")


def answer_command(
    question_id: Id,
    values: Annotated[
        list[str] | None, typer.Argument(help="FIELD=VALUE for each field of the answer.", metavar="FIELD=VALUE")
    ] = None,
    decline: Annotated[bool, typer.Option("--decline", help="Refuse what is asked.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Allow without showing the question first.")] = False,
) -> None:
    """Answer a question: allow it, fill in its fields, or decline it. Fields that are not given are asked for."""
    folder = _folder()
    question = _find(asyncio.run(_ask(folder, InboxRequest())), question_id)
    given = {} if decline else _read_values(question, values or [], asks=sys.stdin.isatty(), is_sure=yes)
    request = InboxRequest(question_id=question.id, action="decline" if decline else "accept", values=given)
    reply = asyncio.run(_ask(folder, request))
    if reply.refused:
        raise {"question-closed": QuestionClosed, "question-not-found": QuestionNotFound}.get(
            reply.code, InvalidArgument
        )(reply.refused, hint=reply.hint)
    print(f"{question.id}: {'declined' if decline else 'answered'}", file=sys.stderr)


def watch_command() -> None:
    """Stay and show questions as they come; while you watch, cells whose client cannot ask may ask you."""
    folder, seen = _folder(), set[str]()
    print("watching; Ctrl-C ends. Answer with `belljar inbox answer ID` in another terminal.", file=sys.stderr)
    while True:
        reply = asyncio.run(_ask(folder, InboxRequest(is_present=True)))
        for question in reply.waiting:
            if question.id not in seen:
                seen.add(question.id)
                print(f"{question.id}  {_line(question.message)}", flush=True)
        time.sleep(LOOK_S)


def _folder() -> Path:
    return load_command_settings().data_directory


async def _ask(folder: Path, request: InboxRequest) -> InboxReply:
    """Ask all servers of the data directory; an answer is taken by the one where the question waits."""
    paths = await asyncio.to_thread(server_sockets, folder)
    found = await asyncio.gather(*(_ask_server(path, request) for path in paths))
    replies = [reply for reply in found if reply is not None]
    if not replies:
        raise QuestionNotFound(f"no server runs that uses {folder}", hint="Questions wait only while their server runs")
    taken = [reply for reply in replies if not reply.refused]
    if request.question_id and not taken:
        # The refusal that says most: the other servers only do not know the question.
        return min(replies, key=lambda reply: reply.code == QuestionNotFound.code)
    waiting = {question.id: question for reply in replies for question in reply.waiting}
    ended = {question.id: question for reply in replies for question in reply.ended if question.id not in waiting}
    return InboxReply(
        waiting=[*waiting.values()], ended=sorted(ended.values(), key=lambda one: one.ended_at or "", reverse=True)
    )


async def _ask_server(path: Path, request: InboxRequest) -> InboxReply | None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            stream = await ipc.open_stream(path, limit_bytes=MAX_MESSAGE_BYTES)
            try:
                await stream.send(request.model_dump())
                return await stream.receive(InboxReply.model_validate_json)
            finally:
                stream.close()
    except (TimeoutError, OSError, ipc.Malformed):
        return None  # a server that was killed, or ends at this moment


def _find(reply: InboxReply, prefix: str) -> InboxQuestion:
    known = [*reply.waiting, *reply.ended]
    found = [each for each in known if each.id == prefix] or [each for each in known if each.id.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidArgument(f"{prefix[:80]!r} begins the ids of {len(found)} questions", hint="Give more of the id")
    raise QuestionNotFound(f"there is no question {prefix[:80]!r}", hint="`belljar inbox` lists those that wait")


def _read_values(question: InboxQuestion, assignments: Sequence[str], *, asks: bool, is_sure: bool) -> dict[str, Any]:
    """Return the values of an answer: those given as FIELD=VALUE, and for the rest what the person types."""
    properties = _properties(question)
    given: dict[str, Any] = {}
    for assignment in assignments:
        name, mark, text = assignment.partition("=")
        if not mark:
            raise InvalidArgument(f"{assignment[:80]!r} is no FIELD=VALUE", hint=f"It asks for {', '.join(properties)}")
        given[name] = _typed(properties.get(name, {}), text)
    if asks and not (properties or is_sure):
        print(f"{question.message}\n", file=sys.stderr)
        if not typer.confirm("Allow it?", err=True):
            raise typer.Exit(1)
    required = cast("list[str]", question.fields.get("required") or [])
    for name in [each for each in required if each not in given] if asks else []:
        print(question.message, file=sys.stderr)
        text = getpass.getpass(f"{name}: ") if question.is_password else input(f"{name}: ")
        given[name] = _typed(properties.get(name, {}), text)
    return given


def _typed(schema: dict[str, Any], text: str) -> Any:
    """Return a value of the type that a field wants; text that is none stays text, and is refused by the server."""
    if schema.get("type", "string") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"yes": True, "no": False}.get(text.lower(), text) if schema.get("type") == "boolean" else text


def _properties(question: InboxQuestion) -> dict[str, dict[str, Any]]:
    return cast("dict[str, dict[str, Any]]", question.fields.get("properties") or {})


def _fields(question: InboxQuestion) -> list[tuple[str, str]]:
    shown: list[tuple[str, str]] = []
    for name, entry in _properties(question).items():
        facts = [str(entry.get("type", "text")), str(entry.get("description") or entry.get("title") or "")]
        facts += [f"one of {', '.join(map(str, entry['enum']))}"] if entry.get("enum") else []
        shown.append((name, ", ".join(filter(None, facts))))
    return shown


def _row(question: InboxQuestion) -> tuple[str, ...]:
    left = duration(_left_s(question.expires_at)) if question.expires_at else "-"
    return question.id, _age(question), left, question.owner, _line(question.message)


def _ended_row(question: InboxQuestion) -> tuple[str, ...]:
    by, where = question.answered_by or "-", question.answered_in or "-"
    return question.id, question.state, by, where, _line(question.message)


def _age(question: InboxQuestion) -> str:
    return duration(max(0.0, time.time() - datetime.fromisoformat(question.put_at).timestamp()))


def _left_s(until: str) -> float:
    return max(0.0, datetime.fromisoformat(until).timestamp() - time.time())


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_LINE_CHARS else f"{line[: MAX_LINE_CHARS - 1]}…"
