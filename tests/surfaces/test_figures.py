"""Pictures, pages and other rich outputs, captured without the code saving them."""

import io
import json
from base64 import b64decode
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from calls import ERAS, Caller, blocks, connected, images, links, opened_runtime, text_of
from mcp.types import AudioContent, BlobResourceContents, CallToolResult, Implementation, TextResourceContents
from PIL import Image

from belljar.environments import Environment
from belljar.models import ExecutionResult
from belljar.runtime import Runtime

pytestmark = pytest.mark.anyio
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
PNG = f"display({{'image/png': {PIXEL!r}}}, raw=True)"
PLOT = "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1, 2, {last}])\n"


@pytest.fixture(scope="module")
async def runtime(
    anyio_backend: str, default_environment: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    """An engine whose sessions have matplotlib already, because nearly every test draws in a fresh one."""
    chosen = {"fork_start": True, "preload": ["matplotlib.pyplot"]}
    async with opened_runtime(default_environment, tmp_path_factory.mktemp("belljar"), **chosen) as runtime:
        yield runtime


async def shown(caller: Caller, code: str, session_id: str) -> tuple[CallToolResult, ExecutionResult]:
    """The answer with its blocks, and the same result as fields."""
    arguments = {"code": code, "session_id": session_id}
    answer = await caller.client.call_tool("execute_code", arguments, meta={"belljar/structured": "always"})
    assert not answer.is_error, text_of(answer)
    return answer, ExecutionResult.model_validate(answer.structured_content)


def picture(data: str) -> Image.Image:
    return Image.open(io.BytesIO(b64decode(data)))


def mimes(result: ExecutionResult) -> list[str]:
    return [display.mime for display in result.displays]


# matplotlib


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("name", "has_fields", "has_links"),
    [
        ("claude-code", False, True),
        ("codex-mcp-client", False, True),
        ("some-agent", True, True),
        ("fastmcp", True, True),
        ("mcp-inspector", True, True),
        ("mcp", False, False),
        ("", False, False),
    ],
)
async def test_every_client_gets_the_picture_and_those_that_may_drop_it_no_fields_beside_it(
    runtime: Runtime, shared_session: str, era: str, name: str, has_fields: bool, has_links: bool
):
    """Frameworks call themselves `mcp`: they prefer fields to pictures, or have their model fetch a link."""
    async with connected(runtime, era, client_info=Implementation(name=name, version="1")) as caller:
        code = f"{PNG}\nfor name in ('a.csv', 'b.png'): open(name, 'w').close()"
        answer = await caller.call("execute_code", code=code, session_id=shared_session)
        assert len(images(answer)) == 1
        assert picture(images(answer)[0].data).size == (1, 1)
        fields = json.dumps(answer.structured_content)
        assert (answer.structured_content is not None) == has_fields
        assert PIXEL[:20] not in fields
        assert len(links(answer)) == (2 if has_links else 0)
        for file in ("a.csv", "b.png"):
            uri = f"kernel://{shared_session}/{file}"
            assert uri in text_of(answer)
            assert (uri in fields) == has_fields
        plain = await caller.call("execute_code", code="1 + 1", session_id=shared_session)
        assert plain.structured_content is not None
        whole = await caller.whole("execute_code", code=PNG, session_id=shared_session)
        assert (whole.structured_content or {})["displays"][0]["mime"] == "image/png"


async def test_what_fields_say_of_a_figure_is_where_it_is_found(caller: Caller, shared_session: str):
    answer = await caller.call("execute_code", code=PLOT.format(last=7), session_id=shared_session)
    assert answer.structured_content is not None
    (display,) = answer.structured_content["displays"]
    assert display["file"] in [file["uri"] for file in answer.structured_content["files"]]
    for uri in (display["uri"], display["file"]):
        assert (await caller.read(uri)).mime_type == "image/png"


@pytest.mark.parametrize(
    "ending",
    [
        "plt.show()",
        "fig",
        "pass",
        "plt.show()\nfig",
        "display(fig)\nplt.close()",
        "plt.savefig('kept.png')\nplt.show()",
    ],
)
async def test_a_figure_comes_as_one_image(caller: Caller, shared_session: str, ending: str):
    answer, result = await shown(caller, PLOT.format(last=3) + ending, shared_session)
    (image,) = images(answer)
    assert image.mime_type == "image/png"
    assert picture(image.data).size > (300, 200)
    assert answer.structured_content is not None
    assert answer.structured_content["success"] is True
    assert mimes(result) == ["image/png"]
    (display,) = result.displays
    assert display.uri is not None
    assert (display.file or display.uri) in text_of(answer)
    for uri in filter(None, (display.uri, display.file)):
        content = await caller.read(uri)
        assert isinstance(content, BlobResourceContents)
        assert (content.mime_type, content.blob) == ("image/png", image.data)


async def test_savefig_and_show_give_one_image_and_one_file(caller: Caller, shared_session: str):
    code = PLOT.format(last=4) + "plt.savefig('saved.png')\nplt.show()"
    answer, result = await shown(caller, code, shared_session)
    assert len(images(answer)) == 1
    assert [link.name for link in links(answer)] == ["saved.png"]
    assert [(file.name, file.mime_type) for file in result.files] == [("saved.png", "image/png")]


async def test_a_figure_that_is_shown_is_a_file_of_the_session_too(caller: Caller):
    answer, result = await shown(caller, PLOT.format(last=4) + "plt.show()\nfig", "")
    (file,) = result.files
    assert (file.name, file.mime_type, file.change) == ("figure-1.png", "image/png", "created")
    (display,) = result.displays
    assert (display.file, display.size) == (file.uri, file.size)
    # The text names it once, where the figure is, and there is no link beside the picture itself.
    assert text_of(answer).count("figure-1.png") == text_of(answer).count("://") == 1
    assert f"[image/png 1 {file.uri}]" in text_of(answer)
    assert (len(images(answer)), links(answer)) == (1, [])
    first = await caller.read(file.uri)
    # The next one takes the next name, also where code has taken that of a figure.
    assert (await caller.execute("open('figure-2.png', 'w').close()", result.session_id)).success
    result = await caller.execute(PLOT.format(last=9), result.session_id)
    assert [file.name for file in result.files] == ["figure-3.png"]
    assert await caller.read(file.uri) == first
    listed = await caller.fields("list_session_files", session_id=result.session_id)
    assert [file["name"] for file in listed["files"]] == [f"figure-{number}.png" for number in (1, 2, 3)]


async def test_each_figure_of_a_cell_is_one_file(caller: Caller):
    code = "for width in (2, 3): plt.figure(figsize=(width, 2)); plt.plot([1, width]); plt.show()\nfig.savefig('a.png')"
    result = await caller.execute(PLOT.format(last=3) + "plt.close()\n" + code, "")
    assert [file.name for file in result.files] == ["a.png", "figure-1.png", "figure-2.png"]
    assert [display.file for display in result.displays] == [file.uri for file in result.files[1:]]
    error = await caller.execute(PLOT.format(last=3) + "plt.show()\n1/0", result.session_id)
    assert [file.name for file in error.files] == ["figure-3.png"]


async def test_a_picture_that_code_saved_is_not_doubled(caller: Caller):
    result = await caller.execute(PLOT.format(last=4) + "plt.savefig('mine.png')\nplt.show()", "")
    assert [file.name for file in result.files] == ["mine.png"]
    code = "from IPython.display import Image\nImage('mine.png')"
    result = await caller.execute(code, result.session_id)
    assert (mimes(result), result.files) == (["image/png"], [])


async def test_a_figure_that_finds_no_room_is_still_shown(default_environment: Environment, tmp_path: Path):
    async with opened_runtime(default_environment, tmp_path, disk_mb=1) as runtime, connected(runtime) as caller:
        full = await caller.execute("open('full', 'wb').write(bytes(1_048_500))")
        answer, result = await shown(caller, PLOT.format(last=4) + "plt.show()", full.session_id)
    assert (len(images(answer)), result.files) == (1, [])
    (display,) = result.displays
    assert display.uri is not None
    assert display.uri in text_of(answer)


async def test_several_figures_come_in_order(caller: Caller, shared_session: str):
    code = (
        "import matplotlib.pyplot as plt\nfor width in (2, 3, 4): plt.figure(figsize=(width, 2)); plt.plot([1, width])"
    )
    for ending in ("\nplt.show()", ""):
        answer, result = await shown(caller, code + ending, shared_session)
        widths = [picture(image.data).width for image in images(answer)]
        assert len(widths) == 3
        assert widths == sorted(widths)
        assert mimes(result) == ["image/png"] * 3


async def test_a_figure_is_not_shown_again_by_the_next_cell(caller: Caller, shared_session: str):
    await shown(caller, PLOT.format(last=5), shared_session)
    answer, result = await shown(caller, "1", shared_session)
    assert (images(answer), result.displays) == ([], [])


async def test_a_figure_made_before_an_error_is_kept(caller: Caller, shared_session: str):
    answer = await caller.call("execute_code", code=PLOT.format(last=6) + "plt.show()\n1/0", session_id=shared_session)
    assert answer.is_error
    assert len(images(answer)) == 1
    assert "ZeroDivisionError" in text_of(answer)


async def test_seaborn_figures_are_captured(caller: Caller, shared_session: str):
    code = "import seaborn as sns\nsns.histplot([1, 2, 2, 3])"
    answer, result = await shown(caller, code, shared_session)
    assert len(images(answer)) == 1
    assert mimes(result) == ["image/png"]


async def test_a_pillow_image_is_a_picture(caller: Caller, shared_session: str):
    answer, _ = await shown(caller, "from PIL import Image\nImage.new('RGB', (30, 20))", shared_session)
    assert [picture(image.data).size for image in images(answer)] == [(30, 20)]


async def test_more_figures_than_one_message_takes_stay_behind_their_links(caller: Caller, shared_session: str):
    code = (
        "import matplotlib.pyplot as plt\nfor i in range(12): plt.figure(figsize=(1, 1)); plt.plot([i, 1]); plt.show()"
    )
    answer, result = await shown(caller, code, shared_session)
    assert 0 < len(images(answer)) < 12
    assert len(result.displays) == 12
    assert all(display.file and display.file in text_of(answer) for display in result.displays)


async def test_a_big_image_is_scaled_under_the_budget_and_the_original_linked(caller: Caller, shared_session: str):
    code = (
        "import numpy as np\nfrom PIL import Image\n"
        "noise = np.random.default_rng(1).integers(0, 255, (900, 900, 3), dtype='uint8')\nImage.fromarray(noise)"
    )
    answer, result = await shown(caller, code, shared_session)
    (image,) = images(answer)
    assert len(b64decode(image.data)) <= 700_000
    assert picture(image.data).width < 900
    (display,) = result.displays
    assert display.size > 2_000_000
    assert display.file is not None
    assert display.file in text_of(answer)
    original = await caller.read(display.file)
    assert isinstance(original, BlobResourceContents)
    assert picture(original.blob).size == (900, 900)


async def test_the_image_budget_is_for_all_images_of_an_answer(default_environment: Environment, tmp_path: Path):
    code = (
        "import numpy as np\nfrom PIL import Image\nfor seed in range(3):\n"
        "  display(Image.fromarray(np.random.default_rng(seed).integers(0, 255, (99, 99, 3), dtype='uint8')))"
    )
    async with (
        opened_runtime(default_environment, tmp_path, image_budget_bytes=50_000) as runtime,
        connected(runtime) as caller,
    ):
        answer, result = await shown(caller, code, "")
    assert sum(len(b64decode(image.data)) for image in images(answer)) <= 50_000
    assert len(images(answer)) >= 2
    assert len(result.displays) == 3


@pytest.mark.parametrize("value", ["'not base64!'", "'AAAA'", "12", "None", "['a']", "'iVBORw0KGgo='"], ids=str)
async def test_a_picture_that_is_none_breaks_nothing(caller: Caller, shared_session: str, value: str):
    code = f"display({{'image/png': {value}, 'text/plain': 'fallback'}}, raw=True)\nprint('on')"
    answer = await caller.call("execute_code", code=code, session_id=shared_session)
    assert not answer.is_error
    assert "\non\n" in text_of(answer)


async def test_sound_comes_as_an_audio_block(caller: Caller, shared_session: str):
    code = "import numpy as np\nfrom IPython.display import Audio\ndisplay({'audio/wav': 'UklGRgAAAABXQVZF'}, raw=True)"
    answer, _ = await shown(caller, code, shared_session)
    (audio,) = blocks(answer, AudioContent)
    assert (audio.mime_type, b64decode(audio.data)[:4]) == ("audio/wav", b"RIFF")


# Plotly

PLOTLY = "import plotly.graph_objects as go\nchart = go.Figure(go.Scatter(x=[1, 2], y=[3, 1], name='series-name'))\n"
NO_BROWSER = (
    "import plotly.io\ndef no_browser(*_, **__): raise RuntimeError('no browser')\nplotly.io.to_image = no_browser"
)


@pytest.fixture(scope="module")
async def browserless(runtime: Runtime) -> str:
    """A session in which figures have no picture, as on most hosts; drawing one takes seconds."""
    async with connected(runtime) as caller:
        return (await caller.execute(NO_BROWSER)).session_id


@pytest.mark.parametrize("ending", ["chart.show()", "chart", "chart.show()\nchart"])
async def test_a_plotly_figure_is_one_page_that_needs_no_network(caller: Caller, browserless: str, ending: str):
    answer, result = await shown(caller, PLOTLY + ending, browserless)
    (page,) = result.displays
    assert (page.mime, page.also) == ("text/html", [])
    assert page.uri is not None
    assert page.uri in text_of(answer)
    # Once, also where it is the value, in place of the figure's long `repr`.
    assert text_of(answer).count("An operator adds Chromium") == 1
    assert "'data'" not in text_of(answer)
    content = await caller.read(page.uri)
    assert isinstance(content, TextResourceContents)
    assert content.mime_type == "text/html"
    assert "series-name" in content.text
    assert "Plotly.newPlot" in content.text
    assert len(content.text) > 1_000_000
    assert '<script src="' not in content.text


async def test_a_plotly_figure_changed_between_two_shows_is_shown_twice(caller: Caller, browserless: str):
    code = PLOTLY + "chart.show()\nchart.update_layout(title='another')\nchart.show()"
    _, result = await shown(caller, code, browserless)
    assert mimes(result) == ["text/html", "text/html"]


async def test_plotly_express_works_on_a_frame(caller: Caller, browserless: str):
    code = (
        "import pandas as pd, plotly.express as px\npx.bar(pd.DataFrame({'k': ['a', 'b'], 'v': [1, 2]}), x='k', y='v')"
    )
    _, result = await shown(caller, code, browserless)
    assert mimes(result) == ["text/html"]


async def test_a_plotly_figure_has_a_picture_where_a_browser_can_draw_it(caller: Caller):
    answer, result = await shown(caller, PLOTLY + "chart.show()\nchart", "")
    (display,) = result.displays
    forms = [form.mime for form in (display, *display.also)]
    if "image/png" not in forms:
        pytest.skip("kaleido finds no browser that it can start in a session")
    assert forms == ["image/png", "text/html"]
    (image,) = images(answer)
    assert picture(image.data).width > 300


# Charts of other libraries

BOKEH = "from bokeh.plotting import figure, show\np = figure(title='a title'); p.line([1, 2], [3, 1])\n"
ALTAIR = "import altair as alt\nalt.Chart(alt.Data(values=[{'a': 'x', 'b': 3}])).mark_bar().encode(x='a:N', y='b:Q')"


async def test_charts_of_bokeh_and_altair_are_pages_that_need_no_network(caller: Caller) -> None:
    packages = ["bokeh", "altair", "vl-convert-python"]
    session_id = await caller.new_session()
    installed = await caller.call("install_dependencies", session_id=session_id, packages=packages)
    if installed.is_error:
        pytest.skip(f"there is no package index here: {text_of(installed)[:200]}")
    for ending in ("show(p)", "p", "import bokeh.io; bokeh.io.output_notebook(); show(p)"):
        answer, result = await shown(caller, BOKEH + ending, session_id)
        (display,) = result.displays
        assert (display.mime, display.also) == ("text/html", [])
        assert "Bokeh figure" in text_of(answer)
        assert display.uri is not None
        page = await caller.read_text(display.uri)
        assert "a title" in page
        assert '<script src="http' not in page
        assert len(page) > 1_000_000
    answer, result = await shown(caller, ALTAIR, session_id)
    (display,) = result.displays
    assert [form.mime for form in (display, *display.also)] == ["image/png", "text/html"]
    assert picture(images(answer)[0].data).width > 50
    (page_form,) = display.also
    assert page_form.uri is not None
    page = await caller.read_text(page_form.uri)
    assert "vegaEmbed" in page
    assert '<script src="http' not in page
    without = "alt.renderers.enable('mimetype')\n_chart = alt.Chart(alt.Data(values=[])).mark_point()\n_chart"
    _, result = await shown(caller, f"{ALTAIR};\n{without}", session_id)
    assert all(form.mime != "text/html" for form in result.displays)


# Other rich outputs


@pytest.mark.parametrize(
    ("code", "mime", "text"),
    [
        (
            "SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>')",
            "image/svg+xml",
            '<svg xmlns="http://www.w3.org/2000/svg"/>',
        ),
        ("HTML('<b>bold</b>')", "text/html", "<b>bold</b>"),
        ("Markdown('# Title')", "text/markdown", "# Title"),
        ("Latex('$x^2$')", "text/latex", "$x^2$"),
        ("JSON({'a': [1, None]})", "application/json", '{"a": [1, null]}'),
    ],
)
@pytest.mark.parametrize("form", ["{}", "display({})"])
async def test_rich_values_are_displays(
    caller: Caller, shared_session: str, code: str, mime: str, text: str, form: str
):
    _, result = await shown(caller, "from IPython.display import *\n" + form.format(code), shared_session)
    (display,) = result.displays
    assert (display.mime, display.text, display.uri) == (mime, text, None)
    assert display.size == len(text)


async def test_a_frame_is_a_table_in_html_and_in_plain_text(caller: Caller, shared_session: str):
    answer, result = await shown(caller, "import pandas as pd\npd.DataFrame({'a': [10, 20]})", shared_session)
    assert result.result == "    a\n0  10\n1  20"
    (display,) = result.displays
    assert display.mime == "text/html"
    assert display.text is not None
    assert "<td>10</td>" in display.text
    assert display.plain == result.result
    assert text_of(answer).count("0  10") == 1


async def test_a_long_page_is_a_resource(caller: Caller, shared_session: str):
    answer, result = await shown(caller, "from IPython.display import HTML\nHTML('<p>' + 'x' * 9_000)", shared_session)
    (display,) = result.displays
    assert display.text is None
    assert display.uri is not None
    assert display.uri in text_of(answer)
    content = await caller.read(display.uri)
    assert isinstance(content, TextResourceContents)
    assert (content.mime_type, content.text) == ("text/html", "<p>" + "x" * 9_000)


async def test_large_json_is_a_resource_of_its_own_type(caller: Caller, shared_session: str):
    _, result = await shown(caller, "from IPython.display import JSON\nJSON(list(range(5_000)))", shared_session)
    (display,) = result.displays
    assert display.uri is not None
    content = await caller.read(display.uri)
    assert isinstance(content, TextResourceContents)
    assert content.mime_type == "application/json"
    assert json.loads(content.text) == list(range(5_000))


async def test_a_symbolic_expression_has_its_latex(caller: Caller, shared_session: str):
    _, result = await shown(caller, "import sympy\nsympy.Symbol('x') ** 2", shared_session)
    assert result.result == "x**2"
    assert any(form.mime == "text/latex" for display in result.displays for form in (display, *display.also))


# The notebook's rules


async def test_clear_output_forgets_what_came_before(caller: Caller, shared_session: str):
    code = (
        "from IPython.display import HTML, clear_output\nprint('gone')\ndisplay(HTML('<i>gone</i>'))\nclear_output()\n"
        "print('stays')"
    )
    _, result = await shown(caller, code, shared_session)
    assert (result.stdout, result.displays) == ("stays\n", [])
    last, _ = await shown(caller, "print('gone')\nclear_output()", shared_session)
    assert "gone" not in text_of(last)


async def test_clear_output_may_wait_for_the_next_output(caller: Caller, shared_session: str):
    code = "from IPython.display import clear_output\nprint('stays')\nclear_output(wait=True)"
    assert (await caller.execute(code, shared_session)).stdout == "stays\n"
    code += "\nprint('instead')"
    assert (await caller.execute(code, shared_session)).stdout == "instead\n"
    code += "\nclear_output(wait=True)\n7"
    last = await caller.execute(code, shared_session)
    assert (last.stdout, last.result) == ("", "7")


async def test_update_display_replaces_in_place(caller: Caller, shared_session: str):
    code = (
        "from IPython.display import HTML, Markdown, display, update_display\n"
        "handle = display(HTML('<b>1</b>'), display_id=True)\ndisplay(Markdown('after'))\n"
        "handle.update(HTML('<b>2</b>'))\nhandle.update(HTML('<b>3</b>'))"
    )
    _, result = await shown(caller, code, shared_session)
    assert [(display.mime, display.text) for display in result.displays] == [
        ("text/html", "<b>3</b>"),
        ("text/markdown", "after"),
    ]


async def test_update_display_of_plain_text_replaces_it(caller: Caller, shared_session: str):
    code = "handle = display('half', display_id='bar')\nhandle.update('whole')"
    _, result = await shown(caller, code, shared_session)
    assert [(display.mime, display.text, display.display_id) for display in result.displays] == [
        ("text/plain", "'whole'", "bar")
    ]


async def test_an_update_of_an_earlier_cells_display_is_shown_by_the_cell_that_made_it(
    caller: Caller, shared_session: str
):
    await caller.execute(
        "from IPython.display import HTML\nlater = display(HTML('<b>0</b>'), display_id=True)", shared_session
    )
    _, result = await shown(caller, "later.update(HTML('<b>1</b>'))", shared_session)
    assert [display.text for display in result.displays] == ["<b>1</b>"]


async def test_more_displays_than_the_limit_are_counted(caller: Caller, shared_session: str):
    code = "from IPython.display import Markdown\nfor i in range(70): display(Markdown(f'note {i}'))"
    _, result = await shown(caller, code, shared_session)
    assert len(result.displays) == 50
    assert "20 more displays" in "".join(result.output)
