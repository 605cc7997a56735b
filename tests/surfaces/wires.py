"""`belljar serve` over its bare pipes: lines in, lines out, for what no client library would send."""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from belljar.environments import Environment
from serving_process import COLD, serve_command, variables
from warm_processes import heed_hangups

HELLO: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": "hello",
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "0"}},
}


def tool_call(request_id: object, tool: str, **arguments: Any) -> dict[str, Any]:
    params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": str(request_id)}}
    return {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}


class Wire:
    """One server process and its pipes."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.stdin, self.stdout = process.stdin, process.stdout

    def send(self, *messages: dict[str, Any] | bytes) -> None:
        for message in messages:
            self.stdin.write((message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n")
        self.stdin.flush()

    def receive(self) -> dict[str, Any]:
        line = self.stdout.readline()
        assert line, "the server ended"
        return json.loads(line)

    def answer_to(self, request_id: object) -> dict[str, Any]:
        while (answer := self.receive()).get("id", self) != request_id or "method" in answer:
            pass
        return answer

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.send(message)
        return self.answer_to(message["id"])

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer of a tool."""
        return self.ask(tool_call(tool, tool, **arguments))["result"]["structuredContent"]


@contextmanager
def opened_wire(environment: Environment | None, folder: Path, **chosen: str) -> Generator[Wire]:
    """A server that has shaken hands; what it says beside its answers is in `stderr.txt`.

    Without an environment it makes the default one.
    """
    command = serve_command(environment) if environment is not None else [sys.executable, "-m", "belljar", "serve"]
    with (
        (folder / "stderr.txt").open("ab") as said,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**variables(folder), **COLD, **chosen},
            preexec_fn=heed_hangups,
        ) as process,
    ):
        wire = Wire(process)
        try:
            wire.ask(HELLO)
            wire.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
            yield wire
        finally:
            process.kill()
