"""Stands before the environment's pip, if it has one: `python -m pip install` asks the host; the rest is pip's own."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
