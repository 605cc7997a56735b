"""Printed values, which code chooses, as the data plane reads them."""

import pytest

from belljar.azure.data_plane.cell_values import read_value
from hostile_texts import slow_texts


@pytest.mark.parametrize("written", ["{}", "[{}]"], ids=["a value", "a list"])
def test_a_printed_value_takes_no_more_than_three_times_as_long_for_twice_the_text(written: str) -> None:
    assert not slow_texts(lambda text: read_value(written.replace("{}", text)))
