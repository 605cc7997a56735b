"""Functions of a zygote are moved in memory only where nothing can tell them from their old ones."""

import sys
import types
import weakref
from typing import Any

import pytest

from belljar.inside.runner.compaction import move_functions

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 12), reason="done up to Python 3.11 only")

_SOURCE = '''
def f(a: int, b=2, *, c=3):
    """What it does."""
    return a, b, c

f.mark = "m"

class C:
    def method(self):
        return super().__repr__()

    @property
    def value(self):
        return 1

    def __len__(self):
        return 5

def outer():
    inside = 1
    def inner():
        return inside
    return inner

inner = outer()
'''


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = types.ModuleType("made_up")
    exec(_SOURCE, vars(made))
    for name in ("made_up", "made_up_again"):
        monkeypatch.setitem(sys.modules, name, made)
    return made


def test_moved_function_is_what_the_old_one_was(module: Any) -> None:
    module.g = module.f
    before = (id(module.f), id(module.C.method), id(module.inner))
    hot = {one.__code__ for one in (module.f, module.C.method, module.C.__len__, module.inner)}
    move_functions(hot)
    assert {id(module.f), id(module.C.method), id(module.inner)}.isdisjoint(before)
    assert module.g is module.f
    assert (module.f(1), module.f.mark, module.f.__doc__) == ((1, 2, 3), "m", "What it does.")
    assert (module.f.__annotations__, module.f.__module__, module.f.__qualname__) == ({"a": int}, "made_up", "f")
    assert "made_up.C object" in module.C().method()
    assert (len(module.C()), module.inner(), module.C.method.__qualname__) == (5, 1, "C.method")


def test_function_that_something_else_refers_to_stays(module: Any) -> None:
    kept, reference = [module.f], weakref.ref(module.inner)
    getter = module.C.value.fget
    move_functions({module.f.__code__, module.inner.__code__, getter.__code__})
    assert kept[0] is module.f
    assert reference() is module.inner
    assert module.C.value.fget is getter
