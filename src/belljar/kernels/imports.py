"""Proof that modules import where the cells run. Some kernels can give it: those that run Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol, runtime_checkable

from pydantic import BaseModel, Field, ValidationError

_CODE = """
import contextlib, importlib, io, json, sys
loaded = [name for name in watched if name in sys.modules]
errors = {}
importlib.invalidate_caches()
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            errors[name] = f"{type(error).__name__}: {error}"[:2000]
told = json.dumps({"loaded": loaded, "errors": errors}).encode().hex()
"""


@dataclass(frozen=True, slots=True)
class ImportProof:
    """What a kernel says after it has imported modules; written by code that may be hostile."""

    loaded: frozenset[str] = frozenset()
    """Those of the watched modules that were there before."""
    errors: Mapping[str, str] = field(default_factory=dict[str, str])
    """Modules that do not import, and why."""


@runtime_checkable
class ProvesImports(Protocol):
    """A kernel that can be asked."""

    async def prove_imports(self, modules: Sequence[str], *, watched: Sequence[str]) -> ImportProof:
        """Import modules, as no cell of anyone's; under the session's turn, like `execute`."""
        ...


class _Told(BaseModel):
    loaded: list[str] = Field(max_length=2_000)
    errors: dict[str, Annotated[str, Field(max_length=2_000)]]


def proof_expression(modules: Sequence[str], watched: Sequence[str]) -> str:
    """A Python expression whose value `read_proof` reads; it leaves no name behind."""
    given = {"modules": [*modules], "watched": [*watched]}
    return f"(lambda names: (exec({_CODE!r}, names), names['told'])[1])({given!r})"


def read_proof(text: str) -> ImportProof | None:
    """What the expression's value says, as a notebook shows it; None when it cannot be read."""
    try:
        told = _Told.model_validate_json(bytes.fromhex(text.strip("'\"")))
    except (ValueError, ValidationError):
        return None
    return ImportProof(frozenset(told.loaded), told.errors)
