"""Going on with a runner where another server stopped listening to it, wherever that was.

The runner is asked to say where it stands. It answers at once when it waits, for us or for the next cell, and after its
cell when it is busy. What a killed server had half read or half written, the wire has passed over by then.
"""

import secrets
from collections.abc import AsyncIterator

from belljar.kernels import frames, messages
from belljar.outputs.events import Stream


async def heard_again(wire: frames.Wire, request: int) -> AsyncIterator[Stream | messages.Message]:
    """What it says until it is between two cells. How the last one ended comes last, perhaps for a second time."""
    nonce = secrets.token_hex(8)
    has_acknowledged = is_attended = False
    await wire.send({"op": "attend", "id": nonce})
    while True:
        for item in await wire.receive():
            if not isinstance(item, messages.Resumed):
                yield item
                if isinstance(item, Stream):
                    continue
                has_acknowledged = has_acknowledged or item.ack
                if is_attended and isinstance(item, messages.Done):
                    return
            elif item.id == nonce:
                is_attended = True
                # What it waits to have acknowledged was read by a server that never did; else it was just done.
                if item.awaits == "ack" and not has_acknowledged:
                    await wire.send({"op": "ack"})
                elif item.awaits == "input":
                    yield messages.Input(type="input", id=request, prompt=item.prompt, is_password=item.is_password)
                elif not item.awaits:
                    if item.last is not None:
                        yield item.last
                    return
