"""Pages of rows of frames, series, arrays and lists of dictionaries, read by the methods of their libraries.

Only objects of exact types are asked for anything, down to the arrays behind columns and indexes, because methods of
libraries call those of what they hold: a slice of a DataFrame copies its `attrs`, an Index the array of its labels.
"""

# What is read has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# ruff: noqa: B905 - Python 3.9 has no `strict`

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from .columns import matcher, summary_of
from .exact_types import Deadline, ExactTypes, UnreadableObject, size_of, type_name

MAX_SORTED = 1_000_000
"""Numbers and times are sorted up to here, in a few tenths of a second that nothing can interrupt."""
MAX_SORTED_TEXTS = 300_000
MAX_SORTED_OBJECTS = 200_000
_MAX_WEIGHED = 20_000
_LONGEST_ITEM_BYTES = 4_096
_MAX_KEY_ROWS = 500
_MAX_KEYS = 10_000
_MAX_SUMMARIES = 30
_SUMMED_ROWS, _RUN = 5_000, 50
_FILTERED_AT_ONCE, _FILTERED_CHARS = 1_000, 1_000
_KINDS = {"b": "boolean", "i": "number", "u": "number", "f": "number", "c": "number", "M": "time", "m": "time"}
_TEXT_KINDS = "SUT"
_PANDAS_KINDS = {
    "pandas.IntegerArray": "number",
    "pandas.FloatingArray": "number",
    "pandas.BooleanArray": "boolean",
    "pandas.PeriodArray": "time",
    "pandas.IntervalArray": "object",
}
_PANDAS_TEXTS = ("pandas.StringArray", "pandas.StringArrayNumpySemantics")
_ARROW_TEXTS = ("pandas.ArrowStringArray", "pandas.ArrowStringArrayNumpySemantics")
_WORDS = {
    "text": re.compile(r"(large_)?str(ing)?|cat|enum"),
    "number": re.compile(r"(u?int|[iuf]|float|halffloat|double|decimal)\d*"),
    "boolean": re.compile(r"bool"),
    "time": re.compile(r"timestamp|date(time|\d+)?|time\d*|duration"),
}
"""What types of pyarrow and polars are called, without what follows in brackets."""


class Column(NamedTuple):
    """One column. `kind` is number, boolean, time, text or object; `dtype` is what its library calls it.

    `taken` returns what is at some places; `order` the places of its values in ascending order, and of those missing.
    """

    length: int
    kind: str
    dtype: str
    taken: "Callable[[slice | list[int]], list[Any]]"
    order: "Callable[[Deadline], tuple[Any, Any]] | None" = None


class Table(NamedTuple):
    """Rows and columns: how many of both there are, and a column by its place. `labels` is None for numbered rows."""

    rows: int
    columns: int
    labels: "Column | None"
    names: Column
    column: "Callable[[int], Column]"


class TableReader:
    """Reads the tables among a session's variables, during one look."""

    def __init__(self, known: ExactTypes, deadline: Deadline) -> None:
        self._known, self._deadline = known, deadline

    def is_table(self, value: Any) -> bool:
        """Return whether `table_of` would find one, without reading it."""
        if type(value) is list:
            return bool(value) and type(value[0]) is dict
        name = self._known.name(value)
        return 1 <= value.ndim <= 2 if name == "numpy.ndarray" else name in self._TABLES

    def table_of(self, value: Any) -> "Table | None":
        """Return the table that an object is, or None; raise `UnreadableObject` where it is hidden."""
        if type(value) is list:
            return self._list_table(value)
        read = self._TABLES.get(self._known.name(value))
        return read(self, value) if read is not None else None

    def shape_of(self, value: Any) -> "list[int] | None":
        """Return the shape of an array or a table; None for others."""
        name = self._known.name(value)
        if name == "numpy.ndarray":
            return [*value.shape]
        if name not in self._TABLES:
            return None
        table = self._TABLES[name](self, value)
        return [table.rows] if name.endswith(".Series") else [table.rows, table.columns]

    def bytes_of(self, value: Any) -> "int | None":
        """Return how many bytes an object takes, and the values of an array or a table; not what it refers to."""
        name = self._known.name(value)
        if name in ("numpy.ndarray", "pyarrow.Table"):
            return int(value.nbytes)
        if name.startswith("polars."):
            return int(value.estimated_size())
        if name == "pandas.Series":
            return self._weight([value._values])
        if name == "pandas.DataFrame" and self._table_of_frame(value).columns <= _MAX_WEIGHED:
            return self._weight([value._get_column_array(place) for place in range(len(value.columns))])
        return None if name in self._TABLES else size_of(value)

    def _weight(self, arrays: "list[Any]") -> int:
        return sum(int(one.nbytes) for one in arrays if self._known.name(one))

    def page(self, table: Table, wanted: "dict[str, Any]") -> "dict[str, Any]":
        """Return a part of a table: columns with names and kinds, the labels of rows, and rows as texts."""
        chars, first = wanted["chars"], min(wanted["first_column"], table.columns)
        last = min(first + wanted["columns"], table.columns)
        found = None if wanted["where"] is None else self._matching(table, range(first, last), *wanted["where"])
        count = table.rows if found is None else len(found)
        start = min(wanted["offset"], count)
        part = slice(start, min(start + wanted["limit"], count))
        places: slice | list[int] = part if found is None else found[part]
        if wanted["order"] is not None:
            places = self._ordered(table, wanted["order"], part, found, is_descending=wanted["is_descending"])
        names = self._texts(table.names, slice(first, last), chars)
        columns: list[dict[str, Any]] = []
        contents: list[list[str | None]] = []
        for position, name in zip(range(first, last), names):
            self._deadline.check()
            column = table.column(position)
            contents.append(self._texts(column, places, chars))
            columns.append({"position": position, "name": name or "", "kind": column.kind, "dtype": column.dtype})
        if table.labels is not None:
            labels = self._texts(table.labels, places, chars)
        else:
            labels = [str(place) for place in _listed(places, table.rows)]
        rows = [[*cells] for cells in zip(*contents)] if contents else [[] for _ in labels]
        if wanted["summaries"]:
            for entry in columns[:_MAX_SUMMARIES]:
                entry["summary"] = self._summary(table.column(entry["position"]), chars)
        return {"columns": columns, "labels": [label or "" for label in labels], "rows": rows, "matching": count}

    def _matching(self, table: Table, shown: range, position: int, text: str) -> "list[int]":
        """Return the places of rows whose column, or any that is shown for -1, is as a text says; see `matcher`."""
        if position >= table.columns:
            raise UnreadableObject(f"there is no column {position}: it has {table.columns:,}")
        columns = [table.column(place) for place in ([position] if position >= 0 else shown)]
        tests = [(column, matcher(text, column.kind)) for column in columns]
        found: list[int] = []
        for start in range(0, table.rows, _FILTERED_AT_ONCE):
            self._deadline.check()
            part = slice(start, min(start + _FILTERED_AT_ONCE, table.rows))
            fits = [[test(one) for one in self._texts(column, part, _FILTERED_CHARS)] for column, test in tests]
            found += [start + place for place, row in enumerate(zip(*fits)) if any(row)]
        return found

    def _summary(self, column: Column, chars: int) -> "dict[str, Any] | None":
        """Return what a column holds; of a long one, what parts of it do that are spread evenly."""
        length = column.length
        step = max(_RUN, length * _RUN // _SUMMED_ROWS)
        try:
            texts: list[str | None] = []
            for start in range(0, length, step):
                texts += self._texts(column, slice(start, min(start + _RUN, length)), chars)
                self._deadline.check()
        except UnreadableObject:
            return None
        return summary_of(texts, column.kind)

    def _ordered(
        self, table: Table, by: int, page: slice, found: "list[int] | None", *, is_descending: bool
    ) -> "list[int]":
        if not 0 <= by < table.columns:
            raise UnreadableObject(f"there is no column {by}: it has {table.columns:,}")
        order = table.column(by).order
        if order is None:
            raise UnreadableObject("this column cannot be sorted")
        present, missing = order(self._deadline)
        self._deadline.check()
        if found is not None:
            wanted = set(found)
            present, missing = ([place for place in places if int(place) in wanted] for places in (present, missing))
        if is_descending:
            present = present[::-1]
        count = len(present)
        taken: list[Any] = [*present[page.start : page.stop]]
        taken += [*missing[max(0, page.start - count) : max(0, page.stop - count)]]
        return [int(place) for place in taken]

    def _texts(self, column: Column, places: "slice | list[int]", chars: int) -> "list[str | None]":
        return [self._known.cell_text(value, chars) for value in column.taken(places)]

    # Tables

    def _table_of_frame(self, frame: Any) -> Table:
        self._deadline.check()
        names, labels = self._index_column(frame.columns), self._index_column(frame.index)
        return Table(
            labels.length,
            names.length,
            labels,
            names,
            lambda place: self._column_of(frame._get_column_array(place), labels.length),
        )

    def _table_of_series(self, series: Any) -> Table:
        labels = self._index_column(series.index)
        name = self._known.cell_text(series.name, 200) or "value"
        return Table(
            labels.length,
            1,
            labels,
            _object_column([name]),
            lambda _: self._column_of(series._values, labels.length),
        )

    def _table_of_array(self, array: Any) -> Table:
        if array.ndim == 2:
            names = _range_column(range(array.shape[1]))
            return Table(array.shape[0], names.length, None, names, lambda place: _array_column(array[:, place]))
        if array.ndim != 1:
            raise UnreadableObject(f"an array with {array.ndim} dimensions has no rows and columns")
        fields = array.dtype.names
        names = _object_column([*fields] if fields else ["value"])
        return Table(
            array.shape[0],
            names.length,
            None,
            names,
            lambda place: _array_column(array[fields[place]] if fields else array),
        )

    def _table_of_polars(self, frame: Any) -> Table:
        if self._known.name(frame) == "polars.Series":
            frame = frame.to_frame()
        # Not `dtypes`, whose entries may be of classes that the session has registered with polars.
        kinds = frame._df.dtype_strings()
        return Table(
            frame.height,
            frame.width,
            None,
            _object_column(frame.columns),
            lambda place: _library_column(frame.to_series(place), frame.height, kinds[place], "to_list"),
        )

    def _table_of_arrow(self, table: Any) -> Table:
        return Table(
            table.num_rows,
            table.num_columns,
            None,
            _object_column(table.column_names),
            lambda place: self._arrow_column(table.column(place), table.num_rows),
        )

    _TABLES: ClassVar[dict[str, Callable[..., Table]]] = {
        "numpy.ndarray": _table_of_array,
        "pandas.DataFrame": _table_of_frame,
        "pandas.Series": _table_of_series,
        "polars.DataFrame": _table_of_polars,
        "polars.Series": _table_of_polars,
        "pyarrow.Table": _table_of_arrow,
    }

    def _list_table(self, rows: "list[Any]") -> "Table | None":
        if not rows or type(rows[0]) is not dict:
            return None
        keys: dict[Any, None] = {}
        for row in rows[:_MAX_KEY_ROWS]:
            if type(row) is dict:
                found = itertools.islice([*row], _MAX_KEYS)
                keys.update((key, None) for key in found if type(key) is str or type(key) is int)
        names = [*itertools.islice(keys, _MAX_KEYS)]
        are_plain: dict[int, bool] = {}

        def value_of(place: int, key: Any) -> Any:
            row = rows[place]
            if type(row) is not dict:
                return None
            self._deadline.check()
            if place not in are_plain:
                # Another key may have the same hash, and an `__eq__` of the session's.
                are_plain[place] = all(type(one) is str or type(one) is int for one in [*row])
            return row.get(key) if are_plain[place] else "<keys of other types>"

        def column(place: int) -> Column:
            key, length = names[place], len(rows)

            def taken(places: "slice | list[int]") -> "list[Any]":
                return [value_of(one, key) for one in _listed(places, length)]

            return Column(length, "object", "object", taken, lambda deadline: _sorted_objects(taken, length, deadline))

        return Table(len(rows), len(names), None, _object_column(names), column)

    # Columns

    def _index_column(self, index: Any) -> Column:
        name = self._known.name(index)
        if name == "pandas.RangeIndex":
            return _range_column(range(index.start, index.stop, index.step))
        if name == "pandas.MultiIndex":
            parts = [self._coded_column(*part) for part in zip(index.codes, index.levels)]
            if not parts:
                raise UnreadableObject("its labels have no parts")
            return Column(parts[0].length, "text", "object", lambda places: self._joined(parts, places))
        values: Any = index._values if name == "pandas.Index" else None
        if not self._known.name(values):
            raise UnreadableObject(f"its labels are of the type {type_name(type(index if values is None else values))}")
        return self._column_of(values, len(values))

    def _joined(self, parts: "list[Column]", places: "slice | list[int]") -> "list[str]":
        found = [self._texts(part, places, 200) for part in parts]
        return [", ".join("" if text is None else text for text in texts) for texts in zip(*found)]

    def _column_of(self, values: Any, length: int) -> Column:
        """Return the column in an array of numpy or pandas."""
        name = self._known.name(values)
        if name in ("pandas.NumpyExtensionArray", "pandas.PandasArray"):
            values = values.to_numpy()
            name = self._known.name(values)
        if name == "numpy.ndarray":
            return _array_column(values)
        if name in ("pandas.DatetimeArray", "pandas.TimedeltaArray"):
            return _array_column(values._ndarray)
        if name == "pandas.Categorical":
            return self._coded_column(values.codes, values.categories)
        if name in _PANDAS_TEXTS:
            return _text_column(values._ndarray)
        if name in _ARROW_TEXTS or name == "pandas.ArrowExtensionArray":
            dtype = "str" if name in _ARROW_TEXTS else ""
            return self._arrow_column(values._pa_array, length, dtype)
        if name in _PANDAS_KINDS:
            order = None if name == "pandas.IntervalArray" else lambda _: _split_order(values)
            return Column(length, _PANDAS_KINDS[name], str(values.dtype), lambda places: [*values[places]], order)
        return _unknown_column(type_name(type(values)), length)

    def _coded_column(self, codes: Any, index: Any) -> Column:
        """Return the column of codes that stand for labels, -1 for none; it is sorted by the order of the labels."""
        labels = self._index_column(index)

        def taken(places: "slice | list[int]") -> "list[Any]":
            found = codes[places].tolist()
            used = sorted({code for code in found if 0 <= code < labels.length})
            known = dict(zip(used, labels.taken(used)))
            return [known.get(code) for code in found]

        def order(_: Deadline) -> "tuple[Any, Any]":
            _check_count(codes.shape[0], MAX_SORTED)
            places = codes.argsort(kind="stable")
            missing = int((codes < 0).sum())
            return places[missing:], places[:missing]

        return Column(codes.shape[0], labels.kind, "category", taken, order)

    def _arrow_column(self, values: Any, length: int, dtype: str = "") -> Column:
        own = None if dtype else values.type
        # Not one that contains others, whose values would be dictionaries and lists of any types.
        if own is not None and not self._known.name(own):
            return _unknown_column(type_name(type(own)), length)
        return _library_column(values, length, dtype or str(own), "to_pylist")


def _array_column(values: Any) -> Column:
    """Return the column in an array of numpy with one dimension."""
    kind, length = values.dtype.kind, values.shape[0]
    if kind == "O":
        return _object_column(values)

    def order(_: Deadline) -> "tuple[Any, Any]":
        _check_count(length, MAX_SORTED_TEXTS if kind in _TEXT_KINDS else MAX_SORTED)
        places = values.argsort(kind="stable")
        # numpy sorts NaN and NaT to the end, and neither is equal to itself.
        missing = int((values != values).sum()) if kind in "fMm" else 0
        return places[: length - missing], places[length - missing :]

    shown = "text" if kind in _TEXT_KINDS else _KINDS.get(kind, "object")
    dtype: str = {"M": "datetime64", "m": "timedelta64", "S": "bytes", "U": "str", "T": "str"}.get(
        kind
    ) or values.dtype.name
    return Column(
        length,
        shown,
        dtype,
        lambda places: _array_values(values[places], dtype),
        order if kind in "biufMmSU" else None,
    )


def _array_values(values: Any, dtype: str) -> "list[Any]":
    kind = values.dtype.kind
    if kind == "M":
        return [_time_text(text) for text in values.astype("U48").tolist()]
    if kind == "m":
        return [f"{value} µs" if type(value) is int else value for value in values.astype("m8[us]").tolist()]
    if kind == "f" and values.dtype.itemsize != 8:
        return values.astype("U48").tolist()  # through a double, 0.1 of 4 bytes would have 17 digits
    if kind == "U" and values.dtype.itemsize > _LONGEST_ITEM_BYTES:
        values = values.astype(f"U{_LONGEST_ITEM_BYTES // 4}")
    if kind in "biufcSUT":
        return values.tolist()
    return [f"<{dtype}>"] * values.shape[0]


def _object_column(values: Any) -> Column:
    """Return the column of Python objects in a list or an array of numpy."""
    length = len(values)

    def taken(places: "slice | list[int]") -> "list[Any]":
        if type(values) is list:
            return [values[place] for place in _listed(places, length)]
        return values[places].tolist()

    return Column(length, "object", "object", taken, lambda deadline: _sorted_objects(taken, length, deadline))


def _text_column(values: Any) -> Column:
    """Return the column of texts that pandas keeps as Python objects, with NaN or NA for those that are missing."""
    inner = _object_column(values)

    def taken(places: "slice | list[int]") -> "list[Any]":
        return [None if type(value) is float else value for value in inner.taken(places)]

    return inner._replace(kind="text", dtype="str", taken=taken)


def _library_column(values: Any, length: int, dtype: str, listing: str) -> Column:
    """Return the column in an array of pyarrow or polars, which can be sliced and turned `listing` a list."""
    if "ext[" in dtype:
        return _unknown_column(dtype, length)

    def taken(places: "slice | list[int]") -> "list[Any]":
        if type(places) is slice:
            start, stop, _ = places.indices(length)
            return getattr(values.slice(start, max(0, stop - start)), listing)()
        return [getattr(values.slice(place, 1), listing)()[0] for place in places]

    word = dtype.partition("[")[0].partition("(")[0]
    kind = next((kind for kind, words in _WORDS.items() if words.fullmatch(word)), "object")

    def order(deadline: Deadline) -> "tuple[Any, Any]":
        if kind != "time" and not dtype.startswith("decimal"):
            return _sorted_objects(taken, length, deadline)
        _check_count(length, MAX_SORTED_OBJECTS)
        values = taken(slice(0, length))
        present = sorted((place for place in range(length) if values[place] is not None), key=values.__getitem__)
        return present, [place for place in range(length) if values[place] is None]

    return Column(length, kind, dtype[:100], taken, order)


def _range_column(numbers: range) -> Column:
    def taken(places: "slice | list[int]") -> "list[Any]":
        return [numbers[place] for place in _listed(places, len(numbers))]

    return Column(len(numbers), "number", "int64", taken)


def _unknown_column(name: str, length: int) -> Column:
    """Return a column of which only the name of its class is shown."""
    return Column(length, "object", name[:100], lambda places: [f"<{name}>"] * len(_listed(places, length)))


def _sorted_objects(
    taken: "Callable[[slice | list[int]], list[Any]]", length: int, deadline: Deadline
) -> "tuple[Any, Any]":
    """Order Python objects: numbers come before texts; whatever else there is counts as missing."""
    _check_count(length, MAX_SORTED_OBJECTS)
    numbers: list[tuple[Any, int]] = []
    texts: list[tuple[str, int]] = []
    missing: list[int] = []
    for place, value in enumerate(taken(slice(0, length))):
        kind = type(value)
        if kind is str:
            texts.append((value, place))
        elif (kind is int or kind is bool or kind is float) and value == value:
            numbers.append((value, place))
        else:
            missing.append(place)
        if place % 10_000 == 0:
            deadline.check()
    numbers.sort()
    texts.sort()
    return [place for _, place in itertools.chain(numbers, texts)], missing


def _split_order(values: Any) -> "tuple[Any, Any]":
    """Order an array of pandas that may lack values."""
    _check_count(len(values), MAX_SORTED)
    places, present = values.argsort(kind="stable"), len(values) - int(values.isna().sum())
    return places[:present], places[present:]


def _listed(places: "slice | list[int]", length: int) -> "Sequence[int]":
    """Return the numbers of these places."""
    return places if isinstance(places, list) else range(*places.indices(length))


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise UnreadableObject(f"{count:,} rows are too many to sort here, where {most:,} are the most")


def _time_text(text: str) -> "str | None":
    if text == "NaT":
        return None
    return text.rstrip("0").rstrip(".") if "." in text else text
