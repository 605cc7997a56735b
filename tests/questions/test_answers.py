"""Questions whose schemas a hostile server or session wrote: each is read, and each answer is checked or taken."""

import json
import socket
import time
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from belljar.console.forms import MAX_FIELDS, form_fields
from belljar.errors import InvalidArgument
from belljar.questions.schema import (
    checked_values,
    choices_of,
    fields_of,
    schema_problem,
    typed_prompt,
    typed_value,
    values_of,
)


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


def refusal(schema: dict[str, Any], values: dict[str, Any]) -> str:
    """Why an answer is refused; empty if it is taken as it is."""
    try:
        return "" if checked_values(schema, values) == values else "changed"
    except InvalidArgument as error:
        return error.message


HOSTILE: list[dict[str, Any]] = [
    {"properties": {f"f{number}": {"type": "integer"} for number in range(10_000)}},
    {"properties": {"a": {"items": {"items": {"items": {"items": {"type": "integer"}}}}}}},
    {"properties": {"a": 5, "b": [], "c": None, "d": "text"}},
    {"properties": [1], "required": {"a": 1}},
    {"properties": {"a": {"type": ["x"], "title": 5, "description": [], "enum": "x", "enumNames": 7, "oneOf": {}}}},
    {"properties": {"a": {"type": "string", "oneOf": [1, {"title": "A"}, {"const": {"b": 1}}], "default": {"c": 1}}}},
    {"properties": {"a": {"type": "string", "enum": [[1], {"b": 2}, None], "enumNames": ["x"]}}, "required": "a"},
    {"properties": {"__proto__": {"type": "integer"}, "constructor": {}}, "required": ["__proto__", 5, ["a"]]},
    {"properties": {"a\x1b[2J\nb": {"type": "number", "minimum": "x", "maxLength": -1, "multipleOf": 0}}},
]


@pytest.mark.parametrize("schema", HOSTILE)
def test_whatever_a_schema_is_it_is_read_and_an_answer_is_taken_or_refused_in_words(schema: dict[str, Any]) -> None:
    fields = fields_of(schema)
    assert len(form_fields(schema)) == min(len(fields), MAX_FIELDS)
    assert typed_prompt("Well?", schema).startswith("Well?")
    for name, entry in fields.items():
        typed_value(entry, "[1")
        choices_of(entry)
        for value in ("x", 1, None, [1, [2]], {"a": {}}):
            assert "\x1b" not in refusal({"properties": {name: entry}}, {name: value})
    assert isinstance(schema_problem(schema), str)


def test_an_answer_without_a_required_field_is_refused_with_its_name() -> None:
    schema = {"properties": {"__proto__": {}, "b": {}, "c\x1b[2J": {}}, "required": ["__proto__", "c\x1b[2J", "d"]}
    with pytest.raises(InvalidArgument, match="the answer lacks __proto__, c\N{REPLACEMENT CHARACTER}") as refused:
        checked_values(schema, {"b": 1})
    assert "\x1b" not in refused.value.message
    many = {"properties": {f"f{number}": {} for number in range(10_000)}, "required": [f"f{n}" for n in range(10_000)]}
    with pytest.raises(InvalidArgument, match="f19 and 9,980 more"):
        checked_values(many, {})


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {}}, "is no object with properties"),
        ({"type": "array", "properties": {"a": {}}}, "is no object with properties"),
        ({"properties": {f"f{number}": {} for number in range(101)}}, "101 fields, the limit is 100"),
        ({"properties": {"a": 1}}, "field a is no schema"),
        ({"properties": {"a": {"type": "object"}}}, "is of type object"),
        ({"properties": {"a": {"type": ["string"]}}}, "is of type"),
        ({"properties": {"a": {"pattern": "(a+)+$"}}}, "has the keyword 'pattern', which a form cannot show"),
        ({"properties": {"a": {"type": "array"}}}, "is a list of anything"),
        ({"properties": {"a": {"type": "array", "items": {"enum": [1], "items": {}}}}}, "is a list of lists"),
        ({"properties": {"a": {"minLength": "x"}}}, 'no value of JSON Schema for minLength: "x"'),
        ({"properties": {"a": {"oneOf": [{"const": {"b": 1}}]}}}, "more than plain values in oneOf"),
        ({"properties": {"a": {"oneOf": [5]}}}, "no value of JSON Schema for oneOf: [5]"),
        ({"properties": {"a": {"default": {"b": {}}}}}, "more than plain values in default"),
        ({"properties": {"a": {}}, "required": ["b"]}, "required names a field that is not there"),
        ({"properties": {"a": {}}, "required": [["a"]]}, "required names a field that is not there"),
        ({"properties": {"\x1b[2J": {"$ref": "#"}}}, "field \N{REPLACEMENT CHARACTER}[2J has the keyword"),
    ],
)
def test_why_a_person_cannot_be_asked_is_said_in_words(schema: dict[str, Any], problem: str) -> None:
    assert problem in schema_problem(schema)


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "array", "items": {"enum": [f"{number:x}" for number in range(6_000)]}},
        {"type": "array", "items": {"anyOf": [{"const": f"{n:x}", "title": "t"} for n in range(3_000)]}},
        {"items": {"anyOf": [*[{"enum": [f"{n:x}" for n in range(700)]}] * 7, {"type": "string"}]}},
        {"oneOf": [{"type": "integer"}] * 3_000},
    ],
)
def test_many_values_are_checked_against_many_choices_in_linear_time(entry: dict[str, Any]) -> None:
    def processor_time(count: int) -> float:
        values = {"a": [f"{number % 500:x}" for number in range(count)]}
        began = time.process_time()
        for _ in range(5):
            assert checked_values({"properties": {"a": entry}}, values) == values
        return time.process_time() - began

    if "oneOf" in entry:
        assert checked_values({"properties": {"a": entry}}, {"a": "x" * 60_000})
    processor_time(100)
    assert processor_time(8_000) < 3 * processor_time(4_000) + 0.1


def test_a_text_of_a_megabyte_is_refused_by_its_size() -> None:
    with pytest.raises(InvalidArgument, match="more than 65,536 bytes"):
        checked_values({"properties": {"a": {"pattern": "(a+)+$"}}}, {"a": "a" * 1_000_000 + "b"})


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e308, 10**300, 1e-320])
def test_numbers_that_no_float_holds_are_checked_too(value: float) -> None:
    for entry in ({"multipleOf": 0.1}, {"multipleOf": 1e-308}, {"type": "integer", "maximum": 5}):
        assert refusal({"properties": {"a": entry}}, {"a": value})[:5] in ("", "a is ")


def test_values_that_are_nested_too_deeply_are_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        checked_values({"properties": {"a": {}}}, {"a": value})


@pytest.mark.parametrize(
    ("entry", "text", "value"),
    [
        ({"type": "string"}, "21", "21"),
        ({"type": "integer"}, "21", 21),
        ({"type": "integer"}, "many", "many"),
        ({"type": "boolean"}, "Yes", True),
        ({"type": "boolean"}, "0", False),
        ({"type": "array"}, '["a"]', ["a"]),
        ({}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_what_somebody_types_has_the_type_that_the_field_wants(entry: Any, text: str, value: Any) -> None:
    assert typed_value(entry, text) == value
    assert values_of({"properties": {"a": entry}}, text) == {"a": value}


@pytest.mark.parametrize(
    ("entry", "value", "fault"),
    [
        ({"type": "integer"}, "x", "'x' is not of type 'integer'"),
        ({"enum": ["a", "b"]}, "c", "'c' is not one of ['a', 'b']"),
        ({"enum": [1]}, True, "True is not one of [1]"),
        ({"oneOf": [{"const": "a", "title": "A"}]}, "c", "'c' is not valid under any of the given schemas"),
        ({"const": 1}, 2, "1 was expected"),
        ({"minimum": 3}, 2, "2 is less than the minimum of 3"),
        ({"exclusiveMinimum": 3}, 3, "3 is less than or equal to the minimum of 3"),
        ({"multipleOf": 5}, 7, "7 is not a multiple of 5"),
        ({"minLength": 1}, "", "'' should be non-empty"),
        ({"maxLength": 2}, "abc", "'abc' is too long"),
        ({"maxItems": 0}, [1], "[1] is expected to be empty"),
        ({"items": {"enum": ["a"]}}, ["a", "b"], "'b' is not one of ['a']"),
    ],
)
def test_a_refusal_says_what_the_library_jsonschema_says(entry: dict[str, Any], value: Any, fault: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        checked_values({"properties": {"a": entry}}, {"a": value})
    assert refused.value.message == f"a is {json.dumps(value)}: {fault}"
    assert next(Draft202012Validator(entry).iter_errors(value)).message.endswith(fault)


@pytest.mark.parametrize(
    ("entry", "value"),
    [({"enum": [1]}, 1.0), ({"type": "integer"}, 2.0), ({"anyOf": [{}, {"const": 1}]}, 7)],
)
def test_values_that_are_equal_in_json_fit(entry: dict[str, Any], value: Any) -> None:
    assert checked_values({"properties": {"a": entry}}, {"a": value}) == {"a": value}
