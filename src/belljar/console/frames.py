"""What cells displayed, as documents and pictures of their own: nothing of it is part of our pages.

A page of a cell is a whole document with a policy of its own, from an opaque origin and without a network. Its scripts
do not run, unless a person asked for it by a click. Pictures are checked to be pictures.
"""

import asyncio
import io
import re
import secrets
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from belljar.engine.contract import Access, Engine
from belljar.errors import BelljarError, ExecutionNotFound, TooLarge
from belljar.http.api_operations import problem
from belljar.models import Display, OutputEvent
from belljar.outputs.forms import DRAWN, FRAMED, MARKDOWN, PAGE, SVG, form_of, pillow_format
from belljar.outputs.html import TOKENS
from belljar.outputs.mathematics import markdown_html
from belljar.outputs.terminal_text import printable

_NAME: Final = re.compile(r"(?P<sequence>[0-9]{1,9})(?P<suffix>\.[a-z]{1,9})")
_BY_SUFFIX: Final = {form_of(mime).ending: mime for mime in (PAGE, *DRAWN)}
# Elements for which Chromium opens a connection before, or although, a policy forbids what they would load: a host name
# that is looked up and a port that is knocked at can carry a secret away. Names of elements are ASCII, and controls
# within them were made visible before.
_CONNECTING: Final = re.compile(
    r"<(a|area|applet|base|embed|fencedframe|form|frame|frameset|iframe|link|meta|object|portal)(?=[\s/>]|\Z)",
    re.IGNORECASE | re.ASCII,
)
_MAX_PAGE_BYTES: Final = 64 * 1024 * 1024
_COMMON: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; media-src data: blob:; "
    "connect-src 'none'; form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
)
_HEADERS: Final = {
    "Referrer-Policy": "no-referrer",
    "X-DNS-Prefetch-Control": "off",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, no-store",
}
_STYLE: Final = (
    # A page that is as high as its frame would have the frame grow for ever.
    "html,body{height:auto!important;min-height:0!important}"
    "body{margin:8px;font:14px system-ui,sans-serif;background:var(--paper);color:var(--ink)}"
    "table{border-collapse:collapse;border-color:var(--line)}th,td{padding:2px 10px;text-align:right;"
    "border-color:var(--line)}math{font-size:1.1em}math[display=block]{margin:.6em 0}"
    "tbody tr:nth-child(odd){background:var(--soft)}pre,code{font:13px ui-monospace,monospace}"
)
# Whoever chose colours, or shows pictures, did so for white paper, unless they speak of themes themselves. What only
# arranges, like the style that pandas puts before its tables, chooses none.
_LIGHT: Final = ":root{color-scheme:light}"
_STYLES: Final = re.compile(r"<style\b[^>]*+(?:>|\Z)(.*?)(?:</style|\Z)", re.IGNORECASE | re.DOTALL)
_TAGS: Final = re.compile(r"<([a-z][a-z0-9-]*+)([^<>]*+)", re.IGNORECASE)
_COLOURS: Final = re.compile(r"color|background|fill|stroke|filter", re.IGNORECASE)
_THEMES: Final = re.compile(r"prefers-color-scheme|light-dark\(|color-scheme\s*:", re.IGNORECASE)
_PICTURES: Final = frozenset({"canvas", "font", "img", "svg", "video"})
_JUDGED_CHARS: Final = 65_536
# Tells the page around the frame how high it is, as a number and nothing else.
_HEIGHT: Final = (
    "(()=>{const tell=()=>{const d=document.documentElement,b=document.body;"
    "parent.postMessage(Math.ceil(Math.max(d.getBoundingClientRect().height,b?b.scrollHeight+b.offsetTop:0)),'*')};"
    "addEventListener('load',tell);addEventListener('message',(e)=>{if(e.source===parent)tell()});"
    "new ResizeObserver(tell).observe(document.documentElement)})()"
)
# Charts have the width that their code chose; one that is wider than the page is shown smaller, instead of cut.
_FIT: Final = (
    "addEventListener('load',()=>{const d=document.documentElement,fit=()=>{d.style.zoom=1;"
    "const wide=d.scrollWidth,room=d.clientWidth;if(wide>room+1)d.style.zoom=Math.max(.4,room/wide)};"
    "fit();addEventListener('resize',fit);setTimeout(fit,500)})"
)
# WebRTC is under no policy, so its entrances are removed before a script of the page can run.
_NO_WEBRTC: Final = (
    "for(const name of ['RTCPeerConnection','webkitRTCPeerConnection','RTCDataChannel','RTCIceTransport',"
    "'RTCDtlsTransport','RTCSessionDescription','RTCIceCandidate'])"
    "{try{Object.defineProperty(globalThis,name,{value:undefined,writable:false,configurable:false})}catch{}}"
)


class Frames:
    """Serves displays to browsers that may see them."""

    def __init__(self, engine: Engine, *, allows_scripts: bool) -> None:
        self._engine = engine
        self._allows_scripts = allows_scripts

    async def serve(self, request: Request) -> Response:
        """Answer `/frames/EXECUTION/SEQUENCE.SUFFIX`."""
        try:
            return await self._answer(request)
        except BelljarError as error:
            return problem(error)

    async def _answer(self, request: Request) -> Response:
        access: Access = request.state.access
        execution_id = str(request.path_params["execution_id"])
        wanted = _NAME.fullmatch(str(request.path_params["name"]))
        mime = _BY_SUFFIX.get(wanted["suffix"]) if wanted else None
        if wanted is None or mime is None:
            raise ExecutionNotFound(f"execution {execution_id[:64]!r} has no such display")
        event = await self._engine.event(access, execution_id, int(wanted["sequence"]))
        forms = _forms(event)
        if mime == PAGE:
            form = next((forms[mime] for mime in FRAMED if mime in forms), None)
            content = await self._content(access, execution_id, form)
            runs_scripts = request.query_params.get("scripts") == "1" and self._allows_scripts
            return await _page(content, form.mime if form else PAGE, runs_scripts=runs_scripts)
        return await picture_response(await self._content(access, execution_id, forms.get(mime)), mime)

    async def _content(self, access: Access, execution_id: str, form: Display | None) -> bytes:
        if form is None:
            raise ExecutionNotFound(f"execution {execution_id[:64]!r} has no such display")
        if form.text is not None:
            return form.text.encode(errors="replace")
        content = await self._engine.display(access, execution_id, (form.uri or "").rpartition("/")[2])
        if len(content) > _MAX_PAGE_BYTES:
            raise TooLarge(f"the display has {len(content):,} bytes, too many to show", hint="Download it instead")
        return content


def _forms(event: OutputEvent) -> dict[str, Display]:
    display = event.display
    return {form.mime: form for form in (display, *display.also)} if display is not None else {}


async def _page(content: bytes, mime: str, *, runs_scripts: bool) -> Response:
    # In a thread, because a page may have many megabytes.
    document, policy = await asyncio.to_thread(_document, content, mime, runs_scripts=runs_scripts)
    return HTMLResponse(document, headers={**_HEADERS, "Content-Security-Policy": policy})


def _document(content: bytes, mime: str, *, runs_scripts: bool) -> tuple[bytes, str]:
    """Return a page of a cell as a whole document, and its policy."""
    text = content.decode(errors="replace")
    if mime == MARKDOWN:
        text = markdown_html(text)
    # A script could make such elements by itself, so that sealing them would only break what it shows.
    body = printable(text) if runs_scripts else _sealed(text)
    nonce = secrets.token_urlsafe(16)
    if runs_scripts:
        scripts = "script-src 'unsafe-inline' 'unsafe-eval' blob:; worker-src blob:"
        first = f"<script>{_NO_WEBRTC}</script><script>{_HEIGHT};{_FIT}</script>"
    else:
        scripts = f"script-src 'nonce-{nonce}'"
        first = f'<script nonce="{nonce}">{_HEIGHT}</script>'
    policy = f"sandbox allow-scripts; {_COMMON}; {scripts}"
    style = f"<style>{TOKENS}{'' if _follows_theme(text) and not runs_scripts else _LIGHT}{_STYLE}</style>"
    document = f'<!DOCTYPE html><html><head><meta charset="utf-8">{first}{style}</head><body>{body}</body></html>'
    return document.encode(errors="replace"), policy


def _follows_theme(html: str) -> bool:
    """Return whether a page can be read in the colours of the console's theme: it has none, or themes of its own.

    Its beginning decides, where styles stand.
    """
    html = html[:_JUDGED_CHARS]
    styles = [found[1] for found in _STYLES.finditer(html)]
    if any(_THEMES.search(style) for style in styles):
        return True
    if any(_COLOURS.search(style) for style in styles):
        return False
    return not any(tag[1].lower() in _PICTURES or _COLOURS.search(tag[2]) for tag in _TAGS.finditer(html))


def _sealed(html: str) -> str:
    """Return a page without the elements for which a browser opens connections, whatever the policy says."""
    return _CONNECTING.sub(r"<no-\1", printable(html))


async def picture_response(content: bytes, mime: str) -> Response:
    """Return a picture whose header is of its type, so that browsers take it for nothing else."""
    if mime != SVG and not await asyncio.to_thread(_is_picture, content, mime):
        raise ExecutionNotFound("the display is not a picture of its type")
    # In an <img> no script of an SVG runs; opened by itself, the policy keeps it from running too.
    policy = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:"
    headers = {**_HEADERS, "Content-Security-Policy": policy, "Cache-Control": "private, max-age=3600"}
    return Response(content, media_type=mime, headers=headers)


def _is_picture(content: bytes, mime: str) -> bool:
    """Return whether the header of a picture is of its type; its pixels are not decoded."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=(pillow_format(mime),)) as picture:
            return picture.width > 0
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        return False
