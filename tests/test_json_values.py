import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar import json_values
from belljar.json_values import MAX_VALUES, TooManyValues, check_values, has_too_many_values

VALUES = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a",[{}]:\\ü')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize(
    "text",
    [b"[" + b"{}," * MAX_VALUES + b"{}]", b"[" * (MAX_VALUES + 1), b'{"a":[' + b'"b",' * MAX_VALUES + b"1]}"],
    ids=["objects", "nested", "strings"],
)
def test_a_text_with_too_many_values_is_refused_unparsed(text):
    with pytest.raises(TooManyValues):
        check_values(text)
    assert has_too_many_values(text.decode())


@pytest.mark.parametrize(
    "content", ['a,"b",[{' * MAX_VALUES, '\\"' * MAX_VALUES + "," * MAX_VALUES, "\\" * 2_999_999 + "," * MAX_VALUES]
)
def test_a_string_is_one_value_whatever_is_in_it(content):
    assert not has_too_many_values(json.dumps({"content": content}))
    assert has_too_many_values(json.dumps({"content": content, "more": [0] * (MAX_VALUES + 1)}))


@given(VALUES, st.integers(1, 9))
def test_separators_are_counted_wherever_the_text_is_cut(value, piece):
    text = json.dumps(value, ensure_ascii=False)
    expected = sum(1 for _ in _separators(value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_PIECE_BYTES", piece)
        patch.setattr(json_values, "MAX_VALUES", expected)
        assert not has_too_many_values(text)
        patch.setattr(json_values, "MAX_VALUES", expected - 1)
        assert expected == 0 or has_too_many_values(text)


def _separators(value):
    if isinstance(value, dict | list):
        yield value
        yield from [None] * (len(value) - 1)
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _separators(inner)
