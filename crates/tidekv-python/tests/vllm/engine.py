"""vLLM's scheduler, block pool and prefix cache as they are, with ranks that simulate a model over real KV memory."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from ranks import Row, SimulatedModel, allocate, next_token, run_rank

MIB = 1 << 20
BLOCK_TOKENS = 16
PATIENCE_S = 120.0
LAYOUTS = ["LBNHC", "LBHNC", "BLNHC", "BLHNC"]

init_none_hash(sha256)
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["kvcached.integration.vllm.connector", "vllm.v1.worker.utils", "ranks"])
# In the folder that goes at the end, also when a process that made this one its own is killed.
MODEL_DIR = Path(os.environ["KVCACHED_RUNTIME_DIR"]) / "model"
MODEL_DIR.mkdir(exist_ok=True)
(MODEL_DIR / "config.json").write_text(
    json.dumps(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "vocab_size": 1000,
            "max_position_embeddings": 4096,
            "torch_dtype": "float32",
        }
    )
)


@dataclass
class Shape:
    """What the engine under test is."""

    blocks: int = 160
    layers: tuple[int, ...] = (3,)
    """Layers of each pipeline stage. Three of 64 KiB: blocks straddle pages of 2 MiB."""
    tensor_parallel: int = 1
    max_num_seqs: int = 16
    max_batched_tokens: int = 256
    prefix_caching: bool = True
    ahead: bool = False
    """Asynchronous scheduling, vLLM's default: a step is planned before the last one has computed."""
    extra: dict[str, Any] = field(default_factory=dict)
    beside: list[dict[str, Any]] = field(default_factory=list)
    """Other connectors."""

    @property
    def ranks(self) -> int:
        return len(self.layers) * self.tensor_parallel


def ours(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "ElasticConnector",
        "kv_connector_module_path": "kvcached.integration.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"page_size": "2M", **extra},
    }


def make_config(shape: Shape, elastic: bool, rank: int = 0) -> VllmConfig:
    transfer = None
    if elastic:
        chosen = ours(**shape.extra)
        if shape.beside:
            connectors = {"connectors": [chosen, *shape.beside]}
            chosen = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": connectors}
        transfer = KVTransferConfig(**chosen, engine_id=str(uuid.uuid4()))
    model_config = ModelConfig(model=str(MODEL_DIR), skip_tokenizer_init=True, dtype="float32", max_model_len=2048)
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_batched_tokens,
            max_model_len=2048,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=shape.ahead,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=shape.prefix_caching),
        parallel_config=ParallelConfig(
            pipeline_parallel_size=len(shape.layers),
            tensor_parallel_size=shape.tensor_parallel,
            distributed_executor_backend="mp",
        ),
        kv_transfer_config=transfer,
    )
    config.parallel_config.rank = rank
    # vLLM switches it off on platforms that cannot compute with it; its scheduler does not care.
    config.scheduler_config.async_scheduling = shape.ahead
    return config


def make_kv_cache_configs(shape: Shape, config: VllmConfig) -> list[Any]:
    """By vLLM's own planning: one for each rank."""
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=128, dtype=torch.float32)
    specs = []
    first = 0
    for layers in shape.layers:
        specs += [{f"model.layers.{first + i}.attn": spec for i in range(layers)}] * shape.tensor_parallel
        first += layers
    resolve_kv_cache_layout(config, [LAYOUTS] * shape.ranks, [spec])
    memory = [len(mine) * spec.page_size_bytes * shape.blocks for mine in specs]
    return get_kv_cache_configs(config, specs, memory)


class Rank:
    """A worker process. Never left behind: it ends with its pipe, and is killed where it does not."""

    def __init__(self, config: VllmConfig, kv_cache_config: Any, rank: int) -> None:
        config = copy.deepcopy(config)
        config.parallel_config.rank = rank
        self.arguments = (config, kv_cache_config, BLOCK_TOKENS)
        self.start()

    def start(self) -> None:
        self.pipe, theirs = _processes.Pipe()
        self.process = _processes.Process(target=run_rank, args=(theirs, *self.arguments), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        if not self.pipe.poll(PATIENCE_S):
            raise TimeoutError(f"rank {self.process.pid} says nothing")
        answer = self.pipe.recv()
        if isinstance(answer, str) and answer != "ready":
            raise AssertionError(f"a rank failed:\n{answer}")
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)
        self.pipe.close()

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(30)
        if self.process.is_alive():
            self.kill()


def make_scheduler(config: VllmConfig, rank_configs: list[Any]) -> Scheduler:
    """As `EngineCore` does it; the ranks serve already."""
    config.parallel_config.rank = 0
    scheduler_config = generate_scheduler_kv_cache_config(rank_configs)
    config.cache_config.num_gpu_blocks = scheduler_config.num_blocks
    register_all_kvcache_specs(config)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=scheduler_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        log_stats=True,
    )
    if scheduler.connector is not None:
        scheduler.connector.set_xfer_handshake_metadata_pp_aware({})
    return scheduler


def make_request(request_id: str, prompt: list[int], max_tokens: int) -> Request:
    parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    parameters.update_from_generation_config({}, 999)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=parameters,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )


@dataclass
class Planned:
    """A step that is planned: where each request's tokens are, as it was then."""

    plan: Any
    places: dict[str, tuple[int, int, list[int]]]
    """Start, count and blocks."""


class Engine:
    """As `EngineCore` does it: scheduler, then the workers' handshake, then steps."""

    def __init__(self, shape: Shape, elastic: bool = True, scheduler: bool = True) -> None:
        self.shape = shape
        self.elastic = elastic
        self.config = make_config(shape, elastic)
        self.rank_configs = rank_configs = make_kv_cache_configs(shape, self.config)
        self.ranks: list[Rank] = []
        self.local: SimulatedModel | None = None
        self.requests: dict[str, Request] = {}
        self.planned: deque[Planned] = deque()
        self.decisions: list[dict[str, int]] = []
        self.steps = 0
        self.preemptions = 0
        # Whether what the ranks have finished is kept from the scheduler.
        self.hold_answers = False
        try:
            if elastic:
                for rank, rank_config in enumerate(rank_configs):
                    self.ranks.append(Rank(self.config, rank_config, rank))
                for one in self.ranks:
                    one.receive()
            else:
                self.local = SimulatedModel(allocate(None, self.config, rank_configs[0]), BLOCK_TOKENS)
            if scheduler:
                self.start_scheduler()
        except BaseException:
            self.close()
            raise

    def start_scheduler(self) -> None:
        self.scheduler = make_scheduler(self.config, self.rank_configs)
        self.block_pool = self.scheduler.kv_cache_manager.block_pool

    @property
    def connector(self) -> Any:
        found = self.scheduler.connector
        return found.sub_connectors[0] if hasattr(found, "sub_connectors") else found

    @property
    def blocks(self) -> Any:
        return self.connector._blocks

    @property
    def pool(self) -> Any:
        return self.blocks.pool

    # ---- requests

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.requests[request_id] = make_request(request_id, prompt, max_tokens)
        self.scheduler.add_request(self.requests[request_id])

    def prompt(self, request_id: str) -> list[int]:
        return list(self.requests[request_id].prompt_token_ids or [])

    def output(self, request_id: str) -> list[int]:
        return list(self.requests[request_id].output_token_ids)

    @property
    def outputs(self) -> dict[str, list[int]]:
        return {request_id: self.output(request_id) for request_id in self.requests}

    @property
    def unfinished(self) -> int:
        return int(self.scheduler.get_num_unfinished_requests())

    # ---- steps

    def step(self) -> int:
        """Plans a step, or one more than is computed, and computes the oldest; how many tokens that were."""
        self._plan()
        if self.shape.ahead and len(self.planned) < 2:
            self._plan()
        return self._compute(self.planned.popleft())

    def _plan(self) -> None:
        plan = self.scheduler.schedule()
        self.steps += 1
        self.preemptions += len(plan.preempted_req_ids or ())
        self.decisions.append(dict(plan.num_scheduled_tokens))
        places = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            # vLLM has counted this step's tokens as computed already.
            start = self.scheduler.requests[request_id].num_computed_tokens - count
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            if self.elastic:
                assert all(self.blocks.balloon.has_memory(block) for block in blocks), f"{request_id}: a block without memory"
            places[request_id] = (start, count, list(blocks))
        self.planned.append(Planned(plan, places))

    def _compute(self, planned: Planned) -> int:
        """What the ranks say is compared with what the tokens say."""
        plan = planned.plan
        rows = [self._row(request_id, *place) for request_id, place in planned.places.items()]
        answers = self._execute(plan, rows)
        sampled = answers[0][0]
        for tokens, _ in answers[1:]:
            assert tokens == sampled, "ranks disagree"
        for row in rows:
            if row.samples:
                known = list(self.requests[row.request_id].all_token_ids)[: row.start + len(row.tokens)]
                assert sampled[row.request_id] == next_token(known), f"{row.request_id}: the KV cache is not what it should be"
        done = answers[0][1]
        for _, other in answers[1:]:
            done = done.aggregate(other)  # As vLLM's KVOutputAggregator does.
        ids = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
            sampled_token_ids=[[sampled[request_id]] if request_id in sampled else [] for request_id in ids],
            kv_connector_output=None if done is None or self.hold_answers else KVConnectorOutput(kv_connector_worker_meta=done),
        )
        self.scheduler.update_from_output(plan, output)
        return int(plan.total_num_scheduled_tokens)

    def _row(self, request_id: str, start: int, count: int, blocks: list[int]) -> Row:
        known = list(self.requests[request_id].all_token_ids)
        return Row(request_id, blocks, start, known[start : start + count], start + count == len(known))

    def _execute(self, plan: Any, rows: list[Row]) -> list[tuple[dict[str, int], Any]]:
        if self.local is not None:
            return [(self.local.step(rows), None)]
        for rank in self.ranks:
            rank.pipe.send((plan.kv_connector_metadata, rows))
        return [rank.receive() for rank in self.ranks]

    def run(self, until: Callable[[], bool] | None = None, each_step: Callable[[int], None] | None = None) -> None:
        """Steps until no request is left, or `until` says so; also when memory has to be waited for."""
        deadline = time.monotonic() + PATIENCE_S
        while self.unfinished and not (until is not None and until()):
            if each_step is not None:
                each_step(self.steps)
            computed = self.step()
            if computed == 0:
                time.sleep(0.001)  # As vLLM's engine core yields when it can schedule nothing.
            assert time.monotonic() < deadline, f"{self.unfinished} requests do not finish: {self.describe()}"

    def settle(self) -> None:
        """What is planned is computed; then an empty step, which tells the workers what vLLM tells them after the last request."""
        while self.planned:
            self._compute(self.planned.popleft())
        self._plan()
        self._compute(self.planned.popleft())

    # ---- looking

    def describe(self) -> str:
        if not self.elastic:
            return f"{self.steps} steps"
        figures = self.pool.snapshot()
        names = ("mapped_bytes", "used_bytes", "limit_bytes", "demand_bytes", "reclaim")
        return f"{self.steps} steps, {self.blocks.balloon.pages_in} pages in, " + str({name: figures[name] for name in names})

    def check_no_block_is_lost(self) -> None:
        """Nobody has a block: all are free, or held for want of memory."""
        balloon = self.blocks.balloon
        assert balloon.in_use == 0
        free = {block.block_id for block in self.block_pool.free_block_queue.get_all_free_blocks()}
        held = {block for block in range(1, self.shape.blocks) if balloon._held[block]}
        assert not free & held and free | held == set(range(1, self.shape.blocks))
        assert all(self.block_pool.blocks[block].ref_cnt == (block in held) for block in range(1, self.shape.blocks))

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """For what another thread or process does."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen: {self.describe()}"
            time.sleep(0.005)

    def close(self) -> None:
        if getattr(self, "scheduler", None) is not None:
            self.scheduler.shutdown()
        for rank in self.ranks:
            rank.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
