"""A stand-in for Azure OpenAI on loopback: its wire format, and a model that follows a script.

It checks what a client sends as the service does: path, version, key, and that each tool call is answered.
"""

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Turn = Callable[[list[dict[str, Any]], list[str]], Any]
"""Gets the messages and the names of the tools; returns a tool call as (name, arguments), or the answer as text."""


class ScriptedModel:
    """What was asked for, and how to answer it."""

    def __init__(self, script: list[Turn]) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str] = []
        self.url = ""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the message of the next turn."""
        calls = [call["id"] for message in request["messages"] for call in message.get("tool_calls") or ()]
        answered = [message["tool_call_id"] for message in request["messages"] if message["role"] == "tool"]
        assert calls == answered, "a tool call was not answered"
        # The last turn is taken again, for models that decide by what they read.
        turn = self.script[min(len(self.requests), len(self.script)) - 1]
        said = turn(request["messages"], [tool["function"]["name"] for tool in request["tools"]])
        if isinstance(said, str):
            return {"role": "assistant", "content": said}
        name, arguments = said
        function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"call_{len(self.requests)}", "type": "function", "function": function}],
        }


class _Handler(BaseHTTPRequestHandler):
    model: ScriptedModel

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        place = urlsplit(self.path)
        self.model.paths.append(f"{place.path}?{parse_qs(place.query)['api-version'][0]}")
        self.model.keys.append(self.headers["api-key"])
        self.model.requests.append(request)
        message = self.model.answer(request)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": request.get("model", ""),
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def scripted_model(*script: Turn) -> Generator[ScriptedModel]:
    model = ScriptedModel([*script])
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"model": model}))
    model.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
