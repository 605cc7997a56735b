"""Which kind of form a source is: the targets that are known, and those that the operator's plugins add.

A target is a function `(source, options) -> Form | None`; None means that the source is none of its own. Plugins'
targets are asked first. They are modules that the operator shows to sessions, and run in the session like its own code.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from .base import Form
from .errors import FormChanged, FormError

VARIABLE = "BELLJAR_FORM_TARGETS"
"""The modules that bring targets, separated by commas; the host sets it for plugins."""
Target = Callable[[Any, Mapping[str, Any]], Any]
_LARGEST_BYTES = 100 * 1024 * 1024
_targets: dict[str, Target] = {}
_loaded: set[str] = set()


def register(name: str, target: Target) -> None:
    """Add a target, or replace the one of that name."""
    _targets[name] = target


def open(
    source: Any,
    *,
    form: str = "",
    url: str = "",
    browser: str = "",
    password: str = "",
    fingerprint: str = "",
    **options: Any,
) -> Form:
    """Read a form: the path of a PDF or HTML file, a URL, HTML text, or bytes of either.

    `form` chooses among the forms of a page by id, name or number; `url` is where HTML text came from; `browser` names
    a browser server of the toolbox; `fingerprint` is that of an earlier reading, and another form raises FormChanged.
    """
    known = {"form": form, "url": url, "browser": browser, "password": password, **options}
    _load_plugins()
    for target in [*reversed(_targets.values())]:
        found = target(source, known)
        if found is not None:
            if fingerprint and found.fingerprint != fingerprint:
                raise FormChanged(f"{found.source} is not the form that was read before: read its schema again")
            return found
    raise FormError(f"{source!r:.200} is no form that is known here: pass a path, a URL, or HTML")


def targets() -> list[str]:
    """Return the names of the targets, those asked first in front."""
    _load_plugins()
    return [*reversed(_targets)]


def _load_plugins() -> None:
    for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        if name not in _loaded:
            _loaded.add(name)
            try:
                register(name, importlib.import_module(name).open_form)
            except Exception as error:
                raise FormError(f"the plugin's form target {name} cannot be loaded: {error}") from error


def _open_pdf(source: Any, options: Mapping[str, Any]) -> Form | None:
    content = _content(source)
    if content is None or not content[:1024].lstrip().startswith(b"%PDF-"):
        return None
    from .pdf import PdfForm

    return PdfForm(content, _name(source), options["password"])


def _open_http(source: Any, options: Mapping[str, Any]) -> Form | None:
    from . import http

    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return http.open_url(source, options["form"])
    content = _content(source)
    if content is None or b"<" not in content:
        return None
    return http.from_html(content, options["url"] or _name(source), options["form"])


def _open_browser(source: Any, options: Mapping[str, Any]) -> Form | None:
    if not options["browser"]:
        return None
    if not (isinstance(source, str) and source.startswith(("http://", "https://"))):
        raise FormError(f"a browser opens http and https addresses, not {source!r:.200}")
    from .browser import BrowserForm

    return BrowserForm(options["browser"], source, options["form"])


def _content(source: Any) -> bytes | None:
    """Return the bytes of a file, or of text that is HTML; None for an address."""
    if isinstance(source, (bytes, bytearray)):
        return bytes(source)
    if isinstance(source, str) and source.lstrip().startswith("<"):
        return source.encode("utf-8", "replace")
    if isinstance(source, str) and "://" in source:
        return None
    if not isinstance(source, (str, os.PathLike)):
        raise FormError(f"a {type(source).__name__} is no form: pass a path, a URL, or HTML")
    file = Path(cast("str", source))
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise FormError(f"{file} has more than {_LARGEST_BYTES:,} bytes")
        return file.read_bytes()
    except OSError as error:
        raise FormError(f"{str(file)[:200]} cannot be read: {error.strerror}") from None
    except ValueError:
        raise FormError(f"{str(file)[:200]!r} is no path") from None


def _name(source: Any) -> str:
    if isinstance(source, (bytes, bytearray)):
        return "the document"
    text = str(source)
    return "the page" if text.lstrip().startswith("<") else text


register("http", _open_http)
register("pdf", _open_pdf)
register("browser", _open_browser)
