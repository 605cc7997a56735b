"""Packages that bring a sandbox provider, as an installer leaves them: for the tests."""

import secrets
from pathlib import Path

import pytest

PROVIDER = """
class Provider:
    contract = 1
    name = {name!r}
    isolates = True
    warning = ""
    def check(self): return []
    def take_identity(self): return None
    def release_identity(self, identity): pass
    async def open(self, spec): raise NotImplementedError
"""


class PackageFolder:
    """A folder that Python imports from, for packages of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def bring(self, name: str, code: str = "", *, package: str = "") -> None:
        """Put a package there, called NAME-sandbox, that brings a provider of this name."""
        package = package or f"{name}-sandbox"
        # Python imports a name once: another test's package of the same name must be another module.
        module = f"{package.replace('-', '_')}_{secrets.token_hex(4)}"
        (self.folder / f"{module}.py").write_text(code or PROVIDER.format(name=name))
        metadata = self.folder / f"{package.replace('-', '_')}-1.2.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (metadata / "entry_points.txt").write_text(f"[belljar.sandboxes]\n{name} = {module}:Provider\n")


def packages_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PackageFolder:
    """Make the folder, and import from it as long as the test runs."""
    packages = PackageFolder(folder)
    monkeypatch.syspath_prepend(str(folder))
    return packages
