"""Layouts against plain arithmetic: where a block's bytes are, written down once more and dully."""

from __future__ import annotations

import itertools

import pytest
import tidekv
from tidekv import Layout

LAYOUTS = ["slab", "per-layer", "interleaved"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "gqa", "wide-k", "mla", "raw"])
def test_no_two_blocks_share_a_byte(layout: str, kind: str) -> None:
    made = make(layout, kind)
    geometry = made.geometry(pages=3)
    assert geometry.block_count == 3 * geometry.blocks_per_page
    ids = [geometry.kernel_id(index) for index in range(geometry.block_count)]
    assert len(set(ids)) == len(ids) and max(ids) < geometry.id_count
    spans = []
    for block, layer in itertools.product(ids, range(made.layers)):
        for value in range(made.buffers_per_layer):
            view = geometry.view(layer, bool(value))
            start = geometry.byte_offset(block, layer, bool(value))
            itemsize = view.block_bytes // size(view.shape[1:])
            assert start == view.offset + block * view.strides[0] * itemsize
            spans.append((start, start + view.block_bytes))
    spans.sort()
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert spans[-1][1] <= geometry.reservation_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_and_indices_are_each_others_inverse(layout: str) -> None:
    geometry = make(layout, "gqa").geometry(pages=4)
    known = {geometry.kernel_id(index): index for index in range(geometry.block_count)}
    for block in range(geometry.id_count):
        assert geometry.block_index(block) == known.get(block)
    for block, index in known.items():
        assert geometry.page_of(block) == index // geometry.blocks_per_page


def test_shapes_are_what_attention_kernels_expect() -> None:
    heads = Layout.heads(2, 4, 64, dtype="float16", block_tokens=8).geometry(pages=1).view(1, True)
    assert heads.shape[1:] == (8, 4, 64) and heads.strides == (8 * 4 * 64, 4 * 64, 64, 1)
    latent = Layout.latent(2, 576, dtype="bfloat16", block_tokens=16).geometry(pages=1).view(0)
    assert latent.shape[1:] == (16, 576) and latent.strides[1:] == (576, 1)
    raw = Layout.raw(4, 1024, chunk_bytes=8192).geometry(pages=1).view(3)
    assert raw.shape[1:] == (1024,) and raw.dtype == "uint8"


def test_layouts_are_values() -> None:
    assert make("slab", "gqa") == make("slab", "gqa")
    assert hash(make("slab", "gqa")) == hash(make("slab", "gqa"))
    assert make("slab", "gqa") != make("per-layer", "gqa")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Layout.heads(0, 1, 1),
        lambda: Layout.heads(1, 1, 64, dtype="float7"),
        lambda: Layout.heads(1, 1, 64, layout="spiral"),
        lambda: Layout.latent(1, 64).geometry(),
        lambda: Layout.latent(1, 64).geometry(pages=1, capacity=1),
        lambda: Layout.latent(1, 64).geometry(pages=1, device="tpu"),
        lambda: Layout.latent(1, 64).geometry(pages=1).view(0, True),
        lambda: Layout.latent(1, 64).geometry(pages=1).view(1),
        lambda: Layout.raw(1, 8192, layout="per-layer", chunk_bytes=4096).geometry(pages=1),
    ],
)
def test_nonsense_is_refused_with_advice(wrong) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(tidekv.BadArgument) as caught:
        wrong()
    assert isinstance(caught.value, ValueError) and len(str(caught.value)) > 15


def make(layout: str, kind: str) -> Layout:
    chunk = None if layout == "slab" else 16384
    match kind:
        case "mha":
            return Layout.heads(2, 8, 32, dtype="float32", block_tokens=4, layout=layout, chunk_bytes=chunk)
        case "gqa":
            return Layout.heads(3, 2, 24, dtype="float16", block_tokens=5, layout=layout, chunk_bytes=chunk)
        case "wide-k":
            return Layout.heads(2, 2, 48, value_size=32, dtype="bfloat16", block_tokens=4, layout=layout, chunk_bytes=chunk)
        case "mla":
            return Layout.latent(3, 144, dtype="bfloat16", block_tokens=4, layout=layout, chunk_bytes=chunk)
        case _:
            return Layout.raw(6, 1536, layout=layout, chunk_bytes=chunk)


def size(shape: tuple[int, ...]) -> int:
    product = 1
    for part in shape:
        product *= part
    return product


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [None, "", "4"])
def test_a_geometry_can_be_the_one_that_a_pool_will_have(
    monkeypatch: pytest.MonkeyPatch, layout: str, page_size: str | None
) -> None:
    if page_size is not None:
        monkeypatch.setenv("KVCACHED_PAGE_SIZE_MB", page_size)
    made = Layout.heads(2, 2, 64, layout=layout)
    foreseen = made.geometry(pages=3, device="cpu", env=True)
    with tidekv.Pool(made, device="cpu", pages=3, name="foreseen") as pool:
        assert (pool.geometry.page_bytes, pool.geometry.id_count) == (foreseen.page_bytes, foreseen.id_count)
    assert (foreseen.chunk_bytes == 4 << 20) == (page_size == "4")
    assert made.geometry(pages=3).chunk_bytes < 4 << 20
    said = Layout.heads(2, 2, 64, layout=layout, chunk_bytes=1 << 20)
    assert said.geometry(pages=3, env=True).chunk_bytes == 1 << 20
