"""What a kernel tells of its variables to an observer: the contract, and the form and limits of an answer.

Looking runs no code of the session and changes nothing in it. What is told comes out of the session all the same, so
its form is checked here like that of every message.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_VARIABLES = 2_000
MAX_ROWS = 500
MAX_COLUMNS = 100
MAX_LOOK_BYTES = 256 * 1024
"""The most that a kernel tells in one answer."""
LONGEST_TEXT = 1_000

_Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
_Name = Annotated[str, Field(max_length=200)]
_TypeName = Annotated[str, Field(max_length=100)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
ColumnKind = Literal["number", "boolean", "time", "text", "object"]


class VariableItem(BaseModel):
    """One variable. `size_bytes` is the memory of it alone, without that of objects it refers to."""

    model_config = ConfigDict(defer_build=True)

    name: _Name
    type: _TypeName
    length: _Count | None = None
    shape: Annotated[list[_Count], Field(max_length=64)] | None = None
    size_bytes: _Count | None = None
    value: _Text | None = None
    """The value of texts, numbers, True, False and None; other types have none here."""
    is_cut: bool = False
    has_rows: bool = False


class VariableListing(BaseModel):
    """Some variables in the order in which they were made, how many there are, and where the next ones begin."""

    model_config = ConfigDict(defer_build=True)

    items: list[VariableItem] = Field(max_length=MAX_VARIABLES)
    total: _Count
    next: _Count | None = None


class FrequentText(BaseModel):
    """A text that a column has several times."""

    model_config = ConfigDict(defer_build=True)

    text: _Text
    count: _Count


class ColumnSummary(BaseModel):
    """What a column holds, as far as `count` rows of it were read. Of numbers and times `bins` tell how they spread."""

    model_config = ConfigDict(defer_build=True)

    count: _Count
    missing: _Count
    distinct: _Count
    least: _Text = ""
    most: _Text = ""
    bins: Annotated[list[_Count], Field(max_length=64)] = []
    frequent: Annotated[list[FrequentText], Field(max_length=16)] = []


class TableColumn(BaseModel):
    """One column of a table."""

    model_config = ConfigDict(defer_build=True)

    position: _Count
    name: _Text
    kind: ColumnKind
    dtype: _TypeName
    summary: ColumnSummary | None = None


class TablePage(BaseModel):
    """A part of a table as texts, null for what is missing; `problem` says why there is none."""

    model_config = ConfigDict(defer_build=True)

    name: _Name
    kind: _TypeName
    problem: Literal["", "missing", "no rows", "unreadable"]
    reason: _Text = ""
    columns: list[TableColumn] = Field(default=[], max_length=MAX_COLUMNS)
    labels: list[_Text] = Field(default=[], max_length=MAX_ROWS)
    rows: list[Annotated[list[_Text | None], Field(max_length=MAX_COLUMNS)]] = Field(default=[], max_length=MAX_ROWS)
    total_rows: _Count = 0
    total_columns: _Count = 0
    matching: _Count | None = None
    """How many rows fit `where`; None from a kernel that does not know it."""

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if len(self.rows) != len(self.labels) or any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError("the rows do not fit the columns and labels")
        return self


@dataclass(frozen=True, slots=True)
class TablePart:
    """Which part of a table is wanted. `order` is the column that it is sorted by; None for the order it is kept in."""

    offset: int = 0
    limit: int = 100
    first_column: int = 0
    columns: int = 30
    order: int | None = None
    is_descending: bool = False
    where: tuple[int, str] | None = None
    """A column, -1 for any that is shown, and what is looked for in it; None for all rows."""
    summaries: bool = False
    """Whether it is told what each column holds."""
    chars: int = 200
    """Texts are cut behind so many characters."""


@runtime_checkable
class VariableKernel(Protocol):
    """A kernel that tells of its variables. Called under the session's turn.

    Both methods return None when the kernel does not answer in time, and raise `KernelDied` when its process ends.
    """

    async def variables(self, offset: int, limit: int, chars: int) -> VariableListing | None:
        """Return some of the variables."""
        ...

    async def rows(self, name: str, part: TablePart) -> TablePage | None:
        """Return some rows of a variable that is a table."""
        ...
