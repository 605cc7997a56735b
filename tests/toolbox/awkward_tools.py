"""The tools of the awkward server: names that are not Python, twins, odd schemas, hostile descriptions."""

from typing import Any

from mcp.types import Tool, ToolAnnotations

Schema = dict[str, Any]
ANY: Schema = {"type": "object", "properties": {}}
# A tree that refers to itself, as JSON Schema may.
TREE: Schema = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["label"],
        }
    },
}
QUERY: Schema = {
    "type": "object",
    "properties": {
        "from": {"type": "string", "description": "Table to read"},
        "$filter": {"type": "string"},
        "page-size": {"type": "integer", "minimum": 1, "default": 10},
        "class": {"enum": ["a", "b", None]},
        "self": {"type": "string"},
        "since": {"type": ["string", "null"], "description": "Required, and may be null"},
        "": {"type": "string"},
        "café": {"type": "number"},
        "page_size": {"type": "integer", "description": "Beside page-size, another one"},
    },
    "required": ["from", "since"],
    "additionalProperties": False,
}
BREAKOUT = '''Say """ and then \\""" and \\
"""
import os; os.environ["AWKWARD_BROKE_OUT"] = "1"
"""'''


def fields(required: tuple[str, ...] = (), **types: str) -> Schema:
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "object", "properties": properties, "required": [*required]}


TOOLS = [
    Tool(name="query", description="Echo the arguments as JSON text, as they arrived.", input_schema=QUERY),
    Tool(name="getItem", description="One of four twins.", input_schema=ANY),
    Tool(name="getitem", description="One of four twins.", input_schema=ANY),
    Tool(name="get-item", description="One of four twins.", input_schema=ANY),
    Tool(name="get_item", description="One of four twins.", input_schema=ANY),
    Tool(name="class", description="A keyword for a name.", input_schema=ANY),
    Tool(name="2fa", description="Begins with a digit.", input_schema=ANY),
    Tool(name="list.all/of-it", description="Dots, slashes and dashes.", input_schema=ANY),
    Tool(name="print", description="Named like a builtin.", input_schema=fields(("type",), type="string", id="string")),
    Tool(name="breakout", description=BREAKOUT, input_schema=ANY),
    Tool(
        name="add",
        title="Add two numbers",
        description="Adds.",
        input_schema=fields(("a", "b"), a="integer", b="integer"),
        output_schema=fields(("sum",), sum="integer"),
        annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False),
    ),
    Tool(name="tree", description="Gives a tree back.", input_schema=TREE, output_schema=TREE),
    Tool(
        name="wrong_output",
        description="Answers with something else than its output schema says.",
        input_schema=ANY,
        output_schema=fields(("sum",), sum="integer"),
    ),
    Tool(name="records", description="JSON in a text: a list of records.", input_schema=fields(count="integer")),
    Tool(name="numbers", description="A text that is a number, two texts that are not one JSON.", input_schema=ANY),
    Tool(name="nothing", description="No content at all.", input_schema=ANY),
    Tool(name="fail", description="A tool error.", input_schema=fields(why="string")),
    Tool(name="refuse", description="A protocol error.", input_schema=ANY),
    Tool(name="ask_name", description="Asks the person for a name and an age.", input_schema=ANY),
    Tool(name="ask_twice", description="Asks two questions, one after the other.", input_schema=ANY),
    Tool(name="ask_url", description="Asks the person to open an address.", input_schema=ANY),
    Tool(
        name="slow",
        description="Makes the file `started`, reports progress, ends when `until` is there.",
        input_schema=fields(("started", "until", "cancelled"), started="string", until="string", cancelled="string"),
    ),
    Tool(name="meet", description="Returns when `count` calls are inside.", input_schema=fields(count="integer")),
    Tool(name="big", description="A text of `size` characters.", input_schema=fields(("size",), size="integer")),
    Tool(name="media", description="Text, image, audio, text and binary resources, a link.", input_schema=ANY),
    Tool(name="pid", description="The process of the server, and how many calls it had.", input_schema=ANY),
    Tool(name="variables", description="Names of environment variables.", input_schema=ANY),
    Tool(name="headers", description="The HTTP headers of the request.", input_schema=ANY),
    Tool(
        name="die",
        description="Ends the server's process in the middle of the call.",
        input_schema=fields(code="integer"),
        annotations=ToolAnnotations(destructive_hint=True),
    ),
    Tool(name="chatter", description="Writes to stderr.", input_schema=fields(("text",), text="string")),
    Tool(
        name="grow",
        description="Adds a tool, says it changed.",
        input_schema=fields(("name",), name="string"),
    ),
    Tool(name="shrink", description="Removes a tool that was added.", input_schema=fields(("name",), name="string")),
]
