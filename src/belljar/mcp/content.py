"""Execution results as MCP content blocks: one text that a model can act on, pictures, and links to the rest.

Several clients drop images, or the text, when `structuredContent` is present. So the text block says everything that a
model needs, URIs included. Clients that are known to drop images, and those that cannot be told apart, get structured
content only where there are none, unless the settings or the caller ask for it; it never holds the bytes of an image.

The text of a cell may end with a line that says which call helps: for faults whose cause is the sandbox and not the
code, as a package that is not installed, a file that is not there, a folder that cannot be written, a network that is
not there. What the line promises exists: the tools are those of the interpreter surface.
"""

import base64
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from mcp.server.mcpserver import Context
from mcp.types import AudioContent, CallToolResult, ContentBlock, ImageContent, ResourceLink, TextContent
from pydantic import JsonValue

from belljar.errors import BelljarError, expired_words
from belljar.models import Display, ExecutionResult, FileReference, Model, NextCall, ToolCall
from belljar.outputs.budget import clip
from belljar.outputs.displays import fitted
from belljar.outputs.forms import WIDGET, form_of
from belljar.outputs.spoofed_notices import disarmed, disarmed_around
from belljar.outputs.tracebacks import short_traceback, short_warnings, without_cell_file
from belljar.sandboxes.base import WORKSPACE

Structured = Literal["auto", "always", "never"]
ReadDisplay = Callable[[str], bytes | None]

MAX_PICTURES = 8
MAX_LINKS = 20
NEXT_WAIT_S = 45
SHOWN_TRACEBACK_LINES = 60
SHOWN_PAGE_CHARS = 1_000
SAME_ERROR_CHARS = 500
MAX_PRINTED_ALONE = 4
LINE_CHARS = 120
ALWAYS_TOLD, OF_FAILURES = ("result", "sequence"), ("error", "traceback")
"""Fields of a result with a default that programs are told all the same; some only of cells that failed."""
DROPPERS = ("claude-code", "codex", "opencode", "openclaw")
"""How the names of clients begin that drop pictures where there is structured content."""
NO_NAMES = ("", "mcp")
"""What clients call themselves that cannot be told apart: nothing, or the Python SDK's default, as most frameworks do.

Microsoft's agent-framework drops everything beside structured content, and LangChain passes a link on to the model as a
picture or a file to fetch, which fails. So they get pictures without structured content, and links in the text alone.
"""
_CALL_STATES = {
    "started": "unfinished",
    "cancelled": "unfinished",
    "returned": "returned",
    "failed": "failed",
    "refused": "refused",
}
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([A-Za-z_][\w]*)")
_OURS = re.compile(r"ModuleNotFoundError: No module named '(skills|servers)\.")
"""Modules that belljar itself makes; a package of that name would be a stranger's."""
_WITH_OPTIONAL = ("ImportError: ", "AttributeError: The '.")
_OPTIONAL = re.compile(
    r"(?:`Import |optional dependency '|requires '|accessor requires )([A-Za-z][\w-]*)"
    r"|\b([A-Za-z]\w*)>=[\d.]+ is required"
)
"""How pandas and its like name a package that only some of their functions need."""
_UNWRITABLE = re.compile(
    r"(?:OSError: \[Errno 30\]|PermissionError: \[Errno 13\] [^'\n]*'/|"
    r"OSError: Cannot save file into a non-existent directory: '/)"
)
_IN_TMP = re.compile(r"""['"]/tmp/([^'"\n]{1,200}\.\w{1,8})['"]""")
_SAVING = re.compile(
    r"""\b(?:to_(?:csv|excel|feather|html|image|json|markdown|parquet|pickle|stata|xml)|write_\w+|savefig|savetxt|imsave"""
    r"""|ExcelWriter|save)\(|,\s{0,9}(?:mode\s{0,9}=\s{0,9})?['"][awx]b?\+?['"]"""
)
"""Calls that save a file, as far as models write them."""
_MISSING_FILE = re.compile(r"FileNotFoundError: .*?(?:'([^'\n]*)'|$)")
_HOST_PATH = re.compile(r"(?:[A-Za-z]:\\|/(?:home|Users|root|Volumes|media)/|~/)")
_NO_NETWORK = (
    "Name or service not known",
    "Temporary failure in name resolution",
    "nodename nor servname",
    "Network is unreachable",
    "No address associated with hostname",
    "Failed to resolve",
)
_DISTRIBUTIONS = {
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "Crypto": "pycryptodome",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "fitz": "pymupdf",
    "git": "gitpython",
    "PIL": "pillow",
    "pytables": "tables",
    "pptx": "python-pptx",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "serial": "pyserial",
    "yaml": "pyyaml",
}
"""Modules whose distribution has another name, as far as models import them."""


def execution_blocks(
    result: ExecutionResult,
    read_display: ReadDisplay,
    *,
    image_budget_bytes: int,
    structured: Structured,
    is_whole: bool = False,
    has_links: bool = True,
    failures_are_errors: bool = True,
    has_checkpoint: bool = False,
    names_session: bool = True,
    advice: str = "",
) -> CallToolResult:
    """Return the answer of `execute_code` and `get_execution`.

    `is_whole` says whether the fields have everything, as programs ask for it, `has_links` whether files come as links
    beside the text too, `has_checkpoint` whether the session can be rewound to the state before the execution,
    `names_session` whether the text has its id, which a caller that passed it need not read again, `advice` which call
    comes next.
    """
    media = dict(media_blocks(result, read_display, image_budget_bytes))
    if result.status == "running":
        result = result.model_copy(update={"next": _next_call(result)})
    links = [
        ResourceLink(type="resource_link", uri=file.uri, name=file.name, mime_type=file.mime_type, size=file.size)
        for file in _files_of_code(result)[: MAX_LINKS if has_links else 0]
    ]
    is_structured = structured == "always" or (structured == "auto" and not media)
    text = text_of(result, [*media], has_checkpoint=has_checkpoint, names_session=names_session, advice=advice)
    return CallToolResult(
        content=[TextContent(type="text", text=text), *media.values(), *links],
        structured_content=_fields(result, advice, is_whole=is_whole) if is_structured else None,
        is_error=not result.success and (failures_are_errors or result.status == "rejected"),
    )


def _fields(result: ExecutionResult, advice: str, *, is_whole: bool) -> dict[str, Any]:
    """Return a result as structured content, which some clients show to their model in place of the text.

    So what is empty is left out, and stdout stands in `output` alone, with a line for each file as clients of another
    interpreter look for it, unless a program wants it whole.
    """
    whole = result.model_dump(mode="json")
    if is_whole:
        return whole
    told = result.model_dump(mode="json", exclude_defaults=True, exclude={"stdout"})
    told |= {name: whole[name] for name in (*ALWAYS_TOLD, *(() if result.success else OF_FAILURES))}
    told["output"] = [*whole["output"], *map(_file_notice, result.files[:MAX_LINKS])]
    fields = {name: told[name] for name in whole if name in told and (name != "stderr" or result.stderr)}
    return {**fields, "hint": advice} if advice else fields


def _file_notice(file: FileReference) -> str:
    return _marked(f"File {file.change}: {file.name} ({file.mime_type}, {file.size} bytes)")


def model_blocks(model: Model, text: str) -> CallToolResult:
    """Return an answer of plain data: the text for models, the fields for programs."""
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content=model.model_dump(mode="json")
    )


def error_blocks(error: BelljarError, fields: Mapping[str, JsonValue] | None = None) -> CallToolResult:
    """Return an error as a refusal that says what to do; `fields` are those that the tool always answers with."""
    failure = {"success": False, "error": f"{expired_words(error)}{error.code}: {error.message}", "hint": error.hint}
    return CallToolResult(
        content=[TextContent(type="text", text=f"{error.code}: {error}")],
        structured_content={**(fields or {}), **failure},
        is_error=True,
    )


def error_field(error: BelljarError) -> str:
    """Return an error as the field `error` of an execution result has it."""
    return f"{expired_words(error)}{error.code}: {error}"


def text_of(
    result: ExecutionResult,
    media: Sequence[str] = (),
    *,
    has_checkpoint: bool = False,
    names_session: bool = True,
    advice: str = "",
) -> str:
    """Return everything that a model needs as text, in the order it happened.

    `media` has the URIs of the pictures and sounds that follow the text as blocks. Words of the session that look like
    a notice or like the last lines, which are belljar's, are marked as printed.
    """
    said: list[str] = []
    if result.result is not None:
        said.append(_result_text(result.execution_count, result.result))
    said += [_marked(_display_line(display, media, result.result)) for display in result.displays if display.at is None]
    traceback = "\n".join(_shown(short_traceback(result.traceback))) if result.traceback else ""
    said.append(_marked(traceback))
    # By its beginning, because of a long message the traceback and the error keep different parts.
    if result.error is not None and (error := without_cell_file(result.error))[:SAME_ERROR_CHARS] not in traceback:
        said.append(_marked(f"Error: {error}"))
    if result.calls:
        said.append(_marked(_calls_line(result.calls, text_before="\n".join([*result.output, traceback, *said]))))
    if files := _files_of_code(result):
        said.append(_marked("\n".join(["Files:", *_file_lines(files)])))
    parts = [_shown_in_order(result, media), *said]
    if result.truncated is not None:
        cut = result.truncated
        parts.append(
            f"Shown {cut.shown_bytes:,} of {cut.total_bytes:,} bytes of output; all of it: "
            f'get_execution(execution_id="{result.execution_id}", offset=0), or {cut.uri}'
        )
    body = "\n".join(part for part in (*parts, advice) if part)
    if result.waits_for:
        body = f"It has not started yet: it waits for {result.waits_for}\nIt runs by itself after that."
    return (
        f"{body or _nothing(result)}\n\n{_footer(result, has_checkpoint=has_checkpoint, names_session=names_session)}"
    )


def _nothing(result: ExecutionResult) -> str:
    if result.status != "running":
        return "(no output)"
    return "(no new output)" if result.sequence else "(no output yet)"


def _marked(text: str) -> str:
    """Return words of the session with what imitates belljar's marked; without a bracket there is nothing to mark."""
    return text if text.isascii() and "[" not in text else disarmed(text)


def _result_text(count: int, text: str) -> str:
    """Return the value of a cell. One of several lines starts on its own, so that a table's columns stay aligned."""
    text = _marked(_reflowed(text))
    return f"Out[{count}]:\n{text}" if "\n" in text else f"Out[{count}]: {text}"


def _reflowed(text: str) -> str:
    """Return a list of plain values, which IPython prints one a line, on as few lines as it takes."""
    lines = text.split("\n")
    if len(lines) < MAX_PRINTED_ALONE or text[0] not in "[({" or any(mark in text[1:-1] for mark in "[](){}\"'\\"):
        return text
    return textwrap.fill(" ".join(line.strip() for line in lines), LINE_CHARS, break_long_words=False)


def _shown_in_order(result: ExecutionResult, media: Sequence[str]) -> str:
    """Return what was printed, with belljar's notices and a line for each display where they were shown."""
    ours = {notice.at for notice in result.notices}
    texts: list[tuple[str, bool]] = []
    place = 0

    def add(text: str, *, is_notice: bool = False) -> None:
        if text:
            texts.append((text, is_notice))

    def end_line() -> None:
        if texts and not texts[-1][0].endswith("\n"):
            add("\n")

    def add_output(until: int) -> None:
        for at in range(place, min(until, len(result.output))):
            if at in ours and not result.output[at].startswith("\n"):
                end_line()
            text = result.output[at]
            # Warnings are printed to stderr.
            add(short_warnings(text) if result.stderr and at not in ours else text, is_notice=at in ours)

    for display in result.displays:
        if display.at is not None:
            add_output(display.at)
            place = max(place, display.at)
            end_line()
            add(f"{_display_line(display, media, None)}\n")
    add_output(len(result.output))
    return disarmed_around(texts).rstrip("\n") if texts else ""


def _next_call(result: ExecutionResult) -> NextCall:
    arguments: dict[str, JsonValue] = {
        "execution_id": result.execution_id,
        "since": result.sequence,
        "wait_s": NEXT_WAIT_S,
    }
    return NextCall(tool="get_execution", arguments=arguments)


def _calls_line(calls: Sequence[ToolCall], text_before: str) -> str:
    """Return the calls of a cell that did not end well, by state: those that are done, and those that may be.

    A reason that stands in `text_before` already is left out.
    """
    groups: dict[str, Counter[str]] = {}
    for call in calls:
        why = f" ({call.reason})" if call.reason and call.reason.removesuffix("…") not in text_before else ""
        groups.setdefault(_CALL_STATES[call.state], Counter())[f"{call.server}.{call.tool}{why}"] += 1
    listed = [
        f"{state}: {', '.join(name if count == 1 else f'{name} ×{count}' for name, count in names.items())}"
        for state, names in groups.items()
    ]
    return f"Calls made: {'; '.join(listed)}"


def _footer(result: ExecutionResult, *, has_checkpoint: bool, names_session: bool) -> str:
    # The execution's id stands only in the calls below that need it: a rewind or a fork can also be told how many
    # executions back, and programs find the id in the fields.
    session = f" | session_id: {result.session_id}" if names_session and result.session_id else ""
    lines = [f"[{result.status}{session}]"]
    if result.status == "running" and result.asks_person:
        lines.append(f"It waits for {_marked(result.asks_person)}. Tell the person; its clock stands still meanwhile.")
    if result.status == "running":
        lines.append(
            f'It goes on in the background: get_execution(execution_id="{result.execution_id}", '
            f"since={result.sequence}, wait_s={NEXT_WAIT_S}) returns the rest."
        )
    # Where the kernel was replaced before this cell, a notice among the output has said so.
    if result.state == "lost" and result.status not in ("ok", "error", "running", "rejected"):
        names = _marked(", ".join(result.lost[:40])) or "none known"
        lines.append(f"The kernel was replaced: files are kept, imports and variables are lost ({names}).")
        if has_checkpoint:
            call = f'rewind_session(session_id="{result.session_id}", to="{result.execution_id}")'
            lines.append(f"{call} brings back variables and files as they were before this execution.")
    if result.state == "rewound" and result.lost:
        lines.append(f"Did not come back: {_marked(', '.join(result.lost[:40]))}.")
    if result.session_info is not None:
        lines.append(result.session_info.instructions)
    return "\n".join(lines)


def _display_line(display: Display, media: Sequence[str], result_text: str | None) -> str:
    """Return a display as text, without its plain form where that is the same as `result_text`."""
    places = [form.file or form.uri for form in (display, *display.also) if form.uri]
    where = f" {' '.join(places)}" if places else ""
    playable = _playable(display)
    if playable is not None and playable.uri in media:
        # The blocks come after the text: the number says which of them belongs here.
        where = f" {media.index(playable.uri) + 1}{where}"
    form = form_of(display.mime)
    if form.block == "image":
        return f"[{display.mime}{where}]"
    if form.as_text == "plain" and display.plain:
        plain = "" if display.plain == result_text else display.plain
        # A table says as text what its page says. What has no text of its own is shown by a link to its page, or, where
        # that is so short that there is no file of it, by the page itself.
        is_textless = display.mime == WIDGET or display.plain.startswith("<")
        if is_textless and not places and display.text:
            return clip(display.text, SHOWN_PAGE_CHARS)
        return "\n".join(filter(None, [plain, f"[{display.mime}{where}]" if is_textless and places else ""]))
    if form.as_text == "result" and result_text is not None and not result_text.startswith("<"):
        return ""  # the value stands above, in the form that code can use
    if display.text is not None:
        return display.text
    return f"[{display.mime}, {display.size:,} bytes{where}]"


def _files_of_code(result: ExecutionResult) -> list[FileReference]:
    """Return the files but for those made of figures, which are named where the figures are."""
    figures = {display.file for display in result.displays}
    return [file for file in result.files if file.uri not in figures]


def _file_lines(files: Sequence[FileReference]) -> Iterator[str]:
    for file in files[:MAX_LINKS]:
        yield f"  {file.change} {file.name} ({file.mime_type}, {file.size:,} bytes) {file.uri}"
    if len(files) > MAX_LINKS:
        yield f"  and {len(files) - MAX_LINKS} more: list_session_files names them all"


def _shown(traceback: list[str]) -> list[str]:
    if len(traceback) <= SHOWN_TRACEBACK_LINES:
        return traceback
    half = SHOWN_TRACEBACK_LINES // 2
    return [*traceback[:half], f"... {len(traceback) - 2 * half} lines left out ...", *traceback[-half:]]


def _playable(display: Display) -> Display | None:
    """Return the one form of a display that a client can show or play; None if there is none."""
    forms = (form for form in (display, *display.also) if form.uri)
    return next((form for form in forms if form_of(form.mime).block is not None), None)


def media_blocks(
    result: ExecutionResult, read_display: ReadDisplay, budget_bytes: int
) -> Iterator[tuple[str, ContentBlock]]:
    """Yield pictures and sounds by their URI, within one message's budget; the originals stay behind their URIs."""
    left = budget_bytes
    # A picture that is shown at two places is sent once, and both places name it.
    forms = {form.uri: form for display in result.displays if (form := _playable(display)) is not None}
    for form in [*forms.values()][:MAX_PICTURES]:
        content = read_display(form.uri or "")
        if content is None:
            continue
        block = form_of(form.mime).block
        if block == "audio" and len(content) <= left:
            left -= len(content)
            yield form.uri or "", AudioContent(type="audio", data=_base64(content), mime_type=form.mime)
        elif block == "image" and (picture := fitted(content, form.mime, left)) is not None:
            left -= len(picture[0])
            yield form.uri or "", ImageContent(type="image", data=_base64(picture[0]), mime_type=picture[1])


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def asked_structure(ctx: Context[Any, Any], default: Structured) -> Structured:
    """Return what the request's `_meta` asks for beside text, or the default; our own client asks for everything.

    `auto` is left to clients that drop pictures, or may do so; all others can be sent both.
    """
    asked = _meta(ctx).get("belljar/structured")
    wanted = asked if asked in ("auto", "always", "never") else default
    return "always" if wanted == "auto" and not _may_drop_pictures(ctx) else wanted


def _may_drop_pictures(ctx: Context[Any, Any]) -> bool:
    return not takes_links(ctx) or client_name(ctx).lower().startswith(DROPPERS)


def takes_links(ctx: Context[Any, Any]) -> bool:
    """Return whether the client can be sent links beside the text, because it says which one it is."""
    return client_name(ctx).lower() not in NO_NAMES


def client_name(ctx: Context[Any, Any]) -> str:
    """Return the name that the client gave of itself; empty if it gave none."""
    client = ctx.request_context.session.client_params
    return client.client_info.name if client is not None else ""


def wants(ctx: Context[Any, Any], key: str, value: object) -> bool:
    """Return whether the request's `_meta` has this value for one of our keys."""
    return _meta(ctx).get(key) == value


def _meta(ctx: Context[Any, Any]) -> Mapping[str, object]:
    return cast("Mapping[str, object]", ctx.request_context.meta or {})


def next_call(
    result: ExecutionResult,
    *,
    hosts: Sequence[str],
    isolates: bool,
    folders: Sequence[str],
    workspace: str = WORKSPACE,
    code: str = "",
) -> str:
    """Return the line for an execution; empty where no call of ours helps.

    `hosts` are those that sessions may reach, `folders` the paths of the user's folders in them, `workspace` is that of
    the session's own folder.
    """
    if result.status == "ok":
        return _about_saved(code, result, workspace)
    error, session = result.error or "", f'session_id="{result.session_id}"'
    if result.status != "error" or not error:
        return ""
    if found := _OURS.match(error):
        return f"Next: os.listdir('{found[1]}') names those there are; no package brings another."
    if name := _missing_package(error):
        return f'Next: install_dependencies(packages=["{name}"], {session}), then run the cell again.'
    if isolates and any(text in error for text in _NO_NETWORK):
        reach = f"Sessions reach only {', '.join(hosts)}" if hosts else "Sessions have no network"
        return f'Next: {reach}; upload_file({session}, name="…", url="https://…") fetches a file for it.'
    if _UNWRITABLE.match(error):
        return f"Next: write to {workspace}, the session's own folder."
    if found := _MISSING_FILE.match(error):
        return _about_file(found[1] or "", session, folders, isolates=isolates)
    return ""


def _missing_package(error: str) -> str:
    found = _MODULE.match(error) or (_OPTIONAL.search(error) if error.startswith(_WITH_OPTIONAL) else None)
    module = next(filter(None, found.groups()), "") if found else ""
    return _DISTRIBUTIONS.get(module, module.replace("_", "-"))


def _about_saved(code: str, result: ExecutionResult, workspace: str) -> str:
    """Return the line for a cell that saves a file in /tmp, unless one of its name is in the session's folder now."""
    saved = {name.rpartition("/")[2] for name in _IN_TMP.findall(code)}
    if not saved - {file.name.rpartition("/")[2] for file in result.files} or not _SAVING.search(code):
        return ""
    return f"Next: files in /tmp are not downloadable from there; save to {workspace} what somebody is to get."


def _about_file(path: str, session: str, folders: Sequence[str], *, isolates: bool) -> str:
    if isolates and _HOST_PATH.match(path):
        seen = f" The user's folders are {', '.join(folders)}." if folders else ""
        return f"Next: the user's own paths are not in the session; upload_file({session}, …) puts a file there.{seen}"
    return f"Next: list_session_files({session}) names the files that are there."
