"""An MCP server without the SDK, for what the SDK would never send: run it as a process, with one word of how it errs.

    python plain_server.py asks-for-ever|asks-for-ever-anew|text-ids|no-answer|no-json|gibberish|flood|chatter|odd-lists
    python plain_server.py tells-meta

It has one tool, `do`.
"""

import json
import sys
from typing import Any

MODERN = "2026-07-28"
FORM = {"type": "object", "properties": {"name": {"type": "string"}}}
DO: dict[str, Any] = {"name": "do", "inputSchema": {"type": "object", "properties": {"size": {"type": "integer"}}}}

# Each against the protocol in its own way, but for the last; what it says after the dash is what should become of it.
ODD: list[Any] = [
    {"name": "no-type - completed", "inputSchema": {"properties": {"size": {"type": "integer"}}}},
    {"name": "no-schema - completed"},
    {"name": "odd-extras - bare", "inputSchema": {"type": "object"}, "outputSchema": 3, "annotations": []},
    {"name": 3, "inputSchema": {"type": "object"}},
    {"name": "text - left out", "inputSchema": {"type": "string"}},
    {"name": "odd-properties - left out", "inputSchema": {"type": "object", "properties": [1]}},
    None,
    DO,
]
ODD_BLOCKS: list[Any] = [
    {"type": "text", "text": "before"},
    {"type": "hologram", "data": "?"},
    {"type": "image", "mimeType": "image/png", "data": "not base64!"},
    None,
    {"type": "text"},
    {"type": "text", "text": "after"},
]


def main(kind: str) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("method") == "tools/call":
            called(kind, message)
        elif "id" in message and "method" in message:
            listed(kind, message)


def listed(kind: str, message: dict[str, Any]) -> None:
    info = {"name": "plain", "version": "1"}
    match message["method"]:
        case "server/discover" if kind == "asks-for-ever-anew":
            meta = {"io.modelcontextprotocol/serverInfo": info}
            cached = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
            answer(message, {"supportedVersions": [MODERN], "capabilities": {"tools": {}}, "_meta": meta, **cached})
        case "initialize":
            version = message["params"]["protocolVersion"]
            answer(message, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        case "tools/list":
            more = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"} if kind.endswith("anew") else {}
            answer(message, {"tools": ODD if kind == "odd-lists" else [DO], **more})
        case _:
            say({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "no"}})


def called(kind: str, message: dict[str, Any]) -> None:
    done = {"content": [{"type": "text", "text": "x" * message["params"]["arguments"].get("size", 4)}]}
    question = {"mode": "form", "message": "Again?", "requestedSchema": FORM}
    match kind:
        case "asks-for-ever":
            for number in range(1_000):
                say({"jsonrpc": "2.0", "id": f"q{number}", "method": "elicitation/create", "params": question})
                if "cancelled" in sys.stdin.readline():
                    return
        case "asks-for-ever-anew":
            asked = {"again": {"method": "elicitation/create", "params": question}}
            answer(message, {"resultType": "input_required", "inputRequests": asked})
        case "odd-lists":
            answer(message, {"content": ODD_BLOCKS})
            ODD.append({"name": "later", "inputSchema": {"type": "object"}})
            say({"jsonrpc": "2.0", "method": "notifications/tools/list_changed", "params": ["odd"]})
        case "tells-meta":
            answer(message, {"content": [{"type": "text", "text": json.dumps(message["params"]["_meta"])}]})
        case "text-ids":
            answer({"id": str(message["id"])}, done)
        case "no-answer":
            say({"jsonrpc": "2.0", "id": message["id"], "error": "none"})
        case "no-json":
            write(f'{{"jsonrpc": "2.0", "id": {message["id"]}, "result": {{"content": [nothing]}}}}')
        case "gibberish":
            write("\n".join(["starting up", "", "[1, 2]", "{not json"] * 50))
            answer(message, done)
        case "flood":
            while True:
                write("what?\n" * 10_000)
        case _:
            sys.stderr.write("\n" * 1_000_000 + "x" * 1_000_000 + "\nlast words\n")
            answer(message, done)


def answer(message: dict[str, Any], result: dict[str, Any]) -> None:
    say({"jsonrpc": "2.0", "id": message["id"], "result": result})


def say(message: dict[str, Any]) -> None:
    write(json.dumps(message))


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
