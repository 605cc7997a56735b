"""The line that ends the text of a failed cell: which call helps, where the error tells.

Only for faults whose cause is the sandbox and not the code: a package that is not installed, a file that is not there,
a network that is not there. What the line promises exists: the tools are those of the interpreter surface.
"""

import re
from collections.abc import Sequence

from belljar.models import ExecutionResult

_MODULE = re.compile(r"ModuleNotFoundError: No module named '([A-Za-z_][\w]*)")
_OURS = re.compile(r"ModuleNotFoundError: No module named '(skills|servers)\.")
"""Modules that belljar itself makes; a package of that name would be a stranger's."""
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
    "pptx": "python-pptx",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "serial": "pyserial",
    "yaml": "pyyaml",
}
"""Modules whose distribution has another name, as far as models import them."""


def next_call(result: ExecutionResult, *, hosts: Sequence[str], isolates: bool, folders: Sequence[str]) -> str:
    """Return the line for a failed execution; empty where no call of ours helps.

    `hosts` are those that sessions may reach, `folders` the paths of the user's folders in them.
    """
    error, session = result.error or "", f'session_id="{result.session_id}"'
    if result.status != "error" or not error:
        return ""
    if found := _OURS.match(error):
        return f"Next: os.listdir('{found[1]}') names those there are; no package brings another."
    if found := _MODULE.match(error):
        name = _DISTRIBUTIONS.get(found[1], found[1].replace("_", "-"))
        return f'Next: install_dependencies(packages=["{name}"], {session}), then run the cell again.'
    if isolates and any(text in error for text in _NO_NETWORK):
        reach = f"Sessions reach only {', '.join(hosts)}" if hosts else "Sessions have no network"
        return f'Next: {reach}; upload_file({session}, name="…", url="https://…") fetches a file for it.'
    if found := _MISSING_FILE.match(error):
        return _about_file(found[1] or "", session, folders, isolates=isolates)
    return ""


def _about_file(path: str, session: str, folders: Sequence[str], *, isolates: bool) -> str:
    if isolates and _HOST_PATH.match(path):
        seen = f" The user's folders are {', '.join(folders)}." if folders else ""
        return f"Next: the user's own paths are not in the session; upload_file({session}, …) puts a file there.{seen}"
    return f"Next: list_session_files({session}) names the files that are there."
