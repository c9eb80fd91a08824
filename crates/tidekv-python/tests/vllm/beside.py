"""A connector of somebody else, which counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)


@dataclass
class Count(KVConnectorMetadata, KVConnectorWorkerMetadata):
    steps: int

    def aggregate(self, other: Any) -> Count:
        return self


class Beside(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.steps = self.done = 0

    def build_connector_meta(self, scheduler_output: Any) -> Count:
        self.steps += 1
        return Count(self.steps)

    def build_connector_worker_meta(self) -> Count:
        return self._get_connector_metadata()  # type: ignore[return-value]

    def update_connector_output(self, connector_output: Any) -> None:
        self.done = connector_output.kv_connector_worker_meta.steps

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def update_state_after_alloc(self, *_: Any) -> None: ...
    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, *_: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...
