"""Kinds of forms that plugins bring: their Python files, copied to a folder that every session sees and reads.

They run in sessions, because documents and pages are hostile. Copies are shown, so that nothing else of the operator's
folder is, and whoever runs the session's code can read them. Sessions may outlive the server, so the folder's name
depends on what is in it.
"""

import hashlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from belljar.facts import FormTarget, hookimpl
from belljar.files.private import make_folder, shown_mode
from belljar.inside import MODULES
from belljar.plugins import Plugins

VARIABLE = "BELLJAR_FORM_TARGETS"
"""Names the folder to the module `forms` in sessions."""
_OWN = ("http", "pdf", "browser")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_LARGEST_BYTES = 1024 * 1024

log = logging.getLogger(__name__)


class BuiltinTargets:
    """The targets of the module `forms`, as a plugin."""

    @hookimpl
    def form_targets(self) -> Iterable[FormTarget]:
        """Return them; their files are part of the module."""
        return [FormTarget(name, MODULES / "forms" / f"{name}.py") for name in _OWN]


def shown_targets(plugins: Plugins, data_directory: Path) -> Path | None:
    """Copy the files of plugins' targets to a folder that sandboxes show; None where no plugin brings one."""
    files: dict[str, bytes] = {}
    for name, target in plugins.named("form_targets").items():
        if name in _OWN:
            continue
        try:
            files[name] = _content(name, Path(target.module))
        except (OSError, ValueError, AttributeError, TypeError) as error:
            log.warning("the form target %s of a plugin is left out: %s", name, error)
    if not files:
        return None
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
    folder = data_directory / "form-targets" / digest
    make_folder(folder.parent, shown_mode(is_folder=True))
    make_folder(folder, shown_mode(is_folder=True))
    for name, content in files.items():
        file = folder / f"{name}.py"
        file.write_bytes(content)
        file.chmod(shown_mode(is_folder=False))
    return folder


def _content(name: str, module: Path) -> bytes:
    if not _NAME.fullmatch(name):
        raise ValueError("its name is not one like my_target")
    if module.stat().st_size > _LARGEST_BYTES:
        raise ValueError(f"{module} has more than {_LARGEST_BYTES:,} bytes")
    content = module.read_bytes()
    compile(content, str(module), "exec")
    return content
