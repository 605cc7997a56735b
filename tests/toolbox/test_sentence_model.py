"""The model of the extra `search`, in a process that finds its packages in a folder of their own."""

import json
import os
import subprocess
import sys
from importlib.metadata import requires
from typing import Any

import pytest

from registry_packages import Unreachable, python_environment
from shared_environment import shared_settings

ASKED = {
    "do I need an umbrella": "get_forecast",
    "I do not like this song": "next_track",
    "the customer still owes us money": "list_unpaid_bills",
    "\ud800 is it night in Tokyo": "convert_time",
}
PROBE = """
import json, sys
from belljar.toolbox.base import Catalogue, ServerCatalogue, ToolDefinition
from belljar.toolbox.search import ToolIndex
from belljar.toolbox.sentence_vectors import sentence_model

model = sentence_model()
tools = (
    ToolDefinition("s", "next_track", "Skip to the next track in the queue."),
    ToolDefinition("s", "list_unpaid_bills", "Open invoices."),
    ToolDefinition("s", "get_forecast", "Weather of a place."),
    ToolDefinition("s", "convert_time", "Converts between zones. \\ud800"),
    ToolDefinition("s", "ping", "Tests whether the server is there."),
)
index = ToolIndex(Catalogue({"s": ServerCatalogue("s", tools)}))
index.use_model(model)
texts = ["a", "Weather forecast for a place.", "Skip to the next track in the queue. " * 20, "a"]
vectors = model.embed(texts)
print(json.dumps({
    "found": [index.search(query)[0].name for query in json.loads(sys.argv[1])],
    "nothing": [tool.name for tool in index.search("qwertz uiop")],
    "alone": [model.similarities(text, [vector])[0] for text, vector in zip(texts, vectors)],
    "most": max(near for text in texts for near in model.similarities(text, vectors)),
    "none": model.similarities("anything", []),
    "modules": sorted(name for name in sys.modules if name.startswith("holographic")),
}))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    wanted = [
        line.partition(";")[0]
        for line in requires("belljar-mcp") or []
        if 'extra == "search"' in line.replace("'", '"')
    ]
    assert len(wanted) == 3
    try:
        folder = python_environment(shared_settings().data_directory / "search-extra", *wanted)
    except Unreachable as error:
        pytest.skip(f"the extra `search` cannot be fetched: {error}")
    (packages,) = folder.glob("lib/python*/site-packages")
    variables = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([*ASKED])], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_finds_what_has_no_word_in_common_in_hostile_text_too(answers: dict[str, Any]) -> None:
    assert dict(zip(ASKED, answers["found"], strict=True)) == ASKED
    assert answers["nothing"] == []


def test_texts_have_the_same_vectors_alone_and_together_and_none_is_more_similar_than_the_text_itself(
    answers: dict[str, Any],
) -> None:
    # A text in a batch of its own is not filled up.
    assert answers["alone"] == pytest.approx([1, 1, 1, 1], abs=0.001)
    assert answers["most"] <= 1.001
    assert answers["none"] == []


def test_no_code_of_the_package_that_brings_it_runs(answers: dict[str, Any]) -> None:
    assert answers["modules"] == []
