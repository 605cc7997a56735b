"""The errors of this package. Each says the fact and what to do next; none of them means that something was sent."""

from __future__ import annotations

from typing import Any


class FormError(Exception):
    """A form cannot be read, filled, saved or sent."""


class InvalidValues(FormError, ValueError):
    """Values are missing, unknown or do not fit; nothing was changed. `faults` has the reason for each name."""

    def __init__(self, message: str, faults: dict[str, str]) -> None:
        super().__init__(message)
        self.faults = faults

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.faults)


class NobodyToAsk(FormError, EOFError):
    """Values are missing, and there is no person who could be asked for them here."""


class Declined(FormError):
    """The person was asked for values and did not give them."""


class FormChanged(FormError):
    """The form is not the one that was read before; nothing was sent."""


class FateUnknown(FormError):
    """The connection broke while the form was on its way: it may have arrived, so it is not sent again."""


class FormRefused(FormError):
    """The form was sent, and the target answered that it does not take it. `receipt` has the answer."""

    def __init__(self, message: str, receipt: dict[str, Any]) -> None:
        super().__init__(message)
        self.receipt = receipt

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.receipt)
