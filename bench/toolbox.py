"""Tools of other MCP servers called in code, beside a model that calls each itself: tokens, and time per call.

Seven published servers; the official client is what everything is compared with, ipybox and FastMCP's code mode where
they install.
"""

import asyncio
import itertools
import json
import statistics
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client

from bench.figures import Figure, Round, paired
from bench.registries import Unreachable, kept
from bench.servers import belljar_command, open_stdio
from bench.stage import Stage
from bench.tokens import count_tokens
from bench.toolbox_place import Place, make_place
from bench.toolbox_sides import PEERS, Call, Direct, Peer, Session, Side, open_peer
from bench.toolbox_task import Transcript, all_definitions, definitions, done_directly, done_in_code

# 90 and 95 per cent fewer.
DEFINITIONS_TARGET = 10.0
TASK_TARGET = 20.0
CALL_TARGET = 2.0
PARALLEL_TARGET = 1.5
READS = 20
BATCHES = 5
TURN = 10
CALLED = ("everything", "filesystem", "git", "sqlite")
"""The servers whose tools are timed."""


@dataclass(frozen=True, slots=True)
class Scene:
    """All sides, started."""

    place: Place
    kept: Path
    clients: dict[str, Client]
    ours: Client
    peers: dict[str, Peer]
    absent: dict[str, str]
    """Peers that cannot be measured here, and why."""


async def measure(stage: Stage) -> list[Figure]:
    """Tokens first, then times, every side in turns."""
    async with _open_scene(stage) as scene:
        return [
            *await _definitions(scene),
            *await _task(scene),
            *await _calls(stage, scene),
            *await _reads(stage, scene),
        ]


@asynccontextmanager
async def _open_scene(stage: Stage) -> AsyncGenerator[Scene]:
    folder = kept()
    place = await asyncio.to_thread(make_place, stage.folder / "place", folder)
    settings = {"BELLJAR_SURFACES": "toolbox", "BELLJAR_MCP_CONFIG": str(place.config)}
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(place.open_direct())
        ours = await stack.enter_async_context(open_stdio(stage, belljar_command(), "modern", settings))
        peers: dict[str, Peer] = {}
        absent: dict[str, str] = {}
        for name in PEERS:
            try:
                peers[name] = await stack.enter_async_context(open_peer(name, place, CALLED, folder))
            except (Unreachable, RuntimeError, TimeoutError, OSError) as error:
                absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        yield Scene(place, folder, clients, ours, peers, absent)


# Tokens


async def _definitions(scene: Scene) -> list[Figure]:
    direct = await all_definitions(scene.clients)
    ours = definitions((await scene.ours.list_tools()).tools)
    beside = {name: [_compact(each) for each in peer.definitions] for name, peer in scene.peers.items()}
    counted = iter(count_tokens(["\n".join(texts) for texts in (direct, ours, *beside.values())], scene.kept))
    peer, own = next(counted), next(counted)
    absent = "".join(f"; {name} not measured: {why}" for name, why in scene.absent.items())
    note = f"{len(direct)} tools of {len(scene.clients)} servers; ours: {len(ours)} tools; o200k{absent}"
    what = "definitions of all tools"
    return [
        Figure("toolbox", what, "tokens", own, peer, DEFINITIONS_TARGET, "gain", note),
        *(
            Figure("toolbox", f"{what}, beside {name}", "tokens", own, count, note=f"peer: {_peer_note(scene, name)}")
            for name, count in zip(beside, counted, strict=True)
        ),
    ]


def _peer_note(scene: Scene, name: str) -> str:
    peer = scene.peers[name]
    return f"{name} {peer.version}, {len(peer.definitions)} tools"


def _compact(definition: Mapping[str, Any]) -> str:
    return json.dumps(definition, separators=(",", ":"), ensure_ascii=False)


async def _task(scene: Scene) -> list[Figure]:
    direct = await done_directly(scene.place, scene.clients)
    ours = await done_in_code(scene.place, scene.ours)
    if direct.answer != ours.answer:
        raise RuntimeError(f"tool by tool the answer is {direct.answer!r}, in code {ours.answer!r}")
    peer, own = _counted(direct, scene.kept), _counted(ours, scene.kept)
    turns = f"{len(direct.turns)} turns and the answer; ours {len(ours.turns)}"
    return [
        Figure("toolbox", "a task, every text once", "tokens", own[0], peer[0], TASK_TARGET, "gain", turns),
        Figure(
            "toolbox",
            "a task, all that is sent",
            "tokens",
            own[1],
            peer[1],
            None,
            "gain",
            "each turn sends all before it",
        ),
    ]


def _counted(said: Transcript, folder: Path) -> tuple[int, int]:
    """Tokens of all texts, each once; and of what goes to the model over all turns, with what it writes."""
    texts = ["\n".join(said.opening), *itertools.chain.from_iterable(said.turns), said.answer]
    opening, *later, answer = count_tokens(texts, folder)
    sent, context = 0, opening
    for call, result in zip(later[::2], later[1::2], strict=True):
        sent += context + call
        context += call + result
    return context + answer, sent + context + answer


# Times


def _timed_calls(place: Place) -> dict[str, Call]:
    return {
        "echo": Call("everything", "echo", {"message": "hello"}),
        "read_text_file": _read(place),
        "git_status": Call("git", "git_status", {"repo_path": str(place.repository)}),
        "sqlite read_query": Call("sqlite", "read_query", {"query": "SELECT * FROM customers LIMIT 20"}),
    }


def _read(place: Place) -> Call:
    return Call("filesystem", "read_text_file", {"path": str(place.orders / "orders-01.csv")})


def _sides(scene: Scene) -> dict[str, Side]:
    return {"direct": Direct(scene.clients), "ours": Session(scene.ours), **scene.peers}


async def _calls(stage: Stage, scene: Scene) -> list[Figure]:
    sides = _sides(scene)
    figures: list[Figure] = []
    for name, call in _timed_calls(scene.place).items():
        await _turns(sides, call, 1)
        rounds = [
            await _turns(sides, call, stage.pick(5, 2))
            for _ in stage.rounds(stage.pick(3, 2), within_s=stage.pick(8, 3))
        ]
        figures += _compared(f"a call of {name}", rounds, CALL_TARGET)
    return figures


async def _turns(sides: Mapping[str, Side], call: Call, count: int) -> dict[str, list[float]]:
    """Some calls of each side, then of the next: what else the machine does disturbs all alike."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(count):
        for name, side in sides.items():
            taken[name] += await side.one_by_one(call, TURN)
    return taken


async def _reads(stage: Stage, scene: Scene) -> list[Figure]:
    sides, call = _sides(scene), _read(scene.place)
    for side in sides.values():
        await side.at_once(call, READS, 1)
    rounds: list[dict[str, list[float]]] = []
    for _ in stage.rounds(stage.pick(5, 2), within_s=stage.pick(25, 6)):
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(stage.pick(4, 2)):
            for name, side in sides.items():
                # The peers take long, and have no target to be exact for.
                taken[name] += await side.at_once(call, READS, 1 if name in scene.peers else BATCHES)
        rounds.append(taken)
    return _compared(f"{READS} reads at once", rounds, PARALLEL_TARGET)


def _compared(what: str, rounds: Sequence[Mapping[str, list[float]]], target: float) -> list[Figure]:
    """Ours beside the direct calls, with the target; then beside each peer."""
    figures: list[Figure] = []
    for name in (name for name in rounds[0] if name != "ours"):
        pairs = [Round(taken[name], taken["ours"]) for taken in rounds]
        if name == "direct":
            figures += paired("toolbox", what, pairs, target=target, note=f"peer: official client; {_spread(pairs)}")
        else:
            figures += paired("toolbox", f"{what}, beside {name}", pairs, note=f"peer: {name}")
    return figures


def _spread(rounds: Sequence[Round]) -> str:
    """The ratios of all rounds, on a busy machine not one."""
    ratios = sorted(statistics.median(one.ours) / statistics.median(one.peer) for one in rounds)
    return f"{ratios[0]:.2f}× to {ratios[-1]:.2f}× in {len(ratios)} rounds"
