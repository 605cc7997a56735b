"""A `belljar.toml` in the working directory that the user has read and trusts."""

from pathlib import Path

from belljar.settings import CONFIG_FILE
from belljar.settings.trust import trust


def write_trusted(text: str, folder: Path | None = None) -> Path:
    """Write the file into a folder, the working directory without one, and trust it as `belljar trust` does."""
    file = (folder or Path.cwd()) / CONFIG_FILE
    file.write_text(text)
    trust(file, text.encode())
    return file
