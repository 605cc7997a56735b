"""A cloud for Ray's autoscaler, in its process: it writes down which machines are wanted, and a trial makes them so."""

import json
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND, TAG_RAY_NODE_STATUS, TAG_RAY_USER_NODE_TYPE

HEAD = "127.0.0.1"
TAGS = {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: "head", TAG_RAY_NODE_STATUS: "up-to-date"}


class TrialCloud(NodeProvider):
    """Machines are loopback addresses, by which Ray knows them too."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._file = Path(provider_config["file"])

    def _machines(self) -> dict[str, dict[str, str]]:
        return {HEAD: TAGS, **(json.loads(self._file.read_text()) if self._file.exists() else {})}

    def _keep(self, machines: dict[str, dict[str, str]]) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps({ip: tags for ip, tags in machines.items() if ip != HEAD}))
        draft.replace(self._file)

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        return [ip for ip, tags in self._machines().items() if tag_filters.items() <= tags.items()]

    def is_running(self, node_id: str) -> bool:
        return node_id in self._machines()

    def is_terminated(self, node_id: str) -> bool:
        return node_id not in self._machines()

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._machines()[node_id]

    def external_ip(self, node_id: str) -> str:
        return node_id

    def internal_ip(self, node_id: str) -> str:
        return node_id

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        machines = self._machines()
        for _ in range(count):
            free = next(ip for number in range(2, 9) if (ip := f"127.0.0.{number}") not in machines)
            machines[free] = {**tags, TAG_RAY_NODE_STATUS: "up-to-date"}
        self._keep(machines)

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        machines = self._machines()
        if node_id != HEAD and node_id in machines:
            machines[node_id] |= tags
            self._keep(machines)

    def terminate_node(self, node_id: str) -> None:
        machines = self._machines()
        machines.pop(node_id, None)
        self._keep(machines)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config
