"""A package index in a folder: hand-made wheels and source packages, no network."""

import base64
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class LocalIndex:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        return self._folder.as_uri()

    def add_wheel(self, name: str, version: str, files: Mapping[str, str], requires: Sequence[str] = ()) -> None:
        information = f"{name.replace('-', '_')}-{version}.dist-info"
        needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
        contents = dict(files) | {
            f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
            f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in contents.items())
        with zipfile.ZipFile(self._place(name, f"{name.replace('-', '_')}-{version}-py3-none-any.whl"), "w") as wheel:
            for path, text in contents.items():
                wheel.writestr(path, text)
            wheel.writestr(f"{information}/RECORD", f"{record}{information}/RECORD,,\n")

    def add_source(self, name: str, version: str, setup: str) -> None:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        with tarfile.open(self._place(name, f"{name}-{version}.tar.gz"), "w:gz") as archive:
            for path, text in {"setup.py": setup, "PKG-INFO": metadata}.items():
                member = tarfile.TarInfo(f"{name}-{version}/{path}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))

    def _place(self, name: str, file: str) -> Path:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        names = sorted({file, *(path.name for path in folder.iterdir() if path.suffix != ".html")})
        (folder / "index.html").write_text("".join(f'<a href="{each}">{each}</a>\n' for each in names))
        return folder / file


@dataclass(frozen=True)
class IndexedPackages:
    """A local index, and the variables that make uv use it instead of the user's."""

    packages: LocalIndex
    variables: dict[str, str]


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def add_support(index: LocalIndex) -> None:
    """What our runner needs beside Python, as far as it is looked at before a session starts."""
    index.add_wheel("ipython", "9.0", {"IPython/__init__.py": "", "IPython/core/__init__.py": "", **_SHELL})
    index.add_wheel("matplotlib-inline", "0.1", {"matplotlib_inline/__init__.py": ""})
    index.add_wheel("cloudpickle", "3.0", {"cloudpickle/__init__.py": ""})


_SHELL = {"IPython/core/interactiveshell.py": "import traitlike\nclass InteractiveShell: ...\n", "traitlike.py": ""}
