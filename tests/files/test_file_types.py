import mimetypes

import pytest

from belljar.files.file_types import is_text, mime_type_of


@pytest.mark.parametrize(
    ("name", "mime_type", "text"),
    [
        ("a.ipynb", "application/x-ipynb+json", True),
        ("a.parquet", "application/vnd.apache.parquet", False),
        ("sub/README.MD", "text/markdown", True),
        ("a.jsonl", "application/jsonl", True),
        ("a.json", "application/json", True),
        ("a.toml", "application/toml", True),
        ("a.yaml", "application/yaml", True),
        ("a.webp", "image/webp", False),
        ("a.svg", "image/svg+xml", True),
        ("a.py", "text/x-python", True),
        ("a.csv", "text/csv", True),
        ("a.csv.gz", "application/gzip", False),
        ("data:text/html,x.png", "image/png", False),
        ("a.", "application/octet-stream", False),
        (".csv", "application/octet-stream", False),
        ("folder.csv/file", "application/octet-stream", False),
        ("", "application/octet-stream", False),
    ],
)
def test_types_follow_the_last_suffix(name: str, mime_type: str, text: bool):
    assert (mime_type_of(name), is_text(mime_type)) == (mime_type, text)


def test_parameters_and_case_do_not_hide_text():
    assert is_text("Application/JSON; charset=utf-8")
    assert not is_text("application/octet-stream; name=text/plain")


def test_types_do_not_depend_on_the_host():
    mimetypes.add_type("application/x-odd", ".csv")
    try:
        assert mime_type_of("a.csv") == "text/csv"
    finally:
        mimetypes.add_type("text/csv", ".csv")
