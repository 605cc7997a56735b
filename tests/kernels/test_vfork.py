"""A child that shares its parent's memory: what it does there, what it raises, and what it forks."""

import os
import signal
import sys
from collections.abc import Callable

import pytest

from belljar.inside.runner import vfork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="clone(2) is Linux's")


def test_function_runs_in_another_process_with_the_same_objects() -> None:
    seen: list[int] = []

    def is_right() -> bool:
        (pid,) = seen
        return pid != os.getpid()

    _in_single_thread(lambda: vfork.run_in_child(lambda: seen.append(os.getpid())), is_right)


def test_what_the_child_raises_is_raised_here() -> None:
    caught: list[str] = []

    def act() -> None:
        try:
            vfork.run_in_child(lambda: os.chdir("/there/is/no/such/file"))
        except FileNotFoundError as error:
            caught.append(str(error.filename))

    _in_single_thread(act, lambda: caught == ["/there/is/no/such/file"])


def test_process_that_the_child_forks_lives_on_and_has_stack_to_recurse() -> None:
    reading, writing = os.pipe()

    def fork() -> None:
        if os.fork() == 0:
            nested: list[object] = []
            for _ in range(10_000):
                nested = [nested]
            try:
                repr(nested)  # recursion in C, which uses the stack
            except RecursionError:
                os.write(writing, b"deep")
            os._exit(0)

    _in_single_thread(lambda: vfork.run_in_child(fork), lambda: os.read(reading, 10) == b"deep")
    os.close(reading)
    os.close(writing)


def test_process_that_a_child_forked_runs_functions_of_its_own_in_children() -> None:
    reading, writing = os.pipe()

    def tell() -> None:
        os.write(writing, b"its own")

    def fork() -> None:
        if os.fork() == 0:
            vfork.begin_anew()
            vfork.run_in_child(tell)
            os._exit(0)

    _in_single_thread(lambda: vfork.run_in_child(fork), lambda: os.read(reading, 10) == b"its own")
    os.close(reading)
    os.close(writing)


def test_process_ends_when_its_child_was_killed_in_its_memory() -> None:
    def act() -> None:
        vfork.run_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))

    _in_single_thread(act, lambda: True, status=1)


def _in_single_thread(act: Callable[[], None], is_right: Callable[[], bool], *, status: int = 0) -> None:
    """Act in a fork of this process, because pytest may have threads, and look there whether the outcome is right."""
    child = os.fork()
    if child == 0:
        outcome = 2
        try:
            act()
            outcome = 0 if is_right() else 3
        finally:
            os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
