"""`belljar inbox`: what waits for a person on the servers of this data directory, and the way to answer it."""

import asyncio
import getpass
import json
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from belljar.cli.sessions import duration
from belljar.cli.streams import columns, one_line
from belljar.control import TIMEOUT_S
from belljar.engine.contract import Access
from belljar.engine.many import ManyEngine, servers_of
from belljar.errors import InvalidArgument, QuestionNotFound
from belljar.questions.models import InboxQuestion
from belljar.questions.schema import choices_of, fields_of, required_of, typed_value
from belljar.servers import http_sockets
from belljar.settings import load_command_settings
from belljar.settings.keys import LOCAL_PRINCIPAL
from belljar.toolbox.server_text import shortened

LOOK_S = 2.0
ANSWER_S = 30.0
"""How long a server may take to take an answer: as long as its disk is busy."""
MAX_LINE_CHARS = 80
_TITLES = ("question", "waits", "left", "owner", "asks")
_ENDED_TITLES = ("question", "state", "by", "in", "asked")
Id = Annotated[str, typer.Argument(help="The question's id, or enough of its beginning.", metavar="ID")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_command(as_json: Json = False) -> None:
    """List what waits for a person, and what was answered lately."""
    waiting, ended = asyncio.run(_questions(_engine()))
    if as_json:
        print(json.dumps([each.model_dump(mode="json") for each in [*waiting, *ended]], indent=2))
        return
    if waiting:
        print(columns([_TITLES, *map(_row, waiting)]))
        print("hint: belljar inbox show ID, belljar inbox answer ID", file=sys.stderr)
    else:
        print("nothing waits for a person", file=sys.stderr)
    if ended:
        print(columns([_ENDED_TITLES, *map(_ended_row, ended[:10])]))


def show_command(question_id: Id, as_json: Json = False) -> None:
    """Show a question whole, with the fields of its answer."""
    question = _find(_engine(), question_id)
    if as_json:
        print(question.model_dump_json(indent=2))
        return
    print(f"{question.id}: {question.state}, asked {_age(question)} ago by the session {question.session_id}")
    print(f"owner: {question.owner}{', execution ' + question.execution_id if question.execution_id else ''}\n")
    print(question.message)
    for name, line in _fields(question):
        print(f"  {name}: {line}")
    if question.state == "waiting":
        values = " ".join(f"{shlex.quote(name)}=…" for name, _ in _fields(question))
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
    engine = _engine()
    question = _find(engine, question_id)
    given = {} if decline else _read_values(question, values or [], asks=sys.stdin.isatty(), is_sure=yes)
    action = "decline" if decline else "accept"
    asyncio.run(servers_of(_folder(), ANSWER_S).answer(_person(), question.id, action, given))
    print(f"{question.id}: {'declined' if decline else 'answered'}", file=sys.stderr)


def watch_command() -> None:
    """Stay and show questions as they come; while you watch, cells whose client cannot ask may ask you."""
    engine, seen = _engine(), set[str]()
    print("watching; Ctrl-C ends. Answer with `belljar inbox answer ID` in another terminal.", file=sys.stderr)
    while True:
        asyncio.run(engine.note_presence(_person()))
        for question in asyncio.run(engine.questions(_person())):
            if question.id not in seen:
                seen.add(question.id)
                print(f"{question.id}  {_line(question.message)}", flush=True)
        time.sleep(LOOK_S)


def _folder() -> Path:
    return load_command_settings().data_directory


def _engine() -> ManyEngine:
    """Return the servers of the data directory; refuse to go on where there are none."""
    folder = _folder()
    if not http_sockets(folder):
        raise QuestionNotFound(f"no server runs that uses {folder}", hint="Questions wait only while their server runs")
    return servers_of(folder, TIMEOUT_S)


async def _questions(engine: ManyEngine) -> tuple[list[InboxQuestion], list[InboxQuestion]]:
    """Return what waits on any server, and what was answered lately, the latest first."""
    waiting, ended = [await engine.questions(_person(), state) for state in ("waiting", "ended")]
    waits = {question.id for question in waiting}
    ended = [question for question in ended if question.id not in waits]
    return waiting, sorted(ended, key=lambda one: one.ended_at or "", reverse=True)


def _person() -> Access:
    return Access(LOCAL_PRINCIPAL, is_operator=True, name=getpass.getuser(), via="terminal")


def _find(engine: ManyEngine, prefix: str) -> InboxQuestion:
    waiting, ended = asyncio.run(_questions(engine))
    known = [*waiting, *ended]
    found = [each for each in known if each.id == prefix] or [each for each in known if each.id.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidArgument(f"{prefix[:80]!r} begins the ids of {len(found)} questions", hint="Give more of the id")
    raise QuestionNotFound(f"there is no question {prefix[:80]!r}", hint="`belljar inbox` lists those that wait")


def _read_values(question: InboxQuestion, assignments: Sequence[str], *, asks: bool, is_sure: bool) -> dict[str, Any]:
    """Return the values of an answer: those given as FIELD=VALUE, and for the rest what the person types."""
    fields = fields_of(question.fields)
    given: dict[str, Any] = {}
    for assignment in assignments:
        name, mark, text = assignment.partition("=")
        if not mark:
            raise InvalidArgument(f"{assignment[:80]!r} is no FIELD=VALUE", hint=f"It asks for {', '.join(fields)}")
        given[name] = typed_value(fields.get(name, {}), text)
    if asks and not (fields or is_sure):
        print(f"{question.message}\n", file=sys.stderr)
        if not typer.confirm("Allow it?", err=True):
            raise typer.Exit(1)
    for name in [each for each in required_of(question.fields) if each not in given] if asks else []:
        print(question.message, file=sys.stderr)
        prompt = f"{one_line(name)}: "
        given[name] = typed_value(fields[name], getpass.getpass(prompt) if question.is_password else input(prompt))
    return given


def _fields(question: InboxQuestion) -> list[tuple[str, str]]:
    shown: list[tuple[str, str]] = []
    for name, entry in fields_of(question.fields).items():
        facts = [str(entry.get("type", "text")), str(entry.get("description") or entry.get("title") or "")]
        facts += [f"one of {', '.join(str(value) for value, _ in choices)}"] if (choices := choices_of(entry)) else []
        shown.append((one_line(name), one_line(" ".join(", ".join(filter(None, facts)).split()))))
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
    return shortened(" ".join(text.split()), MAX_LINE_CHARS)
