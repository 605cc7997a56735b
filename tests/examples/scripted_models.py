"""Models that follow a script, in each framework's own form: run in that framework's environment, not in ours.

The script: compute something, compute with its variable in the same session, say what came of it.
"""

import asyncio
import importlib
import json
import re
import sys
from typing import Any

FIRST = {"code": "total = sum(range(10))\nprint(total)"}


def next_step(results: list[str]) -> dict[str, Any] | str:
    """The arguments of the next call of execute_code, or the final answer."""
    if not results:
        return FIRST
    # Told once, by the call that made it.
    found = re.search(r"session_id\W+([a-z]{17})", results[0])
    assert found, f"no session in {results[0]!r}"
    if len(results) == 1:
        return {"code": "total * 2", "session_id": found[1]}
    return f"The tool said: {results[-1]}"


def with_openai_agents() -> Any:
    from agents import Model, ModelResponse, Usage
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

    class Scripted(Model):
        async def get_response(self, system_instructions: Any, input: Any, *_: Any, **__: Any) -> ModelResponse:  # noqa: A002
            items = [] if isinstance(input, str) else input
            results = [str(item["output"]) for item in items if item.get("type") == "function_call_output"]
            step = next_step(results)
            if isinstance(step, str):
                text = ResponseOutputText(text=step, type="output_text", annotations=[])
                message = ResponseOutputMessage(
                    id="m", content=[text], role="assistant", status="completed", type="message"
                )
                return ModelResponse(output=[message], usage=Usage(), response_id=None)
            call = ResponseFunctionToolCall(
                arguments=json.dumps(step), call_id=f"c{len(results)}", name="execute_code", type="function_call"
            )
            return ModelResponse(output=[call], usage=Usage(), response_id=None)

        def stream_response(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    return Scripted()


def with_langchain() -> Any:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, ToolMessage
    from langchain_core.outputs import ChatGeneration, ChatResult

    class Scripted(BaseChatModel):
        @property
        def _llm_type(self) -> str:
            return "scripted"

        def bind_tools(self, tools: Any, **_: Any) -> "Scripted":
            assert "execute_code" in [tool.name for tool in tools]
            return self

        def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
            results = [message.text for message in messages if isinstance(message, ToolMessage)]
            step = next_step(results)
            message = (
                AIMessage(step)
                if isinstance(step, str)
                else AIMessage("", tool_calls=[{"name": "execute_code", "args": step, "id": f"c{len(results)}"}])
            )
            return ChatResult(generations=[ChatGeneration(message=message)])

    return Scripted()


def with_pydantic_ai() -> Any:
    from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
    from pydantic_ai.models.function import FunctionModel

    def respond(messages: Any, info: Any) -> ModelResponse:
        assert "execute_code" in [tool.name for tool in info.function_tools]
        parts = [part for message in messages if isinstance(message, ModelRequest) for part in message.parts]
        results = [part.model_response_str() for part in parts if isinstance(part, ToolReturnPart)]
        step = next_step(results)
        return ModelResponse([TextPart(step) if isinstance(step, str) else ToolCallPart("execute_code", step)])

    return FunctionModel(respond)


def with_agent_framework() -> Any:
    from agent_framework import BaseChatClient, ChatResponse, Content, FunctionInvocationLayer, Message

    class Scripted(FunctionInvocationLayer, BaseChatClient):
        def _inner_get_response(self, *, messages: Any, stream: bool, options: Any, **_: Any) -> Any:
            async def respond() -> ChatResponse:
                contents = [content for message in messages for content in message.contents]
                results = [str(content.result) for content in contents if content.type == "function_result"]
                step = next_step(results)
                content = (
                    Content.from_text(step)
                    if isinstance(step, str)
                    else Content.from_function_call(f"c{len(results)}", "execute_code", arguments=step)
                )
                return ChatResponse(messages=[Message("assistant", [content])])

            return respond()

    return Scripted()


if __name__ == "__main__":
    example = importlib.import_module(sys.argv[1])
    print(asyncio.run(example.answer("What is twice the sum?", globals()[sys.argv[1]]())))
