"""Code that runs inside a sandbox, or in a process apart from the server.

It runs on Python 3.9 and imports nothing of belljar outside this package, because a session's environment brings an
interpreter of its own. The server starts these files by their path and shows `FOLDER` to every sandbox.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
RUNNER = FOLDER / "runner"
COMMANDS = FOLDER / "commands"
"""The folder of the `pip` and `uv` commands that come first on a session's PATH."""
MODULES = FOLDER / "modules"
"""The folder of the modules of ours that every session can import: `workspace_state`, `forms`."""
