"""Everything that people do wrong once: an exception that says what to do, and a process that goes on."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import pytest
from kvcached import vmm_ops
from kvcached.integration.sglang import interfaces as sglang
from kvcached.integration.vllm import interfaces as vllm
from kvcached.kv_cache_manager import KVCacheManager
from kvcached.utils import KVCachedConfigError
from tidekv import Closed, TidekvError

PAGE = 2 << 20
LAYERS = 2


def test_double_init() -> None:
    vmm_ops.init_kvcached("cpu")
    with pytest.raises(RuntimeError, match=r"shutdown_kvcached\(\) first"):
        vmm_ops.init_kvcached("cpu")


@pytest.mark.parametrize("interfaces", [vllm, sglang])
def test_engines_may_init_twice_but_not_for_two_devices(interfaces: Any) -> None:
    interfaces.init_kvcached(device="cpu")
    interfaces.init_kvcached(device="cpu", world_size=1)
    with pytest.raises(RuntimeError, match="one device"):
        interfaces.init_kvcached(device="cuda:1")


@pytest.mark.parametrize("interfaces", [vllm, sglang])
def test_the_ranks_have_two_names(interfaces: Any) -> None:
    with pytest.raises(ValueError, match="two names of one number"):
        interfaces.init_kvcached(device="cpu", world_size=2, tp_size=3)
    vllm.init_kvcached(device="cpu", tp_size=4)
    assert vllm.get_world_size() == 4


def test_use_before_init() -> None:
    for call in (
        lambda: vmm_ops.create_kv_tensors(2 * PAGE, 1, "cpu", 1),
        lambda: vmm_ops.map_to_kv_tensors([0]),
        lambda: vllm.alloc_kv_cache((2, 1, 16, 1, 1), 16, None, "cpu", 1),
        lambda: sglang.alloc_kv_cache((1, 1, 1), None, "cpu", 1),
        lambda: vllm.get_kv_cache_manager(1, 1, 1, 1),
        lambda: sglang.get_kv_cache_manager(1, 1, 1, 1),
        vllm.get_world_size,
    ):
        with pytest.raises(RuntimeError, match=r"Please call init_kvcached\(\) first"):
            call()
    assert vmm_ops.kv_tensors_created() is False


def test_use_after_shutdown(manager: Any) -> None:
    made = manager()
    blocks = made.alloc(4)
    vmm_ops.shutdown_kvcached()
    vmm_ops.shutdown_kvcached()
    for call in (lambda: made.alloc(1), lambda: made.free(blocks), made.available_size, made.trim):
        with pytest.raises(Closed):
            call()
    with pytest.raises(RuntimeError, match="init_kvcached"):
        vmm_ops.map_to_kv_tensors([0])
    vmm_ops.init_kvcached("cpu")


@pytest.mark.parametrize("size", [0, 3, 16, -1])
def test_wrong_dtype_size(size: int) -> None:
    vmm_ops.init_kvcached("cpu")
    with pytest.raises(ValueError, match="1, 2, 4 or 8"):
        vmm_ops.create_kv_tensors(2 * PAGE, size, "cpu", 1)


def test_wrong_sizes_and_devices() -> None:
    with pytest.raises(ValueError, match="multiple of 2 MiB"):
        vmm_ops.init_kvcached("cpu", page_size=4096)
    vmm_ops.init_kvcached("cpu")
    with pytest.raises(ValueError, match=str(4 * PAGE)):
        vmm_ops.create_kv_tensors(3 * PAGE, 1, "cpu", 1)
    with pytest.raises(ValueError, match="at least one layer"):
        vmm_ops.create_kv_tensors(2 * PAGE, 1, "cpu", 0)
    with pytest.raises(ValueError, match="initialized for cpu"):
        vmm_ops.create_kv_tensors(2 * PAGE, 1, "cuda:0", 1)
    vmm_ops.create_kv_tensors(2 * PAGE, 1, "cpu", 1)
    with pytest.raises(RuntimeError, match="group 0 has its tensors already"):
        vmm_ops.create_kv_tensors(2 * PAGE, 1, "cpu", 1)


def test_blocks_larger_than_pages_name_the_variable() -> None:
    with pytest.raises(KVCachedConfigError, match="KVCACHED_PAGE_SIZE_MB=6"):
        KVCacheManager(100, 16, 5 * (1 << 20) // 16, LAYERS)
    with pytest.raises(KVCachedConfigError, match="at least 2048 blocks"):
        KVCacheManager(10, 16, 64, LAYERS)
    with pytest.raises(ValueError, match="num_layers is 0"):
        KVCacheManager(4096, 16, 64, 0)


def test_a_manager_for_other_layers_than_the_tensors_have(tensors: Any) -> None:
    tensors(4)
    with pytest.raises(KVCachedConfigError, match="same num_layers"):
        KVCacheManager(64, 16, PAGE // 256, LAYERS + 1)


def test_a_group_has_one_manager(manager: Any) -> None:
    made = manager()
    with pytest.raises(TidekvError, match="close it first"):
        KVCacheManager(128, 16, PAGE // 256, LAYERS)
    assert made.alloc(1) is not None


def test_fork_after_init(python: Any) -> None:
    said = python(
        """
import os
from kvcached import vmm_ops
from kvcached.kv_cache_manager import KVCacheManager
vmm_ops.init_kvcached("cpu")
vmm_ops.create_kv_tensors(8 << 21 << 1, 1, "cpu", 2)
manager = KVCacheManager(128, 16, (2 << 20) // 256, 2)
manager.alloc(1)
child = os.fork()
if child == 0:
    said = []
    for call in (lambda: manager.alloc(1), lambda: vmm_ops.map_to_kv_tensors([0]),
                 lambda: vmm_ops.create_kv_tensors(2 << 22, 1, "cpu", 2, group_id=5)):
        try:
            call()
        except Exception as error:
            said.append(type(error).__name__)
    os._exit(0 if said == ["Forked"] * 3 else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), len(manager.alloc(4)))
"""
    )
    assert said.stdout == "0 4\n", said.stdout + said.stderr


def test_objects_cannot_be_pickled_and_say_why(manager: Any) -> None:
    made = manager()
    with pytest.raises(TypeError, match="process"):
        pickle.dumps(made)
    with pytest.raises(TypeError, match="process"):
        pickle.dumps(vmm_ops.PageAllocator(LAYERS, 8 * PAGE, PAGE))


def test_the_other_distribution_is_named_once(python: Any, tmp_path: Any) -> None:
    info = tmp_path / "kvcached-0.4.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcached\nVersion: 0.4.2\n")
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(tmp_path)])
    said = python("import kvcached, kvcached.utils, kvcached.vmm_ops", PYTHONPATH=path)
    assert said.returncode == 0
    assert said.stderr.count("two distributions provide the package") == 1
    assert "kvcached 0.4.2" in said.stderr and "pip uninstall kvcached" in said.stderr


def test_without_the_other_nothing_is_said(python: Any) -> None:
    assert python("import kvcached").stderr == ""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVCACHED_PAGE_SIZE_MB", "3"),
        ("KVCACHED_PAGE_SIZE_MB", "two"),
        ("KVCACHED_PAGE_SIZE_MB", "-2"),
        ("KVCACHED_GPU_UTILIZATION", "much"),
        ("KVCACHED_GPU_UTILIZATION", "1.5"),
        ("KVCACHED_MAX_CACHED_TOKENS", "x"),
        ("KVCACHED_CONTIGUOUS_LAYOUT", "perhaps"),
    ],
)
def test_malformed_variables_are_named_at_import(python: Any, variable: str, value: str) -> None:
    said = python("import kvcached.utils", **{variable: value})
    assert said.returncode == 1 and f"ValueError: {variable}='{value}' is not" in said.stderr


def test_variables_and_their_defaults(python: Any) -> None:
    names = (
        "PAGE_SIZE GPU_UTILIZATION PAGE_PREALLOC_ENABLED MIN_RESERVED_PAGES MAX_RESERVED_PAGES MAX_CACHED_BLOCKS "
        "SANITY_CHECK MAX_CACHED_TOKENS CONTIGUOUS_LAYOUT SHM_DIR"
    ).split()
    program = f"import kvcached.utils as u; print(*[getattr(u, name) for name in {names}])"
    assert python(program, KVCACHED_RUNTIME_DIR=None).stdout.split() == (
        "2097152 0.95 True 5 10 1000 False 16000 True /dev/shm".split()
    )
    changed = python(
        program,
        KVCACHED_PAGE_SIZE_MB="4",
        KVCACHED_GPU_UTILIZATION="0.5",
        KVCACHED_PAGE_PREALLOC_ENABLED="0",
        KVCACHED_MIN_RESERVED_PAGES="1",
        KVCACHED_MAX_RESERVED_PAGES="2",
        KVCACHED_MAX_CACHED_BLOCKS="3",
        KVCACHED_SANITY_CHECK="TRUE",
        KVCACHED_MAX_CACHED_TOKENS="-1",
        KVCACHED_CONTIGUOUS_LAYOUT="false",
        KVCACHED_RUNTIME_DIR="/somewhere",
    )
    assert changed.stdout.split() == "4194304 0.5 False 1 2 3 True -1 False /somewhere".split()


def test_names_of_instances(python: Any) -> None:
    program = "from kvcached.utils import DEFAULT_IPC_NAME; print(DEFAULT_IPC_NAME)"
    assert python(program, KVCACHED_IPC_NAME="my pool/ü" + "x" * 90).stdout == ("my-pool--" + "x" * 90)[:64] + "\n"
    found = python(program, KVCACHED_IPC_NAME=None).stdout.strip()
    assert found.startswith("kvcached_") and found.endswith(f"_{os.getpgid(0)}"), found
    assert sys.version_info >= (3, 10)


def test_small_helpers() -> None:
    import logging

    from kvcached import utils
    from kvcached.locks import NoOpCondition, NoOpLock

    assert [utils.align_to(x, 8) for x in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert utils.align_up_to_page(1, 1 << 20) == 2
    with pytest.raises(KVCachedConfigError, match="KVCACHED_PAGE_SIZE_MB"):
        utils.align_up_to_page(1, 3 << 20)
    assert [utils.normalize_gpu_device(name) for name in ("hip", "hip:1", "cuda:2", "cpu")] == [
        "cuda", "cuda:1", "cuda:2", "cpu",
    ]  # fmt: skip
    logger = utils.get_kvcached_logger("kvcached.test")
    assert logger is utils.get_kvcached_logger("kvcached.test") and len(logger.handlers) == 1
    assert not logger.propagate and logger.level == logging.INFO
    with NoOpLock() as lock, NoOpCondition() as condition:
        assert lock and condition
    assert NoOpCondition().wait_for(lambda: True) and not NoOpLock().locked()
