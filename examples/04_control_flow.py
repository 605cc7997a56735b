"""Loops, branches, errors and parallel calls: one cell where direct tool calling takes a turn of the model for each."""

from shared import TIME, pypi_server, run, shown

import belljar

CELL = """
import asyncio
import toolbox
from servers.time import convert_time

async def hour_in(zone):
    try:
        answer = await convert_time.aio(source_timezone="UTC", time="07:00", target_timezone=zone)
    except toolbox.ToolError as error:
        return zone, None, str(error.message).splitlines()[0]
    return zone, int(answer["target"]["datetime"][11:13]), ""

zones = ["Europe/Oslo", "Asia/Tokyo", "America/Lima", "Mars/Olympus"]
for zone, hour, fault in await asyncio.gather(*map(hour_in, zones)):
    if fault:
        print(f"{zone}: skipped, {fault}")
    elif 9 <= hour < 17:
        print(f"{zone}: {hour}:00, the office is open")
    else:
        print(f"{zone}: {hour}:00, nobody there")
"""


async def main() -> None:
    """Run the loop."""
    async with belljar.open_session(mcp_servers={"time": pypi_server(TIME, "--local-timezone=UTC")}) as session:
        print(shown(await session.execute(CELL)))


if __name__ == "__main__":
    run(main)
