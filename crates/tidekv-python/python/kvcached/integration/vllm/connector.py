"""vLLM's KV connector: its KV cache in elastic memory.

    --kv-transfer-config '{"kv_connector": "ElasticConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "kvcached.integration.vllm.connector"}'

It moves no KV between instances; it uses the points that vLLM gives to those who do:

    engine core process (no CUDA context)               worker processes, one for each rank
    -------------------------------------               ------------------------------------
    ElasticBlocks: balloon in vLLM's block pool         KvBuffer: the KV cache over a reservation
        |  pages mapped and unmapped on all ranks          ^
        +------------- tidekv: Pool -> Fleet ------------->+  Worker, two phases, acknowledged
        |  every step: its number, pages that came and went |
        +------------- StepOrders (metadata) ------------->+  looked at before the step computes
        +<------------ StepDone (worker metadata) ---------+  the fence: pages are unmapped behind it

Memory itself does not wait for a step: blocks are given to requests only when all ranks have them mapped, and an idle engine
has no steps (docs/decisions/0018).
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvcached.integration.vllm.buffer import KvBuffer
from kvcached.integration.vllm.demand import Demand
from kvcached.integration.vllm.elastic import ElasticBlocks
from kvcached.integration.vllm.messages import StepDone, StepOrders
from kvcached.integration.vllm.settings import Settings, page_map, place_of
from kvcached.utils import MAX_CACHED_TOKENS, KVCachedConfigError

__all__ = ["ElasticConnector"]


class ElasticConnector(KVConnectorBase_V1, SupportsHMA):
    """One in the scheduler, one in each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.of(vllm_config)
        self._pages = page_map(kv_cache_config, self._settings)
        self._blocks: ElasticBlocks | None = None
        self._buffer: KvBuffer | None = None
        self._begun: int | None = None
        if role is KVConnectorRole.WORKER:
            place = place_of(vllm_config.parallel_config)
            self._buffer = KvBuffer(self._pages, self._settings, place, self._warmup_blocks())

    def _warmup_blocks(self) -> int:
        """Warm-up and graph capture use the null block, and in newer model runners two blocks for each sequence and group."""
        if self._settings.warmup_blocks is not None:
            return self._settings.warmup_blocks
        groups = len(self._kv_cache_config.kv_cache_groups)
        return 1 + 2 * groups * int(self._vllm_config.scheduler_config.max_num_seqs)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Block-outermost: a page of memory is a run of blocks."""
        return "BLNHC"

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed to anybody."""
        return False

    # ---- worker

    def get_mem_pool_context(self) -> Any:
        return self._worker_side().allocation()

    def get_handshake_metadata(self) -> None:
        """vLLM asks for it once the warm-up is over and the scheduler exists. There is nothing to tell."""
        self._worker_side().serve()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepOrders)
        self._worker_side().check(connector_metadata.came)
        self._begun = connector_metadata.step

    def build_connector_worker_meta(self) -> StepDone | None:
        """The step's kernels are launched. Those who unmap wait for the device as well."""
        step, self._begun = self._begun, None
        return None if step is None else StepDone(step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    # ---- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        config = self._vllm_config
        sizes = [int(group.kv_cache_spec.block_size) for group in self._kv_cache_config.kv_cache_groups]
        watermark = int(getattr(config.scheduler_config, "watermark", 0.0) * self._pages.blocks)
        demand = Demand(sizes, int(config.num_lookahead_tokens), watermark)
        # As in kvcached: negative for no bound, 0 for none, else at least one block.
        cached = None if MAX_CACHED_TOKENS < 0 else -(-MAX_CACHED_TOKENS // min(sizes))
        self._blocks = ElasticBlocks(gpu_block_pool, self._pages, self._settings, demand, cached)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """All workers serve."""
        self._scheduler_side().connect()

    def on_new_request(self, request: Any) -> None:
        self._scheduler_side().request_came(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """vLLM asks before it looks for blocks for the request; there is nothing to load."""
        self._scheduler_side().admitting(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler_side().admitted(request)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return StepOrders(*self._scheduler_side().plan_step(scheduler_output.num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        done = connector_output.kv_connector_worker_meta
        if isinstance(done, StepDone):
            self._scheduler_side().steps_done(done.step)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_side().request_gone(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Nothing is cached outside vLLM's own prefix cache."""
        return True

    # ---- both

    def shutdown(self) -> None:
        if self._blocks is not None:
            self._blocks.close()
        if self._buffer is not None:
            self._buffer.close()

    def _scheduler_side(self) -> ElasticBlocks:
        if self._blocks is None:
            raise KVCachedConfigError("vLLM has not given its block pool to this connector: it must do so at its start")
        return self._blocks

    def _worker_side(self) -> KvBuffer:
        if self._buffer is None:
            raise KVCachedConfigError("this connector is the scheduler's, and was asked for what workers do")
        return self._buffer
