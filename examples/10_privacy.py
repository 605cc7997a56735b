"""Personal data of a tool's answer are tokens to code and model; a tool that may have them gets them back."""

import sqlite3
import tempfile
from pathlib import Path

from shared import SQLITE, pypi_server, run, shown

import belljar

POLICY = """
[privacy]
hide = ["email"]
where = ["tools", "outputs"]

[[privacy.reveal]]
tools = ["sqlite.write_query"]
kinds = ["email"]
"""
CELL = """
import ast
from servers.sqlite import read_query, write_query

(row,) = ast.literal_eval(read_query(query="SELECT name, mail FROM people WHERE name = 'Ada'"))
print("the code sees", row["mail"])
write_query(query=f"INSERT INTO letters VALUES ('{row['mail']}', 'Dear {row['name']}')")
"""


async def main() -> None:
    """Read a person's address and write to it, without ever seeing it."""
    with tempfile.TemporaryDirectory() as folder:
        database, policy = Path(folder) / "people.db", Path(folder) / "policy.toml"
        policy.write_text(POLICY)
        connection = sqlite3.connect(database)
        with connection:
            connection.execute("CREATE TABLE people (name TEXT, mail TEXT)")
            connection.execute("CREATE TABLE letters (mail TEXT, text TEXT)")
            connection.execute("INSERT INTO people VALUES ('Ada', 'ada@example.com')")
        servers = {"sqlite": pypi_server(SQLITE, "--db-path", str(database))}
        async with belljar.open_session(mcp_servers=servers, policy=str(policy)) as session:
            print(shown(await session.execute(CELL)))
        print("the database has", connection.execute("SELECT mail FROM letters").fetchone()[0])
        connection.close()


if __name__ == "__main__":
    run(main)
