import json
import tomllib
from collections.abc import Callable
from typing import Any

from belljar.settings import hash_key, load_settings, parse_key
from trusted_settings import write_trusted

Run = Callable[..., Any]


def test_the_line_it_prints_makes_a_server_know_the_key(belljar: Run) -> None:
    key, line = belljar("key", "alice").out.splitlines()
    assert tomllib.loads(line) == {"api_keys": [f"alice:sha256:{hash_key(key)}"]}
    write_trusted(line)
    (entry,) = load_settings().api_keys
    assert parse_key(entry.get_secret_value()) == parse_key(f"alice:{key}")


def test_every_key_is_new_and_long_and_fits_into_the_variable(belljar: Run) -> None:
    first, second = (json.loads(belljar("key", "--json").out) for _ in range(2))
    assert first["key"] != second["key"]
    assert len(first["key"]) >= 43
    assert not set(first["key"]) & set(":, ")
    assert first["name"] == parse_key(first["key"]).name


def test_the_key_itself_is_on_stdout_only(belljar: Run) -> None:
    outcome = belljar("key")
    assert outcome.out.splitlines()[0] not in outcome.err


def test_a_name_that_could_not_be_read_back_is_refused(belljar: Run) -> None:
    for name in ("a:b", "a,b", "sha256", "x" * 65):
        outcome = belljar("key", name)
        assert (outcome.code, outcome.out) == (2, "")
        assert name in outcome.err
