from pathlib import Path

import pytest

from belljar.cli.saved_outputs import OutputSaver, saved_forms
from belljar.models import Display, OutputEvent


class Pictures:
    """Stands in for a session of which only displays are read."""

    async def display(self, uri: str) -> bytes:
        return uri.encode()


def _picture(name: str, display_id: str | None = None, *, is_update: bool = False) -> OutputEvent:
    display = Display(mime="image/png", uri=f"execution://x/displays/{name}", display_id=display_id)
    return OutputEvent(sequence=1, kind="display", data={"display": display.model_dump(), "update": is_update})


def _clear(*, is_waiting: bool) -> OutputEvent:
    return OutputEvent(sequence=1, kind="clear", data={"wait": is_waiting})


STDOUT = OutputEvent(sequence=1, kind="stdout", text="text")


CASES: list[tuple[list[OutputEvent], list[str]]] = [
    ([_picture("1.png"), _picture("2.png")], ["1.png", "2.png"]),
    ([_picture("1.png"), _picture("1.png")], ["1.png"]),
    ([_picture("1.png"), _clear(is_waiting=False), _picture("2.png")], ["2.png"]),
    ([_picture("1.png"), _clear(is_waiting=True)], ["1.png"]),
    ([_picture("1.png"), _clear(is_waiting=True), _picture("2.png")], ["2.png"]),
    ([_picture("1.png"), _clear(is_waiting=True), STDOUT], []),
    ([_picture("1.png", "a"), _picture("2.png"), _picture("3.png", "a", is_update=True)], ["3.png", "2.png"]),
    ([_picture("1.png", "a"), _picture("2.png", "b", is_update=True)], ["1.png", "2.png"]),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("events", "kept"), CASES)
async def test_what_is_saved_is_what_a_notebook_would_show(
    events: list[OutputEvent], kept: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = OutputSaver(Pictures(), tmp_path)
    for event in events:
        saver.add(event)
    await saver.save([])
    saved = [tmp_path / f"figure-{number}.png" for number in range(1, len(kept) + 1)]
    assert sorted(tmp_path.iterdir()) == saved
    assert [path.read_text().rpartition("/")[2] for path in saved] == kept
    names = ", ".join(path.name for path in saved)
    assert capsys.readouterr().err == (f"saved in {tmp_path}: {names}\n" if saved else "")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("is_mounted", "words"), [(True, "from what is mounted there"), (False, "gone with it unless a folder is mounted")]
)
async def test_in_our_image_a_folder_is_told_as_the_containers_and_by_the_name_that_it_has_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_mounted: bool, words: str
) -> None:
    monkeypatch.setenv("container", "oci")
    monkeypatch.setattr(Path, "is_mount", lambda _: is_mounted)
    for told_as in ("", "/home/ada/results"):
        saver = OutputSaver(Pictures(), tmp_path, told_as=told_as)
        saver.add(_picture("1.png"))
        await saver.save([])
        said = capsys.readouterr().err
        assert said.startswith(f"saved in {told_as or tmp_path}")
        assert (words in said) == (not told_as)


@pytest.mark.parametrize(
    ("display", "kept"),
    [
        (Display(mime="image/png", uri="x", plain="<Figure>"), ["image/png"]),
        (Display(mime="image/png", uri="x", also=[Display(mime="text/html", uri="y")]), ["image/png", "text/html"]),
        (Display(mime="text/html", text="<table>", plain="   a\n0  1"), []),
        (Display(mime="text/html", text="<b>", plain="<IPython.core.display.HTML object>"), ["text/html"]),
        (Display(mime="text/markdown", text="# t", plain="<IPython.core.display.Markdown object>"), []),
        (Display(mime="text/markdown", uri="x", plain="<IPython.core.display.Markdown object>"), ["text/markdown"]),
        (Display(mime="image/svg+xml", text="<svg/>", plain="words"), ["image/svg+xml"]),
    ],
)
def test_pictures_and_pages_are_kept_and_what_can_be_read_is_not(display: Display, kept: list[str]) -> None:
    assert [form.mime for form in saved_forms(display)] == kept
