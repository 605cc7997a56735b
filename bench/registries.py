"""What measurements need of PyPI and npm, installed as the tests do it and kept where they keep it."""

import os
import sys
from pathlib import Path

import platformdirs

# Tests are no package, and their folder is on the path of tests alone.
sys.path.append(str(Path(__file__).parent.parent / "tests"))

from registry_packages import Unreachable, node, npm_folder, python_environment
from registry_servers import command

__all__ = ["Unreachable", "command", "kept", "node", "npm_folder", "python_environment"]


def kept() -> Path:
    """The folder for what is installed once."""
    chosen = os.environ.get("BELLJAR_TEST_DATA")
    return (Path(chosen) if chosen else platformdirs.user_cache_path("belljar") / "tests") / "mcp-servers"
