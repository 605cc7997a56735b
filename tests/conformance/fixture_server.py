"""belljar's own HTTP server with the tools, prompts and resources that the conformance scenarios call.

Run by the test as a process of its own, like `belljar serve`: settings come from the environment, the ready line goes
to stderr. What the scenarios look at is our app, its guard and its protocol eras; the fixtures are mounted on it.
"""

import asyncio
import sys

from fixture_content import add_content
from fixture_conversations import add_conversations
from fixture_questions import add_questions
from fixture_tasks import add_tasks

from belljar.http.app import build_app, check_bind, parse_bind, serve_http
from belljar.mcp.server import build_server
from belljar.runtime import open_runtime
from belljar.settings import load_settings


async def main() -> None:
    settings = load_settings()
    check_bind(settings)
    host, port = parse_bind(settings.http)
    async with open_runtime(settings) as runtime:
        server = build_server(runtime, settings.surfaces)
        for add in (add_content, add_conversations, add_questions):
            add(server)
        if "tasks" in sys.argv[1:]:
            add_tasks(server, runtime)
        await serve_http(build_app({"/mcp": server}, settings), host, port, on_ready=_say_ready, log_level="WARNING")


def _say_ready(url: str) -> None:
    print(f"belljar serves MCP at {url}/mcp", file=sys.stderr, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
