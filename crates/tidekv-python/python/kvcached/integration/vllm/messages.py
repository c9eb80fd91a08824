"""What scheduler and workers tell each other with every step, in vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

__all__ = ["StepDone", "StepOrders"]


@dataclass
class StepOrders(KVConnectorMetadata):
    """To every worker: the step's number, and the pages that it may touch from now on, or no longer."""

    step: int
    came: list[int]
    went: list[int]


@dataclass
class StepDone(KVConnectorWorkerMetadata):
    """From every worker: it has launched this step. Together they have launched what the slowest has."""

    step: int

    def aggregate(self, other: Any) -> StepDone:
        return StepDone(min(self.step, other.step))
