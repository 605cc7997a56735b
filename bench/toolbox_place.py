"""What the toolbox is measured on: a folder with orders, a database and a repository, and seven MCP servers around it.

The servers are those that others publish, started alike by every side.
"""

import json
import os
import random
import sqlite3
import subprocess
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from bench.registries import command

MONTHS = 12
ORDERS_A_MONTH = 400
CUSTOMERS = 300
COMMITS = 60
MEMORY = "MEMORY_FILE_PATH"
"""Where that server keeps its graph: each side has one of its own."""
REGIONS = ("north", "east", "south", "west")


@dataclass(frozen=True, slots=True)
class Place:
    """The folder, and the command of each server by its name."""

    folder: Path
    servers: dict[str, list[str]]

    @property
    def orders(self) -> Path:
        return self.folder / "orders"

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    @property
    def config(self) -> Path:
        """The servers as a file that MCP clients have."""
        return self.folder / "mcp.json"

    @asynccontextmanager
    async def open_direct(self) -> AsyncGenerator[dict[str, Client]]:
        """The official client, connected to each of them."""
        async with AsyncExitStack() as stack:
            log = stack.enter_context((self.folder / "direct.log").open("a"))
            clients: dict[str, Client] = {}
            for name, (program, *arguments) in self.servers.items():
                variables = {**os.environ, MEMORY: str(self.folder / "memory-direct.jsonl")}
                parameters = StdioServerParameters(command=program, args=arguments, env=variables)
                clients[name] = await stack.enter_async_context(Client(stdio_client(parameters, errlog=log)))
            yield clients


def make_place(folder: Path, kept: Path) -> Place:
    """The same bytes in every run; servers are installed under `kept`."""
    folder.mkdir()
    arguments = {
        "everything": [],
        "filesystem": [str(folder)],
        "memory": [],
        "time": [],
        "git": ["--repository", str(folder / "repository")],
        "sqlite": ["--db-path", str(folder / "customers.db")],
        "fetch": [],
    }
    place = Place(folder, {name: [*command(name, kept), *more] for name, more in arguments.items()})
    _write_orders(place.orders)
    _write_customers(folder / "customers.db")
    _write_repository(place.repository)
    variables = {MEMORY: str(folder / "memory.jsonl")}
    entries = {
        name: {"command": program, "args": more, "env": variables} for name, (program, *more) in place.servers.items()
    }
    place.config.write_text(json.dumps({"mcpServers": entries}))
    return place


def _write_orders(folder: Path) -> None:
    folder.mkdir()
    chance = random.Random(7)
    for month in range(1, MONTHS + 1):
        rows = [
            f"2026-{month:02}-{chance.randint(1, 28):02},c{chance.randrange(CUSTOMERS):03},"
            f"{chance.randint(1, 9)},{chance.randint(100, 9_999) / 100:.2f}"
            for _ in range(ORDERS_A_MONTH)
        ]
        (folder / f"orders-{month:02}.csv").write_text("\n".join(["day,customer,amount,price", *rows, ""]))


def _write_customers(path: Path) -> None:
    chance = random.Random(11)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE customers (id TEXT PRIMARY KEY, region TEXT)")
        rows = [(f"c{number:03}", chance.choice(REGIONS)) for number in range(CUSTOMERS)]
        database.executemany("INSERT INTO customers VALUES (?, ?)", rows)
    database.close()


def _write_repository(folder: Path) -> None:
    subprocess.run(["git", "init", "-q", "-b", "main", str(folder)], check=True)
    commits: list[str] = []
    for number in range(1, COMMITS + 1):
        message = f"prices: list {number}" if number % 7 == 0 else f"reports: draft {number}"
        when = f"Ada <ada@example.com> {1_790_000_000 + 3_600 * number} +0000"
        commits.append(
            f"commit refs/heads/main\nauthor {when}\ncommitter {when}\ndata {len(message)}\n{message}\n"
            f"M 100644 inline notes.txt\ndata {len(message)}\n{message}\n"
        )
    subprocess.run(
        ["git", "-C", str(folder), "fast-import", "--quiet"], input="\n".join(commits), text=True, check=True
    )
    subprocess.run(["git", "-C", str(folder), "reset", "-q", "--hard"], check=True)
