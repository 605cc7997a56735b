"""A model of Azure OpenAI drives the interpreter: it writes cells, reads what they show, and answers.

Needs the variables of `azure_agent.py`, in the environment or in a `.env` beside you.
"""

import sys

from shared import belljar_client, read_env, run

INSTRUCTIONS = (
    "You have a Python session. Compute, never guess. Pass the session_id that you were given in later calls."
)
QUESTION = "How many days are there between 29 February 2024 and 1 March 2028, and which weekday is the second one?"


async def main() -> None:
    """Ask the question of the command line, or the one above."""
    read_env()
    try:
        from azure_agent import answer, check
    except ModuleNotFoundError:
        raise SystemExit("this example takes the package openai: pip install openai") from None
    check()
    async with belljar_client() as client:
        print(await answer(client, INSTRUCTIONS, " ".join(sys.argv[1:]) or QUESTION))


if __name__ == "__main__":
    run(main)
