"""The folders by which the servers of a data directory know each other."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

import pytest

from belljar import servers
from belljar.servers import Run, is_living, run_folder
from waiting import until_blocking

STARTING = 16


def test_servers_that_start_at_once_do_not_remove_each_others_folders(tmp_path: Path) -> None:
    begin, ready, end = (Barrier(STARTING) for _ in range(3))

    def serve(_: int) -> bool:
        begin.wait()
        with run_folder(tmp_path) as run:
            ready.wait()
            is_there = (run.folder / "lock").exists() and is_living(tmp_path / "runs", run.folder.name)
            end.wait()
            return is_there

    with ThreadPoolExecutor(STARTING) as threads:
        for _ in range(5):
            assert all(threads.map(serve, range(STARTING)))
    assert [*(tmp_path / "runs").iterdir()] == []


def test_a_folder_that_is_not_locked_yet_is_left_alone_and_one_that_never_will_be_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server starts between the making of a folder and its lock."""
    killed = tmp_path / "runs" / "4711-00000000"
    killed.mkdir(parents=True)
    others: list[Run] = []

    with ThreadPoolExecutor(1) as threads, ExitStack() as ends:
        make = servers.make_folder

        def made(folder: Path) -> None:
            make(folder)
            if folder.parent.name == "runs" and not others:
                others.append(Run(folder, frozenset(), {}))
                other = threads.submit(lambda: ends.enter_context(run_folder(tmp_path)))
                ends.callback(lambda: other.result())
                # It cannot get further than to wait for this one.
                assert not other.done()

        monkeypatch.setattr(servers, "make_folder", made)
        with run_folder(tmp_path) as run:
            until_blocking(lambda: len([*(tmp_path / "runs").iterdir()]) == 2 and not killed.exists())
            assert (run.folder / "lock").exists()
            assert is_living(tmp_path / "runs", run.folder.name)


def test_two_that_look_at_the_same_server_do_not_take_each_other_for_it(tmp_path: Path) -> None:
    gone = tmp_path / "runs" / "4711-00000000"
    gone.mkdir(parents=True)
    (gone / "lock").touch()
    with ThreadPoolExecutor(8) as threads:
        assert not any(threads.map(is_living, [tmp_path / "runs"] * 2_000, [gone.name] * 2_000))
