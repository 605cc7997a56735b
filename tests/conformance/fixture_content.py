"""Fixtures that return something at once: content of every type, resources, prompts, completions."""

import json
from base64 import b64decode
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.prompts.base import UserMessage
from mcp.types import (
    AudioContent,
    CallToolResult,
    Completion,
    CompletionArgument,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)
from pydantic import WithJsonSchema

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
WAV = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQAAAAA="


def add_content(server: MCPServer[Any]) -> None:
    for tool in (
        test_simple_text,
        test_image_content,
        test_audio_content,
        test_embedded_resource,
        test_multiple_content_types,
        test_error_handling,
        test_custom_headers,
    ):
        server.add_tool(tool, structured_output=False)
    _add_resources(server)
    _add_prompts(server)
    server.completion()(_complete)


# Tools


async def test_simple_text() -> CallToolResult:
    """Text."""
    return _answer(_text("This is a simple text response for testing."))


async def test_image_content() -> CallToolResult:
    """An image."""
    return _answer(_image())


async def test_audio_content() -> CallToolResult:
    """A sound."""
    return _answer(AudioContent(type="audio", data=WAV, mime_type="audio/wav"))


async def test_embedded_resource() -> CallToolResult:
    """A resource."""
    return _answer(_resource("test://embedded-resource", "text/plain", "This is an embedded resource content."))


async def test_multiple_content_types() -> CallToolResult:
    """Text, an image and a resource."""
    data = json.dumps({"test": "data", "value": 123})
    return _answer(
        _text("Multiple content types test:"),
        _image(),
        _resource("test://mixed-content-resource", "application/json", data),
    )


async def test_error_handling() -> CallToolResult:
    """An error."""
    raise ValueError("This tool intentionally returns an error for testing")


async def test_custom_headers(
    region: Annotated[str, WithJsonSchema({"type": "string", "x-mcp-header": "Region"})],
) -> CallToolResult:
    """Takes an argument that clients repeat in a header."""
    return _answer(_text(f"region={region}"))


# Resources


def _add_resources(server: MCPServer[Any]) -> None:
    server.resource("test://static-text", name="static-text", description="Text", mime_type="text/plain")(_static_text)
    server.resource("test://static-binary", name="static-binary", description="An image", mime_type="image/png")(
        _static_binary
    )
    server.resource("test://watched-resource", name="watched", description="Text", mime_type="text/plain")(_watched)
    server.resource(
        "test://template/{identifier}/data", name="template", description="By id", mime_type="application/json"
    )(_by_identifier)


def _static_text() -> str:
    return "This is the content of the static text resource."


def _static_binary() -> bytes:
    return b64decode(PNG)


def _watched() -> str:
    return "Watched."


def _by_identifier(identifier: str) -> str:
    return json.dumps({"id": identifier, "templateTest": True, "data": f"Data for ID: {identifier}"})


# Prompts


def _add_prompts(server: MCPServer[Any]) -> None:
    for name, prompt in (
        ("test_simple_prompt", _simple_prompt),
        ("test_prompt_with_arguments", _prompt_with_arguments),
        ("test_prompt_with_embedded_resource", _prompt_with_resource),
        ("test_prompt_with_image", _prompt_with_image),
    ):
        server.prompt(name=name, description="For a scenario")(prompt)


def _simple_prompt() -> list[UserMessage]:
    return _prompted(_text("This is a simple prompt for testing."))


def _prompt_with_arguments(arg1: str, arg2: str) -> list[UserMessage]:
    return _prompted(_text(f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"))


def _prompt_with_resource(resourceUri: str) -> list[UserMessage]:
    return _prompted(
        _resource(resourceUri, "text/plain", "Embedded resource content for testing."),
        _text("Please process the embedded resource above."),
    )


def _prompt_with_image() -> list[UserMessage]:
    return _prompted(_image(), _text("Please analyze the image above."))


async def _complete(reference: Any, argument: CompletionArgument, context: Any) -> Completion:
    places = ["paris", "park", "party"]
    return Completion(values=[place for place in places if place.startswith(argument.value)], has_more=False)


# Blocks


def _answer(*content: Any) -> CallToolResult:
    return CallToolResult(content=[*content])


def _prompted(*content: Any) -> list[UserMessage]:
    return [UserMessage(content=block) for block in content]


def _text(text: str) -> TextContent:
    return TextContent(type="text", text=text)


def _image() -> ImageContent:
    return ImageContent(type="image", data=PNG, mime_type="image/png")


def _resource(uri: str, mime_type: str, text: str) -> EmbeddedResource:
    return EmbeddedResource(type="resource", resource=TextResourceContents(uri=uri, mime_type=mime_type, text=text))
