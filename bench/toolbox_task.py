"""One task with large results on the way, done twice: tool by tool, and in code. Keeps what a model reads and writes.

The model is a script that knows what to do, and both must come to the same answer. Tool by tool, it would have to add
up thousands of lines in its head; here Python does, and that is not counted.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcp import Client

from bench.toolbox_place import COMMITS, Place

Call = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class Transcript:
    """What the model has in front of it first, then turn by turn what it writes and what it is told."""

    opening: list[str]
    turns: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    answer: str = ""

    def add(self, calls: Sequence[Call], results: Sequence[str]) -> None:
        """A turn: some calls at once."""
        written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        self.turns.append(("\n".join(written), "\n".join(results)))


def definitions(tools: Sequence[Any]) -> list[str]:
    """What a model is told of each tool."""
    return [
        json.dumps(
            {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema},
            separators=(",", ":"),
            ensure_ascii=False,
        )
        for tool in tools
    ]


async def all_definitions(clients: Mapping[str, Client]) -> list[str]:
    """Of all tools of all servers."""
    return [text for client in clients.values() for text in definitions((await client.list_tools()).tools)]


def task(place: Place) -> str:
    """What the person wants."""
    return (
        f"Of the orders in {place.orders}: which region bought most, and for how much? Customers and their regions are "
        f"in the database. And which commit in {place.repository} was the last about prices? "
        'Keep the answer in the knowledge graph, as the entity "year".'
    )


# Tool by tool


async def done_directly(place: Place, clients: Mapping[str, Client]) -> Transcript:
    """The official client calls what the model asks for, and the model reads everything."""
    said = Transcript([*await all_definitions(clients), *_instructions(clients.values()), task(place)])

    async def turn(*calls: tuple[str, str, dict[str, Any]]) -> list[str]:
        results = [await text_of(clients[server], tool, arguments) for server, tool, arguments in calls]
        said.add([(tool, arguments) for _, tool, arguments in calls], results)
        return results

    [listed] = await turn(("filesystem", "list_directory", {"path": str(place.orders)}))
    paths = [f"{place.orders}/{name}" for name in re.findall(r"\[FILE\] (\S+)", listed)]
    orders, customers, log = await turn(
        ("filesystem", "read_multiple_files", {"paths": paths}),
        ("sqlite", "read_query", {"query": "SELECT id, region FROM customers"}),
        ("git", "git_log", {"repo_path": str(place.repository), "max_count": COMMITS}),
    )
    said.answer = _concluded(orders, customers, log)
    entity = {"name": "year", "entityType": "report", "observations": [said.answer]}
    await turn(("memory", "create_entities", {"entities": [entity]}))
    return said


def _concluded(orders: str, customers: str, log: str) -> str:
    region_of = {row["id"]: row["region"] for row in ast.literal_eval(customers)}
    bought: Counter[str] = Counter()
    for customer, amount, price in re.findall(r"^\S+,(c\d+),(\d+),([\d.]+)$", orders, re.MULTILINE):
        bought[region_of[customer]] += int(amount) * float(price)
    [(region, total)] = bought.most_common(1)
    last = next(message for message in re.findall(r"Message: (.*)", log) if "prices" in message)
    return f"{region}: {total:.2f}; {last.strip()}"


# In code

_QUESTIONS = ("read text files", "query the database", "commit history", "add entities to the knowledge graph")

_LOOK = """
from servers.filesystem import list_directory, read_text_file
from servers.git import git_log
from servers.sqlite import read_query

print(list_directory(path="{orders}")["content"][:200])
print(read_text_file(path="{orders}/orders-01.csv", head=3))
print(repr(read_query(query="SELECT id, region FROM customers"))[:200])
print(repr(git_log(repo_path="{repository}", max_count=1)))
"""

_WORK = """
import ast, csv, io, re
from servers.memory import create_entities

customers = ast.literal_eval(read_query(query="SELECT id, region FROM customers"))
region_of = {{row["id"]: row["region"] for row in customers}}
bought = dict.fromkeys(region_of.values(), 0)
for name in re.findall(r"\\[FILE\\] (\\S+)", list_directory(path="{orders}")["content"]):
    for row in csv.DictReader(io.StringIO(read_text_file(path="{orders}/" + name)["content"])):
        bought[region_of[row["customer"]]] += int(row["amount"]) * float(row["price"])
region = max(bought, key=bought.get)
log = git_log(repo_path="{repository}", max_count={commits})
last = next(message for message in re.findall(r"Message: (.*)", str(log)) if "prices" in message)
answer = f"{{region}}: {{bought[region]:.2f}}; {{last.strip()}}"
create_entities(entities=[{{"name": "year", "entityType": "report", "observations": [answer]}}])
print(answer)
"""


async def done_in_code(place: Place, client: Client) -> Transcript:
    """The model looks for tools, looks at what they return, and writes a cell that does the rest."""
    tools = definitions((await client.list_tools()).tools)
    said = Transcript([*tools, *_instructions([client]), task(place)])

    async def turn(*calls: Call) -> list[str]:
        results = [await text_of(client, name, arguments) for name, arguments in calls]
        said.add(calls, results)
        return results

    names = {"orders": place.orders, "repository": place.repository, "commits": COMMITS}
    await turn(*(("search_tools", {"query": query, "limit": 3}) for query in _QUESTIONS))
    [looked] = await turn(("execute_code", {"code": _LOOK.format(**names)}))
    session_id = re.findall(r"session_id: (\w+)", looked)[-1]
    [worked] = await turn(("execute_code", {"code": _WORK.format(**names), "session_id": session_id}))
    said.answer = next((line for line in worked.splitlines() if "prices" in line), worked)
    return said


async def text_of(client: Client, tool: str, arguments: dict[str, Any]) -> str:
    """The text of a result, which is what a model is shown; one that failed fails the measurement."""
    answer = await client.call_tool(tool, arguments)
    text = "\n".join(getattr(block, "text", "") for block in answer.content)
    if answer.is_error:
        raise RuntimeError(f"{tool} answered {text}")
    return text


def _instructions(clients: Any) -> list[str]:
    return [client.instructions for client in clients if client.instructions]
