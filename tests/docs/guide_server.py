"""The MCP servers that the guides call, without the SDK, because that takes seconds to start: run it with a name.

python guide_server.py files|crm|mail
"""

import json
import sys
from typing import Any

TEXT = {"type": "string"}
FILES = {"notes.md": "# Notes", "todo.md": "- nothing"}
PEOPLE = [
    {"email": "ada@example.com", "full_name": "Ada Lovelace", "city": "Rome"},
    {"email": "bob@example.com", "full_name": "Bob Dobbs", "city": "Rome"},
]


def tool(name: str, text: str, result: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": arguments, "required": [*arguments]}
    shape = {"outputSchema": {"type": "object", "properties": result, "required": [*result]}} if result else {}
    return {"name": name, "description": text, "inputSchema": schema, **shape}


TOOLS = {
    "files": [
        tool("read_text_file", "Read a file as text.", {"content": TEXT}, path=TEXT),
        tool("list_directory", "List a folder.", {"content": TEXT}, path=TEXT),
    ],
    "crm": [tool("list_contacts", "List the people of a city.", city=TEXT)],
    "mail": [tool("send_message", "Send a mail.", to=TEXT, subject=TEXT)],
}


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    match name:
        case "read_text_file":
            return structured({"content": FILES[arguments["path"]]})
        case "list_directory":
            return structured({"content": "\n".join(FILES)})
        case "list_contacts":
            return {"content": [{"type": "text", "text": json.dumps(PEOPLE)}]}
        case _:
            # A token of the privacy rules would not be an address.
            known = arguments["to"] in {person["email"] for person in PEOPLE}
            return {"content": [{"type": "text", "text": "sent" if known else "no such address"}], "isError": not known}


def structured(value: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": json.dumps(value)}], "structuredContent": value}


def main(name: str) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        params = message.get("params") or {}
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        match message["method"]:
            case "initialize":
                info = {"name": name, "version": "1"}
                version = params["protocolVersion"]
                reply["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
            case "tools/list":
                reply["result"] = {"tools": TOOLS[name]}
            case "tools/call":
                reply["result"] = called(params["name"], params.get("arguments") or {})
            case _:
                reply["error"] = {"code": -32601, "message": "no"}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
