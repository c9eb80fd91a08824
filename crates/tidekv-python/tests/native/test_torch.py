"""Tensors against a plain reference: all layouts, all kinds of attention, on the CPU and where there is one on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import tidekv
from tidekv import Layout, Pool, Region

torch = pytest.importorskip("torch")

HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda:0", marks=[pytest.mark.cuda, pytest.mark.skipif(not HAS_GPU, reason="SKIPPED: no GPU")])]
KINDS = ["mha", "gqa", "mqa", "mla", "wide-k", "fp8"]

pytestmark = pytest.mark.torch


def make(kind: str, layout: str, dtype: str = "bfloat16") -> Layout:
    common: dict[str, Any] = {"layout": layout, "block_tokens": 16, "dtype": dtype}
    match kind:
        case "mha":
            return Layout.heads(4, 8, 64, **common)
        case "gqa":
            return Layout.heads(4, 2, 128, **common)
        case "mqa":
            return Layout.heads(4, 1, 64, **common)
        case "wide-k":
            return Layout.heads(4, 4, 192, value_size=128, **common)
        case "mla":
            return Layout.latent(4, 576, **common)
        case _:
            return Layout.heads(4, 4, 64, **{**common, "dtype": "float8_e4m3fn"})


def numbers(shape: tuple[int, ...], seed: int, like: Any) -> Any:
    """The same values for the same seed, exactly representable everywhere, even in float8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(torch.float32).to(like.dtype).to(like.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["slab", "per-layer", "interleaved"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_hold_what_a_plain_cache_holds(kind: str, layout: str, device: str) -> None:
    """Writes by block and by token, reads by gather, over frees and remaps, against a dictionary of tensors."""
    with Pool(make(kind, layout), device=device, pages=3, name="torch", budget=1 << 30, reserve=(0, 1)) as pool:
        plain: dict[tuple[int, int, int], Any] = {}
        for turn in range(3):
            blocks = pool.alloc(min(24, pool.geometry.block_count - 1))
            tensors = pool.tensors()
            for block in blocks:
                for layer, kv in enumerate(tensors):
                    for side, tensor in enumerate(kv):
                        if tensor is None:
                            continue
                        assert tensor.device.type == device.partition(":")[0]
                        seed = turn * 7919 + block * 31 + layer * 3 + side
                        plain[block, layer, side] = numbers(tuple(tensor.shape[1:]), seed, tensor)
                        tensor[block] = plain[block, layer, side]
            index = torch.tensor(blocks, device=device)
            for layer, kv in enumerate(tensors):
                for side, tensor in enumerate(kv):
                    if tensor is None:
                        assert kind == "mla"
                        continue
                    # As an attention kernel reads it: a gather by block ids.
                    read = bits(tensor)[index]
                    wanted = torch.stack([bits(plain[block, layer, side]) for block in blocks])
                    assert torch.equal(read, wanted)
            half = blocks[::2]
            pool.free(half)
            kept = blocks[1::2]
            pool.trim()
            again = pool.alloc(len(half))
            for block in kept:
                for layer, kv in enumerate(tensors):
                    for side, tensor in enumerate(kv):
                        if tensor is not None:
                            assert torch.equal(bits(tensor[block]), bits(plain[block, layer, side]))
            pool.free(kept + again)
            pool.trim()
        assert pool.mapped_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_of_attention_is_the_same_as_over_plain_memory(device: str) -> None:
    torch.manual_seed(0)
    heads, size, tokens = 2, 32, 75
    with Pool(Layout.heads(2, heads, size, dtype="float32"), device=device, pages=2, name="steps", budget=1 << 30) as pool:
        blocks = torch.tensor(pool.alloc(-(-tokens // 16)), device=device)
        plain = [torch.randn(2, tokens, heads, size, device=device) for _ in range(2)]
        for kv, (key, value) in zip(pool.tensors(), plain):
            slots = torch.arange(tokens, device=device)
            place = (blocks[slots // 16], slots % 16)
            kv.key[place], kv.value[place] = key, value
            query = torch.randn(1, heads, 1, size, device=device)
            gathered = [side[blocks].flatten(0, 1)[:tokens] for side in kv]
            ours = attention(query, *gathered)
            assert torch.equal(ours, attention(query, key, value))


def attention(query: Any, key: Any, value: Any) -> Any:
    def by_head(part: Any) -> Any:
        return part.transpose(0, 1).unsqueeze(0).contiguous()

    return torch.nn.functional.scaled_dot_product_attention(query, by_head(key), by_head(value))


@pytest.mark.parametrize("device", DEVICES)
def test_hybrid_groups_have_a_pool_each(device: str) -> None:
    full = Layout.heads(2, 4, 64, dtype="bfloat16")
    window = Layout.heads(6, 2, 64, dtype="bfloat16")
    with (
        Pool(full, device=device, pages=2, name="hybrid", group=0, budget=1 << 30) as one,
        Pool(window, device=device, pages=2, name="hybrid", group=1, budget=1 << 30) as two,
    ):
        (a,), (b,) = one.alloc(1), two.alloc(1)
        for pool, block, mark in [(one, a, 3.0), (two, b, 5.0)]:
            for kv in pool.tensors():
                kv.key[block], kv.value[block] = mark, -mark
        for pool, block, mark in [(one, a, 3.0), (two, b, 5.0)]:
            assert all((kv.key[block] == mark).all() and (kv.value[block] == -mark).all() for kv in pool.tensors())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_flat_tensors_of_a_region(device: str, itemsize: int) -> None:
    """What `create_kv_tensors` hands out."""
    chunk = 2 << 20
    region = Region(device, pages=4, chunk_bytes=chunk, chunks=2, contiguous=False)
    dtype = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}[itemsize]
    flat = torch.from_dlpack(region.view(dtype, (region.nbytes // itemsize,)))
    assert flat.dtype == getattr(torch, dtype) and flat.data_ptr() == region.base_address
    region.map([1])
    for part in range(2):
        start = (part * 4 + 1) * chunk // itemsize
        flat[start : start + chunk // itemsize] = part + 1
    if device == "cpu":
        assert region.read(chunk, itemsize) == (1).to_bytes(itemsize, "little")
    assert int(flat[chunk // itemsize]) == 1 and int(flat[(4 + 2) * chunk // itemsize - 1]) == 2
    del flat
    gc.collect()
    region.close()


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_outlive_their_pool_and_the_memory_goes(device: str) -> None:
    pool = Pool(make("gqa", "slab"), device=device, pages=2, name="outlived", budget=1 << 30)
    blocks = pool.alloc(4)
    tensors = pool.tensors()
    tensors[0].key[blocks[0]] = 1.0
    address = tensors[0].key.data_ptr()
    pool.close()
    with pytest.raises(tidekv.Closed):
        pool.tensors()
    assert tensors[0].key.data_ptr() == address and tensors[0].key.shape[0] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_far_larger_than_memory_costs_nothing(device: str) -> None:
    layout = Layout.heads(2, 8, 128, layout="per-layer")
    with Pool(layout, device=device, capacity=200 << 30, name="large", budget=1 << 30) as pool:
        kv = pool.tensors()
        last = pool.geometry.kernel_id(pool.geometry.block_count - 1)
        assert kv[1].value.numel() * 2 > 40 << 30 and last * 16 < 1 << 31
        block = pool.alloc(1)[0]
        kv[1].value[block] = 4.0
        assert pool.mapped_bytes < 1 << 30


def bits(tensor: Any) -> Any:
    """float8 cannot be compared or gathered everywhere; its bytes can."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
