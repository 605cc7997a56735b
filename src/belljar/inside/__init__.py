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
"""The folder of the modules of ours that every session can import: `workspace_state`, `belljar_transfer`, `forms`."""

_LOAD_PACKAGE = (
    "import importlib.util as u, sys; name, path, module, *arguments = sys.argv[1:]; "
    "spec = u.spec_from_file_location(name, path + '/__init__.py', submodule_search_locations=[path]); "
    "package = u.module_from_spec(spec); sys.modules[name] = package; spec.loader.exec_module(package); "
    "from importlib import import_module; import_module(name + '.' + module).main(*arguments)"
)


def package_command(python: str, folder: Path, module: str) -> list[str]:
    """Return a command that loads a package of ours by its path and calls `main` of a module with what follows it.

    For packages that need nothing but Python's standard library; each has a name of its own, whatever else is there.
    """
    return [python, "-I", "-S", "-c", _LOAD_PACKAGE, f"belljar_{folder.name}", str(folder), module]
