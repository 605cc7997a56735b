import os
import subprocess
import sys
from pathlib import Path

import pytest

from belljar.environments.base import Environment, describe, inspect_interpreter
from belljar.errors import EnvironmentBroken
from belljar.sandboxes.namespace.bwrap_args import find_bubblewrap


def make_venv(folder: Path, python: str = sys.executable) -> Path:
    subprocess.run([python, "-I", "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def write_script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def is_shown(path: Path, environment: Environment) -> bool:
    return path.is_relative_to("/usr") or any(path.is_relative_to(tree) for tree in environment.readable)


def test_an_interpreter_tells_of_itself(tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv")

    interpreter = inspect_interpreter(python)

    assert interpreter.executable == python
    assert interpreter.version == ".".join(map(str, sys.version_info[:3]))
    assert interpreter.release == sys.version_info[:2]
    assert interpreter.prefix == tmp_path / "venv"
    assert interpreter.base_prefix == Path(sys.base_prefix)
    assert interpreter.is_virtual
    assert "json" in interpreter.standard_library
    assert [path.parts[-1] for path in interpreter.paths][-1] == "site-packages"


def test_the_callers_python_variables_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    assert tmp_path not in inspect_interpreter(Path(sys.executable)).paths


def test_what_the_environment_prints_at_its_start_does_no_harm(tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv")
    (inspect_interpreter(python).paths[-1] / "noise.pth").write_text("import sys; sys.stdout.write('good morning')\n")

    assert inspect_interpreter(python).prefix == tmp_path / "venv"


def test_an_interpreter_that_fails_is_quoted(tmp_path: Path) -> None:
    python = write_script(tmp_path / "python", "echo no library today >&2; exit 3")

    with pytest.raises(EnvironmentBroken, match="does not run: no library today"):
        inspect_interpreter(python)


def test_a_program_that_is_no_interpreter_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match="is not a Python interpreter: it answered 'hello'"):
        inspect_interpreter(write_script(tmp_path / "python", "echo hello"))


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match="absent does not run: No such file"):
        inspect_interpreter(tmp_path / "absent")


def test_an_interpreter_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    python = write_script(tmp_path / "python", f"exec 9>{tmp_path / 'alive'}; sleep 100; exit 0")
    listener = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)

    with pytest.raises(EnvironmentBroken, match=r"gave no answer in 0.5 s"):
        inspect_interpreter(python, timeout_s=0.5)

    os.set_blocking(listener, True)
    assert os.read(listener, 1) == b""  # only once every writer is gone
    os.close(listener)


def test_a_venv_shows_itself_and_its_base(tmp_path: Path) -> None:
    interpreter = inspect_interpreter(make_venv(tmp_path / "venv"))

    environment = describe("mine", interpreter)

    assert environment.name == "mine"
    assert environment.python == tmp_path / "venv" / "bin" / "python"
    assert is_shown(tmp_path / "venv", environment)
    assert is_shown(interpreter.base_prefix.resolve(), environment)
    assert not any(tree.is_relative_to("/usr") for tree in environment.readable)


def test_an_interpreter_reached_through_links_shows_every_link(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "current").symlink_to(sys.base_prefix)
    major_minor = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python = make_venv(tmp_path / "venv", str(tmp_path / "versions" / "current" / "bin" / major_minor))

    environment = describe("mine", inspect_interpreter(python))

    assert is_shown(tmp_path / "versions" / "current" / "bin" / major_minor, environment)
    assert is_shown(Path(sys.base_prefix).resolve(), environment)
    assert not is_shown(tmp_path / "elsewhere", environment)


def test_a_link_that_makes_a_detour_shows_the_detour(tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv")
    (tmp_path / "detour").mkdir()
    (tmp_path / "detour" / "python").symlink_to(python.resolve())
    python.unlink()
    python.symlink_to("../../detour/python")

    assert tmp_path / "detour" in describe("mine", inspect_interpreter(python)).readable


def test_a_plain_interpreter_is_used_at_its_real_place(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(inspect_interpreter(Path(sys.executable)).executable.resolve())

    environment = describe("mine", inspect_interpreter(link))

    assert environment.python == link.resolve()
    assert not is_shown(tmp_path, environment)


def test_an_editable_install_shows_its_folder(tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv")
    (tmp_path / "project").mkdir()
    (inspect_interpreter(python).paths[-1] / "project.pth").write_text(f"{tmp_path / 'project'}\n")

    assert tmp_path / "project" in describe("mine", inspect_interpreter(python)).readable


def test_an_environment_that_is_the_home_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = inspect_interpreter(make_venv(tmp_path / "venv"))
    monkeypatch.setenv("HOME", str(tmp_path / "venv"))

    with pytest.raises(EnvironmentBroken, match="which sessions must not see"):
        describe("mine", interpreter)


def test_the_default_environment_runs_with_nothing_but_its_readable_trees(default_environment: Environment) -> None:
    bubblewrap = find_bubblewrap()
    if bubblewrap is None:
        pytest.skip("bubblewrap is not installed")
    trees = ["/usr", *(path for path in ("/bin", "/lib", "/lib64") if Path(path).exists())]
    shown = [*trees, *map(str, default_environment.readable)]
    binds = [argument for tree in shown for argument in ("--ro-bind", tree, tree)]
    seal = [str(bubblewrap), "--unshare-all", "--proc", "/proc", "--dev", "/dev", *binds, "--clearenv"]
    if subprocess.run([*seal, "/usr/bin/env", "true"], capture_output=True).returncode:
        pytest.skip("this host does not let bubblewrap run")

    code = "import IPython, numpy, sys; print(sys.executable)"
    result = subprocess.run([*seal, str(default_environment.python), "-I", "-c", code], capture_output=True, text=True)

    assert (result.stdout, result.stderr) == (f"{default_environment.python}\n", "")
