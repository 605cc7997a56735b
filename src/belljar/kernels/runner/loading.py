"""Loading: what another process of the same environment saved comes back, as far as it can be made again."""

# What is kept may be anything.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from . import surroundings
from .culprits import said
from .keeping import IMPORTS, INTERRUPTED, SURROUNDING, VARIABLE, WHOLE_FILE, Entry, Loss, Report, undisturbed
from .statereader import Damaged, StateReader
from .unpickling import FastUnpickler, ForgivingUnpickler

ENDS_EARLY = "the file ends early"


class Loading:
    """Brings variables back into a session that has none."""

    def __init__(self, shell: Any, path: str) -> None:
        self.report = Report()
        self._shell = shell
        self._path = path
        self._order: list[str] = []
        self._left: list[Entry] = []
        self._loaded: dict[str, Any] = {}
        self._afterwards: list[tuple[surroundings.Surrounding, Any]] = []
        self._is_begun = False
        self._stopped = INTERRUPTED

    def run(self) -> None:
        """Load everything; nothing is under its name yet."""
        try:
            reader = StateReader(self._path)
        except Damaged as error:
            self.report.lost.append(Loss(WHOLE_FILE, "", said(error)))
            self._is_begun = True
            return
        self._is_begun = True
        self.report.size_bytes = reader.size_bytes
        with contextlib.closing(reader), undisturbed():
            python = self._read_header(reader)
            if python or not self._is_loaded_fast(reader):
                self._load_forgiving(reader, python)

    def finish(self) -> None:
        """Put everything under its name."""
        if not self._is_begun:
            self.report.lost.append(Loss(WHOLE_FILE, "", self._stopped))
        for name in self._order:
            if name in self._loaded:
                self._shell.user_ns[name] = self._loaded[name]
                self.report.kept.append(name)
        for one, value in self._afterwards:
            self._give(one, value)
        self.report.lost += [Loss(entry.name, entry.value, self._stopped) for entry in self._left]

    def _read_header(self, reader: StateReader) -> str:
        """The Python that wrote the file, if it is another one."""
        try:
            self._order = [str(name) for name in reader.header["order"]]
            entries = [Entry(str(kind), str(name), str(of)) for kind, name, of in reader.header["entries"]]
            python = str(reader.header["python"])
        except (KeyError, TypeError, ValueError):
            self.report.lost.append(Loss(WHOLE_FILE, "", "the file is damaged: its header is not whole"))
            return ""
        self._left = entries if reader.count is None else entries[: reader.count]
        if reader.count is None:
            self.report.lost.append(Loss(WHOLE_FILE, "", ENDS_EARLY))
        if python.split(".")[:2] == sys.version.split()[0].split(".")[:2]:
            return ""
        reason = f"saved by Python {python}, and this is {sys.version.split()[0]}: code in it cannot be loaded"
        self.report.lost.append(Loss(WHOLE_FILE, "", reason))
        return python

    def _is_loaded_fast(self, reader: StateReader) -> bool:
        entries = list(self._left)
        unpickler = FastUnpickler(reader, self._loaded)
        try:
            while self._left:
                self._take(self._left[0], unpickler.load())
                del self._left[0]
        except KeyboardInterrupt:
            raise
        except BaseException:
            # What was loaded goes first: there may not be room for both.
            self._loaded.clear()
            self._afterwards.clear()
            self._left = entries
            return False
        return True

    def _load_forgiving(self, reader: StateReader, python: str) -> None:
        unpickler = ForgivingUnpickler(reader, self._loaded, python)
        try:
            while self._left:
                value = unpickler.load_entry()
                entry = self._left.pop(0)
                if unpickler.fault:
                    self.report.lost.append(Loss(entry.name, entry.value, unpickler.fault))
                else:
                    self._take(entry, value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._stopped = said(error)

    def _take(self, entry: Entry, value: Any) -> None:
        if entry.kind == VARIABLE:
            self._loaded[entry.name] = value
        elif entry.kind == IMPORTS:
            self._import(*value)
        for one in surroundings.BEFORE_VARIABLES:
            if (entry.kind, entry.name) == (SURROUNDING, one.name):
                self._give(one, value)
        for one in surroundings.AFTER_VARIABLES:
            if (entry.kind, entry.name) == (SURROUNDING, one.name):
                self._afterwards.append((one, value))

    def _import(self, modules: dict[str, str], submodules: list[str]) -> None:
        for name, module in modules.items():
            try:
                self._loaded[name] = importlib.import_module(module)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.report.lost.append(Loss(name, "module", said(error)))
        for module in submodules:
            if module not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)

    def _give(self, one: surroundings.Surrounding, value: Any) -> None:
        try:
            one.give(self._shell, value)
        except BaseException as error:
            self.report.lost.append(Loss(one.name, "", said(error)))
