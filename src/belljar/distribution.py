"""What belljar is called where packages come from, and which version of it runs.

The distribution is `belljar-mcp`, because the name `belljar` on PyPI is somebody else's. The import and the command are
`belljar`; the command `belljar-mcp` is the same, so that `uvx belljar-mcp serve` works.
"""

import functools
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version

DISTRIBUTION = "belljar-mcp"
_MODULE = "belljar"


@functools.cache
def own_version() -> str:
    """Return the version of the belljar that runs."""
    return version(DISTRIBUTION)


def install_extra(name: str) -> str:
    """Return the command that installs what an optional part of belljar needs."""
    return f"pip install '{DISTRIBUTION}[{name}]'"


def foreign_belljar() -> Distribution | None:
    """Return the other project's `belljar`, if it is installed here and has put files among ours."""
    try:
        other = distribution(_MODULE)
    except PackageNotFoundError:
        return None
    return other if any(file.parts[0] in (_MODULE, f"{_MODULE}.py") for file in other.files or []) else None
