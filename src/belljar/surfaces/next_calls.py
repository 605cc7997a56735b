"""The line that ends the text of a cell: which call helps, where its error tells, or what it saved is out of reach.

Only for faults whose cause is the sandbox and not the code: a package that is not installed, a file that is not there,
a folder that cannot be written, a network that is not there. What the line promises exists: the tools are those of the
interpreter surface.
"""

import re
from collections.abc import Sequence

from belljar.models import ExecutionResult
from belljar.sandboxes.base import WORKSPACE

_MODULE = re.compile(r"ModuleNotFoundError: No module named '([A-Za-z_][\w]*)")
_OURS = re.compile(r"ModuleNotFoundError: No module named '(skills|servers)\.")
"""Modules that belljar itself makes; a package of that name would be a stranger's."""
_WITH_OPTIONAL = ("ImportError: ", "AttributeError: The '.")
_OPTIONAL = re.compile(
    r"(?:`Import |optional dependency '|requires '|accessor requires )([A-Za-z][\w-]*)"
    r"|\b([A-Za-z]\w*)>=[\d.]+ is required"
)
"""How pandas and its like name a package that only some of their functions need."""
_UNWRITABLE = re.compile(
    r"(?:OSError: \[Errno 30\]|PermissionError: \[Errno 13\] [^'\n]*'/|"
    r"OSError: Cannot save file into a non-existent directory: '/)"
)
_IN_TMP = re.compile(r"""['"]/tmp/([^'"\n]{1,200}\.\w{1,8})['"]""")
_SAVING = re.compile(
    r"""\b(?:to_(?:csv|excel|feather|html|image|json|markdown|parquet|pickle|stata|xml)|write_\w+|savefig|savetxt|imsave"""
    r"""|ExcelWriter|save)\(|,\s{0,9}(?:mode\s{0,9}=\s{0,9})?['"][awx]b?\+?['"]"""
)
"""Calls that save a file, as far as models write them."""
_MISSING_FILE = re.compile(r"FileNotFoundError: .*?(?:'([^'\n]*)'|$)")
_HOST_PATH = re.compile(r"(?:[A-Za-z]:\\|/(?:home|Users|root|Volumes|media)/|~/)")
_NO_NETWORK = (
    "Name or service not known",
    "Temporary failure in name resolution",
    "nodename nor servname",
    "Network is unreachable",
    "No address associated with hostname",
    "Failed to resolve",
)
_DISTRIBUTIONS = {
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "Crypto": "pycryptodome",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "fitz": "pymupdf",
    "git": "gitpython",
    "PIL": "pillow",
    "pytables": "tables",
    "pptx": "python-pptx",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "serial": "pyserial",
    "yaml": "pyyaml",
}
"""Modules whose distribution has another name, as far as models import them."""


def next_call(
    result: ExecutionResult,
    *,
    hosts: Sequence[str],
    isolates: bool,
    folders: Sequence[str],
    workspace: str = WORKSPACE,
    code: str = "",
) -> str:
    """Return the line for an execution; empty where no call of ours helps.

    `hosts` are those that sessions may reach, `folders` the paths of the user's folders in them, `workspace` is that of
    the session's own folder.
    """
    if result.status == "ok":
        return _about_saved(code, result, workspace)
    error, session = result.error or "", f'session_id="{result.session_id}"'
    if result.status != "error" or not error:
        return ""
    if found := _OURS.match(error):
        return f"Next: os.listdir('{found[1]}') names those there are; no package brings another."
    if name := _missing_package(error):
        return f'Next: install_dependencies(packages=["{name}"], {session}), then run the cell again.'
    if isolates and any(text in error for text in _NO_NETWORK):
        reach = f"Sessions reach only {', '.join(hosts)}" if hosts else "Sessions have no network"
        return f'Next: {reach}; upload_file({session}, name="…", url="https://…") fetches a file for it.'
    if _UNWRITABLE.match(error):
        return f"Next: write to {workspace}, the session's own folder."
    if found := _MISSING_FILE.match(error):
        return _about_file(found[1] or "", session, folders, isolates=isolates)
    return ""


def _missing_package(error: str) -> str:
    found = _MODULE.match(error) or (_OPTIONAL.search(error) if error.startswith(_WITH_OPTIONAL) else None)
    module = next(filter(None, found.groups()), "") if found else ""
    return _DISTRIBUTIONS.get(module, module.replace("_", "-"))


def _about_saved(code: str, result: ExecutionResult, workspace: str) -> str:
    """Return the line for a cell that saves a file in /tmp, unless one of its name is in the session's folder now."""
    saved = {name.rpartition("/")[2] for name in _IN_TMP.findall(code)}
    if not saved - {file.name.rpartition("/")[2] for file in result.files} or not _SAVING.search(code):
        return ""
    return f"Next: files in /tmp are not downloadable from there; save to {workspace} what somebody is to get."


def _about_file(path: str, session: str, folders: Sequence[str], *, isolates: bool) -> str:
    if isolates and _HOST_PATH.match(path):
        seen = f" The user's folders are {', '.join(folders)}." if folders else ""
        return f"Next: the user's own paths are not in the session; upload_file({session}, …) puts a file there.{seen}"
    return f"Next: list_session_files({session}) names the files that are there."
