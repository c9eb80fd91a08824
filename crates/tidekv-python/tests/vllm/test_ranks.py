"""Several ranks, several stages, several connectors."""

from __future__ import annotations

import pytest
from engine import Engine, Shape
from test_workload import workload


@pytest.mark.parametrize(
    "shape",
    [
        Shape(layers=(2, 3), blocks=256),
        Shape(layers=(3,), blocks=160, beside=[{"kv_connector": "Beside", "kv_connector_module_path": "beside", "kv_role": "kv_both"}]),
    ],
    ids=["two stages of unequal layers", "beside another connector"],
)
def test_requests_finish_and_pages_are_the_same_everywhere(shape: Shape) -> None:
    with Engine(shape) as engine:
        names = workload(engine, 12)
        engine.run(until=lambda: engine.steps >= 5)
        page = engine.pool.geometry.page_bytes
        engine.pool.resize(6 * page)
        engine.run(until=lambda: engine.steps >= 40)
        held = engine.blocks._fleet.held(0)
        assert len(held) == shape.ranks and len({tuple(pages) for pages in held.values()}) == 1
        engine.pool.resize(1 << 40)
        engine.run()
        assert all(engine.output(name) for name in names)
        engine.settle()
        engine.check_no_block_is_lost()
        if shape.beside:
            other = engine.scheduler.connector.sub_connectors[1]
            assert other.steps == engine.steps and other.done == engine.steps
