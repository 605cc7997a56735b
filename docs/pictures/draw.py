"""Draws the pictures of the documentation: `.venv/bin/python docs/pictures/draw.py`, after `scripts/setup`.

`session.svg` is a recording: the calls below are made, by a real client to a real server, and what it answers is drawn.
`architecture.svg` is drawn from the table below.
"""

import base64
import io
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import anyio
from mcp import Client
from mcp.types import CallToolResult, ImageContent, TextContent
from PIL import Image

from belljar.mcp.server import build_server
from belljar.runtime import open_runtime
from belljar.settings import load_settings

HERE = Path(__file__).parent
SALES = "region,amount\nnorth,120\nsouth,340\nnorth,90\nwest,210\nsouth,60\n"
CALLS = [
    'import pandas as pd\nsales = pd.read_csv("sales.csv")\nsales.groupby("region").amount.sum()',
    'sales.groupby("region").amount.sum().plot.barh(figsize=(5, 1.8)); None',
    "!cat /etc/shadow",
    "del sales, pd",
]
_IDS = re.compile(r"(session_id: |Session )?\b[a-z]{17}\b")
"""Ids are others at each run: these are drawn as the same two."""


@dataclass(frozen=True)
class Line:
    """A line of the recording: its text and the name of its colour, or a picture."""

    text: str = ""
    colour: str = "plain"
    picture: bytes = b""


# The recording


async def record() -> list[Line]:
    """Make the calls, and return what a client sees."""
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings({"log_level": "ERROR", "download_directory": folder})
        async with open_runtime(settings) as runtime, Client(build_server(runtime, ["interpreter"])) as client:
            made = await client.call_tool("new_session", {})
            session = {"session_id": (made.structured_content or {})["session_id"]}
            await client.call_tool("upload_file", {**session, "name": "sales.csv", "text": SALES})
            lines: list[Line] = []
            for number, code in enumerate(CALLS):
                answer = await client.call_tool("execute_code", {**session, "code": code})
                lines += [*asked("execute_code", code), *answered(answer, with_ids=number == 0), Line()]
            answer = await client.call_tool("rewind_session", {**session, "to": 1})
            lines += [*asked("rewind_session", "to=1"), *answered(answer), Line()]
            answer = await client.call_tool("execute_code", {**session, "code": "len(sales)"})
            lines += [*asked("execute_code", "len(sales)"), *answered(answer)]
            await client.call_tool("clear_session", session)
            return lines


def asked(tool: str, arguments: str) -> Iterator[Line]:
    """Draw a call."""
    for number, line in enumerate(arguments.splitlines()):
        yield Line(f"{tool if number == 0 else '':<15}{line}", "call")


def answered(answer: CallToolResult, *, with_ids: bool = False) -> Iterator[Line]:
    """Draw an answer: its text and its pictures; the line with the ids only where it is wanted."""
    left_out = ("Pass this", "[image/") if with_ids else ("Pass this", "[")
    for block in answer.content:
        if isinstance(block, TextContent):
            for line in block.text.splitlines():
                if line.strip() and not line.startswith(left_out):
                    text = _IDS.sub(lambda found: f"{found[1]}wyln…" if found[1] else "jevw…", line)
                    yield Line(f"  {text}", "status" if line.startswith("[") else "plain")
        elif isinstance(block, ImageContent):
            yield Line(picture=smaller(base64.b64decode(block.data)))


def smaller(png: bytes) -> bytes:
    """Return a picture with few colours, so that the drawing stays small."""
    image = Image.open(io.BytesIO(png)).convert("P", palette=Image.Palette.ADAPTIVE, colors=32)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


COLOURS = {"plain": "#d7dce2", "call": "#8fd3a8", "status": "#7d8794"}
STEP, TOP, LEFT, WIDTH, SIZE = 19, 56, 22, 860, 13.5
FRAME_S = 0.25


def terminal(lines: list[Line]) -> str:
    """Draw the recording: lines appear one after the other, and stay."""
    y, rows = TOP, list[str]()
    for number, line in enumerate(lines):
        delay = f'style="animation-delay:{number * FRAME_S:.2f}s"'
        if line.picture:
            width, height = Image.open(io.BytesIO(line.picture)).size
            width, height = width * 3 // 4, height * 3 // 4
            data = base64.b64encode(line.picture).decode()
            rows.append(
                f'<image class="line" {delay} x="{LEFT + 18}" y="{y - 12}" width="{width}" height="{height}" '
                f'href="data:image/png;base64,{data}"/>'
            )
            y += height + 8
        elif line.text:
            rows.append(
                f'<text class="line" {delay} x="{LEFT}" y="{y}" fill="{COLOURS[line.colour]}" '
                f'xml:space="preserve">{escape(line.text)}</text>'
            )
            y += STEP
        else:
            y += STEP // 2
    return SVG.format(width=WIDTH, height=y + 8, size=SIZE, rows="\n".join(rows))


SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"
 aria-label="An agent's calls and belljar's answers: a table, a chart, a sealed file system, and a cell that is undone">
<style>
text {{ font: {size}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
.line {{ opacity: 0; animation: show 0.3s ease-out forwards; }}
@keyframes show {{ to {{ opacity: 1; }} }}
@media (prefers-reduced-motion: reduce) {{ .line {{ opacity: 1; animation: none; }} }}
</style>
<rect width="{width}" height="{height}" rx="10" fill="#14181d"/>
<g fill="#3a424c"><circle cx="24" cy="22" r="6"/><circle cx="44" cy="22" r="6"/><circle cx="64" cy="22" r="6"/></g>
<text x="430" y="27" fill="#7d8794" text-anchor="middle">one session, as the agent sees it</text>
{rows}
</svg>
"""


# The architecture


@dataclass(frozen=True)
class Box:
    """A box of the architecture: where it is, its title, and what is in it."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    colour: str = "host"


BOXES = [
    Box(
        20, 60, 190, 96, "MCP client", ("Claude, VS Code, Cursor,", "your agent's framework:", "stdio or HTTP"), "other"
    ),
    Box(20, 176, 190, 96, "Azure's clients", ("REST and MCP of", "dynamic sessions"), "other"),
    Box(
        20,
        292,
        190,
        112,
        "You",
        ("belljar attach, top, export:", "a socket of your user's", "Jupyter, Python API"),
        "other",
    ),
    Box(270, 60, 300, 344, "belljar serve", (), "host"),
    Box(290, 100, 260, 50, "surfaces", ("tools, resources, REST, keys, OAuth",), "part"),
    Box(290, 160, 260, 50, "sessions and executions", ("queue, clock, checkpoints, sleep",), "part"),
    Box(290, 220, 260, 50, "policy and privacy", ("rules for code, calls, output",), "part"),
    Box(290, 280, 260, 50, "toolbox", ("other MCP servers as Python",), "part"),
    Box(290, 340, 260, 50, "journal", ("SQLite: what ran, what it said",), "part"),
    Box(
        630,
        60,
        250,
        160,
        "session A",
        ("IPython, your packages", "/mnt/data, private /tmp", "no network, no host files", "no other process"),
        "glass",
    ),
    Box(630, 240, 250, 72, "session B", ("sees nothing of A",), "glass"),
    Box(630, 332, 250, 72, "zygote", ("everything imported, forks", "new sessions in milliseconds"), "glass"),
    Box(270, 440, 300, 60, "other MCP servers", ("files, trackers, databases, browsers",), "other"),
    Box(630, 440, 250, 60, "package index, egress hosts", ("through proxies, if you allow it",), "other"),
]
ARROWS = [
    (210, 108, 268, 120, ""),
    (210, 224, 268, 150, ""),
    (210, 348, 268, 300, ""),
    (570, 185, 628, 140, ""),
    (570, 185, 628, 270, ""),
    (755, 330, 755, 314, "fork"),
    (420, 406, 420, 438, ""),
    (540, 406, 690, 438, ""),
]
FILLS = {
    "other": ("#ffffff", "#8a94a0"),
    "host": ("#eef3f8", "#4a6fa5"),
    "part": ("#ffffff", "#9fb4d0"),
    "glass": ("#eef8f1", "#3f9163"),
}


def architecture() -> str:
    """Draw who talks to whom, and what runs in a sandbox."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 520" width="900" height="520" role="img" '
        'aria-label="Clients talk to belljar serve; sessions are sandboxes of their own behind it">',
        "<style>text { font: 13px system-ui, sans-serif; fill: #1d2733; } .title { font-weight: 600; } "
        ".small { font-size: 12px; fill: #4d5a68; } .arrow { stroke: #5c6875; stroke-width: 1.4; }</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#5c6875"/></marker></defs>',
        '<rect width="900" height="520" fill="#fbfcfd" rx="8"/>',
        '<text x="270" y="36" class="title">the host, trusted</text>',
        '<text x="630" y="36" class="title">inside sandboxes: hostile code</text>',
        '<line x1="600" y1="20" x2="600" y2="420" stroke="#3f9163" stroke-width="2" stroke-dasharray="6 5"/>',
    ]
    for box in BOXES:
        fill, stroke = FILLS[box.colour]
        parts.append(
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6" fill="{fill}" '
            f'stroke="{stroke}"/><text x="{box.x + 12}" y="{box.y + 21}" class="title">{escape(box.title)}</text>'
        )
        for number, line in enumerate(box.lines):
            parts.append(f'<text x="{box.x + 12}" y="{box.y + 40 + 18 * number}" class="small">{escape(line)}</text>')
    for x1, y1, x2, y2, label in ARROWS:
        parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="arrow" marker-end="url(#tip)"/>')
        if label:
            parts.append(f'<text x="{x1 + 8}" y="{y1 - 4}" class="small">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "architecture.svg").write_text(architecture())
    (HERE / "session.svg").write_text(terminal(anyio.run(record)))
