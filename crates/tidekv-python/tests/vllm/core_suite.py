"""vLLM's own tests of its scheduler and block pool, with our connector in every scheduler that they make.

    python core_suite.py FOLDER     runs FOLDER/tests/v1/core without and with us, and compares every test

What passes without us depends on the version alone and is kept in FOLDER.

A pytest plugin for the run with us: a scheduler that is made without a connector gets ours, over host memory that is mapped
whole, so that the tests' counts of free blocks hold; a worker serves in the same process. Tests that bring a connector of
their own are left as they are.

Exit code: 0 every test that passes without us passes with us, 1 one does not, 2 it could not run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MODELS = {
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "word_embed_proj_dim": 768,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "torch_dtype": "float16",
    },
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
}
"""What most tests ask the model hub for: configurations, as a hub cache that is made here. Tests that need tokenizers fail in both runs."""
IGNORED = ("e2e", "test_kv_sharing")
"""Files that compute a model."""
LEFT_ALONE = {
    "test_reset_connector_cache_no_connector_is_no_op_success": "is about a scheduler that has no connector",
    "test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request": "takes any connector's metadata for another's",
}
"""Tests whose schedulers get no connector of ours, and why."""
DESELECTED = {"test_is_kv_cache_spec_uniform": "starts a process with a deadline, which a busy machine misses"}
WITH_US = "TIDEKV_CORE_SUITE"
OURS = "ElasticConnector"


# ---- the plugin

_alive: list[Any] = []
_served: list[int] = []
_left_alone = False


def pytest_configure(config: Any) -> None:
    if os.environ.get(WITH_US) == "with":
        _put_in()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    items[:] = [item for item in items if item.originalname not in DESELECTED]


def pytest_runtest_setup(item: Any) -> None:
    global _left_alone
    _left_alone = item.originalname in LEFT_ALONE


def pytest_runtest_teardown(item: Any) -> None:
    while _alive:
        _alive.pop().shutdown()


def pytest_sessionfinish(session: Any) -> None:
    if os.environ.get(WITH_US) == "with":
        print(f"\nschedulers with our connector: {len(_served)}")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ["TIDEKV_CORE_SUITE_RESULTS"]).open("a") as results:
            print(json.dumps([report.nodeid, report.outcome]), file=results)


def _put_in() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheTensor

    import torch

    plain = Scheduler.__init__

    def with_connector(self: Any, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        parallel = vllm_config.parallel_config
        given = vllm_config.kv_transfer_config
        # A configuration that had a scheduler before has ours already.
        is_plain = (given is None or given.kv_connector == OURS) and not vllm_config.model_config.is_encoder_decoder
        if _left_alone or not is_plain or parallel.pipeline_parallel_size > 1 or not kv_cache_config.kv_cache_groups:
            plain(self, vllm_config, kv_cache_config, *args, **kwargs)
            return
        layers = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        page = max(group.kv_cache_spec.page_size_bytes for group in kv_cache_config.kv_cache_groups)
        stride = page * len(layers)
        kv_cache_config.kv_cache_tensors = [
            KVCacheTensor(size=stride * kv_cache_config.num_blocks, layers=layers, layer_stride=page, block_stride=stride)
        ]
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector=OURS,
            kv_connector_module_path="kvcached.integration.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"name": f"core_{len(_served)}", "page_size": "2M", "start_pages": "all", "warmup_blocks": 0},
        )
        worker = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        _alive.append(worker)
        with worker.get_mem_pool_context():
            torch.zeros(stride * kv_cache_config.num_blocks, dtype=torch.int8, device="cpu")
        worker.get_handshake_metadata()
        plain(self, vllm_config, kv_cache_config, *args, **kwargs)
        _alive.append(self.connector)
        self.connector.set_xfer_handshake_metadata_pp_aware({})
        _served.append(kv_cache_config.num_blocks)

    Scheduler.__init__ = with_connector


# ---- the comparison


def main(folder: Path) -> int:
    kept = folder / f"without-us-{_fingerprint()}.json"
    scratch = Path(tempfile.mkdtemp(prefix="kvv-core-"))
    try:
        _make_hub(scratch / "hf" / "hub")
        if not kept.exists():
            kept.write_text(json.dumps(_run(folder, "without", scratch)))
        runs = {"without": json.loads(kept.read_text()), "with": _run(folder, "with", scratch)}
        worse = _worse(runs)
        if worse:
            # Tests with a deadline of their own may miss it on a busy machine: they are asked once more.
            runs["with"].update(_run(folder, "with", scratch, worse))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    counts = {mode: sum(outcome == "passed" for outcome in run.values()) for mode, run in runs.items()}
    worse = _worse(runs)
    for test in worse:
        print(f"only without us: {test}: {runs['with'].get(test, 'not run')}")
    print(f"vLLM's tests/v1/core: {len(runs['without'])} run, {counts['without']} pass without us, {counts['with']} with us")
    if not counts["without"]:
        print("no test passes at all: the folder is not what it should be")
        return 2
    return 1 if worse else 0


def _worse(runs: dict[str, dict[str, str]]) -> list[str]:
    return sorted(test for test, outcome in runs["without"].items() if outcome == "passed" != runs["with"].get(test))


def _run(folder: Path, mode: str, scratch: Path, only: Sequence[str] = ("tests/v1/core",)) -> dict[str, str]:
    results = scratch / f"{mode}.jsonl"
    environment = {
        **os.environ,
        WITH_US: mode,
        "TIDEKV_CORE_SUITE_RESULTS": str(results),
        "PYTHONPATH": str(Path(__file__).parent),
        "HF_HOME": str(scratch / "hf"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "KVCACHED_LOG_LEVEL": "WARNING",
        "KVCACHED_RUNTIME_DIR": str(scratch),
        "KVCACHED_HOST_BUDGET": "4G",
        "KVCACHED_MAX_CACHED_TOKENS": "-1",
        "OMP_NUM_THREADS": "1",
    }
    ignored = [f"--ignore-glob=*{part}*" for part in IGNORED]
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "core_suite", "-p", "no:cacheprovider", "-q", "--tb=line"]
    done = subprocess.run(
        [*command, "-W", "ignore", "--basetemp", str(scratch / f"pytest-{mode}"), *ignored, *only],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )
    (folder / f"last-{mode}.log").write_text(done.stdout)
    print(mode + ": " + "; ".join(done.stdout.strip().splitlines()[-2:]))
    return dict(_outcomes(results))


def _fingerprint() -> str:
    """Of what the run without us depends on."""
    facts = json.dumps([MODELS, IGNORED, DESELECTED, sys.version])
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


def _outcomes(results: Path) -> Iterator[tuple[str, str]]:
    if results.exists():
        for line in results.read_text().splitlines():
            test, outcome = json.loads(line)
            yield test, outcome


def _make_hub(hub: Path) -> None:
    for name, config in MODELS.items():
        home = hub / ("models--" + name.replace("/", "--"))
        snapshot = home / "snapshots" / "0"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("0")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "tests" / "v1" / "core").is_dir():
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1])))
