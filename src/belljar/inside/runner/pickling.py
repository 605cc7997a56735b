"""The pickler for a session's variables, and the functions that rebuild them when the stream is loaded.

Functions and classes that a cell defined are pickled by value. Classes are left to cloudpickle. Functions are pickled
here, because cloudpickle gives a loaded function a copy of the globals that it used, and each closure a copy of its
cells; here they get the session's own namespace, and the cells that they shared. The functions that the stream calls by
name (`function`, `cell`, ...) are part of the file's format, and so is the name of this module.
"""

# cloudpickle comes from the environment and has no types; variables may have any type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportMissingImports=false

from __future__ import annotations

import functools
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

PROTOCOL = 5
NO_CLOUDPICKLE = "cloudpickle is not in this environment, and without it classes defined in cells cannot be kept"
# More than what goes into the stream: see `OUT_OF_BAND_BYTES` in `state_file`.
LARGE_ARRAY_BYTES = 1024 * 1024
_Cached: Any = type(functools.lru_cache(len))


def make_pickler(sink: Any, shell: Any, unshared: frozenset[int] = frozenset()) -> Any:
    """Return a pickler that writes to the sink and passes it the buffers.

    Arrays that share memory share it again when they are loaded, except those whose memory belongs to an array whose
    id is in `unshared`; each of these has memory of its own then.
    """
    return _pickler_class()(sink, shell, unshared)


def owner_of(array: Any) -> Any:
    """Return the array that owns the memory of this one; itself, where it owns its memory."""
    while type(array.base) is type(array):
        array = array.base
    return array


class _PlainPickler(pickle.Pickler):
    """The pickler without cloudpickle. It refuses classes of `__main__`, because loading could not find their names."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj.__module__ == "__main__":
            raise pickle.PicklingError(NO_CLOUDPICKLE)
        return NotImplemented


@functools.lru_cache(None)
def _base() -> Any:
    try:
        import cloudpickle  # type: ignore[import-not-found]  # it comes from the session's environment
    except ImportError:
        return _PlainPickler
    return cloudpickle.Pickler


@functools.lru_cache(None)
def _pickler_class() -> Any:
    base: Any = _base()

    class SessionPickler(base):
        def __init__(self, sink: Any, shell: Any, unshared: frozenset[int]) -> None:
            copies: set[int] = set()

            def take_buffer(buffer: pickle.PickleBuffer) -> bool:
                goes_into_stream = sink.take_buffer(buffer)
                if id(buffer) in copies:
                    # Release the copy now, because the pickler's memo would keep it until everything is pickled.
                    copies.remove(id(buffer))
                    buffer.release()
                return goes_into_stream

            super().__init__(sink, protocol=PROTOCOL, buffer_callback=take_buffer)
            self._reduce = _reducers(shell, copies, unshared).get

        def reducer_override(self, obj: Any) -> Any:
            reduce = self._reduce(type(obj))
            if reduce is not None:
                reduced = reduce(obj)
                if reduced is not NotImplemented:
                    return reduced
            return super().reducer_override(obj)

    return SessionPickler


def _reducers(shell: Any, copies: set[int], unshared: frozenset[int]) -> dict[type, Callable[[Any], Any]]:
    """Return our reducers by exact type, so that all other objects cost one look-up only."""
    own = shell.user_ns
    cells: dict[int, _ClosureCell] = {}

    def of_function(obj: types.FunctionType) -> Any:
        if obj.__globals__ is not own:
            return NotImplemented
        closure = tuple(cells.setdefault(id(one), _ClosureCell(one)) for one in obj.__closure__ or ())
        made = (marshal.dumps(obj.__code__), obj.__name__, closure)
        return function, made, _function_state(obj), None, None, set_function_state

    def of_shell(obj: Any) -> Any:
        return (own_shell, ()) if obj is shell else NotImplemented

    def of_array(obj: Any) -> Any:
        if type(obj.base) is type(obj) and id(owner_of(obj)) not in unshared and _is_shared(obj):
            return _reduce_view(obj)
        return of_memory(obj)

    def of_memory(obj: Any) -> Any:
        """Reduce a large array to a buffer that can be released once it is written.

        numpy offers neither times nor arrays with gaps as buffers, so pickling would copy them into the stream.
        """
        if obj.nbytes < LARGE_ARRAY_BYTES or obj.dtype.hasobject or (obj.flags.forc and obj.dtype.kind not in "mM"):
            return NotImplemented
        dense = obj if obj.flags.c_contiguous else obj.copy()
        dense.flags.writeable = obj.flags.writeable
        buffer = pickle.PickleBuffer(dense.reshape(-1).view("u1"))
        copies.add(id(buffer))
        return array, (buffer, obj.dtype, obj.shape)

    def of_block(obj: Any) -> Any:
        """Reduce a block of a DataFrame to memory of its own.

        Frames that share memory still behave as copies of each other, by marks that are not pickled. Without the
        marks, a write to one frame would be visible in the others.
        """
        make, (values, *rest), *more = obj.__reduce__()
        if type(values) is not sys.modules["numpy"].ndarray:
            return NotImplemented
        reduced = of_memory(values)
        values = _Unshared(values.__reduce_ex__(PROTOCOL) if reduced is NotImplemented else reduced)
        return (make, (values, *rest), *more)

    arrays = {sys.modules["numpy"].ndarray: of_array} if hasattr(sys.modules.get("numpy"), "ndarray") else {}
    blocks = getattr(sys.modules.get("pandas.core.internals.blocks"), "__dict__", {})
    return {
        **arrays,
        **{blocks[name]: of_block for name in ("NumpyBlock", "NumericBlock", "ObjectBlock") if name in blocks},
        types.FunctionType: of_function,
        _Cached: _reduce_cached,
        functools.cached_property: _reduce_cached_property,
        io.TextIOWrapper: _reduce_text_file,
        type(shell): of_shell,
    }


class _Unshared:
    """A wrapper that pickles a value from its own reduction, and so not as a reference to an object pickled before."""

    def __init__(self, reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


def _references(array: Any) -> int:
    """Return the highest reference count among the arrays that this one takes its memory from."""
    count = 0
    while type(array.base) is type(array):
        array = array.base
        count = max(count, sys.getrefcount(array))
    return count


def _is_shared(array: Any) -> bool:
    """Return whether anything else refers to the memory of this array.

    Compare with a fresh array, because how many references the counting itself adds differs between Python versions.
    """
    alone = array[:0].copy()[:]
    return _references(array) > _references(alone)


def _reduce_view(obj: Any) -> Any:
    """Reduce a view to an offset in the memory of its owner, which is in the stream once."""
    owner = owner_of(obj)
    is_plain = owner.flags.c_contiguous or (owner.flags.f_contiguous and owner.dtype.kind not in "mM")
    if not obj.size or not is_plain or owner.dtype.hasobject or obj.dtype.hasobject:
        return NotImplemented
    offset = obj.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return view, (owner, offset, obj.dtype, obj.shape, obj.strides, obj.flags.writeable)


def _function_state(obj: types.FunctionType) -> dict[str, Any]:
    state: dict[str, Any] = {
        "__defaults__": obj.__defaults__,
        "__kwdefaults__": obj.__kwdefaults__,
        "__qualname__": obj.__qualname__,
        "__module__": obj.__module__,
        "__doc__": obj.__doc__,
        "__dict__": obj.__dict__,
    }
    try:
        state["__annotations__"] = obj.__annotations__
    except Exception:  # from Python 3.14 on they are evaluated when read, and may name what is not defined
        state["__annotations__"] = {}
    if getattr(obj, "__type_params__", ()):
        state["__type_params__"] = obj.__type_params__  # type: ignore[attr-defined]  # Python 3.12
    return state


class _ClosureCell:
    """A closure's cell, as it is pickled; one object for each cell, so that closures that shared it share it again."""

    def __init__(self, of: types.CellType) -> None:
        self._of = of

    def __reduce__(self) -> Any:
        try:
            contents = self._of.cell_contents
        except ValueError:
            return cell, ()
        # Fill it after it is made, because a function may be in its own closure.
        return cell, (), (contents,), None, None, fill_cell


def _reduce_cached(obj: Any) -> Any:
    """Reduce an `lru_cache` by value; by default it is pickled by name, which a new session does not have yet."""
    if getattr(obj, "__module__", None) != "__main__":
        return NotImplemented
    parameters = obj.cache_parameters()
    return cached, (obj.__wrapped__, parameters["maxsize"], parameters["typed"]), dict(obj.__dict__)


def _reduce_cached_property(obj: Any) -> Any:
    """Reduce a cached property without its lock, which it has before Python 3.12 and which cannot be pickled."""
    state = {name: value for name, value in vars(obj).items() if name != "lock"}
    return functools.cached_property, (obj.func,), state


def _reduce_text_file(obj: Any) -> Any:
    """Reduce the standard streams by name and refuse other files, because cloudpickle would turn them into StringIO."""
    for name in ("stdout", "stderr"):
        if obj is getattr(sys, name) or obj is getattr(sys, f"__{name}__"):
            return getattr, (sys, name)
    raise pickle.PicklingError("an open file cannot be kept")


# What the stream calls when it is loaded; the names are part of the file's format


def function(code: bytes, name: str, closure: tuple[Any, ...]) -> types.FunctionType:
    """Make a function of the session, with the session's globals."""
    return types.FunctionType(marshal.loads(code), sys.modules["__main__"].__dict__, name, None, closure)


def set_function_state(obj: types.FunctionType, state: dict[str, Any]) -> None:
    """Set everything that a function has besides its code."""
    obj.__dict__.update(state.pop("__dict__"))
    for name, value in state.items():
        setattr(obj, name, value)


def array(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Make a numpy array in the memory of the buffer."""
    import numpy

    return numpy.frombuffer(buffer, "u1").view(dtype).reshape(shape)


def view(owner: Any, offset: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], writeable: bool) -> Any:
    """Make a numpy array in the memory of another one."""
    import numpy

    memory = owner if owner.flags.c_contiguous else owner.T
    made = numpy.ndarray(shape, dtype, memory, offset, strides)
    made.flags.writeable = writeable and made.flags.writeable
    return made


def cell() -> types.CellType:
    """Make an empty cell."""
    return types.CellType()


def fill_cell(obj: types.CellType, state: tuple[Any]) -> None:
    """Put a closure's value into its cell."""
    (obj.cell_contents,) = state


def cached(wrapped: Any, maxsize: int | None, typed: bool) -> Any:
    """Make an `lru_cache` that is empty."""
    return functools.lru_cache(maxsize, typed)(wrapped)


def own_shell() -> Any:
    """Return the session's shell, which is what `get_ipython()` returns."""
    return sys.modules["__main__"].__dict__["get_ipython"]()
