"""Charts of the console: their axes, their words, and values that nobody expects."""

import re
from xml.etree import ElementTree

import pytest

from belljar import metrics
from belljar.change_signal import ChangeLog
from belljar.console.templating import chart, gauge_words
from belljar.engine.usage import UsageSampler, WorkSampler


@pytest.mark.parametrize("values", [[0.0] * 8, [1.0, 2e9, 0.0] * 3, [0.001] * 180])
@pytest.mark.parametrize("limit", [None, 0.0, 1.0, 1e12])
def test_a_chart_stays_in_its_frame_and_says_what_it_shows(values: list[float], limit: float | None) -> None:
    picture = str(chart("<Sessions>", "open", values, 15, limit))
    root = ElementTree.fromstring(picture)
    svg = root.find("svg")
    assert svg is not None
    assert svg.get("aria-label", "").startswith("<Sessions>: ")
    for line in root.iter("polyline"):
        for x, y in re.findall(r"([\d.-]+),([\d.-]+)", line.get("points", "")):
            assert 0 <= float(x) <= 320
            assert 0 <= float(y) <= 110
    for line in root.iter("line"):
        assert 0 <= float(line.get("y1", "-1")) <= 110


@pytest.mark.parametrize(("values", "now"), [([], "0"), ([3.0], "3"), ([0.0, 7.0, 7.0], "7")])
def test_a_few_points_are_told_and_not_drawn(values: list[float], now: str) -> None:
    root = ElementTree.fromstring(str(chart("Sessions", "open", values, 5, 64)))
    assert "".join(root.itertext()) == f"Sessions {now} of 64 openCollecting: one point every 5 s."
    assert root.find("svg") is None


@pytest.mark.parametrize(("points", "told"), [(10, "50 s"), (180, "15 min")])
def test_an_axis_begins_with_a_time_that_people_read(points: int, told: str) -> None:
    assert f">{told} ago<" in str(chart("Memory", "MB", [1.0] * points, 5))


def test_gauges_have_names_that_people_read() -> None:
    assert [gauge_words(name) for name in ("memory_mb", "session_idle_s", "pool_ready")] == [
        "Memory, MB",
        "Session idle, seconds",
        "Pool ready",
    ]


def test_what_a_server_did_is_counted_between_two_looks_and_told_to_operators_alone() -> None:
    work = WorkSampler()
    metrics.execution_wall.observe(2.0)
    metrics.execution_wall.observe(4.0)
    assert work.sample() == {"cells_a_minute": 24.0, "calls_a_minute": 0.0, "cell_seconds": 3.0}
    assert work.sample()["cells_a_minute"] == 0.0
    sampler = UsageSampler(list, ChangeLog())
    sampler.sample()
    assert "cells_a_minute" in sampler.gauges(lambda _: True, is_operator=True)
    assert "cells_a_minute" not in sampler.gauges(lambda _: True, is_operator=False)
