from typing import Any

import pytest

from belljar.toolbox.base import Catalogue, ServerCatalogue, ToolDefinition
from belljar.toolbox.search import DEFAULT_LIMIT, MAX_RESULTS, ToolIndex, terms
from belljar.toolbox.synonyms import rephrased, stem, synonyms
from belljar.toolbox.word_vectors import word_vectors


def tool(name: str, about: str = "", server: str = "s", **parameters: Any) -> ToolDefinition:
    return ToolDefinition(server, name, about, input_schema={"type": "object", "properties": parameters})


def index(*tools: ToolDefinition) -> ToolIndex:
    servers = {each.server: ServerCatalogue(each.server) for each in tools}
    for name in servers:
        servers[name] = ServerCatalogue(name, tuple(each for each in tools if each.server == name))
    return ToolIndex(Catalogue(servers))


@pytest.mark.parametrize(
    "words",
    [
        "commit commits committed committing",
        "query queries querying",
        "stage staged staging stages",
        "delete deletes deleted deletion",
        "directory directories",
        "modify modification modifies",
        "box boxes",
        "call calls called calling",
        "log logs logging",
    ],
)
def test_forms_of_a_word_have_one_stem(words: str) -> None:
    assert len({stem(word) for word in words.split()}) == 1


@pytest.mark.parametrize("word", ["string", "status", "this", "class", "bus", "ring", "ed", "straße"])
def test_what_only_looks_like_an_ending_stays(word: str) -> None:
    assert stem(word) == word


def test_names_are_words_however_they_are_written() -> None:
    assert terms("getItem get-item get_item HTTPServer") == ["get", "item"] * 3 + ["http", "server"]


def test_a_tool_that_fits_every_word_goes_before_one_that_has_one_of_them_everywhere() -> None:
    found = index(tool("file_file_file", "A file is a file."), tool("x", "Copies a file.")).search("copy file")
    assert [each.name for each in found] == ["x", "file_file_file"]


def test_parameters_are_found_and_descriptions_of_them() -> None:
    tools = index(tool("a", latitude={"type": "number"}), tool("b", where={"description": "Latitude of the place"}))
    assert [each.name for each in tools.search("latitude")] == ["a", "b"]


def test_without_words_all_come_in_their_order_up_to_the_limit() -> None:
    tools = index(*(tool(f"t{number}") for number in range(100)))
    assert [each.name for each in tools.search("")] == [f"t{number}" for number in range(DEFAULT_LIMIT)]
    assert len(tools.search("", limit=10_000)) == MAX_RESULTS
    assert len(tools.search("", limit=-1)) == 1


def test_nothing_is_found_for_what_nothing_is_about() -> None:
    assert index(tool("a", "Reads.")).search("zebra") == []
    assert index().search("anything") == []


def test_a_misspelt_word_finds_the_tool_that_is_named_so() -> None:
    tools = index(tool("create_invoice"), tool("create_calendar"), tool("delete_note"))
    assert tools.search("calender")[0].name == "create_calendar"
    assert tools.search("invocie")[0].name == "create_invoice"


def test_a_synonym_that_a_tool_mentions_in_passing_finds_nothing() -> None:
    passing = tool(
        "count", "Counts rows. Not for deleting anything: it never removes a row.", what={"description": "x"}
    )
    tools = index(passing, tool("drop_table", "Deletes a table."))
    assert [each.name for each in tools.search("discard")] == ["drop_table"]


def test_every_entry_of_the_table_of_words_can_be_read() -> None:
    assert len(synonyms()) > 500
    assert rephrased("get rid of it").split() == ["delete", "it"]
    assert "pictur" in synonyms()["photo"]


def test_one_server_can_be_searched_alone() -> None:
    tools = index(tool("read", server="one"), tool("read", server="two"))
    assert [each.server for each in tools.search("read", server="two")] == ["two"]
    assert tools.search("read", server="three") == []


def test_hostile_schemas_and_queries_are_just_words() -> None:
    odd = ToolDefinition("s", "odd", input_schema={"properties": {"a": None, "b": [], "c": {"description": 3}}})
    tools = index(odd, ToolDefinition("s", "none", input_schema={"properties": "x"}))
    assert [each.name for each in tools.search("odd " * 10_000)] == ["odd"]
    assert tools.search("'; drop table \0 \ud800") == []


def test_a_word_goes_before_those_that_may_stand_for_it() -> None:
    tools = index(tool("edit_it", "x"), *(tool(f"change_{number}", "x") for number in range(5)), tool("drop", "x"))
    assert tools.search("change")[0].name == "change_0"
    assert [each.name for each in tools.search("forget")] == ["drop"]


def test_a_word_that_says_little_decides_between_tools_that_fit_and_finds_none_by_itself() -> None:
    tools = index(tool("make_it", "A commit."), tool("show_it", "A commit."), tool("show_other", "Nothing."))
    assert [each.name for each in tools.search("show commit")] == ["show_it", "make_it"]
    assert [each.name for each in tools.search("commit")] == ["make_it", "show_it"]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("get rid of a card", "delete_card"),
        ("look up a card", "search_cards"),
        ("who is on call right now", "get_oncall_users"),
        ("how many cards are there", "count_cards"),
        ("grab an image of the screen", "take_screenshot"),
    ],
)
def test_everyday_words_find_what_tools_call_otherwise(query: str, first: str) -> None:
    names = ("create_card", "delete_card", "search_cards", "count_cards", "get_oncall_users", "take_screenshot", "ping")
    assert index(*(tool(name) for name in names)).search(query)[0].name == first


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("I do not like this song", "next_track"),
        ("will it rain tomorrow", "get_forecast"),
        ("the customer still owes us money", "list_unpaid_bills"),
        ("what a busy day, when am I meeting people", "get_agenda"),
    ],
)
def test_trained_word_vectors_find_what_has_no_word_in_common(query: str, first: str) -> None:
    tools = index(
        tool("next_track", "Skip to the following item of the queue."),
        tool("list_unpaid_bills", "Open invoices."),
        tool("get_forecast", "Weather of a place."),
        tool("get_agenda", "Events of the calendar."),
        tool("ping", "Test whether the server is there."),
    )
    assert tools.search(query)[0].name == first
    assert tools.search("qwertz")[:1] == []


def test_who_asks_for_a_tool_by_its_name_gets_that_one_first() -> None:
    tools = index(
        tool("run_pagerank", "x"), tool("run_configuration", "Run it. Execute it."), tool("run", "Run a job.", "jobs")
    )
    for query in ("run_pagerank", "runPagerank", "run pagerank"):
        assert tools.search(query)[0].name == "run_pagerank"
    # A word that has no vector makes those that have one count less.
    known, half_known = (
        word_vectors().similarities(query, [word_vectors().of_tool("run", "Run it.")])[0]
        for query in ("run", "run pagerank")
    )
    assert half_known < 0.9 * known


def test_texts_of_unknown_words_are_similar_to_nothing() -> None:
    vectors = [word_vectors().of_tool(*texts) for texts in (("", ""), ("qwertz", "uiop"), ("weather", "forecast"))]
    assert word_vectors().similarities("qwertz", vectors) == [0, 0, 0]
    assert word_vectors().similarities("forecast of the weather", vectors)[2] == pytest.approx(1, abs=0.2)
    assert word_vectors().similarities("a b", []) == []
