"""What belljar's parts do with each form of a rich output, and with types that nobody knows."""

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from starlette.responses import Response

from belljar.cli.saved_outputs import FigureFiles, saved_forms
from belljar.console import frames, pages
from belljar.console.cells import OutputBlock, PageContent, RenderedOutput
from belljar.errors import BelljarError
from belljar.files.file_types import is_text, mime_type_of
from belljar.inside.toolbox.toolbox.results import Media
from belljar.mcp.content import media_blocks, text_of
from belljar.models import Display, ExecutionResult, OutputEvent
from belljar.outputs.displays import DisplayStore, display_of
from belljar.outputs.forms import FORMS, PICTURES, extension_of, form_of, picture_in, readable_text
from belljar.python.session_handle import SessionHandle

# So long that text becomes a file, too. It can be read as base64 and as text.
CONTENT = b"a picture" * 1_000
VALUE = base64.b64encode(CONTENT).decode()


class Told(NamedTuple):
    """What is done with a form: its file, and how models, the console, exports and `belljar run` have it."""

    ending: str
    is_binary: bool
    model: str
    console: str
    export: str
    is_saved: bool


PICTURE = "a picture"
KNOWN = {
    "image/png": Told(".png", True, PICTURE, ".png", PICTURE, True),
    "image/jpeg": Told(".jpg", True, PICTURE, ".jpg", PICTURE, True),
    "image/gif": Told(".gif", True, PICTURE, ".gif", PICTURE, True),
    "image/webp": Told(".webp", True, PICTURE, ".webp", PICTURE, True),
    "image/svg+xml": Told(".svg", False, "named", ".svg", PICTURE, True),
    "text/html": Told(".html", False, "plain", ".html", "html", False),
    "text/markdown": Told(".md", False, "named", ".html", "markdown", False),
    "text/latex": Told(".tex", False, "named", "text", "latex", False),
    "application/json": Told(".json", False, "named", "text", "json", False),
    "application/pdf": Told(".pdf", True, "named", "text", "names", True),
    "application/javascript": Told(".js", False, "named", "text", "names", False),
    "application/vnd.jupyter.widget-view+json": Told(".json", False, "plain", "text", "names", False),
    "application/vnd.plotly.v1+json": Told(".json", False, "named", "text", "names", False),
    "application/octet-stream": Told(".bin", True, "named", "text", "names", False),
    "application/zip": Told(".zip", True, "named", "text", "names", False),
    "audio/mpeg": Told(".mp3", True, "a sound", "text", "names", True),
    "video/mp4": Told(".mp4", True, "named", "text", "names", True),
    "image/bmp": Told(".bmp", True, "named", "text", "names", True),
    "image/tiff": Told(".tiff", True, "named", "text", "names", True),
    "font/x-unknown": Told(".bin", True, "named", "text", "names", False),
    "text/csv": Told(".csv", False, "named", "text", "names", False),
}
OTHERS = {
    # Parameters, upper case and the like make a type that nobody knows, but its bytes stay bytes.
    "image/png; x=1": Told(".bin", True, "named", "text", "names", True),
    "image/svg+xml; charset=utf-8": Told(".bin", True, "named", "text", "names", True),
    "application/pdf;version=2": Told(".bin", True, "named", "text", "names", True),
    "application/zip-like": Told(".bin", True, "named", "text", "names", False),
    "audio/": Told(".bin", True, "a sound", "text", "names", True),
    "IMAGE/PNG": Told(".png", False, "named", "text", "names", False),
    "Text/HTML": Told(".html", False, "named", "text", "names", False),
    "text/html; charset=utf-8": Told(".bin", False, "named", "text", "names", False),
    "text/x": Told(".bin", False, "named", "text", "names", False),
    "x-image/png": Told(".bin", False, "named", "text", "names", False),
    "image": Told(".bin", False, "named", "text", "names", False),
    "": Told(".bin", False, "named", "text", "names", False),
    " image/png": Told(".bin", False, "named", "text", "names", False),
    "image/../../etc/passwd": Told(".bin", True, "named", "text", "names", True),
    "text/html\n<b>": Told(".bin", False, "named", "text", "names", False),
    "x" * 100_000: Told(".bin", False, "named", "text", "names", False),
    f"image/{'x' * 100_000}": Told(".bin", True, "named", "text", "names", True),
}


@pytest.mark.parametrize(("mime", "told"), [*KNOWN.items(), *OTHERS.items()], ids=lambda value: str(value)[:30])
async def test_each_form_is_told_in_the_same_way_everywhere(mime: str, told: Told, tmp_path: Path) -> None:
    display = display_of({"text/plain": "a value", mime: VALUE}, DisplayStore(tmp_path, "e" * 16))
    assert display is not None
    assert display.uri is not None
    name = display.uri.rpartition("/")[2]
    content = (tmp_path / ("e" * 16) / name).read_bytes()
    found = Told(
        name.removeprefix("1"),
        content == CONTENT,
        _for_model(display, content),
        await _in_console(display, content),
        _in_export(mime),
        saved_forms(display) != [],
    )
    assert found == told
    assert extension_of(mime) == told.ending

    assert (await _figures(display) != []) == (told.model == PICTURE)
    assert (pages._mime(f"of.a.cell{told.ending}") == mime) == (told.model == PICTURE)  # pyright: ignore[reportPrivateUsage]


def _result(display: Display) -> ExecutionResult:
    return ExecutionResult(
        success=True,
        status="ok",
        execution_id="e" * 16,
        session_id="s" * 16,
        execution_count=1,
        output=[],
        stdout="",
        stderr="",
        displays=[display],
    )


def _for_model(display: Display, content: bytes) -> str:
    result = _result(display)
    shown = {uri: block.type for uri, block in media_blocks(result, lambda _: content, 1_000_000)}
    line = text_of(result, media=[*shown])
    if display.uri in shown:
        assert f"[{display.mime} 1 {display.uri}]" in line or f"{len(content):,} bytes 1 {display.uri}]" in line
        return {"image": PICTURE, "audio": "a sound"}[shown[display.uri]]
    if "a value" in line:
        return "plain"
    assert f"{len(content):,} bytes {display.uri}]" in line or len(display.mime) > 1_000
    return "named"


async def _in_console(display: Display, content: bytes) -> str:
    block = _block(display, "a value")
    if not block.src:
        return block.kind
    engine = SimpleNamespace(event=_later(_event(display)), display=_later(content))
    request = SimpleNamespace(
        state=SimpleNamespace(access=None),
        path_params={"execution_id": "e" * 16, "name": block.src.rpartition("/")[2]},
        query_params={},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "_is_picture", lambda *_: True)
        answer = await frames.Frames(cast("Any", engine), allows_scripts=False).serve(cast("Any", request))
    assert answer.status_code == 200
    assert answer.media_type == ("text/html" if block.kind == "frame" else display.mime)
    return Path(block.src).suffix


def _block(display: Display, plain: str = "") -> OutputBlock:
    rendered = RenderedOutput("e" * 16, lambda *_: PageContent(has_script=False))
    rendered.add(_event(display, plain))
    return rendered.blocks[0]


def _event(display: Display, plain: str = "") -> OutputEvent:
    return OutputEvent(sequence=1, kind="display", text=plain, data={"display": display.model_dump(mode="json")})


def _later(value: object) -> Any:
    async def answer(*_: object) -> object:
        return value

    return answer


def _in_export(mime: str) -> str:
    if (picture := picture_in({mime: VALUE})) is not None:
        assert picture.mime == mime
        return PICTURE
    text, language = readable_text({mime: VALUE})
    if language == "text":
        assert text == (f"[{mime}]" if mime else "")
        return "names"
    return language


async def _figures(display: Display) -> list[bytes]:
    return await SessionHandle.figures(cast("Any", SimpleNamespace(display=_later(b""))), _result(display))


def test_the_form_that_a_person_would_rather_look_at_comes_first(tmp_path: Path) -> None:
    ranked = [*KNOWN][:10]
    bundle = dict.fromkeys([*KNOWN][:9:-1] + ranked[::-1], "AAAA")
    display = display_of({"text/plain": "a value", **bundle}, DisplayStore(tmp_path, "e" * 16))
    assert display is not None
    # Behind them come the others as the cell gave them, and at most twelve in all.
    assert [form.mime for form in (display, *display.also)] == [*ranked, *[*bundle][:2]]


def test_a_stored_form_is_served_by_its_name_as_what_it_is() -> None:
    for mime in PICTURES:
        assert mime_type_of(f"1{extension_of(mime)}") == mime
    for mime, form in FORMS.items():
        assert form.is_prefix or is_text(mime_type_of(f"1{extension_of(mime)}")) != form.is_binary


@pytest.mark.parametrize("mime", [*PICTURES, "image/svg+xml", "image/x", "audio/x", "video/x"])
def test_media_that_tools_return_inside_a_session_have_values_of_the_kind_that_the_table_says(mime: str) -> None:
    shown = Media({"kind": "blob", "mime": mime, "data": VALUE}).forms()
    assert shown[mime] == (VALUE if form_of(mime).is_binary else CONTENT.decode())


def test_exports_read_the_source_of_a_page_only_where_there_is_nothing_else() -> None:
    bundle = dict.fromkeys(("text/html", "application/json", "text/latex", "text/markdown"), "source")
    read: list[str] = []
    while bundle:
        read.append(language := readable_text(bundle)[1])
        del bundle[next(mime for mime in bundle if mime.endswith(language))]
    assert read == ["markdown", "latex", "json", "html"]


def test_the_console_draws_pictures_before_pages_and_pages_before_text() -> None:
    forms = ["image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml", "text/html", "text/markdown"]
    for place, wanted in enumerate(forms):
        first, *also = [Display(mime=mime, text="source") for mime in reversed(forms[place:])]
        assert _block(first.model_copy(update={"also": also})).src.endswith(KNOWN[wanted].console)
    both = Display(mime="application/json", text="[1]", also=[Display(mime="text/latex", text="$a$")])
    assert _block(both).text == "$a$"


async def test_the_console_serves_pictures_of_their_own_type_only() -> None:
    Image = pytest.importorskip("PIL.Image")
    from io import BytesIO

    drawn: dict[str, bytes] = {}
    for mime in ("image/png", "image/jpeg", "image/gif", "image/webp"):
        buffer = BytesIO()
        Image.new("RGB", (2, 2)).save(buffer, mime.removeprefix("image/").upper())
        drawn[mime] = buffer.getvalue()
    for mime in drawn:
        for other, content in drawn.items():
            if other == mime:
                answer: Response = await frames.picture_response(content, mime)
                assert answer.media_type == mime
            else:
                with pytest.raises(BelljarError):
                    await frames.picture_response(content, mime)


@pytest.mark.parametrize(
    ("name", "mime"),
    [
        ("A.PNG", "image/png"),
        ("a.jpg", "image/jpeg"),
        ("a.jpeg", "image/jpeg"),
        (".gif", "image/gif"),
        ("a.b.webp", "image/webp"),
        ("a.svg", None),
        ("png", None),
        ("a.png.txt", None),
        ("a.html", None),
        ("", None),
    ],
)
def test_the_console_shows_files_that_are_pictures_by_their_name(name: str, mime: str | None) -> None:
    assert pages._mime(name) == mime  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("mime", "name"),
    [
        ("image/png", "figure-1.png"),
        ("image/jpeg", "figure-1.jpg"),
        ("image/webp", "figure-1.webp"),
        ("image/svg+xml", "figure-1.svg"),
        ("application/pdf", "figure-1.pdf"),
        ("audio/mpeg", "figure-1.mp3"),
        ("text/html", "figure-1.html"),
        ("text/latex", None),
        ("application/zip", None),
        ("IMAGE/PNG", None),
    ],
)
def test_the_console_of_a_terminal_saves_what_it_cannot_show(mime: str, name: str | None, tmp_path: Path) -> None:
    saved = FigureFiles(tmp_path).save({mime: "AAAA", "text/plain": "<object>"})
    assert [path.name for path in saved] == ([name] if name else [])
    if name:
        is_text = mime in ("text/html", "image/svg+xml")
        assert saved[0].read_bytes() == (b"AAAA" if is_text else bytes(3))
