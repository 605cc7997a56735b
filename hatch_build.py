"""Fills in what a release says of where it comes from: `[project.urls]`, and links of the README that lead somewhere.

A package index shows README.md without the files beside it, so its relative links would lead nowhere. With
BELLJAR_REPOSITORY, the address that the source is published at, set while a release is built, they lead to the files of
that version there, pictures to the files themselves. Without it links become plain text, pictures are left out, and the
package names no address.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"!\[([^\]]*)\]\((?![a-z][a-z0-9+.-]*:)([^)\s]+)\)\n*")
_SOURCE = re.compile(r'\b(src|srcset)="(?![a-z][a-z0-9+.-]*:)([^"]+)"')
_ELEMENT = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z][a-z0-9+.-]*:|#)([^)\s]+)\)")


class ReleaseMetadata(MetadataHookInterface):
    """Hatchling's hook for the fields that pyproject.toml declares dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README and the URLs."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        repository, version = os.environ.get("BELLJAR_REPOSITORY", "").rstrip("/"), metadata["version"]
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, repository, version)}
        metadata["urls"] = urls(repository, version)


def readme(text: str, repository: str, version: str) -> str:
    """Return the README with links that work elsewhere."""
    if not repository:
        return _LINK.sub(r"\1", _PICTURE.sub("", _ELEMENT.sub("", text)))
    raw = f"{repository}/raw/v{version}/"
    text = _PICTURE.sub(lambda found: found[0].replace(f"({found[2]})", f"({raw}{found[2]})"), text)
    text = _SOURCE.sub(lambda found: f'{found[1]}="{raw}{found[2]}"', text)
    return _LINK.sub(lambda link: f"[{link[1]}]({repository}/blob/v{version}/{link[2]})", text)


def urls(repository: str, version: str) -> dict[str, str]:
    """Return the addresses that an index lists beside the package."""
    if not repository:
        return {}
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/v{version}/docs/README.md",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Security": f"{repository}/blob/v{version}/SECURITY.md",
    }
