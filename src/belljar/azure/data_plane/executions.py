"""Executions of the data plane: code and shell commands, waited for or polled, once for each operation id.

Both REST and MCP of this surface run code through `Executions`, so that both give the same results.
"""

import base64
import binascii
import hashlib
import re
import shlex
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from belljar.azure.data_plane.calls import Call, number, text, word
from belljar.azure.data_plane.cell_values import value_of
from belljar.azure.data_plane.problems import Problem, envelope, invalid, json_response
from belljar.errors import ExecutionNotFound, InvalidArgument
from belljar.executions.cell import make_cell
from belljar.executions.execution import Execution
from belljar.journal.journal import KILLED
from belljar.mcp.execution_wait import stopping_when_left
from belljar.models import ExecutionResult
from belljar.outputs.spoofed_notices import disarmed
from belljar.privacy.signed_urls import without_signatures
from belljar.runtime import Runtime
from belljar.sessions.history import OutputStreams
from belljar.settings.environments import KERNEL_PREFIX

DEFAULT_TIMEOUT_S: Final = 60.0
OLD_TIMEOUT_S: Final = 100.0
MAX_STREAM_CHARS: Final = 8_000_000
MAX_OPERATIONS: Final = 10_000
INPUT_TYPES: Final = {name.lower(): name for name in ("Inline", "InlineBase64", "InlineText")}
EXECUTION_TYPES: Final = {name.lower(): name for name in ("Synchronous", "Asynchronous")}
_OPERATION: Final = re.compile(r"[\x21-\x7e]{1,128}")
_COMMAND: Final = "get_ipython().run_command("
"""How the cell of a shell command begins: see `ZMQShell.run_command` in the runner."""
_STATUSES: Final = {
    "ok": "Succeeded",
    "error": "Failed",
    "timeout": "Failed",
    "out_of_memory": "Failed",
    "died": "Failed",
    "rejected": "Failed",
    "interrupted": "Canceled",
}
_ERROR_CODES: Final = {
    "error": "CodeRaised",
    "timeout": "ExecutionTimeout",
    "out_of_memory": "OutOfMemory",
    "died": "SessionDied",
    "rejected": "CodeRejected",
    "interrupted": "ExecutionCanceled",
}
# The exit statuses that shells give to commands that never ended by themselves.
_EXIT_STATUSES: Final = {"rejected": 126, "timeout": 124, "interrupted": 130, "out_of_memory": 137, "died": 137}


@dataclass(frozen=True, slots=True)
class Order:
    """What a caller wants run under an identifier."""

    identifier: str
    code: str
    timeout_s: float
    operation_id: str = ""
    stream_chars: int = 0
    """The longest that stdout and stderr may be; 0 for the setting."""


@dataclass(frozen=True, slots=True)
class Report:
    """An execution as both dialects of the surface tell it."""

    id: str
    identifier: str
    code: str
    result: ExecutionResult
    streams: OutputStreams
    has_started: bool = True

    @property
    def is_shell(self) -> bool:
        """Return whether it ran a shell command."""
        return self.code.startswith(_COMMAND)

    @property
    def status(self) -> str:
        """Return its status as the data plane words it."""
        if self.result.status == "running":
            return "Running" if self.has_started else "NotStarted"
        return _STATUSES[self.result.status]

    @property
    def milliseconds(self) -> int:
        """Return how long it took."""
        return round(self.result.usage.wall_s * 1000)

    @property
    def stdout(self) -> str:
        """Return stdout; text in it that looks like a notice of belljar's is marked."""
        return disarmed(self.streams.stdout)

    @property
    def stderr(self) -> str:
        """Return stderr with what else there is to know: what was lost before it ran, and how it failed."""
        # The traceback of a shell command that was stopped would show how belljar runs commands.
        failure = "" if self.is_shell else "\n".join(self.result.traceback)
        error = self.result.error or ""
        if error and not self.is_running and error not in failure and error not in self.streams.stderr:
            failure = "\n".join(filter(None, [failure, error]))
        return f"{self.streams.notices}{disarmed(f'{self.streams.stderr}{failure}')}"

    @property
    def is_running(self) -> bool:
        """Return whether it has not ended yet."""
        return self.result.status == "running"

    @property
    def exit_status(self) -> int:
        """Return the exit status of a shell command."""
        printed = self.result.result or ""
        if printed.isascii() and printed.lstrip("-").isdigit() and len(printed) < 12:
            return int(printed)
        return _EXIT_STATUSES.get(self.result.status, 1)


class Executions:
    """Runs code under identifiers, over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._settings = runtime.settings
        self._sessions = runtime.sessions
        self._identified = runtime.identified
        self._waited_for: OrderedDict[str, None] = OrderedDict()
        """The latest executions that somebody waited for; the others were started to be polled."""
        self._stream_chars: OrderedDict[str, int] = OrderedDict()
        """The limit on the streams that an execution was started with, if that is not the setting's."""

    # What both dialects need

    async def submit(self, order: Order, principal: str) -> tuple[Execution | None, str]:
        """Start an execution, or find the one with this operation id; None and its id if only the journal has it."""
        cell = make_cell(self._settings, order.code, timeout_s=order.timeout_s)
        session = await self._identified.reach(order.identifier, principal)
        if order.code.startswith(_COMMAND) and session.environment.startswith(KERNEL_PREFIX):
            raise InvalidArgument(
                f"shell commands need belljar's own kernel, and sessions here have {session.environment}",
                hint="Run the command by code of that kernel's language",
            )
        key = _key(order.identifier, order.operation_id) if order.operation_id else ""
        # Nothing is awaited from here on, so that two requests with one operation id cannot both start something.
        if key and (known := self._sessions.journal.find_key(principal, key)):
            record = self._sessions.journal.find(known)
            if record is not None and record.code != without_signatures(cell.code):
                raise Problem(
                    409,
                    "OperationIdConflict",
                    "This operation-id was used with other code before. Use a new one for each execution",
                    target="operation-id",
                )
            return self._sessions.executions.find(known, principal), known
        execution = session.submit(cell, key)
        if order.stream_chars:
            _remember(self._stream_chars, execution.id, order.stream_chars)
        return execution, execution.id

    async def report(self, execution_id: str, order: Order, principal: str) -> Report:
        """Return what there is to tell of an execution."""
        execution = self._sessions.executions.find(execution_id, principal)
        result = self._sessions.executions.result(execution_id, principal)
        limit = self._stream_chars.get(execution_id, order.stream_chars)
        streams = await self._sessions.executions.streams(execution_id, principal, limit)
        shown_id = order.operation_id or execution_id
        has_started = execution is None or execution.has_started
        return Report(shown_id, order.identifier, order.code, result, streams, has_started)

    async def run(self, order: Order, principal: str, request: Request | None = None) -> Report:
        """Start an execution and wait for its end, also if the caller does not."""
        execution, execution_id = await self.submit(order, principal)
        _remember(self._waited_for, execution_id, None)
        if execution is not None:
            async with stopping_when_left(request, self._settings.interrupt_on, execution.interrupt):
                while not execution.is_finished:
                    await execution.wait(3_600)
        return await self.report(execution_id, order, principal)

    def value(self, report: Report, *, is_old: bool = False) -> Any:
        """Return the value of the execution's last expression."""
        return value_of(
            report.result, self._sessions.executions.display_reader(report.result.session_id), is_old=is_old
        )

    # Routes

    async def create(self, call: Call) -> Response:
        """Answer `POST /executions`."""
        identifier = call.identifier
        fields = await call.body(self.body_limit)
        order = self._order(call, identifier, fields)
        execution_type = word(fields, "executionType", "Synchronous", EXECUTION_TYPES)
        if execution_type == "Synchronous" or is_command(fields):
            report = await self.run(order, call.principal, call.request)
        else:
            _, execution_id = await self.submit(order, call.principal)
            self._sessions.journal.commit()
            report = await self.report(execution_id, order, call.principal)
        return self._answer(call, report, execution_type)

    async def show(self, call: Call, operation_id: str) -> Response:
        """Answer `GET /executions/{id}`."""
        identifier = call.identifier
        execution_id = self._find(identifier, operation_id, call.principal)
        record = self._sessions.journal.find(execution_id)
        code = record.code if record is not None else ""
        order = Order(identifier, code, 1, operation_id)
        report = await self.report(execution_id, order, call.principal)
        return self._answer(call, report, "Synchronous" if execution_id in self._waited_for else "Asynchronous")

    @property
    def body_limit(self) -> int:
        """Return the largest body: code with every character escaped, and what stands around it."""
        return 6 * self._settings.max_code_bytes + 65_536

    def _order(self, call: Call, identifier: str, fields: dict[str, Any]) -> Order:
        timeout_s = number(fields, "timeoutInSeconds") or DEFAULT_TIMEOUT_S
        most = number(fields, "outputStreamsMaxLength")
        stream_chars = min(int(most or 0), MAX_STREAM_CHARS)
        code = command_cell(text(fields, "shellCommand")) if is_command(fields) else code_of(fields)
        return Order(identifier, code, timeout_s, _operation_id(call), stream_chars)

    def _find(self, identifier: str, operation_id: str, principal: str) -> str:
        """Return the id of the caller's execution under this identifier."""
        missing = ExecutionNotFound("there is no such execution under this identifier")
        if not _OPERATION.fullmatch(operation_id):
            raise missing
        known = self._sessions.journal.find_key(principal, _key(identifier, operation_id))
        if known is not None:
            return known
        record = self._sessions.journal.find(operation_id)
        if record is None or record.principal != principal:
            raise missing
        if record.session_id != self._identified.known(identifier, principal).id:
            raise missing
        return record.id

    def _answer(self, call: Call, report: Report, execution_type: str) -> Response:
        headers = {
            "operation-id": report.id,
            "Operation-Location": call.url(f"executions/{report.id}", identifier=report.identifier),
        }
        return json_response(self._fields(report, execution_type), headers=headers)

    def _fields(self, report: Report, execution_type: str) -> dict[str, Any]:
        result: dict[str, Any] = {"stdout": report.stdout, "stderr": report.stderr}
        fields: dict[str, Any] = {"id": report.id, "identifier": report.identifier}
        if report.is_shell:
            status = report.status if report.is_running else str(report.exit_status)
            result["executionTimeInMilliseconds"] = report.milliseconds
            return {**fields, "status": status, "result": result}
        fields |= {"executionType": execution_type, "status": report.status}
        if not report.is_running and not report.result.success:
            message = report.result.error or report.result.cause or report.result.status
            fields["error"] = envelope(_error_code(report.result), message)
        result["executionResult"] = self.value(report)
        result["executionTimeInMilliseconds"] = report.milliseconds
        return {**fields, "result": result}


def _error_code(result: ExecutionResult) -> str:
    """Return the code of a failure. What a killed server left in its queue was refused by nobody."""
    is_left_over = result.status == "rejected" and KILLED in str(result.cause)
    return "ExecutionNotStarted" if is_left_over else _ERROR_CODES[result.status]


def is_command(fields: dict[str, Any]) -> bool:
    """Return whether a body asks for a shell command."""
    return fields.get("shellCommand") is not None and fields.get("code") is None


def command_cell(command: str) -> str:
    """Return the cell that runs a shell command; its value is the exit status."""
    return f"{_COMMAND}{command!r})"


def exec_cell(arguments: list[str]) -> str:
    """Return the cell that runs a program with arguments that no shell takes apart."""
    return command_cell(shlex.join(arguments))


def code_of(fields: dict[str, Any], *, within: str = "") -> str:
    """Return the code that a body brings, decoded."""
    kind = word(fields, "codeInputType", "Inline", INPUT_TYPES, within=within)
    code = text(fields, "code", within=within)
    if kind != "InlineBase64":
        return code
    try:
        return base64.b64decode("".join(code.split()), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        reason = "no UTF-8" if isinstance(error, UnicodeDecodeError) else "no base64"
        raise invalid(f"code of {len(code):,} characters is {reason}", f"{within}code") from None


def _operation_id(call: Call) -> str:
    operation_id = call.request.headers.get("operation-id", "")
    if operation_id and not _OPERATION.fullmatch(operation_id):
        raise invalid("operation-id has to be 1 to 128 visible characters of ASCII, like a UUID", "operation-id")
    return operation_id


def _key(identifier: str, operation_id: str) -> str:
    """Return the idempotency key of an operation. It holds a hash of the identifier, which is sensitive."""
    return f"foundry:{hashlib.sha256(identifier.encode()).hexdigest()[:32]}:{operation_id}"


def _remember(known: "OrderedDict[str, Any]", execution_id: str, value: Any) -> None:
    known[execution_id] = value
    while len(known) > MAX_OPERATIONS:
        known.popitem(last=False)
