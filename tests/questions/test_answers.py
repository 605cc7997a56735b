"""Answers to questions whose schemas a hostile server wrote: each is checked or taken, without a network."""

import socket
from typing import Any

import pytest

from belljar.errors import InvalidArgument
from belljar.questions.schema import checked_values


@pytest.mark.parametrize(
    "entry",
    [
        True,
        None,
        5,
        [],
        {"type": "no-such"},
        {"type": ["string", "null"]},
        {"minLength": "x"},
        {"minLength": -1},
        {"multipleOf": 0},
        {"enum": 5},
        {"oneOf": [5]},
        {"pattern": "(a+)+$"},
        {"allOf": [{"pattern": "(a+)+$"}]},
        {"items": {"items": {"items": {"items": {"items": {"pattern": "(a+)+$"}}}}}},
        {"$dynamicRef": "#x"},
        {"unevaluatedProperties": 7, "if": 3},
    ],
)
def test_a_field_that_nobody_foresaw_takes_any_value(entry: Any) -> None:
    value = "a" * 40 + "b"
    assert checked_values({"properties": {"field": entry}, "required": ["field", 5, "other"]}, {"field": value}) == {
        "field": value
    }


@pytest.mark.parametrize("schema", [{"properties": ["a"]}, {"properties": 1, "required": 5}, {"required": "a"}, {}])
def test_a_form_that_is_none_takes_consent_and_no_values(schema: dict[str, Any]) -> None:
    assert checked_values(schema, {}) == {}
    with pytest.raises(InvalidArgument, match="was not asked for"):
        checked_values(schema, {"a": 1})


def test_a_reference_of_a_hostile_server_is_not_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as canary:
        canary.settimeout(0.2)
        there = f"http://127.0.0.1:{canary.getsockname()[1]}/schema.json"
        for entry in ({"$ref": there}, {"items": {"$ref": there}}, {"oneOf": [{"$dynamicRef": there}]}):
            assert checked_values({"properties": {"a": entry}}, {"a": [1]}) == {"a": [1]}
        with pytest.raises(TimeoutError):
            canary.accept()


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ({"type": "string", "maxLength": 2}, "abc"),
        ({"type": "integer", "minimum": 3}, 2),
        ({"type": "integer"}, "2"),
        ({"type": "number"}, float("nan")),
        ({"type": "string", "enum": ["a", "b"]}, "c"),
        ({"type": "string", "oneOf": [{"const": "a", "title": "A"}]}, "c"),
        ({"type": "array", "items": {"enum": ["a"]}, "maxItems": 2}, ["a", "c"]),
        ({"type": "string"}, "x" * 100_000),
    ],
)
def test_what_forms_can_demand_is_checked(entry: Any, value: Any) -> None:
    with pytest.raises(InvalidArgument):
        checked_values({"properties": {"a": entry}, "required": ["a"]}, {"a": value})
