"""What one call of a tool comes to, in both eras and either way: checked, asked about, and in our own words.

Over pipes a call takes the shortcut, and goes on with the SDK only where its server needs more input. Over HTTP it is
the SDK's from the beginning.
"""

from typing import Final

import anyio
from mcp import Client
from mcp.client import ClientRequestContext
from mcp.shared.exceptions import MCPError
from mcp.types import CallToolResult, ErrorData, InputRequest, InputRequiredResult, InputResponses
from pydantic import ValidationError

from belljar.toolbox import answers
from belljar.toolbox.base import Answer, JsonObject
from belljar.toolbox.questions import Call
from belljar.toolbox.repairs import repair_content
from belljar.toolbox.shortcut import Raw, Shortcut

_KIND: Final = "resultType"
_NEEDS_INPUT: Final = "input_required"
_STATE_ONLY_S: Final = 0.05


class Results:
    """Those of one connection."""

    def __init__(self, client: Client, server: str, shortcut: Shortcut | None, *, is_legacy: bool) -> None:
        self._client = client
        self._server = server
        self._shortcut = shortcut
        self._is_legacy = is_legacy

    async def answer(self, tool: str, arguments: JsonObject, call: Call) -> Answer:
        """Call it. Raises what the SDK raises."""
        if self._shortcut is None:
            result = await self._client.call_tool(tool, arguments, progress_callback=call.progress)
            return answers.answer(self._server, result)
        raw = await self._shortcut.call(tool, arguments, call.note)
        try:
            return await self._read(raw, tool, arguments, call)
        except BaseException:
            raw.release()
            raise

    async def _read(self, raw: Raw, tool: str, arguments: JsonObject, call: Call) -> Answer:
        kind = None if self._is_legacy else raw.fields.get(_KIND)
        if kind == _NEEDS_INPUT:
            needed = InputRequiredResult.model_validate(raw.fields, by_name=False)
            raw.release()
            return answers.answer(self._server, await self._with_input(needed, tool, arguments, call))
        if kind not in (None, "complete"):
            raise ValueError("a kind of result that nobody knows")
        if _KIND in raw.fields:
            del raw.fields[_KIND]
        result = _result(raw.fields)
        if not result.is_error:
            await self._client.session.validate_tool_result(tool, result)
        return answers.answer(self._server, result, raw.release)

    async def _with_input(
        self, needed: InputRequiredResult, tool: str, arguments: JsonObject, call: Call
    ) -> CallToolResult:
        """What it needs is asked for all at once; whatever it needs after that is the SDK's to ask for."""
        responses: InputResponses = {}
        refused: list[ErrorData] = []

        async def put(key: str, request: InputRequest) -> None:
            session, meta = self._client.session, request.params.meta if request.params else None
            context = ClientRequestContext(session=session, request_id=key, meta=meta)
            response = await session.dispatch_input_request(context, request)
            if isinstance(response, ErrorData):
                refused.append(response)
                tasks.cancel_scope.cancel()
            else:
                responses[key] = response

        async with anyio.create_task_group() as tasks:
            for key, request in (needed.input_requests or {}).items():
                tasks.start_soon(put, key, request)
        if refused:
            raise MCPError.from_error_data(refused[0])
        if not needed.input_requests:
            await anyio.sleep(_STATE_ONLY_S)  # it only wants to be asked again
        return await self._client.call_tool(
            tool,
            arguments,
            progress_callback=call.progress,
            input_responses=responses or None,
            request_state=needed.request_state,
        )


def _result(fields: JsonObject) -> CallToolResult:
    """What the fields say; a block that cannot be read costs no other."""
    try:
        return CallToolResult.model_validate(fields, by_name=False)
    except ValidationError:
        repair_content(fields)
        return CallToolResult.model_validate(fields, by_name=False)
