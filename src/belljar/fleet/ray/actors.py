"""What runs in Ray: an agent on every node, which keeps its server, and a controller, which tells all of all machines.

Both are detached actors and keep nothing that is not on disk or asked for again, so that each may die at any time. They
call each other with addresses, counts and states: no secret, nothing of a session. Each works in a thread of its own;
what that does not expect ends the process, which Ray starts again.
"""

import asyncio
import logging
import os
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from belljar.control import ask_sessions
from belljar.fleet.ray.host import NodeHost
from belljar.fleet.ray.membership import MachineReport, Membership, State
from belljar.servers import WORKERS

RESOURCE: Final = "belljar_host"
"""Of which a node that may have a host has one."""
NAMESPACE: Final = "belljar"
CONTROLLER: Final = "controller"
FOLDER_VARIABLE: Final = "BELLJAR_FLEET_FOLDER"
"""By which Ray's processes on a machine know the folder of its host."""
_HEAD: Final = "node:__internal_head__"
_LOOK_S: Final = 1.0
_ANSWER_S: Final = 3.0
_DEMAND_S: Final = 5.0
_START_S: Final = 30.0
_BURIAL_S: Final = 0.2

log = logging.getLogger(__name__)


class NodeAgent:
    """Keeps the server of its node running, and writes the list of all machines for it."""

    def __init__(self) -> None:
        self._host = NodeHost(Path(os.environ[FOLDER_VARIABLE]))
        self._is_draining = False
        _in_thread(self._watch)

    def tell(self, peers: list[str] | None) -> dict[str, Any]:
        """Take the list of all machines, where there is one; return the report of this one."""
        before = self._host.read_peers()
        if peers is not None:
            self._host.write_peers(peers)
        told = self._host.told
        data_directory = Path(told["data_directory"])
        sessions, silent = asyncio.run(ask_sessions(data_directory))
        state: State = "ready" if self._host.is_ready() and not silent else "starting"
        if not self._host.is_running():
            state = "left" if self._host.has_ended else "starting"
        elif self._is_draining:
            state = "draining"
        report = MachineReport(
            state=state,
            sessions=sum(bool(principal) for _, principal, _ in sessions),
            capacity=told["capacity"],
            may_go=told["has_store"] or not _has_sessions(data_directory),
            peers=tuple(before),
        )
        return asdict(report)

    def drain(self) -> None:
        """Have the server end in good order, and stay so."""
        self._is_draining = True
        self._host.stop()

    def return_to_work(self) -> None:
        """Start a server again that has ended."""
        self._is_draining = False
        self._host.start()

    def _watch(self) -> None:
        while True:
            if not self._host.has_ended:
                self._host.start()
            time.sleep(_LOOK_S)


class Controller:
    """Sees that every node has an agent, tells all agents of all machines, and asks for as many nodes as are needed."""

    def __init__(self, spare: int, idle_s: float, is_scaling: bool) -> None:
        self._ray: Any = import_module("ray")
        self._membership = Membership(spare, idle_s)
        self._is_scaling = is_scaling
        self._agents: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        """The answers that agents owe."""
        self._demanded_at = 0.0
        _in_thread(self._watch)

    def lines(self) -> list[str]:
        """Return the list of all machines."""
        return self._membership.lines()

    def _watch(self) -> None:
        while True:
            try:
                self._look()
            except self._ray.exceptions.RayError as error:
                # Its head is away; the agents and the servers go on.
                log.warning("Ray does not answer: %s", error)
            time.sleep(_LOOK_S)

    def _look(self) -> None:
        nodes = [node for node in self._ray.nodes() if "://" in node["NodeName"]]
        living = {node["NodeID"]: node for node in nodes if node["Alive"] and node["Resources"].get(RESOURCE)}
        for node in self._agents.keys() - living.keys():
            del self._agents[node]
            self._asked.pop(node, None)
        for node in living.keys() - self._agents.keys() - self._membership.left():
            self._agents[node] = self._agent(node)
        self._membership.learn(
            self._reports(),
            {node: known["NodeName"] for node, known in living.items()},
            {node["NodeName"] for node in nodes if not node["Alive"]},
        )
        if self._is_scaling:
            self._scale({node for node, known in living.items() if _HEAD in known["Resources"]})

    def _agent(self, node: str) -> Any:
        strategies: Any = import_module("ray.util.scheduling_strategies")
        options = self._ray.remote(NodeAgent).options(
            name=f"agent-{node}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={RESOURCE: 1},
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=4,
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node, soft=False),
        )
        return options.remote()

    def _reports(self) -> dict[str, MachineReport]:
        """Tell all agents of all machines; return what they have answered by now, each to its last question."""
        # One that has not told yet what an earlier controller knew is not told less.
        lines = self._membership.lines()
        for node, agent in self._agents.items():
            if node not in self._asked:
                self._asked[node] = agent.tell.remote(lines if node in self._membership.reports else None)
        waiting = {answer: node for node, answer in self._asked.items()}
        if not waiting:
            return {}
        answered, _ = self._ray.wait([*waiting], num_returns=len(waiting), timeout=_ANSWER_S)
        reports: dict[str, MachineReport] = {}
        for answer in answered:
            node = waiting[answer]
            del self._asked[node]
            try:
                reports[node] = MachineReport.of(self._ray.get(answer))
            except (self._ray.exceptions.RayError, TypeError) as error:
                log.warning("the agent of node %s does not answer: %s", node, error)
        return reports

    def _scale(self, heads: set[str]) -> None:
        returning = self._membership.to_return()
        for node in returning:
            agent = self._agents[node] = self._agents.get(node) or self._agent(node)
            agent.return_to_work.remote()
        for node in (self._membership.left() & self._agents.keys()).difference(returning):
            # Its agent holds the node, which Ray lets go when nothing holds it.
            self._ray.kill(self._agents.pop(node))
            self._asked.pop(node, None)
        if (node := self._membership.to_drain(heads)) is not None:
            self._agents[node].drain.remote()
        if time.monotonic() - self._demanded_at > _DEMAND_S:
            bundles = [{RESOURCE: 1}] * self._membership.wanted()
            import_module("ray.autoscaler.sdk").request_resources(bundles=bundles)
            self._demanded_at = time.monotonic()


def start_controller(address: str, spare: int, idle_s: float, *, is_scaling: bool) -> None:
    """Have a cluster of Ray run a controller with these numbers; one that runs there already is replaced."""
    ray: Any = import_module("ray")
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    try:
        with suppress(ValueError):  # there is none
            ray.kill(ray.get_actor(CONTROLLER))
        options = ray.remote(Controller).options(
            name=CONTROLLER,
            lifetime="detached",
            num_cpus=0,
            resources={_HEAD: 0.001},
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=2,
        )
        deadline = time.monotonic() + _START_S
        while True:
            try:
                ray.get(options.remote(spare, idle_s, is_scaling).lines.remote())
            except ValueError:
                # The name is free only when Ray has buried the former one.
                if time.monotonic() > deadline:
                    raise
                time.sleep(_BURIAL_S)
            else:
                return
    finally:
        ray.shutdown()


def _has_sessions(data_directory: Path) -> bool:
    """Return whether a server of this machine has a session of somebody's, awake or asleep."""
    query = "SELECT 1 FROM sessions WHERE state IN ('live', 'asleep') AND principal <> '' LIMIT 1"
    for folder in (data_directory, *data_directory.glob(f"{WORKERS}/[0-9]*")):
        journal = folder / "journal.sqlite"
        try:
            with closing(sqlite3.connect(f"file:{quote(str(journal))}?mode=ro", uri=True)) as connection:
                if connection.execute(query).fetchone() is not None:
                    return True
        except sqlite3.Error:
            if journal.exists():
                return True  # nobody can tell
    return False


def _in_thread(work: Callable[[], None]) -> None:
    """Do the work of an actor beside its calls; what it does not expect ends the actor, which is then started again."""

    def run() -> None:
        try:
            work()
        finally:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=run, daemon=True).start()
