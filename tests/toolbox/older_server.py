"""A server of the older protocol, as lines of JSON without any SDK: how it takes a request that it does not know.

    python older_server.py exits|refuses|refuses-nobody|ignores|garbles|wedges|… [STARTS]

Each start adds a line to the file STARTS. `hangs` never answers anything, `lists-never` never lists its tools, and
`lists-once` does so the first time only and then says that they have changed. `hangs-later` hangs when it is started
again. The tool `die`, which is not listed, ends each of them.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

TOOL = {"name": "echo", "description": "Says it again.", "inputSchema": {"type": "object"}}


def say(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def take_unknown(how: str, number: Any) -> None:
    match how:
        case "exits":
            sys.exit(1)
        case "refuses" | "lists-never" | "lists-once" | "hangs-later":
            say({"id": number, "error": {"code": -31_999, "message": "what is that?"}})
        case "refuses-nobody":
            say({"id": None, "error": {"code": -32_600, "message": "what is that?"}})
        case "garbles":
            print('{"jsonrpc": "2.0", "id": 1, "what": {', flush=True)
        case "wedges":
            sleep_for_ever()
        case _:
            pass


def main() -> None:
    how, *rest = sys.argv[1:]
    if rest:
        with Path(rest[0]).open("a") as starts:
            starts.write("started\n")
    has_started_before = bool(rest) and len(Path(rest[0]).read_text().splitlines()) > 1
    if how == "hangs" or (how == "hangs-later" and has_started_before):
        sleep_for_ever()
    listed = 0
    for line in sys.stdin:
        message = json.loads(line)
        number = message.get("id")
        match message.get("method"):
            case "initialize":
                capabilities = {"tools": {"listChanged": True}}
                about = {"name": "older", "version": "1"}
                known = {"protocolVersion": "2024-11-05", "capabilities": capabilities, "serverInfo": about}
                say({"id": number, "result": known})
            case "tools/list":
                listed += 1
                if how == "lists-never" or (how == "lists-once" and listed > 1):
                    continue
                say({"id": number, "result": {"tools": [TOOL]}})
                if how == "lists-once":
                    say({"method": "notifications/tools/list_changed"})
            case "tools/call" if message["params"]["name"] == "die":
                sys.exit(3)
            case "tools/call":
                text = json.dumps(message["params"].get("arguments"))
                say({"id": number, "result": {"content": [{"type": "text", "text": text}]}})
            case _ if number is not None:
                take_unknown(how, number)
            case _:
                pass


main()
