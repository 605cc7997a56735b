"""Search: for how many of the phrases of `search_phrases.py` the right tool is among the first five.

The servers are installed from npm and PyPI and asked for their tools; none of them is given anything to work with.
Those of the phrases that the ranking was tuned on are searched together, and those of the others.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from belljar.toolbox.connection import UpstreamLimits
from belljar.toolbox.search import ToolIndex
from belljar.toolbox.sentence_vectors import sentence_model
from belljar.toolbox.server_config import StdioServer
from belljar.toolbox.upstreams import open_upstreams
from bench.figures import Figure
from bench.registries import kept, node, npm_folder, python_environment
from bench.search_phrases import HELD_OUT, TUNING
from bench.stage import Stage

SHOWN = 5
MOST_MISSED = 6.0
START_S = 240.0
# Package, its program, arguments.
NODE: dict[str, tuple[str, ...]] = {
    "airtable": ("airtable-mcp-server", "airtable-mcp-server"),
    "asana": ("@roychri/mcp-server-asana", "mcp-server-asana"),
    "calendar": ("@cocal/google-calendar-mcp", "google-calendar-mcp"),
    "chrome-devtools": ("chrome-devtools-mcp", "chrome-devtools-mcp"),
    "circleci": ("@circleci/mcp-server-circleci", "mcp-server-circleci"),
    "discord": ("mcp-discord", "mcp-discord"),
    "elasticsearch": ("@elastic/mcp-server-elasticsearch", "mcp-server-elasticsearch"),
    "firecrawl": ("firecrawl-mcp", "firecrawl-mcp"),
    "github": ("@modelcontextprotocol/server-github", "mcp-server-github"),
    "gitlab": ("@modelcontextprotocol/server-gitlab", "mcp-server-gitlab"),
    "gmail": ("@gongrzhe/server-gmail-autoauth-mcp", "gmail-mcp"),
    "google-drive": ("@piotr-agier/google-drive-mcp", "google-drive-mcp"),
    "google-maps": ("@modelcontextprotocol/server-google-maps", "mcp-server-google-maps"),
    "hubspot": ("@hubspot/mcp-server", "mcp-hubspot"),
    "kubernetes": ("mcp-server-kubernetes", "mcp-server-kubernetes"),
    "line": ("@line/line-bot-mcp-server", "line-bot-mcp-server"),
    "linear": ("linear-mcp-server", "linear-mcp-server"),
    "mongodb": ("mongodb-mcp-server", "mongodb-mcp-server"),
    "notion": ("@notionhq/notion-mcp-server", "notion-mcp-server"),
    "playwright": ("@playwright/mcp", "playwright-mcp"),
    "sentry": ("@sentry/mcp-server", "sentry-mcp", "--access-token=none"),
    "shopify": ("shopify-mcp", "shopify-mcp", "--accessToken", "shpat_dummy", "--domain", "dummy.myshopify.com"),
    "slack": ("@modelcontextprotocol/server-slack", "mcp-server-slack"),
    "strava": ("@r-huijts/strava-mcp-server", "strava-mcp-server"),
    "stripe": ("@stripe/mcp", "mcp", "--api-key=sk_test_dummy", "--tools=all"),
    "xero": ("@xeroapi/xero-mcp-server", "xero-mcp-server"),
    "youtube": ("youtube-data-mcp-server", "youtube-data-mcp-server"),
}
PYTHON: dict[str, tuple[str, ...]] = {
    "arxiv": ("arxiv-mcp-server", "bin/arxiv-mcp-server"),
    "atlassian": ("mcp-atlassian", "bin/mcp-atlassian"),
    "blender": ("blender-mcp", "bin/blender-mcp"),
    "duckduckgo": ("duckduckgo-mcp-server", "bin/duckduckgo-mcp-server"),
    "excel": ("excel-mcp-server", "bin/excel-mcp-server", "stdio"),
    "git": ("mcp-server-git", "bin/mcp-server-git"),
    "grafana": ("mcp-grafana", "bin/mcp-grafana"),
    "home": ("ha-mcp", "bin/ha-mcp"),
    "meta-ads": ("meta-ads-mcp", "bin/meta-ads-mcp"),
    "obsidian": ("mcp-obsidian", "bin/mcp-obsidian"),
    "osm": ("osm-mcp-server", "bin/osm-mcp-server"),
    "paper-search": ("paper-search-mcp", "bin/paper-search-mcp"),
    "pdf": ("pdf-mcp", "bin/pdf-mcp"),
    "powerpoint": ("office-powerpoint-mcp-server", "bin/ppt_mcp_server"),
    "redis": ("redis-mcp-server", "bin/redis-mcp-server"),
    "spotify": ("mcp-server-spotify", "bin/mcp-server-spotify"),
    "telegram": ("telegram-mcp", "bin/telegram-mcp"),
    "todoist": ("todoist-mcp", "bin/todoist-mcp"),
    "trello": ("trello-mcp-server", "bin/trello-mcp-server"),
    "weather": ("mcp-weather-server", "bin/python", "-m", "mcp_weather_server"),
    "wikipedia": ("wikipedia-mcp", "bin/wikipedia-mcp"),
    "word": ("office-word-mcp-server", "bin/word_mcp_server"),
    "yahoo-finance": ("yahoo-finance-mcp", "bin/yahoo-finance-mcp"),
    "zotero": ("zotero-mcp-server", "bin/zotero-mcp", "serve"),
}
# They want a newer Python than belljar does.
NEWER_PYTHON = {"osm": "3.13", "pdf": "3.13", "spotify": "3.13"}
# They want to be given something before they list their tools.
VARIABLES = dict.fromkeys(
    (
        "AIRTABLE_API_KEY",
        "ASANA_ACCESS_TOKEN",
        "CHANNEL_ACCESS_TOKEN",
        "CIRCLECI_TOKEN",
        "CONFLUENCE_API_TOKEN",
        "DISCORD_TOKEN",
        "ES_API_KEY",
        "FIRECRAWL_API_KEY",
        "GITHUB_PERSONAL_ACCESS_TOKEN",
        "GITLAB_PERSONAL_ACCESS_TOKEN",
        "GOOGLE_MAPS_API_KEY",
        "GRAFANA_API_KEY",
        "HOMEASSISTANT_TOKEN",
        "JIRA_API_TOKEN",
        "LINEAR_API_KEY",
        "META_ACCESS_TOKEN",
        "NOTION_TOKEN",
        "OBSIDIAN_API_KEY",
        "PRIVATE_APP_ACCESS_TOKEN",
        "SLACK_BOT_TOKEN",
        "SLACK_TEAM_ID",
        "SPOTIFY_CLIENT_ID",
        "SPOTIFY_CLIENT_SECRET",
        "SPOTIFY_REFRESH_TOKEN",
        "STRAVA_ACCESS_TOKEN",
        "TELEGRAM_BOT_TOKEN",
        "TODOIST_API_KEY",
        "TODOIST_API_TOKEN",
        "TRELLO_API_KEY",
        "TRELLO_API_TOKEN",
        "TRELLO_TOKEN",
        "XERO_CLIENT_ID",
        "XERO_CLIENT_SECRET",
        "YOUTUBE_API_KEY",
    ),
    "none",
) | {
    "CONFLUENCE_URL": "https://dummy.atlassian.net/wiki",
    "CONFLUENCE_USERNAME": "a@example.com",
    "ES_URL": "http://127.0.0.1:9",
    "GRAFANA_URL": "http://127.0.0.1:9",
    "HOMEASSISTANT_URL": "http://127.0.0.1:9",
    "JIRA_URL": "https://dummy.atlassian.net",
    "JIRA_USERNAME": "a@example.com",
    "SPOTIFY_REDIRECT_URI": "http://127.0.0.1:8080/callback",
    "TELEGRAM_CHAT_ID": "1",
    "ZOTERO_LOCAL": "true",
}
GOOGLE = {"installed": {"client_id": "none", "client_secret": "none", "redirect_uris": ["http://localhost"]}}


async def measure(stage: Stage) -> list[Figure]:
    """The phrases that miss, and those whose tool is not the first."""
    held_out = await _figures("held out", HELD_OUT, target=MOST_MISSED)
    return [*held_out, *await _figures("tuning", TUNING)]


async def _figures(kind: str, phrases: Sequence[tuple[str, str, str]], target: float | None = None) -> list[Figure]:
    index, count = await _index(sorted({server for _, server, _ in phrases}))
    figures = _counted(kind, phrases, index, count, target)
    if (model := sentence_model()) is not None:
        index.add_sentences(model)
        figures += _counted(f"{kind}, with the model", phrases, index, count, target)
    return figures


def _counted(
    kind: str, phrases: Sequence[tuple[str, str, str]], index: ToolIndex, count: int, target: float | None = None
) -> list[Figure]:
    missed = not_first = 0
    for phrase, server, right in phrases:
        found = [(each.server, each.name) for each in index.search(phrase, limit=SHOWN)]
        wanted = {(server, tool) for tool in right.split()}
        missed += wanted.isdisjoint(found)
        not_first += wanted.isdisjoint(found[:1])
    of = f"of {len(phrases)} phrases, {count} tools"
    name = f"not among the first {SHOWN} ({kind})"
    return [
        Figure("search", name, "phrases", missed, target=target, bound="value", note=of),
        Figure("search", f"not the first ({kind})", "phrases", not_first, note=of),
    ]


async def _index(names: Sequence[str]) -> tuple[ToolIndex, int]:
    variables = VARIABLES | _google(kept())
    servers = {name: _node(name, variables) if name in NODE else _python(name, variables) for name in names}
    async with open_upstreams(servers, UpstreamLimits(start_s=START_S)) as upstreams:
        catalogue = await upstreams.catalogue()
    if away := [each.error for each in catalogue.servers.values() if each.error]:
        raise RuntimeError("; ".join(away))
    return ToolIndex(catalogue), len(catalogue.tools())


def _google(folder: Path) -> dict[str, str]:
    """The file of an application that Google does not know."""
    keys = folder / "search-google-keys.json"
    keys.parent.mkdir(parents=True, exist_ok=True)
    keys.write_text(json.dumps(GOOGLE))
    return {"GMAIL_OAUTH_PATH": str(keys), "GOOGLE_OAUTH_CREDENTIALS": str(keys)}


def _node(name: str, variables: dict[str, str]) -> StdioServer:
    package, program, *arguments = NODE[name]
    # One of them downloads a database when it is installed, unless it is told not to.
    folder = npm_folder(kept() / f"search-{name}", "--ignore-scripts", package)
    script = folder / "node_modules/.bin" / program
    return StdioServer(name, str(node()[0]), (str(script.resolve()), *arguments), environment=variables)


def _python(name: str, variables: dict[str, str]) -> StdioServer:
    package, program, *arguments = PYTHON[name]
    folder = python_environment(
        kept() / f"search-{name}", package, "mcp<2", python=NEWER_PYTHON.get(name, sys.executable)
    )
    return StdioServer(name, str(folder / program), tuple(arguments), environment=variables)
