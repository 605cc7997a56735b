"""Rates of a policy that servers of one machine count together."""

import multiprocessing
import sqlite3
from pathlib import Path

import pytest

from belljar.policy.guardrails import read_guardrails
from belljar.policy.rates import Rates, SharedRates
from shared_environment import settings_with

KEY = ("ada", "tools.1")
MOST, PERIOD_S = 20, 3_600.0


def let_out(rates: Rates, key: tuple[str, str] = KEY) -> bool:
    with rates.turn():
        is_free = rates.wait_s(key, MOST, PERIOD_S) == 0
        if is_free:
            rates.add(key, MOST)
    return is_free


def ask_often(path: Path, counted: "multiprocessing.Queue[int]") -> None:
    rates = SharedRates(path)
    counted.put(sum(let_out(rates) for _ in range(3 * MOST)))


def test_servers_at_once_let_out_as_many_as_one_would(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    counted: multiprocessing.Queue[int] = context.Queue()
    servers = [context.Process(target=ask_often, args=(tmp_path / "rates.sqlite", counted)) for _ in range(3)]
    for server in servers:
        server.start()
    assert sum(counted.get(timeout=60) for _ in servers) == MOST
    for server in servers:
        server.join(60)
    assert not let_out(SharedRates(tmp_path / "rates.sqlite"))
    assert let_out(SharedRates(tmp_path / "rates.sqlite"), ("bob", "tools.1"))


def test_workers_count_in_one_file_and_a_server_that_is_alone_in_none(tmp_path: Path) -> None:
    machine, alone = tmp_path / "machine", tmp_path / "alone"
    for folder in (machine / "runs", machine / "workers" / "2", alone):
        folder.mkdir(parents=True)
    rates = [
        read_guardrails(settings_with(data_directory=folder)).compiled.rates
        for folder in (machine, machine / "workers" / "2", alone)
    ]
    assert [let_out(rates[number % 2]) for number in range(MOST + 1)] == [True] * MOST + [False]
    assert let_out(rates[2])
    assert not [*alone.iterdir()]


def test_no_more_is_kept_than_can_matter(tmp_path: Path) -> None:
    rates = SharedRates(tmp_path / "rates.sqlite")
    for _ in range(3 * MOST):
        with rates.turn():
            rates.add(KEY, MOST)
    with sqlite3.connect(tmp_path / "rates.sqlite") as reader:
        assert reader.execute("SELECT count(*) FROM calls").fetchone() == (MOST,)
    reader.close()


@pytest.mark.parametrize("content", [b"", b"nonsense" * 1_000, b"SQLite format 3\0" + bytes(4_000)])
def test_a_file_that_is_none_is_begun_anew_and_meanwhile_each_counts_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rates.sqlite"
    path.write_bytes(content)
    rates = SharedRates(path)
    assert [let_out(rates) for _ in range(MOST + 1)] == [True] * MOST + [False]
    assert not let_out(rates)


def test_a_place_that_cannot_be_written_costs_only_the_counting_together(tmp_path: Path) -> None:
    rates = SharedRates(tmp_path / "nowhere" / "rates.sqlite")
    assert [let_out(rates) for _ in range(MOST + 1)] == [True] * MOST + [False]


def test_whoever_holds_the_file_for_long_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "rates.sqlite"
    rates = SharedRates(path)
    assert let_out(rates)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert let_out(rates)
    other.execute("ROLLBACK")
    other.close()
    assert let_out(rates)
