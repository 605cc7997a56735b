"""Pages of rows of DataFrames, Series, arrays and lists of dictionaries, read by `raw_objects` and sorted here.

Frames are read where pandas keeps them, in blocks of arrays, because slicing one runs code of the session: it copies
`attrs`, and anything of pandas may have been replaced. One that pandas keeps elsewhere is an `UnreadableObject`.
"""

# What is read has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# ruff: noqa: B905 - Python 3.9 has no `strict`

import builtins
import itertools
from collections.abc import Callable
from typing import Any

from .columns import (
    ArrayColumn,
    ArrowColumn,
    CategoricalColumn,
    Column,
    JoinedColumn,
    KeyColumn,
    MaskedColumn,
    ObjectColumn,
    RangeColumn,
    TextColumn,
    UnknownColumn,
    listed,
)
from .raw_objects import (
    Deadline,
    UnreadableObject,
    attribute,
    cell_text,
    class_attribute,
    compiled_attribute,
    compiled_method,
    is_ndarray,
    is_of,
    type_name,
)

__builtins__ = {**vars(builtins)}  # see `raw_objects`

_UNKNOWN_PANDAS = "this version of pandas keeps it in a way that is not known here"
_BLOCKS = ("Block", "SharedBlock", "NumpyBlock", "NDArrayBackedBlock")  # from pandas 2.2 on the first alone
_MAX_WEIGHED = 1_000
_MAX_KEY_ROWS = 500
_MAX_KEYS = 10_000


class TableReader:
    """Rows and columns: how many of both there are, and a column by its place."""

    def __init__(self, rows: int, labels: "Column | None", names: Column, column: "Callable[[int], Column]") -> None:
        self.rows = rows
        self.columns = names.length
        self._labels, self._names, self.column = labels, names, column

    def page(self, wanted: "dict[str, Any]", deadline: Deadline) -> "dict[str, Any]":
        """Return a part of it: columns with names and kinds, the labels of rows, and rows as texts."""
        chars, first = wanted["chars"], min(wanted["first_column"], self.columns)
        last = min(first + wanted["columns"], self.columns)
        start = min(wanted["offset"], self.rows)
        places: slice | list[int] = slice(start, min(start + wanted["limit"], self.rows))
        if wanted["order"] is not None:
            places = self._ordered(wanted["order"], places, deadline, is_descending=wanted["is_descending"])
        names = self._names.texts(slice(first, last), chars, deadline)
        columns: list[dict[str, Any]] = []
        contents: list[list[str | None]] = []
        for position, name in zip(range(first, last), names):
            deadline.check()
            column = self.column(position)
            contents.append(column.texts(places, chars, deadline))
            columns.append({"position": position, "name": name or "", "kind": column.kind, "dtype": column.dtype})
        if self._labels is not None:
            labels = self._labels.texts(places, chars, deadline)
        else:
            labels = [str(place) for place in listed(places, self.rows)]
        rows = [[*cells] for cells in zip(*contents)] if contents else [[] for _ in labels]
        return {"columns": columns, "labels": [label or "" for label in labels], "rows": rows}

    def _ordered(self, by: int, page: slice, deadline: Deadline, *, is_descending: bool) -> "list[int]":
        if not 0 <= by < self.columns:
            raise UnreadableObject(f"there is no column {by}: it has {self.columns:,}")
        present, missing = self.column(by).order(deadline)
        deadline.check()
        if is_descending:
            present = present[::-1]
        count = len(present)
        taken: list[Any] = [*present[page.start : page.stop]]
        taken += [*missing[max(0, page.start - count) : max(0, page.stop - count)]]
        return [int(place) for place in taken]


# Which table an object is


def table_of(value: Any) -> "TableReader | None":
    """Return the table that an object is, or None; raise `UnreadableObject` where its library hides it."""
    if is_ndarray(value):
        return _array_table(value)
    if type(value) is list:
        return _list_table(value)
    if is_of(value, "pandas", "DataFrame"):
        return _frame_table(value)
    if is_of(value, "pandas", "Series"):
        return _series_table(value)
    return None


def is_table(value: Any) -> bool:
    """Return whether `table_of` would find one, without reading it."""
    if is_ndarray(value):
        return 1 <= value.ndim <= 2
    if type(value) is list:
        return bool(value) and type(value[0]) is dict
    return is_of(value, "pandas", "DataFrame", "Series")


def _array_table(array: Any) -> TableReader:
    if array.ndim == 1:
        names = array.dtype.names
        if names:
            fields = [str(name) for name in names]
            return TableReader(
                array.shape[0], None, ObjectColumn(fields), lambda place: column_of(array[fields[place]])
            )
        return TableReader(array.shape[0], None, ObjectColumn(["value"]), lambda _: column_of(array))
    if array.ndim == 2:
        return TableReader(
            array.shape[0], None, RangeColumn(range(array.shape[1])), lambda place: column_of(array[:, place])
        )
    raise UnreadableObject(f"an array with {array.ndim} dimensions has no rows and columns")


def _list_table(rows: "list[Any]") -> "TableReader | None":
    if not rows or type(rows[0]) is not dict:
        return None
    keys: dict[Any, None] = {}
    for row in rows[:_MAX_KEY_ROWS]:
        if type(row) is dict:
            found = itertools.islice([*row], _MAX_KEYS)
            keys.update((key, None) for key in found if type(key) is str or type(key) is int)
    names = [*itertools.islice(keys, _MAX_KEYS)]
    are_plain: dict[int, bool] = {}
    return TableReader(len(rows), None, ObjectColumn(names), lambda place: KeyColumn(rows, names[place], are_plain))


def _manager(value: Any) -> "tuple[list[Any], tuple[Any, ...]]":
    """Return the axes and the blocks of a frame or series."""
    manager = attribute(value, "_mgr")
    blocks = compiled_attribute(manager, "blocks", "BlockManager")
    axes = compiled_attribute(manager, "axes", "BlockManager")
    if type(blocks) is not tuple or type(axes) is not list:
        # A series keeps the same in its own way.
        blocks, axes = attribute(manager, "blocks"), attribute(manager, "axes")
    if type(blocks) is not tuple or type(axes) is not list:
        raise UnreadableObject(_UNKNOWN_PANDAS)
    return axes, blocks


def _frame_table(frame: Any) -> TableReader:
    axes, blocks = _manager(frame)
    names, labels = index_column(axes[0]), index_column(axes[1])
    located = [(block, _placement(block)) for block in blocks]
    # A frame that was put together column by column has a block for each.
    single = {places[0]: block for block, places in located if type(places) is range and len(places) == 1}
    others = [(block, places) for block, places in located if type(places) is not range or len(places) != 1]

    def column(place: int) -> Column:
        block, row = single.get(place), 0
        if block is None:
            found = ((one, _row_in(places, place)) for one, places in others)
            block, row = next((one for one in found if one[1] >= 0), (None, 0))
        if block is None:
            raise UnreadableObject(_UNKNOWN_PANDAS)
        return column_of(compiled_attribute(block, "values", *_BLOCKS), row, labels.length)

    return TableReader(labels.length, labels, names, column)


def _row_in(places: Any, place: int) -> int:
    """Return where a column of the frame is in a block; -1 if it is in another."""
    if type(places) is range:
        return places.index(place) if place in places else -1
    found = (places == place).nonzero()[0].tolist()
    return found[0] if found else -1


def _placement(block: Any) -> Any:
    """Return the places of a block's columns in its frame, as a range or an array."""
    placement = compiled_attribute(block, "_mgr_locs", *_BLOCKS)
    indexer = compiled_attribute(placement, "indexer", "BlockPlacement")
    if type(indexer) is slice:
        return range(indexer.start or 0, indexer.stop, indexer.step or 1)
    if is_ndarray(indexer):
        return indexer
    raise UnreadableObject(_UNKNOWN_PANDAS)


def _series_table(series: Any) -> TableReader:
    axes, blocks = _manager(series)
    labels = index_column(axes[0])
    name = cell_text(attribute(series, "_name"), 200) or "value"
    values = compiled_attribute(blocks[0], "values", *_BLOCKS)
    return TableReader(labels.length, labels, ObjectColumn([name]), lambda _: column_of(values, 0, labels.length))


def index_column(index: Any) -> Column:
    """Return the labels in an index of pandas."""
    numbers = attribute(index, "_range")
    if type(numbers) is range:
        return RangeColumn(numbers)
    levels, codes = attribute(index, "_levels"), attribute(index, "_codes")
    if levels is not None and codes is not None:
        # They are of a subclass of list, so their own length and items are not asked for.
        count = list.__len__(levels)
        parts = [(list.__getitem__(levels, place), list.__getitem__(codes, place)) for place in range(count)]
        joined: list[Column] = [CategoricalColumn(part, index_column(level)) for level, part in parts]
        return JoinedColumn(joined)
    values = attribute(index, "_data")
    if values is None:
        raise UnreadableObject(_UNKNOWN_PANDAS)
    return column_of(values)


def column_of(values: Any, row: int = 0, length: int = 0) -> Column:
    """Return the column in an array of numpy, pandas or pyarrow; `row` of one with two dimensions."""
    if is_ndarray(values):
        if values.ndim == 2:
            values = values[row]
        return ObjectColumn(values) if values.dtype.kind == "O" else ArrayColumn(values)
    if values is None:
        raise UnreadableObject(_UNKNOWN_PANDAS)
    inner = compiled_attribute(values, "_ndarray", "NDArrayBacked")
    if is_ndarray(inner):
        return _backed_column(values, inner, row)
    data, mask = attribute(values, "_data"), attribute(values, "_mask")
    if is_ndarray(data) and is_ndarray(mask) and mask.dtype.kind == "b" and mask.shape == data.shape:
        return MaskedColumn(data, mask)
    arrow = attribute(values, "_pa_array")
    if arrow is not None:
        return _arrow_column(arrow) or UnknownColumn(values, length)
    return UnknownColumn(values, length)


def _backed_column(values: Any, inner: Any, row: int) -> Column:
    inner = inner[row] if inner.ndim == 2 else inner
    if is_of(values, "pandas", "Categorical"):
        categories = attribute(compiled_attribute(values, "_dtype", "NDArrayBacked"), "_categories")
        return CategoricalColumn(inner, index_column(categories))
    if is_of(values, "pandas", "PeriodArray"):
        return UnknownColumn(values, inner.shape[0])
    if inner.dtype.kind != "O":
        return ArrayColumn(inner)
    return TextColumn(inner) if type_name(type(values)).startswith("StringArray") else ObjectColumn(inner)


def _arrow_column(arrow: Any) -> "Column | None":
    if not is_of(arrow, "pyarrow", "ChunkedArray"):
        return None
    kind = type(arrow)
    slice_of, listed, length = (compiled_method(kind, name) for name in ("slice", "to_pylist", "length"))
    own_type = class_attribute(kind, "type")
    if slice_of is None or listed is None or length is None or type_name(type(own_type)) != "getset_descriptor":
        return None
    if not is_of(own_type.__get__(arrow), "pyarrow", "DataType"):
        return None  # a type with parameters, or one that the session defined
    return ArrowColumn(arrow, slice_of, listed, length(arrow))


def shape_of(value: Any) -> "list[int] | None":
    """Return the shape of an array or a frame; None for others."""
    if is_ndarray(value):
        return [*value.shape]
    if is_of(value, "pandas", "DataFrame"):
        axes, _ = _manager(value)
        return [index_column(axes[1]).length, index_column(axes[0]).length]
    if is_of(value, "pandas", "Series"):
        return [index_column(_manager(value)[0][0]).length]
    return None


def bytes_of(value: Any) -> "int | None":
    """Return how many bytes the values of an array or a frame take, without those of Python objects in it."""
    if is_ndarray(value):
        return int(value.nbytes)
    if not is_of(value, "pandas", "DataFrame", "Series"):
        return None
    total, blocks = 0, _manager(value)[1]
    if len(blocks) > _MAX_WEIGHED:
        return None
    for block in blocks:
        values = compiled_attribute(block, "values", *_BLOCKS)
        inner = values if is_ndarray(values) else compiled_attribute(values, "_ndarray", "NDArrayBacked")
        parts = [inner] if is_ndarray(inner) else [attribute(values, "_data"), attribute(values, "_mask")]
        total += sum(int(part.nbytes) for part in parts if is_ndarray(part))
    return total
