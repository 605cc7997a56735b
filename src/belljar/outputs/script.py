"""A session's notebook as a Python script in cells (`# %%`), as editors and jupytext read it.

Only the code of cells becomes code: output is in comments, and so is code that Python itself could not parse.
"""

import ast
from typing import Any

from belljar.outputs.mime_bundles import readable_text
from belljar.outputs.notebook import UNDONE
from belljar.outputs.terminal_text import as_plain, printable

_NOT_PYTHON = ("%", "!", "?")


def script_of(notebook: Any) -> str:
    """Return the script. Its first two lines are ours, so that no cell can declare an encoding."""
    head = f"# Session {notebook.metadata.belljar.session_id}, exported by belljar.\n#\n"
    return head + "".join(map(_cell, notebook.cells))


def _cell(cell: Any) -> str:
    tags = cell.metadata.get("tags", [])
    title = '# %% tags=["undone", "skip-execution"]' if UNDONE in tags else "# %%"
    code = _commented(cell.source) if UNDONE in tags else as_python(cell.source)
    output = "\n".join(filter(None, map(_text_of, cell.outputs)))
    shown = f"# Output:\n{_commented(output)}\n" if output else ""
    return f"\n{title}\n{code}\n{shown}"


def as_python(code: str) -> str:
    """Return the code, with what only IPython understands in comments."""
    if _is_python(code):
        return code.rstrip("\n")
    if not code.lstrip().startswith("%%"):
        lines = code.split("\n")
        commented_magics = "\n".join(f"# {printable(line)}" if line.startswith(_NOT_PYTHON) else line for line in lines)
        if _is_python(commented_magics):
            return commented_magics.rstrip("\n")
    return _commented(code)


def _is_python(code: str) -> bool:
    try:
        compile(code, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def _commented(text: str) -> str:
    # Split at every line end that Python or an editor knows: behind one that is left, the comment would go on as code.
    return "\n".join(f"# {printable(line)}".rstrip() for line in text.splitlines())


def _text_of(output: Any) -> str:
    match output.output_type:
        case "stream":
            text = output.text
        case "error":
            text = "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
        case _:
            text, _ = readable_text(output.data)
    return as_plain(text).rstrip("\n")
