"""Whether a value has any form but text. IPython asks each of its dozen formatters, which takes 0.1 ms; for values of
Python's own types the answer is known, unless somebody has given such a type another form.
"""

from typing import Any

_OURS = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
# With the types that they inherit from: what somebody gives to `object`, all of them have.
_INHERITED: "dict[type, list[tuple[type, tuple[str, str]]]]" = {
    kind: [(parent, (parent.__module__, parent.__name__)) for parent in kind.__mro__] for kind in _OURS
}


def is_text_alone(value: object, display_formatter: Any) -> bool:
    """Whether text is the one form that a shell's formatters would find; False where that is not certain."""
    inherited = _INHERITED.get(type(value))
    if inherited is None or not _is_ipythons(display_formatter) or "format" in vars(display_formatter):
        return False
    formatters = display_formatter.formatters
    others = [formatter for mime, formatter in formatters.items() if mime != "text/plain"]
    others += [display_formatter.ipython_display_formatter, display_formatter.mimebundle_formatter]
    return "text/plain" in formatters and not any(_may_apply(formatter, inherited) for formatter in others)


def _may_apply(formatter: Any, inherited: "list[tuple[type, tuple[str, str]]]") -> bool:
    if not _is_ipythons(formatter) or formatter.singleton_printers:
        return True
    printers, deferred = formatter.type_printers, formatter.deferred_printers
    return any(kind in printers or name in deferred for kind, name in inherited)


def _is_ipythons(formatter: Any) -> bool:
    return type(formatter).__module__.startswith("IPython.")
