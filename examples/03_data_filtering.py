"""Five thousand rows come back from a tool; the model reads three lines.

Filtering and adding up happen in pandas, in the session, where the rows stay for the next cell.
"""

import sqlite3
import tempfile
from pathlib import Path

from shared import SQLITE, pypi_server, run, shown

import belljar

ROWS = 5_000
LOAD = """
import ast
import pandas as pd
from servers.sqlite import read_query

orders = pd.DataFrame(ast.literal_eval(read_query(query="SELECT region, amount, price FROM orders")))
print(f"{len(orders):,} rows came, none was printed")
"""
FILTER = """
orders["total"] = orders.amount * orders.price
large = orders[orders.total > 900]
for region, total in large.groupby("region").total.sum().sort_values(ascending=False).items():
    print(f"{region}: {total:,.0f} in orders above 900")
"""


def fill(database: Path) -> None:
    """Write the orders that the server then serves."""
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE orders (region TEXT, amount INTEGER, price REAL)")
        rows = [(("north", "south", "west")[n % 3], n % 37 + 1, (n * 7) % 50 + 0.5) for n in range(ROWS)]
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?)", rows)
    connection.close()


async def main() -> None:
    """Load, then filter."""
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "orders.db"
        fill(database)
        servers = {"sqlite": pypi_server(SQLITE, "--db-path", str(database))}
        async with belljar.open_session(mcp_servers=servers) as session:
            print(shown(await session.execute(LOAD)))
            print(shown(await session.execute(FILTER)))


if __name__ == "__main__":
    run(main)
