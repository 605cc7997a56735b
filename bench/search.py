"""Search: how many of the phrases of `search_phrases.py` have the right tool among the first five.

The servers are installed from npm and PyPI and asked for their tools; none of them is given anything to work with.
"""

from belljar.toolbox.config import StdioServer
from belljar.toolbox.search import Index
from belljar.toolbox.upstreams import open_upstreams
from bench.figures import Figure
from bench.registries import kept, node, npm_folder, python_environment
from bench.search_phrases import HELD_OUT
from bench.stage import Stage

SHOWN = 5
MOST_MISSED = 6.0
# Package and version, its program, arguments.
NODE = {
    "slack": ("@modelcontextprotocol/server-slack", "mcp-server-slack"),
    "google-maps": ("@modelcontextprotocol/server-google-maps", "mcp-server-google-maps"),
    "notion": ("@notionhq/notion-mcp-server", "notion-mcp-server"),
    "playwright": ("@playwright/mcp", "playwright-mcp"),
    "mongodb": ("mongodb-mcp-server", "mongodb-mcp-server"),
    "airtable": ("airtable-mcp-server", "airtable-mcp-server"),
}
PYTHON = {
    "todoist": ("todoist-mcp", ("bin/todoist-mcp",)),
    "excel": ("excel-mcp-server", ("bin/excel-mcp-server", "stdio")),
    "weather": ("mcp-weather-server", ("bin/python", "-m", "mcp_weather_server")),
    "wikipedia": ("wikipedia-mcp", ("bin/wikipedia-mcp",)),
    "obsidian": ("mcp-obsidian", ("bin/mcp-obsidian",)),
}
# They want to be given something before they list their tools.
VARIABLES = dict.fromkeys(
    (
        "SLACK_BOT_TOKEN",
        "SLACK_TEAM_ID",
        "GOOGLE_MAPS_API_KEY",
        "NOTION_TOKEN",
        "AIRTABLE_API_KEY",
        "OBSIDIAN_API_KEY",
        "TODOIST_API_TOKEN",
        "TODOIST_API_KEY",
    ),
    "none",
)


async def measure(stage: Stage) -> list[Figure]:
    """The phrases that miss, and those whose tool is not the first."""
    servers = {**_node_servers(), **_python_servers()}
    async with open_upstreams(servers) as upstreams:
        catalogue = await upstreams.catalogue()
    if away := [name for name, each in catalogue.servers.items() if each.error]:
        raise RuntimeError(f"not reached: {', '.join(away)}")
    index = Index(catalogue)
    missed = not_first = 0
    for phrase, server, right in HELD_OUT:
        found = [(each.server, each.name) for each in index.search(phrase, limit=SHOWN)]
        wanted = {(server, tool) for tool in right.split()}
        missed += wanted.isdisjoint(found)
        not_first += wanted.isdisjoint(found[:1])
    of = f"of {len(HELD_OUT)} phrases, {len(catalogue.tools())} tools"
    return [
        Figure("search", f"not among the first {SHOWN}", "phrases", missed, target=MOST_MISSED, bound="value", note=of),
        Figure("search", "not the first", "phrases", not_first, note=of),
    ]


def _node_servers() -> dict[str, StdioServer]:
    found: dict[str, StdioServer] = {}
    for name, (package, program) in NODE.items():
        folder = npm_folder(kept() / f"search-{name}", package)
        script = folder / "node_modules/.bin" / program
        found[name] = StdioServer(name, str(node()[0]), (str(script.resolve()),), environment=VARIABLES)
    return found


def _python_servers() -> dict[str, StdioServer]:
    found: dict[str, StdioServer] = {}
    for name, (package, (program, *arguments)) in PYTHON.items():
        folder = python_environment(kept() / f"search-{name}", package, "mcp<2")
        found[name] = StdioServer(name, str(folder / program), tuple(arguments), environment=VARIABLES)
    return found
