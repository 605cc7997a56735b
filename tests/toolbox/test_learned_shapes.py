import json
from pathlib import Path
from typing import Any

import pytest

from belljar.toolbox.learned_shapes import MAX_FIELDS, Shapes, merged, shape_of

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def test_a_shape_has_names_and_types() -> None:
    assert shape_of([{"id": 1, "tags": ["x"], "owner": None}, {"id": 2.5, "tags": []}]) == {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "number"},
                "tags": {"type": "array", "items": TEXT},
                "owner": {"type": "null"},
            },
            "required": ["id", "tags"],
        },
    }


def test_answers_add_up() -> None:
    shape = merged(map(shape_of, [{"a": 1}, {"a": "x", "b": True}, {"a": None}]))
    assert shape == {
        "type": "object",
        "properties": {
            "a": {"anyOf": [NUMBER, {"type": "null"}, TEXT]},
            "b": {"type": "boolean"},
        },
        "required": ["a"],
    }


@pytest.mark.parametrize(
    "keys",
    [
        ["ann@example.com", "bob@example.com"],
        ["2026-01-01", "2026-01-02"],
        ["4111111111111111"],
        ["d41d8cd98f00b204e9800998ecf8427e"],
        ["Ann Smith", "Bob"],
        ["/home/ann"],
        ["account_12345678"],
        [f"field{number}" for number in range(MAX_FIELDS + 1)],
    ],
)
def test_keys_that_are_data_are_not_kept(keys: list[str]) -> None:
    shape = shape_of({"rows": dict.fromkeys(keys, 1)})
    assert shape["properties"]["rows"] == {"type": "object", "additionalProperties": NUMBER}


def test_no_value_is_ever_in_a_file(tmp_path: Path) -> None:
    shapes = Shapes(tmp_path)
    value = {"user": {"name": "Zaphod", "mail": "z@heart.gold", "cards": [4111111111111111], "ok": True}, "n": 4.25}
    assert shapes.learn("server", "tool", value)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert not [part for part in ("Zaphod", "heart", "4111", "4.25", "true") if part in text]
    assert "cards" in text


def test_what_was_learnt_outlives_the_server(tmp_path: Path) -> None:
    shapes = Shapes(tmp_path / "shapes")
    assert shapes.shape("a/../b", "t") is None
    assert shapes.learn("a/../b", "t", {"x": 1})
    assert not shapes.learn("a/../b", "t", {"x": 2})
    assert Shapes(tmp_path / "shapes").shape("a/../b", "t") == shape_of({"x": 1})
    assert [file.parent for file in tmp_path.rglob("*.json")] == [tmp_path / "shapes"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"t": 3}', "\0"])
def test_a_file_that_is_broken_is_nothing(tmp_path: Path, text: str) -> None:
    Shapes(tmp_path).learn("s", "t", {"x": 1})
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    shapes = Shapes(tmp_path)
    assert shapes.shape("s", "t") is None
    assert shapes.learn("s", "t", [1])


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shapes = Shapes(tmp_path / "file" / "below")
    assert shapes.learn("s", "t", 1)
    assert shapes.shape("s", "t") == NUMBER


def test_a_shape_is_bounded_whatever_is_sent(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = {"a": [deep]}
    wide = [{f"k{n}": {f"f{n}_{m}": [1] for m in range(40)} for n in range(MAX_FIELDS)} for _ in range(30)]
    assert len(json.dumps(shape_of(deep))) < 1_000
    assert len(json.dumps(shape_of(wide))) < 200_000
    shapes = Shapes(tmp_path)
    assert not shapes.learn("s", "t", wide)
    assert shapes.shape("s", "t") is None
    mixed = merged(shape_of({f"name{letter}{n}": 1 for n in range(40)}) for letter in "abcdef")
    assert mixed == {"type": "object", "additionalProperties": NUMBER}


@pytest.mark.parametrize(
    "answers",
    [
        [{"alice": {"balance": 1}, "bob": {"balance": 2}}],
        [{"alice": 1}, {"bob": 2}],
        [[{"alice": 1}, {"bob": 2}]],
        [{"accounts": {"alice": {"balance": 1}, "bob": {"balance": 2}}}],
    ],
    ids=["rows", "one after the other", "in a list", "below"],
)
def test_names_of_people_are_not_learnt_as_names_of_fields(tmp_path: Path, answers: list[Any]) -> None:
    shapes = Shapes(tmp_path)
    for answer in answers:
        shapes.learn("bank", "balances", answer)
    assert "bob" not in str(shapes.shape("bank", "balances"))
    assert "alice" not in str(shapes.shape("bank", "balances"))
