"""What a person does in a session with forms of its page: run a cell, interrupt, fork, rewind, upload, end.

Every action goes through `Engine` under the person's name. Works without scripts: each form posts and comes back.
"""

from typing import Final
from urllib.parse import quote

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from belljar.console.forms import MAX_FIELDS, sent_values
from belljar.engine.contract import Access, Engine
from belljar.errors import InvalidArgument, TooLarge

_MAX_CODE_FORM_BYTES: Final = 4 * 1024 * 1024
_FORM_BYTES: Final = 64 * 1024
_ANSWER_BYTES: Final = 1024 * 1024


class SessionActions:
    """The forms of a session's page."""

    def __init__(self, engine: Engine, *, max_upload_bytes: int) -> None:
        self._engine = engine
        self._max_upload_bytes = max_upload_bytes

    async def serve(self, request: Request) -> Response:
        """Answer `POST /console/sessions/ID/ACT`."""
        access: Access = request.state.access
        session_id, act = str(request.path_params["session_id"]), str(request.path_params["act"])
        length = request.headers.get("content-length", "")
        most = self._max_upload_bytes + _FORM_BYTES if act == "upload" else _MAX_CODE_FORM_BYTES
        if not length.isdecimal() or int(length) > most:
            raise TooLarge(f"the form has more than {most:,} bytes")
        async with request.form(max_files=1, max_fields=5, max_part_size=_MAX_CODE_FORM_BYTES) as form:
            fields = {name: value for name, value in form.items() if isinstance(value, str)}
            file = form.get("file")
            if act == "upload" and isinstance(file, UploadFile):
                name = fields.get("name", "").strip() or (file.filename or "").replace("\\", "/").rpartition("/")[2]
                folder = fields.get("folder")
                path = f"{folder.strip('/')}/{name}" if folder else name
                await self._engine.write_file(access, session_id, path, await file.read())
                return _back(session_id) if folder is None else _to_files(session_id, folder)
        return await self._act(access, session_id, act, fields)

    async def create(self, request: Request) -> Response:
        """Answer `POST /console/sessions/new`: open a session of the person's own."""
        access: Access = request.state.access
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > _FORM_BYTES:
            raise TooLarge(f"the form has more than {_FORM_BYTES:,} bytes")
        async with request.form(max_files=0, max_fields=5) as form:
            made = await self._engine.create(access, reason=str(form.get("reason", "")).strip()[:200])
        return _back(made.session_id)

    async def answer(self, request: Request) -> Response:
        """Answer `POST /console/inbox/ID`: pass a person's answer on. Its values are not kept."""
        access: Access = request.state.access
        question_id = str(request.path_params["question_id"])
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > _ANSWER_BYTES:
            raise TooLarge(f"the answer has more than {_ANSWER_BYTES:,} bytes")
        async with request.form(max_files=0, max_fields=2 * MAX_FIELDS) as form:
            sent = {name: value for name, value in form.items() if isinstance(value, str)}
        asked = next((one for one in await self._engine.questions(access) if one.id == question_id), None)
        action = "decline" if sent.get("action") == "decline" else "accept"
        values = sent_values(asked.fields, sent) if asked is not None and action == "accept" else {}
        await self._engine.answer(access, question_id, action, values)
        return RedirectResponse("/console/inbox", status_code=303)

    async def _act(self, access: Access, session_id: str, act: str, fields: dict[str, str]) -> Response:
        engine = self._engine
        match act:
            case "run":
                # Forms end lines as HTTP does; Python would take no notice, but the code is shown again.
                execution_id = await engine.run_cell(access, session_id, fields.get("code", "").replace("\r\n", "\n"))
                return _back(session_id, f"#cell-{execution_id}")
            case "interrupt":
                await engine.interrupt(access, session_id)
            case "fork":
                forked = await engine.fork(access, session_id, fields.get("at", ""))
                return _back(forked.session_id)
            case "rewind":
                await engine.rewind(access, session_id, fields.get("to", ""))
            case "end":
                await engine.end(access, session_id)
                return RedirectResponse("/console", status_code=303)
            case "delete":
                await engine.delete_file(access, session_id, fields.get("name", ""))
                return _to_files(session_id, fields.get("name", "").rpartition("/")[0])
            case "upload":
                raise InvalidArgument("no file was chosen", hint="Choose a file first")
            case _:
                raise InvalidArgument(f"there is no act {act[:64]!r}")
        return _back(session_id)


def _to_files(session_id: str, folder: str) -> Response:
    return _back(session_id, f"/files?path={quote(folder.strip('/'), safe='/')}" if folder else "/files")


def _back(session_id: str, place: str = "") -> Response:
    return RedirectResponse(f"/console/sessions/{quote(session_id, safe='')}{place}", status_code=303)
