"""Search: for how many of the phrases of `search_phrases.py` the right tool is among the first five.

The servers are installed from npm and PyPI and asked for their tools; none of them is given anything to work with.
Each set of phrases is searched among the tools of its own servers. Servers that cannot be installed here are named.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from belljar.toolbox.base import Catalogue, ServerCatalogue, ToolDefinition
from belljar.toolbox.connection import UpstreamLimits
from belljar.toolbox.search import ToolIndex
from belljar.toolbox.server_config import StdioServer
from belljar.toolbox.upstreams import open_upstreams
from bench.figures import Figure
from bench.registries import Unreachable, kept, node, npm_folder, python_environment
from bench.search_phrases import DEVELOPMENT, FRESH, FRESH_ALSO, HELD_OUT, SET_ASIDE, STRANGERS, TUNING, UNSEEN
from bench.stage import Stage

Phrase = tuple[str, str, str]
SHOWN = 5
MISSED = f"not among the first {SHOWN}"
MANY = 1_000
MAX_MISSED_STRANGERS = 15.0
MAX_MISSED_OTHERS = 120.0
START_S = 240.0
# Package, its program, arguments.
NODE: dict[str, tuple[str, ...]] = {
    "charts": ("@antv/mcp-server-chart", "mcp-server-chart"),
    "godot": ("@coding-solo/godot-mcp", "godot-mcp"),
    "hevy": ("hevy-mcp", "hevy-mcp"),
    "lara": ("@translated/lara-mcp", "lara-mcp"),
    "leetcode": ("@jinzcdev/leetcode-mcp-server", "leetcode-mcp-server"),
    # Another of its features fetches something before it lists its tools.
    "supabase": (
        "@supabase/mcp-server-supabase",
        "mcp-server-supabase",
        f"--access-token=sbp_{'0' * 40}",
        "--features=account,database,debugging,development,functions,branching,storage",
    ),
    "taskmanager": ("@kazuph/mcp-taskmanager", "mcp-taskmanager"),
    "tmdb": ("tmdb-mcp", "tmdb-mcp"),
    "bitwarden": ("@bitwarden/mcp-server", "mcp-server-bitwarden"),
    "microsoft365": ("@softeria/ms-365-mcp-server", "ms-365-mcp-server"),
    "pinecone": ("@pinecone-database/mcp", "pinecone-mcp"),
    "postman": ("@postman/postman-mcp-server", "postman-mcp-server"),
    "sonarqube": ("sonarqube-mcp-server", "sonarqube-mcp-server"),
    "variflight": ("@variflight-ai/variflight-mcp", "variflight-mcp"),
    "airtable": ("airtable-mcp-server", "airtable-mcp-server"),
    "asana": ("@roychri/mcp-server-asana", "mcp-server-asana"),
    "calendar": ("@cocal/google-calendar-mcp", "google-calendar-mcp"),
    "chrome-devtools": ("chrome-devtools-mcp", "chrome-devtools-mcp"),
    "circleci": ("@circleci/mcp-server-circleci", "mcp-server-circleci"),
    "discord": ("mcp-discord", "mcp-discord"),
    "elasticsearch": ("@elastic/mcp-server-elasticsearch", "mcp-server-elasticsearch"),
    "firecrawl": ("firecrawl-mcp", "firecrawl-mcp"),
    "github": ("@modelcontextprotocol/server-github", "mcp-server-github"),
    "argocd": ("argocd-mcp", "argocd-mcp", "stdio"),
    "brave": ("@brave/brave-search-mcp-server", "brave-search-mcp-server"),
    "browserstack": ("@browserstack/mcp-server", "browserstack-mcp-server"),
    "cloudinary": ("@cloudinary/asset-management-mcp", "asset-management-mcp", "start"),
    "datadog": ("@winor30/mcp-server-datadog", "mcp-server-datadog"),
    "everart": ("@modelcontextprotocol/server-everart", "mcp-server-everart"),
    "figma": ("figma-developer-mcp", "figma-developer-mcp", "--stdio", "--figma-api-key=none"),
    "filesystem": ("@modelcontextprotocol/server-filesystem", "mcp-server-filesystem", "/tmp"),
    "memory": ("@modelcontextprotocol/server-memory", "mcp-server-memory"),
    "mobile": ("@mobilenext/mobile-mcp", "mcp-server-mobile"),
    "n8n": ("n8n-mcp", "n8n-mcp"),
    "netlify": ("@netlify/mcp", "netlify-mcp"),
    "tavily": ("tavily-mcp", "tavily-mcp"),
    "ynab": ("ynab-mcp-server", "ynab-mcp-server"),
    "gitlab": ("@modelcontextprotocol/server-gitlab", "mcp-server-gitlab"),
    "gmail": ("@gongrzhe/server-gmail-autoauth-mcp", "gmail-mcp"),
    "google-drive": ("@piotr-agier/google-drive-mcp", "google-drive-mcp"),
    "google-maps": ("@modelcontextprotocol/server-google-maps", "mcp-server-google-maps"),
    "hubspot": ("@hubspot/mcp-server", "mcp-hubspot"),
    "kubernetes": ("mcp-server-kubernetes", "mcp-server-kubernetes"),
    "launchdarkly": ("@launchdarkly/mcp-server", "mcp", "start", "--api-key", "api-none"),
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
    "anki": ("mcp-ankiconnect", "bin/mcp-ankiconnect"),
    "canvas": ("canvas-mcp", "bin/canvas-mcp-server"),
    "chess": ("chess-mcp", "bin/python", "-m", "chess_mcp"),
    "elevenlabs": ("elevenlabs-mcp", "bin/elevenlabs-mcp"),
    "fhir": ("fhir-mcp", "bin/fhir-mcp", "serve"),
    "freecad": ("freecad-mcp", "bin/freecad-mcp"),
    "pagerduty": ("pagerduty-mcp", "bin/pagerduty-mcp"),
    "sec-edgar": ("sec-edgar-mcp", "bin/sec-edgar-mcp"),
    "wireshark": ("wireshark-mcp", "bin/wireshark-mcp"),
    "ableton": ("ableton-mcp", "bin/ableton-mcp"),
    "bitbucket": ("bitbucket-mcp", "bin/bitbucket-mcp"),
    "couchbase": ("couchbase-mcp-server", "bin/couchbase-mcp-server"),
    "iam": ("awslabs.iam-mcp-server", "bin/awslabs.iam-mcp-server"),
    "mlflow": ("mlflow-mcp", "bin/mlflow-mcp"),
    "odoo": ("odoo-mcp", "bin/odoo-mcp"),
    "plane": ("plane-mcp-server", "bin/plane-mcp-server", "stdio"),
    "prometheus": ("prometheus-mcp-server", "bin/prometheus-mcp-server"),
    "tree-sitter": ("mcp-server-tree-sitter", "bin/mcp-server-tree-sitter"),
    "unifi": ("unifi-mcp-server", "bin/unifi-mcp-server"),
    "whoop": ("whoop-mcp", "bin/whoop-mcp"),
    "alpaca": ("alpaca-mcp-server", "bin/alpaca-mcp-server"),
    "analytics": ("analytics-mcp", "bin/google-analytics-mcp"),
    "biomcp": ("biomcp-python", "bin/biomcp", "run"),
    "clickhouse": ("mcp-clickhouse", "bin/mcp-clickhouse"),
    "cloudwatch": ("awslabs.cloudwatch-mcp-server", "bin/awslabs.cloudwatch-mcp-server"),
    "dynamodb": ("awslabs.dynamodb-mcp-server", "bin/awslabs.dynamodb-mcp-server"),
    "email": ("mcp-email-server", "bin/mcp-email-server", "stdio"),
    "freshdesk": ("freshdesk-mcp", "bin/freshdesk-mcp"),
    "jenkins": (
        "mcp-jenkins",
        "bin/mcp-jenkins",
        "--jenkins-url=http://127.0.0.1:9",
        "--jenkins-username=a",
        "--jenkins-password=none",
    ),
    "proxmox": ("proxmox-mcp", "bin/proxmox-mcp"),
    "arxiv": ("arxiv-mcp-server", "bin/arxiv-mcp-server"),
    "atlassian": ("mcp-atlassian", "bin/mcp-atlassian"),
    "blender": ("blender-mcp", "bin/blender-mcp"),
    "duckduckgo": ("duckduckgo-mcp-server", "bin/duckduckgo-mcp-server"),
    "excel": ("excel-mcp-server", "bin/excel-mcp-server", "stdio"),
    "git": ("mcp-server-git", "bin/mcp-server-git"),
    "grafana": ("mcp-grafana", "bin/mcp-grafana"),
    "home": ("ha-mcp", "bin/ha-mcp"),
    "meta-ads": ("meta-ads-mcp", "bin/meta-ads-mcp"),
    "nextcloud": ("nextcloud-mcp-server", "bin/nextcloud-mcp-server", "run", "--transport", "stdio"),
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
NEWER_PYTHON = dict.fromkeys(("chess", "freecad", "osm", "pagerduty", "pdf", "spotify"), "3.13")
# They want to be given something before they list their tools.
VARIABLES = dict.fromkeys(
    (
        "CANVAS_API_TOKEN",
        "ELEVENLABS_API_KEY",
        "HEVY_API_KEY",
        "LARA_ACCESS_KEY_ID",
        "LARA_ACCESS_KEY_SECRET",
        "PAGERDUTY_USER_API_KEY",
        "TMDB_API_KEY",
        "BITBUCKET_API_TOKEN",
        "BITBUCKET_APP_PASSWORD",
        "BW_SESSION",
        "CB_PASSWORD",
        "ODOO_PASSWORD",
        "PINECONE_API_KEY",
        "PLANE_API_KEY",
        "PLANE_WORKSPACE_SLUG",
        "POSTMAN_API_KEY",
        "SONARQUBE_TOKEN",
        "UNIFI_API_KEY",
        "VARIFLIGHT_API_KEY",
        "WHOOP_CLIENT_ID",
        "WHOOP_CLIENT_SECRET",
        "X_VARIFLIGHT_KEY",
        "AIRTABLE_API_KEY",
        "ALPACA_API_KEY",
        "ALPACA_SECRET_KEY",
        "ARGOCD_API_TOKEN",
        "ASANA_ACCESS_TOKEN",
        "BRAVE_API_KEY",
        "BROWSERSTACK_ACCESS_KEY",
        "BROWSERSTACK_USERNAME",
        "CHANNEL_ACCESS_TOKEN",
        "CIRCLECI_TOKEN",
        "CLICKHOUSE_PASSWORD",
        "CLICKHOUSE_USER",
        "CLOUDINARY_API_KEY",
        "CLOUDINARY_API_SECRET",
        "CLOUDINARY_CLOUD_NAME",
        "CONFLUENCE_API_TOKEN",
        "DATADOG_API_KEY",
        "DATADOG_APP_KEY",
        "DISCORD_TOKEN",
        "ES_API_KEY",
        "EVERART_API_KEY",
        "FIRECRAWL_API_KEY",
        "FRESHDESK_API_KEY",
        "GITHUB_PERSONAL_ACCESS_TOKEN",
        "GITLAB_PERSONAL_ACCESS_TOKEN",
        "GOOGLE_MAPS_API_KEY",
        "GRAFANA_API_KEY",
        "HOMEASSISTANT_TOKEN",
        "JIRA_API_TOKEN",
        "LINEAR_API_KEY",
        "META_ACCESS_TOKEN",
        "NEXTCLOUD_PASSWORD",
        "NEXTCLOUD_USERNAME",
        "NOTION_TOKEN",
        "OBSIDIAN_API_KEY",
        "PRIVATE_APP_ACCESS_TOKEN",
        "SLACK_BOT_TOKEN",
        "SLACK_TEAM_ID",
        "SPOTIFY_CLIENT_ID",
        "SPOTIFY_CLIENT_SECRET",
        "SPOTIFY_REFRESH_TOKEN",
        "STRAVA_ACCESS_TOKEN",
        "TAVILY_API_KEY",
        "TELEGRAM_BOT_TOKEN",
        "TODOIST_API_KEY",
        "TODOIST_API_TOKEN",
        "TRELLO_API_KEY",
        "TRELLO_API_TOKEN",
        "TRELLO_TOKEN",
        "XERO_CLIENT_ID",
        "XERO_CLIENT_SECRET",
        "YNAB_API_TOKEN",
        "YOUTUBE_API_KEY",
    ),
    "none",
) | {
    "CANVAS_API_URL": "https://dummy.instructure.com/api/v1",
    "SEC_EDGAR_USER_AGENT": "A B (a@example.com)",
    "BITBUCKET_EMAIL": "a@example.com",
    "BITBUCKET_USERNAME": "a",
    "BITBUCKET_WORKSPACE": "w",
    "CB_CONNECTION_STRING": "couchbase://127.0.0.1",
    "CB_USERNAME": "a",
    "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
    "ODOO_DB": "a",
    "ODOO_URL": "http://127.0.0.1:9",
    "ODOO_USERNAME": "a",
    "PROMETHEUS_URL": "http://127.0.0.1:9",
    "SONARQUBE_URL": "http://127.0.0.1:9",
    "UNIFI_API_TYPE": "local",
    "UNIFI_LOCAL_HOST": "127.0.0.1",
    "ARGOCD_BASE_URL": "http://127.0.0.1:9",
    "AWS_REGION": "us-east-1",
    "CLICKHOUSE_HOST": "127.0.0.1",
    "CONFLUENCE_URL": "https://dummy.atlassian.net/wiki",
    "CONFLUENCE_USERNAME": "a@example.com",
    "ES_URL": "http://127.0.0.1:9",
    "FRESHDESK_DOMAIN": "dummy.freshdesk.com",
    "GRAFANA_URL": "http://127.0.0.1:9",
    "HOMEASSISTANT_URL": "http://127.0.0.1:9",
    "JIRA_URL": "https://dummy.atlassian.net",
    "JIRA_USERNAME": "a@example.com",
    "NEXTCLOUD_HOST": "http://127.0.0.1:9",
    "SPOTIFY_REDIRECT_URI": "http://127.0.0.1:8080/callback",
    "TELEGRAM_CHAT_ID": "1",
    "ZOTERO_LOCAL": "true",
}
GOOGLE = {"installed": {"client_id": "none", "client_secret": "none", "redirect_uris": ["http://localhost"]}}


async def measure(stage: Stage) -> list[Figure]:
    """The phrases that miss, those whose tool is not the first, and the time that a search takes."""
    judged = [(phrase, server, f"{right} {FRESH_ALSO.get(phrase, '')}") for phrase, server, right in FRESH]
    others = [
        *await _figures("unseen", UNSEEN),
        *await _figures("held out", HELD_OUT),
        *await _figures("set aside", SET_ASIDE),
        *await _figures("fresh", judged),
        *await _figures("development", DEVELOPMENT),
        *await _figures("tuning", TUNING),
    ]
    missed = sum(figure.ours for figure in others if figure.what.startswith(MISSED))
    return [
        *await _figures("strangers", STRANGERS, target=MAX_MISSED_STRANGERS),
        *others,
        Figure("search", f"{MISSED} (all but strangers)", "phrases", missed, target=MAX_MISSED_OTHERS, bound="value"),
        *_timed(),
    ]


async def _figures(kind: str, phrases: Sequence[Phrase], target: float | None = None) -> list[Figure]:
    """Return how many phrases miss, and of how many the right tool is not the first."""
    catalogue = await _catalogue(sorted({server for _, server, _ in phrases}))
    away = sorted(each.server for each in catalogue.servers.values() if each.error)
    there = [phrase for phrase in phrases if phrase[1] not in away]
    of = f"of {len(there)} phrases, {len(catalogue.tools())} tools"
    note = f"{of}; not here: {', '.join(away)}" if away else of
    index = ToolIndex(catalogue)
    missed = not_first = 0
    for phrase, server, right in there:
        found = [(each.server, each.name) for each in index.search(phrase, limit=SHOWN)]
        wanted = {(server, tool) for tool in right.split()}
        missed += wanted.isdisjoint(found)
        not_first += wanted.isdisjoint(found[:1])
    return [
        Figure("search", f"{MISSED} ({kind})", "phrases", missed, target=target, bound="value", note=note),
        Figure("search", f"not the first ({kind})", "phrases", not_first, note=note),
    ]


def _timed() -> list[Figure]:
    """Return the processor time that an index of 1,000 tools takes to make, and a search in it."""
    texts = [phrase for phrase, _, _ in (*STRANGERS, *UNSEEN, *HELD_OUT, *SET_ASIDE, *FRESH, *DEVELOPMENT, *TUNING)]
    tools = tuple(
        ToolDefinition(f"server{number // 25}", f"tool_{number}", f"{texts[number % len(texts)]}. For {number}.")
        for number in range(MANY)
    )
    began = time.process_time()
    index = ToolIndex(Catalogue({"many": ServerCatalogue("many", tools)}))
    made_ms = (time.process_time() - began) * 1_000
    index.search("once, so that the table of words is read")
    began = time.process_time()
    for text in texts:
        index.search(text)
    search_ms = (time.process_time() - began) * 1_000 / len(texts)
    return [
        Figure("search", f"index of {MANY:,} tools", "ms of CPU", made_ms),
        Figure("search", f"one search among {MANY:,} tools", "ms of CPU", search_ms, note=f"mean of {len(texts)}"),
    ]


async def _catalogue(names: Sequence[str]) -> Catalogue:
    variables = VARIABLES | _google(kept())
    servers: dict[str, StdioServer] = {}
    away: dict[str, ServerCatalogue] = {}
    for name in names:
        try:
            servers[name] = _node(name, variables) if name in NODE else _python(name, variables)
        except (Unreachable, RuntimeError) as error:
            away[name] = ServerCatalogue(name, error=str(error))
    async with open_upstreams(servers, UpstreamLimits(start_s=START_S)) as upstreams:
        catalogue = await upstreams.catalogue()
    return Catalogue({**catalogue.servers, **away})


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
