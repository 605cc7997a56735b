"""Code that runs inside a sandbox, or in a process apart from the server.

It runs on Python 3.9 and imports nothing of belljar outside this package, because a session's environment brings an
interpreter of its own. The server starts these files by their path and shows `FOLDER` to every sandbox.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
RUNNER = FOLDER / "runner"
COMMANDS = FOLDER / "commands"
"""`pip` and `uv` as sessions find them first on their PATH."""
MODULES = FOLDER / "modules"
"""What every session can import of ours: `workspace_state`."""
