"""Results that agents meet every day: the tokens a model reads of each, here and from a plain ipykernel.

The peer is counted twice. *Plain* is what a careful bridge from Jupyter to MCP puts into text: streams, `text/plain` of
displays and results, tracebacks without colours; the figures of the single cases are beside it. *Raw* is everything the
kernel's messages say, as simple bridges pass it on: also HTML, Markdown, LaTeX, SVG and JSON, and colours. Pictures are
left out on both sides, because they cost the same. Ours is the text block of the answer, its last line included. That
nothing is lost is checked: each case names the words that a model needs, and they have to be there. Each case runs in a
session that `new_session` made; what the first result of a session adds, its id and two sentences, is a figure of its
own. What a policy refuses and what a person declines has no peer, and stands apart.

Also the tokens of `tools/list`, which every conversation pays before its first call.
"""

import json
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from mcp import Client
from mcp.types import ElicitResult, TextContent

from belljar.mcp.server import build_server
from belljar.runtime import open_runtime
from bench.figures import Figure
from bench.ipykernels import IPyKernel, open_ipykernel
from bench.registries import kept
from bench.servers import bare_command
from bench.stage import Stage
from bench.tokens import count_tokens

TARGET = 0.5
LIST_BEFORE = 2_160
"""Tokens of `tools/list` before its texts were looked at; the target is a third less."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FRAME = "import pandas as pd, numpy as np\ndf = pd.DataFrame({'city': ['Oslo', 'Bergen'] * 30, 'n': range(60)})\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One cell, and what a model has to find in the answer."""

    name: str
    code: str
    needed: tuple[str, ...]


PRINTED = Case("a printed line", "print('rows: 1,204')", ("rows: 1,204",))
CASES = (
    Case("nothing printed", "x = 1", ("[ok]",)),
    PRINTED,
    Case("a value", "[n * n for n in range(20)]", ("361",)),
    Case("a table", f"{FRAME}df.head(10)", ("city", "Bergen", "9")),
    Case("a table of 60 rows", f"{FRAME}df", ("city", "59")),
    Case("describe()", f"{FRAME}df.describe()", ("mean", "29.5")),
    Case("value_counts()", f"{FRAME}df.city.value_counts()", ("Oslo", "30")),
    Case("a table that was displayed and a value", f"{FRAME}display(df.head(3))\nlen(df)", ("Oslo", "60")),
    Case("a figure", "import matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.title('squares');", ("image/png",)),
    Case("a formula", "import sympy\nx = sympy.Symbol('x')\nsympy.integrate(sympy.sin(x)**2, x)", ("sin",)),
    Case("a name that is not defined", "total = 1\ntotal + missing_name", ("NameError", "missing_name", "line 2")),
    Case("a column that is not there", f"{FRAME}df['town']", ("KeyError: 'town'", "line 3", "frame.py")),
    Case("a wrong shape", "import numpy as np\nnp.ones((2, 3)) @ np.ones((2, 3))", ("ValueError", "matmul", "line 2")),
    Case("a module that is not installed", "import humanize", ("ModuleNotFoundError", "humanize")),
    Case("a file that is not there", "import pandas as pd\npd.read_csv('s.csv')", ("FileNotFoundError", "s.csv")),
    Case("no network", "import requests\nrequests.get('https://example.com/data.json')", ("example.com",)),
    Case("a syntax error", "for i in range(3)\n    print(i)", ("SyntaxError", "line 1")),
    Case("bad JSON", "import json\njson.loads('{\"a\": 1,}')", ("JSONDecodeError", "line 2")),
    Case("a warning", "import warnings\nwarnings.warn('deprecated thing')\nprint('done')", ("deprecated", "done")),
    Case(
        "a progress bar of 2,000 updates",
        "import sys\nfor n in range(2_001):\n    print(f'\\r{n / 20:3.0f}%|{\"#\" * (n // 100):20}| {n}/2000', end='', "
        "file=sys.stderr)\nprint(file=sys.stderr)\n'accuracy 0.93'",
        ("2000/2000", "accuracy 0.93"),
    ),
    Case("two thousand lines", "for i in range(2_000): print('step', i, 'loss', 1 / (i + 1))", ("step 0", "step 1999")),
)

POLICY = """
[[code]]
calls = ["os.system"]
reason = "no other programs"

[[code]]
imports = ["smtplib"]
decision = "ask"
reason = "mail goes to others"

[[tools]]
match = "bare.*"
decision = "deny"
reason = "not in this project"
"""
POLICY_CASES = (
    Case("code that the policy rejects", "import os\nos.system('make')", ("line 2", "os.system", "no other programs")),
    Case("a tool call that it denies", "from servers import bare\nbare.nothing(code='x')", ("bare.nothing", "project")),
    Case("a cell that a person declined", "import smtplib\nsmtplib.SMTP('localhost')", ("smtplib",)),
    Case("a syntax error under a policy", "for i in range(3)\n    print(i)", ("line 1",)),
)


async def measure(stage: Stage) -> list[Figure]:
    """The tokens of all cases together, those of each, and those of `tools/list`."""
    async with open_ipykernel(stage) as kernel:
        messages_by_case = [await _messages(kernel, case.code) for case in CASES]
    raw = ["\n".join(text for message in messages for text in _texts(message)) for messages in messages_by_case]
    plain = ["\n".join(text for message in messages for text in _plain_texts(message)) for messages in messages_by_case]
    settings = stage.settings().model_copy(update={"fork_start": False, "pool_size": 0, "hibernate": False})
    async with open_runtime(settings) as runtime, Client(build_server(runtime, ["interpreter"])) as client:
        listed = json.dumps([_listed(tool) for tool in (await client.list_tools()).tools])
        ours = [await _read(client, case) for case in CASES]
        first = await _read(client, PRINTED, in_new_session=True)
    refused = await _refusals(stage)
    of_list, of_first, *counts = count_tokens([listed, first, *ours, *plain, *raw, *refused], kept())
    mine, bare, whole = (counts[start : start + len(CASES)] for start in range(0, 3 * len(CASES), len(CASES)))
    what = f"{len(CASES)} typical results"
    return [
        Figure("model-tokens", what, "tokens", sum(mine), sum(bare), note="peer: ipykernel, text/plain only"),
        # The long one outweighs all others together, which says nothing of them.
        Figure("model-tokens", "all but the longest of them", "tokens", sum(mine) - max(mine), sum(bare) - max(bare)),
        Figure("model-tokens", f"{what}, raw peer", "tokens", sum(mine), sum(whole), TARGET, note="every text form"),
        Figure("model-tokens", "added by a session's first result", "tokens", of_first - mine[CASES.index(PRINTED)]),
        Figure("model-tokens", "tools/list", "tokens", of_list, LIST_BEFORE, 2 / 3, note="the peer is its own past"),
        *(
            Figure("model-tokens", case.name, "tokens", own, peer, note=f"raw {all_of_it:,}")
            for case, own, peer, all_of_it in zip(CASES, mine, bare, whole, strict=True)
        ),
        *(
            Figure("model-tokens", case.name, "tokens", own)
            for case, own in zip(POLICY_CASES, counts[3 * len(CASES) :], strict=True)
        ),
    ]


async def _refusals(stage: Stage) -> list[str]:
    """What a model reads where a policy says no, or a person who is asked."""

    async def decline(context: object, params: object) -> ElicitResult:
        return ElicitResult(action="decline")

    policy = stage.folder / "policy.toml"
    policy.write_text(POLICY)
    command, *arguments = bare_command()
    chosen = {"fork_start": False, "pool_size": 0, "hibernate": False, "policy": str(policy)}
    settings = stage.settings().model_copy(
        update={**chosen, "mcp_servers": {"bare": {"command": command, "args": arguments}}}
    )
    async with AsyncExitStack() as opened:
        runtime = await opened.enter_async_context(open_runtime(settings))
        surface = build_server(runtime, ["interpreter"])
        client = await opened.enter_async_context(Client(surface, elicitation_callback=decline))
        if runtime.toolbox is not None:
            await runtime.toolbox.wait_until_ready()
        return [await _read(client, case) for case in POLICY_CASES]


def _listed(tool: Any) -> dict[str, Any]:
    """What a client passes to the model of a tool; the hints are for the client."""
    return tool.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"annotations"})


async def _read(client: Client, case: Case, *, in_new_session: bool = False) -> str:
    """The text that a model reads of a case, in a session that was made for it before, or by this call."""
    arguments = {"code": case.code, "wait_s": 120}
    if not in_new_session:
        made = await client.call_tool("new_session", {})
        arguments["session_id"] = (made.structured_content or {})["session_id"]
    answer = await client.call_tool("execute_code", arguments)
    text = "\n".join(block.text for block in answer.content if isinstance(block, TextContent))
    if lost := [words for words in case.needed if words not in text]:
        raise AssertionError(f"{case.name}: the answer has lost {lost}:\n{text}")
    return text


async def _messages(kernel: IPyKernel, code: str) -> list[dict[str, Any]]:
    """Every message of a cell, in a kernel without variables."""
    found: list[dict[str, Any]] = []
    await kernel.execute(f"%reset -f\n{code}", on_message=found.append)
    return found


def _plain_texts(message: dict[str, Any]) -> list[str]:
    if message["msg_type"] in ("display_data", "execute_result"):
        forms: dict[str, Any] = message["content"]["data"]
        return [forms["text/plain"]] if "text/plain" in forms else []
    return [_COLOURS.sub("", text) for text in _texts(message)]


def _texts(message: dict[str, Any]) -> list[str]:
    content: dict[str, Any] = message["content"]
    match message["msg_type"]:
        case "stream":
            return [content["text"]]
        case "display_data" | "execute_result":
            forms: dict[str, Any] = content["data"]
            return [
                text if isinstance(text, str) else json.dumps(text)
                for mime, text in forms.items()
                if not mime.startswith("image/") or mime == "image/svg+xml"
            ]
        case "error":
            return ["\n".join(content["traceback"])]
        case _:
            return []
