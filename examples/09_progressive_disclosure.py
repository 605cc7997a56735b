"""Tools are found by looking, level by level; each level costs what it shows, and none is in the prompt beforehand."""

import tempfile
from pathlib import Path

from shared import SQLITE, TIME, pypi_server, run, shown

import belljar

LEVELS = {
    "the folders": "!ls servers",
    "one line a tool": "print(open('servers/sqlite/__init__.py').read())",
    "a search, names only": "import toolbox; print(toolbox.search('run a query', detail='names'))",
    "a search, signatures": "print(toolbox.search('run a query', limit=2))",
    "one tool in full": "print(open('servers/sqlite/read_query.py').read())",
}


async def main() -> None:
    """Look deeper and deeper."""
    with tempfile.TemporaryDirectory() as folder:
        servers = {
            "sqlite": pypi_server(SQLITE, "--db-path", str(Path(folder) / "empty.db")),
            "time": pypi_server(TIME, "--local-timezone=UTC"),
        }
        async with belljar.open_session(mcp_servers=servers) as session:
            await session.execute("import servers.sqlite, servers.time")  # waits until both have listed their tools
            for level, cell in LEVELS.items():
                text = shown(await session.execute(cell))
                print(f"{level}: {len(text):,} characters\n    {text.splitlines()[0]}")


if __name__ == "__main__":
    run(main)
