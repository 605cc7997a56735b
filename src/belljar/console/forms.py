"""Forms of the console: those that act, and the one for a question to a person.

Every action goes through `Engine` under the person's name. Works without scripts: each form posts and comes back. The
form for a question is made of the JSON Schema of its answer, and so are the values of one that was sent. Knows strings,
numbers, booleans and lists of choices; anything else is given as JSON text. Values are checked by whoever takes the
answer, against the question's own schema.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from belljar.engine.contract import Access, Engine
from belljar.engine.operations import JSON, OPERATIONS
from belljar.errors import BelljarError, InvalidArgument, TooLarge
from belljar.http.api_operations import read_body
from belljar.questions.schema import choices_of, fields_of, required_of, typed_value

MAX_FIELDS: Final = 100
MAX_CHOICES: Final = 500
_INPUTS: Final = {"email": "email", "uri": "url", "date": "date", "date-time": "datetime-local"}
PREFIX: Final = "value-"
_MAX_CODE_FORM_BYTES: Final = 4 * 1024 * 1024
FORM_BYTES: Final = 64 * 1024
_ANSWER_BYTES: Final = 1024 * 1024
DONE: Final = {
    "interrupted": "Stopped. Its variables are kept.",
    "forked": "This is the fork. The session that it was made from goes on unchanged; ending this one undoes the fork.",
    "forked-all": "All forks are made. They are named below and in the timeline.",
    "forked-fewer": "There was no room for all of them. The forks that were made are named below and in the timeline.",
    "rewind": "Rewound. What was undone is folded below: its code can be run again from there.",
    "rename": "Renamed.",
    "answered": "Answered. Whoever asked goes on.",
    "declined": "Declined. Whoever asked is told so.",
    "uploaded": "Uploaded.",
    "file-renamed": "The file has its new name.",
    "deleted": "The file is deleted.",
    "ended": "The session has ended, and all of it is deleted.",
}
"""What a page says first that is shown after an act, and how to undo it where one can."""


@dataclass(frozen=True, slots=True)
class FormField:
    """One field."""

    name: str
    label: str
    kind: str
    """The type of its `input`, or `choice`, `json` or `text`."""
    hint: str = ""
    value: str = ""
    is_required: bool = False
    takes_empty: bool = False
    """Whether an empty text is an answer, as to `input()`."""
    choices: tuple[tuple[str, str], ...] = ()


def form_fields(schema: Mapping[str, Any], *, is_password: bool = False) -> list[FormField]:
    """Return the fields of a form."""
    needed = {*required_of(schema)}
    entries = [*fields_of(schema).items()][:MAX_FIELDS]
    return [_field(name, entry, name in needed, is_password) for name, entry in entries]


def _field(name: str, entry: dict[str, Any], is_required: bool, is_password: bool) -> FormField:
    default, kind = entry.get("default"), _kind(entry)
    choices = choices_of(entry)[:MAX_CHOICES] if entry.get("type") == "string" else []
    if is_password and kind == "text":
        kind = "password"
    return FormField(
        name=name,
        label=str(entry.get("title") or name),
        kind="choice" if choices else kind,
        hint=str(entry.get("description") or ""),
        # What is secret is not sent to the browser, not even as a default.
        value=""
        if default is None or kind == "password"
        else default
        if isinstance(default, str)
        else json.dumps(default),
        is_required=is_required and kind != "checkbox" and entry.get("minLength") != 0,
        takes_empty=is_required and entry.get("minLength") == 0,
        choices=tuple((str(value), label) for value, label in choices),
    )


def _kind(entry: dict[str, Any]) -> str:
    match entry.get("type"):
        case "boolean":
            return "checkbox"
        case "integer" | "number":
            return "number"
        case "string":
            return _INPUTS.get(str(entry.get("format")), "text")
        case _:
            return "json"


def sent_values(schema: Mapping[str, Any], sent: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a form that was sent; a field that was left empty is not given."""
    values: dict[str, Any] = {}
    for field in form_fields(schema):
        text = sent.get(PREFIX + field.name, "")
        if field.kind == "checkbox":
            values[field.name] = bool(text)
        elif text or field.takes_empty:
            values[field.name] = _value(field, text)
    return values


def _value(field: FormField, text: str) -> Any:
    if field.kind not in ("number", "json"):
        return text
    value = typed_value({}, text)
    if value == text:
        wanted = "a number" if field.kind == "number" else "JSON"
        raise InvalidArgument(f"{field.label[:64]} is {text[:64]!r}, which is not {wanted}")
    return value


def check_length(request: Request, most: int = FORM_BYTES, *, what: str = "form") -> None:
    """Refuse a form that is too long, or does not say how long it is."""
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or int(length) > most:
        raise TooLarge(f"the {what} has more than {most:,} bytes")


class SessionActions:
    """The forms of a session's page."""

    def __init__(self, engine: Engine, *, max_upload_bytes: int) -> None:
        self._engine = engine
        self._max_upload_bytes = max_upload_bytes

    async def serve(self, request: Request) -> Response:
        """Answer `POST /console/sessions/ID/ACT`."""
        access: Access = request.state.access
        session_id, act = str(request.path_params["session_id"]), str(request.path_params["act"])
        check_length(request, self._max_upload_bytes + FORM_BYTES if act == "upload" else _MAX_CODE_FORM_BYTES)
        async with request.form(max_files=1, max_fields=5, max_part_size=_MAX_CODE_FORM_BYTES) as form:
            fields = {name: value for name, value in form.items() if isinstance(value, str)}
            file = form.get("file")
            if act == "upload" and isinstance(file, UploadFile):
                name = fields.get("name", "").strip() or (file.filename or "").replace("\\", "/").rpartition("/")[2]
                folder = fields.get("folder")
                path = f"{folder.strip('/')}/{name}" if folder else name
                await self._engine.write_file(access, session_id, path, await file.read())
                return _back(session_id, "uploaded") if folder is None else _to_files(session_id, folder, "uploaded")
        return await self._act(access, session_id, act, fields)

    async def create(self, request: Request) -> Response:
        """Answer `POST /console/sessions/new`: open a session of the person's own."""
        access: Access = request.state.access
        check_length(request)
        async with request.form(max_files=0, max_fields=5) as form:
            made = await self._engine.create(access, reason=str(form.get("reason", "")).strip()[:200])
        return _back(made.session_id)

    async def answer(self, request: Request) -> Response:
        """Answer `POST /console/inbox/ID`: pass a person's answer on. Its values are not kept."""
        access: Access = request.state.access
        question_id = str(request.path_params["question_id"])
        check_length(request, _ANSWER_BYTES, what="answer")
        async with request.form(max_files=0, max_fields=2 * MAX_FIELDS) as form:
            sent = {name: value for name, value in form.items() if isinstance(value, str)}
        asked = next((one for one in await self._engine.questions(access) if one.id == question_id), None)
        choice = sent.get("action", "")
        action = "decline" if choice == "decline" else "accept"
        if asked is not None and choice in ("yes", "no"):
            values: dict[str, Any] = dict.fromkeys(fields_of(asked.fields), choice == "yes")
        else:
            values = sent_values(asked.fields, sent) if asked is not None and action == "accept" else {}
        more = {name: sent.get(name, "").replace("\r\n", "\n") for name in ("edited", "said")}
        await self._engine.answer(access, question_id, action, values, **more)
        return RedirectResponse(
            f"/console/inbox?done={'declined' if action == 'decline' else 'answered'}", status_code=303
        )

    async def answer_several(self, request: Request) -> Response:
        """Answer `POST /console/inbox`: allow or decline all questions that were selected."""
        access: Access = request.state.access
        check_length(request)
        async with request.form(max_files=0, max_fields=2 * MAX_FIELDS) as form:
            action = "decline" if form.get("action") == "decline" else "accept"
            wanted = [str(one) for one in form.getlist("question")]
        if not wanted:
            raise InvalidArgument("no question was selected", hint="Select some first")
        refusals: list[BelljarError] = []
        for question_id in wanted:
            try:
                await self._engine.answer(access, question_id, action, {})
            except BelljarError as error:
                refusals.append(error)
        if refusals:
            done = len(wanted) - len(refusals)
            raise InvalidArgument(
                f"{done} of {len(wanted)} were answered; of the others the first: {refusals[0].message}",
                hint=refusals[0].hint or "The inbox has what still waits",
            )
        return RedirectResponse(
            f"/console/inbox?done={'declined' if action == 'decline' else 'answered'}", status_code=303
        )

    async def _act(self, access: Access, session_id: str, act: str, fields: dict[str, str]) -> Response:
        engine = self._engine
        match act:
            case "run":
                # Forms end lines as HTTP does; Python would take no notice, but the code is shown again.
                queued = await engine.submit(access, session_id, fields.get("code", "").replace("\r\n", "\n"))
                return _back(session_id, place=f"#cell-{queued.execution_id}")
            case "interrupt":
                stopped = await engine.interrupt(access, session_id)
                return _back(session_id, "interrupted" if stopped else "")
            case "fork":
                said = fields.get("count", "1")
                if not (said.isascii() and said.isdecimal() and len(said) < 10):
                    raise InvalidArgument(f"count is {said[:64]!r}", hint="Give a whole number")
                forked = await engine.fork(access, session_id, fields.get("at", ""), count=int(said))
                if forked.session_ids:
                    return _back(session_id, "forked-fewer" if forked.unmade else "forked-all")
                return _back(forked.session_id, "forked")
            case "end":
                await engine.end(access, session_id)
                return RedirectResponse("/console?done=ended", status_code=303)
            case "rename-file":
                name, to = fields.get("name", ""), fields.get("to", "").strip()
                await engine.rename_file(access, session_id, name, to)
                return _to_files(session_id, to.rpartition("/")[0], "file-renamed")
            case "delete":
                await engine.delete_file(access, session_id, fields.get("name", ""))
                return _to_files(session_id, fields.get("name", "").rpartition("/")[0], "deleted")
            case "upload":
                raise InvalidArgument("no file was chosen", hint="Choose a file first")
            case _:
                await self._call(access, session_id, act, fields)
                return _back(session_id, act)

    async def _call(self, access: Access, session_id: str, act: str, fields: dict[str, str]) -> None:
        """Have the engine do what the HTTP API does at `sessions/ID/ACT`, with the form's fields in place of a body."""
        path = f"/sessions/{{session_id}}/{act}"
        operation = next((one for one in OPERATIONS if (one.method, one.path, one.media) == ("POST", path, JSON)), None)
        if operation is None:
            raise InvalidArgument(f"there is no act {act[:64]!r}")
        given: dict[str, Any] = {}
        if operation.body is not None:
            known = operation.body.model_fields.items()
            # A field that was left empty is not sent.
            sent = {name: fields.get(name, "") for name, field in known if name in fields or field.is_required()}
            given = dict(read_body(operation.body.model_validate_json, json.dumps(sent).encode()))
        await getattr(self._engine, operation.verb)(access, session_id, **given)


def _to_files(session_id: str, folder: str, done: str) -> Response:
    path = f"&path={quote(folder.strip('/'), safe='/')}" if folder else ""
    return _back(session_id, place=f"/files?done={done}{path}")


def _back(session_id: str, done: str = "", *, place: str = "") -> Response:
    query = f"?done={done}" if done else ""
    return RedirectResponse(f"/console/sessions/{quote(session_id, safe='')}{query}{place}", status_code=303)
