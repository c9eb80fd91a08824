"""The arrays of a step against a dull model: lists of slots, one token after another."""

from __future__ import annotations

import random

import pytest
import tidekv
from tidekv import Batch

numpy = pytest.importorskip("numpy")

BLOCK = 4


def make(**more: int) -> Batch:
    sizes = {"block_tokens": BLOCK, "max_rows": 6, "max_row_tokens": 64, "max_step_tokens": 96, "max_ids": 64, **more}
    return Batch(**sizes)


def test_steps_agree_with_lists_of_slots() -> None:
    chance = random.Random(3)
    batch = make()
    ids = [100 + 7 * number for number in range(40)]
    batch.lend(ids)
    held: dict[int, int] = {}
    number = 0
    for _ in range(400):
        if chance.random() < 0.3 and len(held) < batch.max_rows:
            number += 1
            batch.admit(number)
            held[number] = 0
        elif chance.random() < 0.2 and held:
            gone = chance.choice(sorted(held))
            assert batch.release(gone) == []
            del held[gone]
        order = batch.sequences()
        assert sorted(order) == sorted(held)
        lens = [min(chance.randrange(0, 6), 64 - held[sequence]) for sequence in order]
        free = batch.free_blocks
        wanted = sum(-(-(held[s] + q) // BLOCK) - -(-held[s] // BLOCK) for s, q in zip(order, lens))
        if wanted > free:
            with pytest.raises(tidekv.PoolExhausted) as caught:
                batch.step(lens)
            assert (caught.value.needed, caught.value.available, caught.value.shortage) == (wanted, free, "batch")
            assert batch.free_blocks == free
            continue
        step = batch.step(lens, pad_rows=6)
        slots: list[int] = []
        for row, (sequence, query) in enumerate(zip(order, lens)):
            blocks = batch.blocks_of(sequence)
            assert blocks is not None and batch.row_of(sequence) == row
            before = held[sequence]
            held[sequence] += query
            assert len(blocks) == -(-held[sequence] // BLOCK) and set(blocks) <= set(ids)
            slots += [blocks[token // BLOCK] * BLOCK + token % BLOCK for token in range(before, held[sequence])]
        rest = 6 - len(order)
        lengths = [held[sequence] for sequence in order]
        assert array(step["slot_mapping"]) == slots
        assert array(step["seq_lens"]) == lengths + [0] * rest
        assert array(step["context_lens"]) == [n - q for n, q in zip(lengths, lens)] + [0] * rest
        starts = [sum(lens[:row]) for row in range(len(lens) + 1)]
        assert array(step["query_start_loc"]) == starts + starts[-1:] * rest
        assert step["tokens"] == len(slots) and step["batch"] == len(order)
        table = numpy.from_dlpack(batch.block_table())
        for row, sequence in enumerate(order):
            blocks = batch.blocks_of(sequence) or []
            assert table[row].tolist() == blocks + [-1] * (table.shape[1] - len(blocks))


def array(view: tidekv.View) -> list[int]:
    values: list[int] = numpy.from_dlpack(view).tolist()
    return values


def test_arrays_are_of_one_step_alone() -> None:
    batch = make()
    batch.lend(range(10))
    batch.admit(1)
    first = numpy.from_dlpack(batch.step([3])["slot_mapping"])
    batch.step()
    assert first.tolist() == [0, 1, 2]


def test_prefixes_are_shared_and_come_back() -> None:
    batch = make()
    batch.lend(range(20))
    batch.admit(1)
    batch.step([10])
    shared = batch.share(1, 2)
    assert shared == [0, 1]
    batch.admit(2, 8, shared=shared)
    assert (batch.blocks_of(2) or [])[:2] == shared
    assert batch.release(1) == [], "2 still reads them"
    assert batch.release(2) == shared
    batch.admit(3)
    batch.step([6])
    lost, freed = batch.preempt(3)
    assert lost == 6 and len(freed) == 2
    rest = batch.take_back(100)
    assert sorted(rest + freed + shared) == list(range(20)) and batch.free_blocks == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda batch: batch.release(9),
        lambda batch: batch.admit(1),
        lambda batch: batch.lend([0]),
        lambda batch: batch.withdraw([50]),
        lambda batch: batch.step([1, 2]),
        lambda batch: batch.truncate(1, 100),
        lambda batch: batch.admit(2, 100),
        lambda batch: batch.step(pad_rows=100),
        lambda batch: make(block_tokens=3),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(wrong) -> None:  # type: ignore[no-untyped-def]
    batch = make()
    batch.lend(range(8))
    batch.admit(1)
    with pytest.raises(tidekv.BadArgument):
        wrong(batch)
    assert batch.sequences() == [1] and batch.free_blocks == 8
