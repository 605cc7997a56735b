"""The module that sessions import to keep state, run by a Python of its own."""

import subprocess
import sys
from pathlib import Path

from belljar.kernels.launch import MODULES


def run(folder: Path, code: str) -> str:
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(MODULES)!r})\nfrom workspace_state import *\n{code}",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr.strip().rpartition("\n")[2]


def test_names_that_lead_out_or_would_not_be_kept_are_refused(tmp_path: Path) -> None:
    refused = ["../x.json", "/x.json", "a/../../x", ".hidden.json", "a/.git/x", "", ".", "a\nb", "a\\b"]
    code = f"for name in {refused!r}:\n    try: save(name, 'x')\n    except ValueError as error: print(error)"
    assert run(tmp_path, code).count("is no name for kept state") == len(refused)
    assert [*tmp_path.iterdir()] == []


def test_values_need_an_ending_that_says_how(tmp_path: Path) -> None:
    assert "does not say how to save a dict" in run(tmp_path, "save('x.dat', {})")
    assert run(tmp_path, "save('x.dat', b'1'); print(load('x.dat'))") == "b'1'\n"


def test_a_value_that_cannot_be_saved_leaves_the_one_before(tmp_path: Path) -> None:
    run(tmp_path, "save('x.csv', [[1, 2]])")
    assert "Error" in run(tmp_path, "save('x.csv', [{'a': 1}, 2])")
    assert run(tmp_path, "print(load_text('x.csv'), names())") == "1,2\n ['x.csv']\n"


def test_tables_that_can_write_themselves_do(tmp_path: Path) -> None:
    table = "class Table:\n    def to_csv(self, index): return f'a\\n{index}\\n'"
    code = f"{table}\nsave('t.csv', Table()); print(load('t.csv'))"
    assert run(tmp_path, code) == "[{'a': 'False'}]\n"


def test_state_is_where_the_session_began_whatever_the_folder_is_now(tmp_path: Path) -> None:
    moved = "import os; os.mkdir('other'); os.chdir('other')"
    code = "save('n.json', 1); print(load('n.json'), names()); remove('n.json')"
    assert run(tmp_path, f"{moved}\n{code}") == "1 ['n.json']\n"
    assert [*(tmp_path / "workspace").iterdir()] == []


def test_what_is_missing_is_an_error_unless_there_is_a_default(tmp_path: Path) -> None:
    said = run(tmp_path, "save('a.txt', 'x'); load('n.json')")
    assert "FileNotFoundError: there is no 'n.json' in workspace/ (there is 'a.txt'); pass a default" in said
    assert run(tmp_path, "print(load('n.json', default=None))") == "None\n"
