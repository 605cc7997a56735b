from pathlib import Path

import pytest

from belljar.environments.requirements import EnvironmentRequirements, read_requirements
from belljar.errors import EnvironmentBroken
from belljar.settings import EnvironmentEntry


def managed(**fields: object) -> EnvironmentEntry:
    return EnvironmentEntry.model_validate({"kind": "managed", **fields})


def read(file: Path, text: str) -> EnvironmentRequirements:
    file.write_text(text)
    return read_requirements(managed(file=str(file)))


def test_a_list_is_taken_as_it_is_and_checked() -> None:
    assert read_requirements(managed(requirements=["pandas>=2", "Humanize"], python="3.12")) == EnvironmentRequirements(
        "pandas>=2\nHumanize\n", "3.12"
    )
    with pytest.raises(EnvironmentBroken, match=r"requirements: '-r evil.txt' is no requirement"):
        read_requirements(managed(requirements=["-r evil.txt"]))


def test_a_requirements_file_is_uvs_to_read_and_counts_with_what_it_includes(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("idna\n")
    first = read(tmp_path / "requirements.txt", "-r more.txt\nhumanize\n")
    (tmp_path / "more.txt").write_text("idna==3.10\n")
    second = read_requirements(managed(file=str(tmp_path / "requirements.txt")))

    assert first.file == second.file == tmp_path / "requirements.txt"
    assert first.text != second.text


def test_files_that_include_each_other_come_to_an_end(tmp_path: Path) -> None:
    assert read(tmp_path / "requirements.txt", "-r requirements.txt\n").text == "-r requirements.txt\n"


def test_a_project_gives_its_dependencies_and_its_python(tmp_path: Path) -> None:
    text = '[project]\nname = "x"\nrequires-python = ">=3.10"\ndependencies = ["pandas>=2", "idna"]\n'

    assert read(tmp_path / "pyproject.toml", text) == EnvironmentRequirements("pandas>=2\nidna\n", ">=3.10")


def test_what_the_settings_say_of_python_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.10"\ndependencies = ["idna"]\n')

    assert read_requirements(managed(file=str(tmp_path / "pyproject.toml"), python="3.12")).python == "3.12"


def test_an_environment_of_conda_gives_what_the_index_has(tmp_path: Path) -> None:
    text = """
name: geo
channels: [conda-forge]
dependencies:
  - python=3.12
  - numpy=1.26
  - conda-forge::pandas>=2,<3
  - scipy=1.11.4=py312h_0
  - pytorch
  - requests 2.31
  - pip
  - pip:
    - humanize==4.9
"""
    assert read(tmp_path / "environment.yml", text) == EnvironmentRequirements(
        "numpy==1.26.*\npandas<3,>=2\nscipy==1.11.4.*\ntorch\nrequests==2.31.*\nhumanize==4.9\n", "3.12"
    )


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("pyproject.toml", "[tool.x]\n", "has no \\[project\\] table"),
        ("pyproject.toml", "project = ", "is not TOML"),
        ("pyproject.toml", '[project]\ndependencies = "pandas"\n', "are not a list of text"),
        ("environment.yml", "- a\n", "has no list of dependencies"),
        ("environment.yml", "a: [", "is not YAML"),
        ("environment.yml", "dependencies: ['a b c d']\n", "is no package of conda"),
        ("setup.cfg", "", "is no file that an environment can be made of"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    with pytest.raises(EnvironmentBroken, match=complaint):
        read(tmp_path / name, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match=r"absent.txt cannot be read: No such file"):
        read_requirements(managed(file=str(tmp_path / "absent.txt")))
