"""Turns what the pool tells of an execution into the events that every kernel reports."""

import json
import re
from collections.abc import Iterator

from pydantic import JsonValue

from belljar.kernels.azure.data_plane import MAX_STREAM_CHARS, PoolExecution
from belljar.kernels.protocol import plain_text
from belljar.outputs.events import DisplayData, Event, ExecuteResult, Raised, Stream

_IMAGES = {"png": "image/png", "jpeg": "image/jpeg", "jpg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]*+={0,2}\s*+")
# IPython's tracebacks begin with a line of dashes, Python's own with these words; a syntax error has neither.
_TRACEBACK = re.compile(r"^(?:-{40,}$|Traceback \(most recent call last\)|  File |  Cell In)", re.MULTILINE)
_LAST_LINE = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?", re.DOTALL)


def output_events(execution: PoolExecution) -> Iterator[Event]:
    """Yield the output of an execution that is over."""
    output = execution.output
    stdout, stderr = (plain_text(output.stdout), plain_text(output.stderr)) if output else ("", "")
    if stdout:
        yield Stream("stdout", stdout)
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        if len(text) >= MAX_STREAM_CHARS:
            yield Stream("stderr", f"[{name} is longer than what the pool sends of it: {len(text):,} characters]\n")
    if execution.is_ok:
        if stderr:
            yield Stream("stderr", stderr)
        if output is not None:
            yield from _result(output.result)
        return
    said, raised = _raised(stderr, execution.error)
    if said:
        yield Stream("stderr", said)
    yield raised


def _result(value: JsonValue) -> Iterator[Event]:
    match value:
        case None | "":  # "" is how pools say that there is no value
            return
        case {"type": "image", "format": str(form), "base64_data": str(data)}:
            kind = _IMAGES.get(form.lower())
            if kind and _BASE64.fullmatch(data):
                yield DisplayData({kind: data})
            else:
                yield ExecuteResult({"text/plain": f"<an image of the form {form[:20]!r}>"})
        case str():
            # Text stands for a string as well as for the printed form of any other value; the pool does not say which.
            yield ExecuteResult({"text/plain": plain_text(value)})
        case _:
            yield ExecuteResult({"text/plain": repr(value)})


def _raised(stderr: str, error: JsonValue) -> tuple[str, Raised]:
    """Return what the cell wrote to stderr, and the exception that the text after it or the pool's error tells of."""
    code, message = _pool_error(error)
    found = _TRACEBACK.search(stderr)
    lines = stderr[found.start() :].rstrip("\n").splitlines() if found else []
    last = next((line for line in reversed(lines) if line.strip()), "")
    if not found:
        # No traceback: the whole text may be one line like "NameError: name 'x' is not defined".
        last = stderr.strip().rpartition("\n")[2]
        lines = [last] if last else []
    named = _LAST_LINE.fullmatch(last.strip())
    if named is not None and (named["message"] is not None or found):
        said = stderr[: found.start()] if found else stderr[: stderr.rindex(last)]
        return said, Raised(named["name"].rpartition(".")[2], named["message"] or "", lines)
    return stderr, Raised(code or "ExecutionFailed", message or last.strip() or "the pool says no more", lines)


def _pool_error(error: JsonValue) -> tuple[str, str]:
    match error:
        case {"error": {"code": str(code), "message": str(message)}} | {"code": str(code), "message": str(message)}:
            return re.sub(r"\W", "", code)[:100], plain_text(message)[:2_000]
        case None:
            return "", ""
        case _:
            return "", json.dumps(error)[:2_000]
