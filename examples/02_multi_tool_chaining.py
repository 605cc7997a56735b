"""Two servers in one cell: what one tool returns goes into the next as a variable, and never through the model."""

import tempfile
from pathlib import Path

from shared import SQLITE, TIME, pypi_server, run, shown

import belljar

CELL = """
import ast
from servers.sqlite import create_table, read_query, write_query
from servers.time import convert_time

create_table(query="CREATE TABLE flights (number TEXT, leaves TEXT, zone TEXT, leaves_utc TEXT)")
for number, leaves, zone in [("BJ1", "09:30", "Asia/Tokyo"), ("BJ2", "18:05", "America/New_York")]:
    utc = convert_time(source_timezone=zone, time=leaves, target_timezone="UTC")["target"]["datetime"]
    write_query(query=f"INSERT INTO flights VALUES ('{number}', '{leaves}', '{zone}', '{utc[11:16]}')")

rows = ast.literal_eval(read_query(query="SELECT number, zone, leaves_utc FROM flights ORDER BY number"))
for row in rows:
    print(f"{row['number']} from {row['zone']} leaves at {row['leaves_utc']} UTC")
"""


async def main() -> None:
    """Chain the tools."""
    with tempfile.TemporaryDirectory() as folder:
        servers = {
            "sqlite": pypi_server(SQLITE, "--db-path", str(Path(folder) / "flights.db")),
            "time": pypi_server(TIME, "--local-timezone=UTC"),
        }
        async with belljar.open_session(mcp_servers=servers) as session:
            print(shown(await session.execute(CELL)))


if __name__ == "__main__":
    run(main)
