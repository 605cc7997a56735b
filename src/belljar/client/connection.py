"""Calls tools and reads resources on a connected server, and turns its answers into fields, questions and errors.

Does not know what the tools do.
"""

import contextlib
from base64 import b64decode
from collections.abc import Generator
from typing import Any, cast

from mcp import Client, MCPError
from mcp.types import (
    INVALID_PARAMS,
    BlobResourceContents,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequiredResult,
    InputResponses,
    RequestParamsMeta,
    TextContent,
)
from pydantic import ValidationError

from belljar.errors import BelljarError, EngineError, InvalidArgument, named_error
from belljar.models import ExecutionResult
from belljar.questions.schema import typed_prompt, values_of

Fields = dict[str, Any]

_REFUSAL = frozenset({"success", "error", "hint"})


def result_of(fields: Fields) -> ExecutionResult:
    """Return the result in the fields of an answer, without the events that came with it."""
    return ExecutionResult.model_validate({name: value for name, value in fields.items() if name != "events"})


def fields_of(answer: CallToolResult) -> Fields:
    """Return the structured content of an answer; a refusal is raised as the error that it names."""
    fields = answer.structured_content
    if isinstance(fields, dict) and not _is_refusal(answer, cast("Fields", fields)):
        return cast("Fields", fields)
    if isinstance(fields, dict):
        refusal = cast("Fields", fields)
        raise named_error(str(refusal.get("error")), str(refusal.get("hint") or ""))
    text = "\n".join(block.text for block in answer.content if isinstance(block, TextContent))
    if " validation error" in text:
        raise InvalidArgument(text)
    raise named_error(text.removeprefix("Error: "))


def _is_refusal(answer: CallToolResult, fields: Fields) -> bool:
    """Return whether an answer says only why there is none; a cell that failed has a result all the same."""
    return _REFUSAL.issuperset(fields) or (answer.is_error and bool(fields.get("error")) and "status" not in fields)


def prompt_of(question: InputRequiredResult) -> str:
    """Return what the server asks, for a person to read."""
    requests = [each for each in (question.input_requests or {}).values() if isinstance(each, ElicitRequest)]
    return "\n".join(typed_prompt(each.params.message, _schema(each)) for each in requests)


def answers_to(question: InputRequiredResult, text: str | None) -> InputResponses:
    """Return the answer to all that the server asks; None declines."""
    answers = {key: values_of(_schema(each), text) for key, each in (question.input_requests or {}).items()}
    return {
        key: ElicitResult(action="decline" if values is None else "accept", content=values)
        for key, values in answers.items()
    }


def _schema(request: object) -> dict[str, Any]:
    params = request.params if isinstance(request, ElicitRequest) else None
    return params.requested_schema if isinstance(params, ElicitRequestFormParams) else {}


@contextlib.contextmanager
def mapped_errors() -> Generator[None]:
    """Raise the SDK's errors as ours."""
    try:
        yield
    except MCPError as error:
        raise as_belljar_error(error) from error
    except ValidationError as error:
        raise EngineError(f"the server's answer has not the form of MCP: {error.errors()[0]['msg']}") from error


def as_belljar_error(error: MCPError) -> BelljarError:
    """Return an error of the SDK as ours; the server puts the code of our error in front of the message."""
    data: object = error.data
    hint = str(cast("Fields", data).get("hint", "")) if isinstance(data, dict) else ""
    named = named_error(error.message, hint)
    is_refusal = error.code == INVALID_PARAMS and type(named) is EngineError
    return InvalidArgument(error.message, hint=hint) if is_refusal else named


class ServerCalls:
    """Calls tools and reads resources over one connection."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(self, tool: str, arguments: dict[str, Any]) -> Fields:
        """Call a tool and return the fields of its answer; a refusal is raised."""
        answer = await self.send(tool, arguments)
        if isinstance(answer, InputRequiredResult):
            raise EngineError(f"the server asked a question in answer to {tool}")
        return fields_of(answer)

    async def send(
        self,
        tool: str,
        arguments: dict[str, Any],
        question: InputRequiredResult | None = None,
        answers: InputResponses | None = None,
        *,
        wants_events: bool = False,
    ) -> CallToolResult | InputRequiredResult:
        """Send a call, or its continuation with the answers to a question."""
        for name, value in arguments.items():
            _check_text(name, value)
        meta: Fields = {"belljar/structured": "always", **({"belljar/events": True} if wants_events else {})}
        with mapped_errors():
            return await self._client.session.call_tool(
                tool,
                arguments,
                meta=cast("RequestParamsMeta", meta),
                input_responses=answers,
                request_state=question.request_state if question else None,
                allow_input_required=True,
            )

    async def read(self, uri: str) -> bytes:
        """Return the content of a resource."""
        with mapped_errors():
            answer = await self._client.read_resource(uri)
        content = answer.contents[0]
        return b64decode(content.blob) if isinstance(content, BlobResourceContents) else content.text.encode()


def _check_text(name: str, value: object) -> None:
    """Refuse text that no message can hold, because the SDK would end the whole connection over it."""
    for each in cast("list[object]", value) if isinstance(value, list) else [value]:
        try:
            if isinstance(each, str):
                each.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"{name} has a lone surrogate at character {error.start}", hint="Write it as an escape"
            ) from error
