"""Tools called and resources read on a connected server."""

from base64 import b64decode
from typing import Any, cast

from mcp import Client
from mcp.types import BlobResourceContents, CallToolResult, InputRequiredResult, InputResponses, RequestParamsMeta

from belljar.client.answering import Fields, fields_of, mapped_errors
from belljar.errors import EngineError, InvalidArgument


class Calls:
    """What can be asked of a server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(self, tool: str, arguments: dict[str, Any]) -> Fields:
        """The fields of a tool's answer; a refusal is raised."""
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
        """One call, or its continuation with the answers to a question."""
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
        """What stands behind a resource's URI."""
        with mapped_errors():
            answer = await self._client.read_resource(uri)
        content = answer.contents[0]
        return b64decode(content.blob) if isinstance(content, BlobResourceContents) else content.text.encode()


def _check_text(name: str, value: object) -> None:
    """Refuse what no message can hold: the SDK would give up the whole connection over it."""
    for each in cast("list[object]", value) if isinstance(value, list) else [value]:
        try:
            if isinstance(each, str):
                each.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"{name} has a lone surrogate at character {error.start}", hint="Write it as an escape"
            ) from error
