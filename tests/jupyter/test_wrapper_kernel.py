import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from front_ends import FrontEnd, started

PNG = "iVBORw0KGgo"


@pytest.fixture(scope="module")
def front_end(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    """Of a kernel that the tests share, started in a folder that means it no good."""
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "belljar.toml").write_text('sandbox = "no such sandbox"\n')
    (folder / "belljar").mkdir()
    (folder / "belljar/__init__.py").write_text("raise SystemExit('not ours')")
    with started(cwd=str(folder)) as (front_end, _):
        yield front_end


def test_what_people_are_told_of_the_kernel(installed: Path, front_end: FrontEnd) -> None:
    told = json.loads((installed / "kernel.json").read_text())
    assert told["interrupt_mode"] == "message"
    assert told["argv"][1:5] == ["-P", "-m", "belljar", "kernel"]
    info = front_end.ask(front_end.client.kernel_info)
    assert info["implementation"] == "belljar"
    assert info["banner"].startswith("belljar: session ")
    assert info["language_info"]["version"].startswith("3.")
    assert info["supported_features"] == []


def test_a_cell_runs_inside_the_sandbox_and_not_in_the_process_of_the_kernel(front_end: FrontEnd) -> None:
    assert (
        front_end.run("import os, sys\n'belljar.jupyter' in sys.modules, os.getcwd() == '/'").result == "(False, False)"
    )


def test_streams_displays_updates_and_results_keep_their_order(front_end: FrontEnd) -> None:
    ran = front_end.run(
        "import sys\nprint('a')\nshown = display('b', display_id=True)\nprint('c', file=sys.stderr)\n"
        "shown.update('d')\nfrom IPython.display import clear_output\nclear_output(wait=True)\n'e'"
    )
    kinds = [message["msg_type"] for message in ran.outputs if message["msg_type"] not in ("status", "execute_input")]
    assert kinds == ["stream", "display_data", "stream", "update_display_data", "clear_output", "execute_result"]
    (first,), (update,) = ran.of("display_data"), ran.of("update_display_data")
    assert update["data"] == {"text/plain": "'d'"}
    assert update["transient"] == first["transient"] != {}
    assert ran.of("clear_output") == [{"wait": True}]
    assert ran.of("execute_result")[0]["execution_count"] == ran.reply["execution_count"]


def test_an_error_has_its_traceback_in_the_output_and_in_the_reply(front_end: FrontEnd) -> None:
    ran = front_end.run("def divide(n):\n    return n / 0\ndivide(1)")
    (error,) = ran.of("error")
    assert (error["ename"], error["evalue"]) == ("ZeroDivisionError", "division by zero")
    assert "return n / 0" in "\n".join(error["traceback"])
    assert ran.reply["status"] == "error"
    assert ran.reply["traceback"] == error["traceback"]


def test_questions_are_put_to_the_person(front_end: FrontEnd) -> None:
    front_end.questions.clear()
    ran = front_end.run("import getpass\ninput('Who? '), len(getpass.getpass('Word: '))", answer="ada")
    assert ran.result == "('ada', 3)"
    assert front_end.questions == [
        {"prompt": "Who? ", "password": False},
        {"prompt": "Word: ", "password": True},
    ]
    assert front_end.run("input('?')", answer="\x04").of("error")[0]["ename"] == "EOFError"


def test_a_silent_cell_publishes_nothing_and_a_blank_one_is_ok(front_end: FrontEnd) -> None:
    outputs: list[str] = []
    reply = front_end.client.execute_interactive(
        "print('a'); quiet = 1",
        silent=True,
        output_hook=lambda message: outputs.append(message["msg_type"]),
        timeout=60,
    )
    assert reply["content"]["status"] == "ok"
    assert set(outputs) == {"status"}
    assert front_end.run("quiet").result == "1"
    assert front_end.run("  \n").reply["status"] == "ok"


def test_half_a_character_is_shown_as_a_question_mark(front_end: FrontEnd) -> None:
    ran = front_end.run("display({'text/plain': 'a\\ud800b', 'application/json': {'k': '\\ud800'}}, raw=True)\n1")
    assert ran.of("display_data")[0]["data"]["text/plain"] == "a?b"
    assert ran.result == "1"


@pytest.mark.parametrize("code", ["import time\ntime.sleep(600)", "while True: pass", "input('?')"])
def test_an_interrupt_ends_the_cell_and_keeps_variables(front_end: FrontEnd, code: str) -> None:
    client = front_end.client
    front_end.run("kept = 'here'")

    def on_output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream" and "started" in message["content"]["text"]:
            client.control_channel.send(client.session.msg("interrupt_request", {}))

    ran = front_end.run(f"print('started', flush=True)\n{code}", answer=None, on_output=on_output)
    assert ran.reply["ename"] == "KeyboardInterrupt"
    assert front_end.run("kept").result == "'here'"


def test_the_death_of_the_session_is_told_and_the_kernel_lives_on(front_end: FrontEnd) -> None:
    front_end.run("lost = 1")
    (error,) = front_end.run("import os\nos._exit(3)").of("error")
    assert (error["ename"], "exit status 3" in error["evalue"]) == ("died", True)
    after = front_end.run("2 + 2")
    assert after.result == "4"
    assert after.reply["execution_count"] == 1
    assert "lost" in after.text("stderr")


def test_a_restart_gives_a_fresh_session_and_a_shutdown_ends_it(installed: Path, data_directory: Path) -> None:
    before = set((data_directory / "sessions").iterdir())
    with started() as (front_end, manager):
        front_end.run("kept = 1\nopen('a-file', 'w').close()")
        (first,) = set((data_directory / "sessions").iterdir()) - before
        manager.restart_kernel()
        front_end.client.wait_for_ready(timeout=60)
        assert front_end.run("kept").of("error")[0]["ename"] == "NameError"
        assert front_end.run("import os\nos.path.exists('a-file')").result == "False"
        assert not first.exists()
    assert set((data_directory / "sessions").iterdir()) == before


def test_an_environment_that_is_broken_is_told_to_every_cell(installed: Path) -> None:
    told = json.loads((installed / "kernel.json").read_text())
    broken = installed.parent / "broken"
    broken.mkdir()
    told["env"]["BELLJAR_ENVIRONMENT"] = "/no/such/environment"
    (broken / "kernel.json").write_text(json.dumps(told))
    with started("broken") as (front_end, _):
        first, second = (front_end.run("1").of("error") for _ in range(2))
    (error,) = first
    assert error["ename"] == "environment-broken"
    assert "/no/such/environment" in error["traceback"][0]
    assert second == first


def test_nothing_in_the_folder_of_a_notebook_is_obeyed(front_end: FrontEnd) -> None:
    assert front_end.run("1 + 1").result == "2"


# Programs that run notebooks


def _notebook(path: Path, *cells: str) -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "belljar", "display_name": "belljar", "language": "python"}
    nbformat.write(notebook, path)
    return path


FIGURE = "import matplotlib.pyplot as plt\nplt.bar(names, counts)\nplt.show()"


def test_nbclient_runs_a_notebook_with_a_figure(installed: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    path = _notebook(tmp_path / "a.ipynb", "names, counts = ['apples', 'pears'], [3, 5]", FIGURE, "sum(counts)")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=60).execute()
    (figure,) = notebook.cells[1].outputs
    assert figure.data["image/png"].startswith(PNG)
    assert notebook.cells[2].outputs[0].data == {"text/plain": "8"}
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, 3]
    nbformat.validate(notebook)


def test_papermill_runs_a_notebook_with_parameters(installed: Path, tmp_path: Path) -> None:
    papermill = pytest.importorskip("papermill")
    path = _notebook(tmp_path / "a.ipynb", "number = 1", "number * 2")
    told = nbformat.read(path, as_version=4)
    told.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(told, path)
    done = papermill.execute_notebook(path, tmp_path / "done.ipynb", {"number": 21}, progress_bar=False)
    assert done.cells[-1].outputs[0].data == {"text/plain": "42"}
