"""Serves `POST /run_code` as SandboxFusion does, for trainers that send it rollouts: each runs in a session of its own.

Knows the fields that verl, slime and NeMo-RL send, and Python. Of `compile_timeout` and `memory_limit_MB` it takes no
notice: limits of sessions are the server's settings. Save it in the folder that `plugins_directory` names.
"""

import ast
import asyncio
import base64
import binascii
from contextlib import aclosing
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from belljar.engine.contract import Access, Engine, MapOptions
from belljar.engine.models import Piece
from belljar.errors import BelljarError
from belljar.hooks import hookimpl
from belljar.http.api_operations import problem, request_body
from belljar.http.auth import current_principal
from belljar.runtime import Runtime

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_OUTPUT_CHARS = 1_000_000
AT_ONCE = 64
FAILED = {"status": "SandboxError", "compile_result": None, "run_result": None, "files": {}}
# What a program finds, its traceback and its exit status are those of `python main.py`.
PROGRAM = """
def _main(files, stdin):
    import base64, builtins, io, pathlib, runpy, sys, traceback
    def read(prompt=""):
        print(prompt, end="")
        if not (line := sys.stdin.readline()):
            raise EOFError("EOF when reading a line")
        return line.rstrip("\\n")
    for name, content in files.items():
        path = pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode(errors="replace")))
    builtins.input, sys.argv = read, ["main.py"]
    try:
        runpy.run_path("main.py", run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return int(end.code or 0)
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        return traceback.print_exc() or 1
    return 0
"""


class RunCode(BaseModel):
    """What a trainer sends."""

    code: str
    language: Literal["python"]
    stdin: str | None = None
    run_timeout: float = Field(10, gt=0)
    files: dict[str, str | None] = {}
    fetch_files: list[str] = Field([], max_length=50)


@hookimpl
def http_routes(runtime: Runtime) -> dict[str, Any]:
    """Return what answers trainers."""
    engine, places = runtime.late_engine.get(), asyncio.Semaphore(AT_ONCE)

    async def run_code(request: Request) -> Response:
        try:
            asked = RunCode.model_validate_json(await request_body(request, MAX_BODY_BYTES))
            sent = {name: content for name, content in asked.files.items() if content is not None}
            for content in sent.values():
                base64.b64decode(content, validate=True)
        except (ValidationError, binascii.Error) as error:
            return JSONResponse({"detail": str(error)[:1_000]}, 422)
        except BelljarError as error:
            return problem(error)
        try:
            async with places:
                return JSONResponse(await _run(engine, Access(current_principal(), via="client"), asked, sent))
        except BelljarError as error:
            return JSONResponse(FAILED | {"message": str(error)})

    return {"/run_code": run_code}


async def _run(engine: Engine, access: Access, asked: RunCode, sent: dict[str, str]) -> dict[str, Any]:
    files = sent | {"main.py": base64.b64encode(asked.code.encode(errors="replace")).decode()}
    piece = Piece(code=f"{PROGRAM}_main({files!r}, {asked.stdin or ''!r})")
    options = MapOptions(timeout_s=asked.run_timeout, keeps=bool(asked.fetch_files))
    async with aclosing(engine.map(access, [piece], options=options)) as results:
        result = await anext(results)
    if result.status == "rejected":
        return FAILED | {"message": result.error or ""}
    try:
        events = await engine.excerpt(access, result.execution_id, chars=MAX_OUTPUT_CHARS)
        fetched = {name: await _fetch(engine, access, result.session_id, name) for name in asked.fetch_files}
    finally:
        if result.session_id:
            await engine.end(access, result.session_id)
    said = {kind: "".join(event.text for event in events if event.kind == kind) for kind in ("stdout", "stderr")}
    code = ast.literal_eval(result.result or "1") if result.status == "ok" else None
    end = "Finished" if result.status == "ok" else "TimeLimitExceeded" if result.status == "timeout" else "Error"
    run = {**said, "status": end, "return_code": code, "execution_time": result.usage.wall_s}
    answer = {"status": "Success" if code == 0 else "Failed", "message": "", "compile_result": None}
    return answer | {"run_result": run, "files": fetched}


async def _fetch(engine: Engine, access: Access, session_id: str, name: str) -> str:
    try:
        part = await engine.read_part(access, session_id, name, 0, MAX_BODY_BYTES)
    except BelljarError:
        return ""
    return base64.b64encode(part.content).decode()
