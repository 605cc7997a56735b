"""Code that worked becomes a skill: checked in a session of its own, kept, and imported by later sessions.

What does not compile, import or run its example is refused, with the reason, and nothing is stored.
"""

from mcp.types import CallToolResult
from shared import belljar_client, run

CODE = '''
"""Money as text."""

def euros(cents: int) -> str:
    """Return an amount in cents as text, like 1,234.50 €."""
    return f"{cents / 100:,.2f} €"
'''
IMPORT = "from skills.money_text import euros"
DESCRIPTION = "Formats amounts of money for reports. Use it wherever a report shows euros."


def said(answer: CallToolResult) -> str:
    """Return the first line that a model reads of an answer."""
    return str(getattr(answer.content[0], "text", "")).splitlines()[0]


async def main() -> None:
    """Save a skill, a broken one too, and use the good one in another session."""
    async with belljar_client(skills="on") as client:
        skill = {"name": "money-text", "description": DESCRIPTION, "code": CODE}
        wrong, right = (f"{IMPORT}\nassert euros(123450) == '{text}'" for text in ("1234 €", "1,234.50 €"))
        print("refused:", said(await client.call_tool("save_skill", {**skill, "example": wrong})))
        print("saved:", said(await client.call_tool("save_skill", {**skill, "example": right})))
        print("found:", said(await client.call_tool("search_skills", {"query": "format money"})))
        print("used:", said(await client.call_tool("execute_code", {"code": f"{IMPORT}\nprint(euros(99))"})))


if __name__ == "__main__":
    run(main)
