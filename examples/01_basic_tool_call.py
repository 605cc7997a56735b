"""One tool of another MCP server, called from Python in a sealed session.

The model writes the cell. It sees a function; the session never sees the server's command or its credentials.
"""

from shared import TIME, pypi_server, run, shown

import belljar

CELL = """
from servers.time import convert_time

answer = convert_time(source_timezone="Europe/Oslo", time="12:00", target_timezone="Asia/Tokyo")
print(answer["target"]["datetime"][11:16], "in Tokyo when it is noon in Oslo,", answer["time_difference"])
"""


async def main() -> None:
    """Call the tool."""
    async with belljar.open_session(mcp_servers={"time": pypi_server(TIME, "--local-timezone=UTC")}) as session:
        print(shown(await session.execute(CELL)))


if __name__ == "__main__":
    run(main)
