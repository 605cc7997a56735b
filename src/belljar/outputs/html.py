"""A session's notebook as one HTML page that needs nothing else: no network, no script.

What cells showed is hostile: text is escaped, pictures are data URIs, and HTML goes into frames that are isolated from
our page and from the network. The colours, and the styles of code, are the console's too.
"""

import importlib
import math
import re
from collections.abc import Sequence
from html import escape
from itertools import islice
from typing import Any

from belljar.outputs.forms import LATEX, MARKDOWN, PAGE, picture_in, readable_text
from belljar.outputs.mathematics import latex_html, markdown_html
from belljar.outputs.notebook import execution_count
from belljar.outputs.tables import table_html, table_in
from belljar.outputs.terminal_text import as_plain, coloured, printable
from belljar.outputs.tracebacks import Frame, RaisedException, folded_frames, raised_exceptions

# Frames without a URL of their own (`srcdoc`) are under the policy of the page around them, so it is theirs too.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; media-src data:; "
    "base-uri 'none'; form-action 'none'"
)
_SCRIPTS = "; script-src 'unsafe-inline' 'unsafe-eval'; worker-src blob:"
_MEDIA = ("audio", "video")
LEAST_PIXELS, MAX_PIXELS = 60, 520
_ROW_PIXELS = 23
_LONGEST_HIGHLIGHTED = 100_000
_TAGS = re.compile(r"<[^<>]*>")


def page_of(notebook: Any, *, runs_scripts: bool = False) -> str:
    """Return the page; with `runs_scripts`, the scripts of what cells showed run, in their frames."""
    session_id = escape(str(notebook.metadata.belljar.session_id))
    policy = _POLICY + (_SCRIPTS if runs_scripts else "")
    cells = "\n".join(_cell(cell, runs_scripts=runs_scripts) for cell in notebook.cells)
    count = execution_count(notebook)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta http-equiv="x-dns-prefetch-control" content="off">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>belljar session {session_id[:8]}</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>belljar session</h1><p><code>{session_id}</code> {count} execution{"" if count == 1 else "s"}</p></header>
<main>
{cells}
</main>
</body>
</html>
"""


def _cell(cell: Any, *, runs_scripts: bool) -> str:
    notes = cell.metadata.get("belljar", {})
    is_undone = bool(notes.get("undone"))
    status = str(notes.get("status", "running"))
    badges = [status] if status != "ok" else []
    badges += ["undone"] if is_undone else []
    signs = "".join(f'<span class="badge">{escape(badge.replace("_", " "))}</span>' for badge in badges)
    outputs = "\n".join(_output(output, runs_scripts=runs_scripts) for output in cell.outputs)
    return (
        f'<section class="cell{" undone" if is_undone else ""}">\n'
        f'<div class="prompt">[{cell.execution_count or " "}]{signs}</div>\n'
        f'<pre class="code">{highlighted(cell.source)}</pre>\n{outputs}\n</section>'
    )


def highlighted(code: str) -> str:
    """Return Python as HTML, escaped, with Pygments' classes; code that is very long without them."""
    code = printable(code.replace("\r\n", "\n"))
    if len(code) > _LONGEST_HIGHLIGHTED:
        return escape(code)
    # Pygments comes with rich; it takes 60 ms to import, and is untyped.
    pygments: Any = importlib.import_module("pygments")
    formatter = importlib.import_module("pygments.formatters.html").HtmlFormatter(nowrap=True)
    lexer = importlib.import_module("pygments.lexers.python").PythonLexer(stripnl=False)
    return str(pygments.highlight(code, lexer, formatter)).removesuffix("\n")


def _output(output: Any, *, runs_scripts: bool) -> str:
    match output.output_type:
        case "stream":
            return (
                f'<pre class="output {"stderr" if output.name == "stderr" else "stdout"}">{coloured(output.text)}</pre>'
            )
        case "error":
            lines = output.traceback or [f"{output.ename}: {output.evalue}"]
            return f'<div class="output error">{traceback_html(lines)}</div>'
        case _:
            return f'<div class="output rich">{_rich(output.data, runs_scripts=runs_scripts)}</div>'


# Tracebacks: the message first, the lines of the cell open, libraries folded, and all of it for those who ask

_MAX_FRAMES = 40
_MAX_WORDS = 12
_EARLIER = {"which caused:": "It was caused by", "and while that was handled:": "It came while this was handled:"}


def traceback_html(lines: Sequence[str]) -> str:
    """Return a traceback as HTML: what was raised and where in the cell, then what came before it, then the whole."""
    raised = [*reversed(raised_exceptions(lines))]
    parts = [_exception_html(raised[0], "")]
    parts += [_exception_html(each, _EARLIER.get(each.link, "")) for each in raised[1 : _MAX_FRAMES + 1]]
    is_whole = len(raised) == 1 and len(raised[0].words) <= _MAX_WORDS and len(raised[0].frames) <= _MAX_FRAMES
    if not is_whole or any(frame.is_library for frame in raised[0].frames):
        parts.append(f"<details><summary>Show all</summary><pre>{coloured(_joined(lines))}</pre></details>")
    return "\n".join(parts)


def _exception_html(raised: RaisedException, before: str) -> str:
    # Of a syntax error, the line of code comes before the words.
    first = next((place for place, line in enumerate(raised.words) if line[:1].strip()), 0)
    code, (message, *more) = raised.words[:first], raised.words[first : first + _MAX_WORDS] or ["An error"]
    parts = [f'<p class="raised">{f"{before} " if before else ""}<strong>{coloured(message)}</strong></p>']
    parts += [f"<pre>{coloured(_joined(block))}</pre>" for block in (more, code[:_MAX_WORDS]) if block]
    frames = [*islice(folded_frames(raised.frames), _MAX_FRAMES)]
    if frames:
        parts.append(f'<ol class="frames">{"".join(map(_frame_html, frames))}</ol>')
    return "\n".join(parts)


def _frame_html(frame: Frame | str) -> str:
    if isinstance(frame, str) or frame.is_library:
        return f'<li class="library">{coloured(frame if isinstance(frame, str) else frame.place)}</li>'
    source = "".join(
        f"<mark>{coloured(line)}\n</mark>" if line.lstrip().startswith(("-", ">")) else f"{coloured(line)}\n"
        for line in frame.source
    )
    return f"<li>{coloured(frame.place)}<pre>{source}</pre></li>" if source else f"<li>{coloured(frame.place)}</li>"


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines)


def _rich(bundle: Any, *, runs_scripts: bool) -> str:
    page = bundle.get(PAGE)
    picture = picture_in(bundle)
    if isinstance(page, str) and picture is None and (table := table_in(page)) is not None:
        return table_html(table)
    if isinstance(page, str) and (runs_scripts or picture is None):
        return _frame(page, runs_scripts=runs_scripts)
    if picture is not None:
        return f'<img alt="{escape(as_plain(str(bundle.get("text/plain", ""))))[:200]}" src="{picture.uri}">'
    for mime, value in bundle.items():
        kind = mime.partition("/")[0]
        if kind in _MEDIA and isinstance(value, str):
            return f'<{kind} controls src="data:{escape(mime)};base64,{escape(value)}"></{kind}>'
    latex, words = bundle.get(LATEX), bundle.get(MARKDOWN)
    if isinstance(latex, str) and (formulas := latex_html(latex)) is not None:
        return f'<div class="formulas">{formulas}</div>'
    if isinstance(words, str):
        lines = sum(1 + len(line) // 100 for line in words.splitlines() if line.strip())
        return _frame(markdown_html(words), runs_scripts=False, height=_bounded(40 + 30 * lines))
    text, _ = readable_text(bundle)
    return f"<pre>{coloured(text)}</pre>"


def frame_height(page: str) -> int:
    """Return how many pixels high the frame of a page is to be, as far as its text tells."""
    rows = page.count("<tr") or math.ceil(len(_TAGS.sub("", page)) / 100)
    return _bounded(40 + _ROW_PIXELS * rows)


def _bounded(height: int) -> int:
    return max(LEAST_PIXELS, min(MAX_PIXELS, height))


def _frame(page: str, *, runs_scripts: bool, height: int = 0) -> str:
    has_script = "<script" in page.lower()
    height = height or (MAX_PIXELS if has_script and runs_scripts else frame_height(page))
    frame = (
        f'<iframe sandbox="{"allow-scripts" if runs_scripts else ""}" loading="lazy" height="{height}" '
        f'srcdoc="{escape(_FRAME_STYLE + printable(page))}"></iframe>'
    )
    if has_script and not runs_scripts:
        return frame + '<p class="note">This output has a script, which does not run here: export with --scripts.</p>'
    return frame


_FRAME_STYLE = (
    "<!DOCTYPE html><style>body{margin:8px;font:14px system-ui,sans-serif}"
    "table{border-collapse:collapse}th,td{padding:2px 10px;text-align:right}"
    "tbody tr:nth-child(odd){background:#f5f6f8}</style>"
)


# Colours, and the styles of code and terminal text, which the console's pages have too

TOKENS = """
:root { color-scheme: light dark;
  --ink: light-dark(#1c2330, #e4e7ec); --paper: light-dark(#ffffff, #15181e); --soft: light-dark(#f5f6f8, #1e232b);
  --line: light-dark(#dfe3e8, #343b46); --dim: light-dark(#5b6475, #98a2b3); --red: light-dark(#b42318, #f97066);
  --green: light-dark(#1d6339, #7fc797); --amber: light-dark(#8a5200, #e0a960); --accent: light-dark(#175cd3, #84b5ff);
  --keyword: light-dark(#7a3e9d, #c9a0e4); --string: light-dark(#1d6339, #7fc797);
  --number: light-dark(#8a5200, #e0a960); --name: light-dark(#175cd3, #84b5ff); --cyan: light-dark(#0b6478, #67c7d9); }
"""

CODE = """
pre, code { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; unicode-bidi: isolate; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.k, .kn, .kc, .ow, .kd { color: var(--keyword); } .s, .s1, .s2, .sd, .sa, .se, .si { color: var(--string); }
.m, .mi, .mf, .mh { color: var(--number); } .nf, .nc, .nb, .nd { color: var(--name); }
.c, .c1, .ch { color: var(--dim); font-style: italic; }
.ansi-bold { font-weight: bold; } .ansi-italic { font-style: italic; } .ansi-underline { text-decoration: underline; }
.ansi-red { color: var(--red); } .ansi-green { color: var(--string); } .ansi-yellow { color: var(--number); }
.ansi-blue { color: var(--name); } .ansi-magenta { color: var(--keyword); } .ansi-cyan { color: var(--cyan); }
.ansi-black, .ansi-white { color: var(--dim); }
.raised { color: var(--red); margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
.frames { list-style: none; margin: .3rem 0 0; padding: 0; font-size: .8125rem; color: var(--dim);
  overflow-wrap: anywhere; }
.frames li { margin: .3rem 0; }
.frames .library { font: 12px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; margin: 0 0 0 .6rem; }
.frames pre { color: var(--ink); background: var(--soft); border-radius: .3rem; padding: .35rem .6rem; }
.frames mark { display: block; margin: 0 -.6rem; padding: 0 .6rem; color: inherit;
  background: light-dark(#fde8e6, #4a1f1c); }
.formulas { overflow: auto; padding: .3rem 0; white-space: pre-wrap; }
.formulas math { font-size: 1.15em; }
.wide { overflow-x: auto; max-width: 100%; }
.data { border-collapse: collapse; display: table; width: max-content; max-width: none;
  font: 13px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.data th, .data td { padding: .2rem .75rem; border: 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; white-space: pre; }
.data th:first-child, .data td:first-child { padding-left: .25rem; }
.data .text { white-space: pre-wrap; max-width: 26rem; overflow-wrap: break-word; }
.data thead th { color: var(--ink); font-weight: 600; vertical-align: bottom; }
.data thead tr:last-child > * { border-bottom-color: var(--dim); }
.data tbody th { color: var(--dim); font-weight: 400; }
.data tbody tr:hover > * { background: var(--soft); }
.data .num { text-align: right; }
.data .none, .data .dtype { color: var(--dim); }
.table-foot { display: flex; flex-wrap: wrap; gap: .1rem 1.25rem; color: var(--dim);
  font-size: .8125rem; margin-top: .3rem; }
.table-foot p { margin: 0; }
.table-foot summary { cursor: pointer; min-height: 24px; }
.table-foot details[open] { flex-basis: 100%; }
.columns { list-style: none; margin: .5rem 0; padding: 0; display: grid; gap: .9rem 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); color: var(--ink); font-size: .8125rem; }
.columns > li { min-width: 0; overflow-wrap: anywhere; }
.columns .dim, .columns .told, .columns .ends, .frequent { color: var(--dim); }
.columns .told, .columns .ends { display: block; font-variant-numeric: tabular-nums; }
.columns .ends span { white-space: nowrap; }
.columns .gaps { color: var(--amber); font-weight: 600; }
.bars { display: block; margin: .2rem 0; }
.bars rect { fill: var(--accent); opacity: .75; }
.frequent { list-style: none; margin: .2rem 0; padding: 0; }
.frequent .bars { margin: 0 0 .15rem; }
.error summary { cursor: pointer; color: var(--dim); font-size: .8125rem; min-height: 24px; }
.error details pre { color: var(--dim); }
"""


# The style sheet of an exported page, for print and dark mode too

STYLE = (
    TOKENS
    + CODE
    + """
body { margin: 0 auto; padding: 1.5rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
header { border-bottom: 1px solid var(--line); margin-bottom: 1.5rem; }
h1 { font-size: 1.3rem; margin: 0; }
header p, .note { color: var(--dim); margin: .25rem 0 1rem; font-size: .85rem; }
.cell { margin-bottom: 1.75rem; break-inside: avoid-page; }
.prompt { color: var(--dim); font: 12px ui-monospace, monospace; margin-bottom: .25rem; white-space: pre; }
.badge { border: 1px solid var(--red); color: var(--red); border-radius: .6rem; padding: 0 .5rem; margin-left: .6rem; }
.code { background: var(--soft); border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .8rem; }
.output { padding: .5rem .8rem 0; max-height: 40rem; overflow: auto; }
.stderr { color: var(--dim); border-left: 3px solid var(--line); margin-top: .5rem; padding-top: 0; }
.error { border-left: 3px solid var(--red); margin-top: .5rem; padding-top: 0; }
.undone .code, .undone .output { opacity: .55; }
.rich img { max-width: 100%; background: #fff; }
iframe { box-sizing: border-box; width: 100%; border: 1px solid var(--line); border-radius: .4rem; background: #fff;
  color-scheme: light;
  resize: vertical; }
@media print { .output { max-height: none; } }
"""
)
