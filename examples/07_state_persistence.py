"""What one session saves in `workspace/`, a later one finds; variables of a session outlive its process, too."""

import tempfile

from shared import run, shown

import belljar

FIRST = """
from workspace_state import save

save("progress.json", {"page": 3, "found": ["a", "b"]})
print("saved page 3")
"""
SECOND = """
from workspace_state import load, save

progress = load("progress.json", default={"page": 0, "found": []})
progress["page"] += 1
save("progress.json", progress)
print(f"went on at page {progress['page']} with {progress['found']}")
"""


async def main() -> None:
    """Save in one session, load in another."""
    with tempfile.TemporaryDirectory() as folder:
        async with belljar.open_engine(workspace="on", workspace_directory=folder) as engine:
            async with engine.open_session() as session:
                print(shown(await session.execute(FIRST)))
            async with engine.open_session() as session:
                print(shown(await session.execute(SECOND)))


if __name__ == "__main__":
    run(main)
