"""The same question answered twice: by direct tool calling, and by code. Prints what a model would have to read.

The question is what the largest region bought in all. Tokens are estimated at four characters each, on both sides.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path

from mcp import Client, StdioServerParameters, stdio_client
from shared import SQLITE, TIME, belljar_client, pypi_server, run

filtering = importlib.import_module("03_data_filtering")
QUERY = "SELECT region, amount, price FROM orders"
CELL = f"""
import ast
from servers.sqlite import read_query

total = {{}}
for row in ast.literal_eval(read_query(query="{QUERY}")):
    total[row["region"]] = total.get(row["region"], 0) + row["amount"] * row["price"]
print(max(total.items(), key=lambda pair: pair[1]))
"""
SEARCH = {"query": "run a SELECT query on the database", "limit": 1}


def tokens(*texts: object) -> int:
    """Estimate how many tokens texts are to a model."""
    return sum(len(text if isinstance(text, str) else json.dumps(text)) for text in texts) // 4


async def definitions(client: Client) -> list[dict[str, object]]:
    """Return what a model is told of a server's tools."""
    tools = (await client.list_tools()).tools
    return [{"name": each.name, "description": each.description, "parameters": each.input_schema} for each in tools]


async def directly(servers: dict[str, dict[str, object]]) -> dict[str, int]:
    """Have every tool in the prompt, and every result too."""
    told: list[dict[str, object]] = []
    rows = ""
    for server in servers.values():
        parameters = StdioServerParameters.model_validate(server)
        # These servers speak the older protocol only, and write ninety lines of warnings when asked for the newer one.
        async with Client(stdio_client(parameters, errlog=sys.stderr), mode="legacy") as client:
            told += await definitions(client)
            if any(each["name"] == "read_query" for each in told) and not rows:
                rows = str((await client.call_tool("read_query", {"query": QUERY})).content[0])
    return {"definitions": tokens(told), "calls": tokens(QUERY), "results": tokens(rows)}


async def by_code(servers: dict[str, dict[str, object]]) -> dict[str, int]:
    """Have three tools in the prompt, one search, one cell, one line."""
    async with belljar_client("--surface", "toolbox", mcp_servers=json.dumps(servers)) as client:
        told = await definitions(client)
        found = await client.call_tool("search_tools", SEARCH)
        answer = await client.call_tool("execute_code", {"code": CELL})
    said = [str(getattr(block, "text", "")) for block in (*found.content, *answer.content)]
    print("the answer:", said[-1].splitlines()[0])
    return {"definitions": tokens(told), "calls": tokens(SEARCH, CELL), "results": tokens(*said)}


async def main() -> None:
    """Do both and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "orders.db"
        filtering.fill(database)
        servers = {
            "sqlite": pypi_server(SQLITE, "--db-path", str(database)),
            "time": pypi_server(TIME, "--local-timezone=UTC"),
        }
        sides = {"direct tool calls": await directly(servers), "code": await by_code(servers)}
    print(f"{'tokens':<20}{'definitions':>12}{'calls':>8}{'results':>10}{'all':>10}")
    for name, side in sides.items():
        print(f"{name:<20}{side['definitions']:>12,}{side['calls']:>8,}{side['results']:>10,}{sum(side.values()):>10,}")


if __name__ == "__main__":
    run(main)
