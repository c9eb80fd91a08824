"""Two engines share a device. One is busy and takes all of it; the other wakes up, and is given its half.

    busy    ################################  ->  ################
    quiet                                         ################
"""

import multiprocessing
import sys
import tempfile
import time

import tidekv

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "auto"
BUDGET = 256 << 20
LAYOUT = tidekv.Layout.heads(layers=4, kv_heads=2, head_size=64, block_tokens=16)


def bar(bytes_held: int) -> str:
    return "#" * (bytes_held * 32 // BUDGET)


def busy(folder: str, say: "multiprocessing.Queue[str]", stop: "multiprocessing.synchronize.Event") -> None:
    """Holds as much as it gets, in requests of 64 blocks; ends some of them when it is asked to give memory back."""
    with tidekv.Pool(LAYOUT, name="busy", device=DEVICE, budget=BUDGET, runtime_dir=folder) as pool:
        requests = []
        while (blocks := pool.try_alloc(64)) is not None:
            requests.append(blocks)
        say.put(f"busy   {bar(pool.mapped_bytes)}  has all there is")
        while not stop.wait(0.001):
            if pool.reclaim_requested()["pages"] and requests:
                pool.free(requests.pop())
        say.put(f"busy   {bar(pool.mapped_bytes)}  gave back what the other's share is")


def main() -> None:
    start = multiprocessing.get_context("spawn")
    say, stop = start.Queue(), start.Event()
    with tempfile.TemporaryDirectory() as folder:
        other = start.Process(target=busy, args=(folder, say, stop))
        other.start()
        print(say.get(timeout=60))
        with tidekv.Pool(LAYOUT, name="quiet", device=DEVICE, budget=BUDGET, runtime_dir=folder) as pool:
            wanted = pool.geometry.blocks_per_page * (BUDGET // 2 // pool.geometry.page_bytes) * 3 // 4
            before = time.monotonic()
            pool.alloc(wanted, wait=30)
            print(f"quiet  {bar(pool.mapped_bytes)}  {wanted} blocks after {time.monotonic() - before:.3f} s")
            stop.set()
            print(say.get(timeout=60))
        other.join()


if __name__ == "__main__":
    main()
