"""Which forms of rich output are figures to Azure's clients, and to belljar where a pool of Azure shows them."""

import base64
from pathlib import Path
from typing import Any, cast

import pytest

from belljar.azure.data_plane.cell_values import picture_in, value_of
from belljar.azure.pool import kernel as azure
from belljar.models import ExecutionResult
from belljar.outputs.displays import DisplayStore, display_of
from belljar.outputs.forms import FORMS, PICTURES

# So long that text becomes a file, too.
CONTENT = b"a picture" * 1_000
OTHERS = ("image/png; x=1", "IMAGE/PNG", "x-image/png", "image", "", "image/../../etc/passwd", f"image/{'x' * 100_000}")


@pytest.mark.parametrize(
    "mime", [*(mime for mime, form in FORMS.items() if not form.is_prefix), *OTHERS], ids=lambda mime: mime[:30]
)
def test_only_pictures_are_figures_of_the_data_plane(mime: str, tmp_path: Path) -> None:
    data = {"text/plain": "a value", mime: base64.b64encode(CONTENT).decode()}
    display = display_of(data, DisplayStore(tmp_path, "e" * 16))
    assert display is not None
    result = ExecutionResult(
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
    figure = picture_in(value_of(result, lambda _: CONTENT))
    assert (figure["format"] if figure is not None else None) == (
        mime.removeprefix("image/") if mime in PICTURES else None
    )


@pytest.mark.parametrize(
    ("form", "mime"),
    [
        ("png", "image/png"),
        ("JPEG", "image/jpeg"),
        ("jpg", "image/jpeg"),
        ("gif", "image/gif"),
        ("webp", "image/webp"),
        ("svg", None),
        ("svg+xml", None),
        ("bmp", None),
        (".png", None),
        ("image/png", None),
        ("", None),
    ],
)
def test_figures_of_an_azure_pool_are_pictures_by_their_format(form: str, mime: str | None) -> None:
    [event] = azure._result({"type": "image", "format": form, "base64_data": "AAAA"})  # pyright: ignore[reportPrivateUsage]
    assert [*cast("Any", event).data] == [mime or "text/plain"]
