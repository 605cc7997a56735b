"""The format of deposits: what each version has left, as this one reads it."""

import pytest

from belljar.distribution import own_version
from belljar.errors import SandboxUnavailable
from belljar.supervisor.deposit_format import FORM, read, written
from left_deposits import NAMES, PRESENT, left_by, shape


@pytest.mark.parametrize("name", NAMES)
def test_what_each_version_left_is_read_as_the_present_one_writes_it(name: str) -> None:
    present, left = left_by(PRESENT), left_by(name)
    assert {kind: shape(read(fields)) for kind, fields in left.items()} == {
        kind: shape(read(fields)) for kind, fields in present.items()
    }


def test_what_is_written_says_its_form_and_version_and_is_read_without_them() -> None:
    stored = written({"a": 1})
    assert stored == {"form": FORM, "version": own_version(), "a": 1}
    assert read(stored) == {"a": 1}


@pytest.mark.parametrize("form", [FORM + 1, FORM - 2, "x", None, []])
def test_another_form_is_refused_with_the_version_that_made_it(form: object) -> None:
    with pytest.raises(SandboxUnavailable, match=r"it was made by belljar 9\.9, and this is belljar \S+, which cannot"):
        read({"form": form, "version": "9.9"})
    with pytest.raises(SandboxUnavailable, match="it was made by an earlier version of belljar, and"):
        read({"form": form})
