"""Whether a value fits is told the same way by a quick look as by writing it out."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from belljar.toolbox.answer_values import encoded, is_larger

JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
    max_leaves=80,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault of the values
@given(value=JSON, limit=some.integers(0, 3_000))
def test_what_is_taken_to_fit_fits(value: object, limit: int):
    assert is_larger(value, limit) == (len(encoded(value)) > limit)


@pytest.mark.parametrize("value", [["x"] * 1_000, {str(number): "x" for number in range(1_000)}, [["x"] * 60] * 60])
def test_values_of_many_small_items_are_counted_to_their_end(value: object):
    assert is_larger(value, 2_000)


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": ["😀", 10**400, 1e300, -0.1, None, True]}, float("inf")])
def test_what_utf_8_or_json_cannot_say_arrives_all_the_same(value: object):
    assert json.loads(encoded(value)) == value
    assert b"\n" not in encoded(value)
