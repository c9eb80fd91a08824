"""Ways to send one order to all workers, as ``python -m kvcached.bench_tp_ipc`` compares them.

A new one is a file here, or in ``./broadcast_map_impl/`` where the benchmark is started, that defines
``broadcast_map_to_kv_tensors_to_workers(tp_size, offsets)``; an ``async def`` is wrapped with ``asyncio.run``.
"""
