//! kvcached's own way with segments, next to ours: a Python process that locks, maps, reads and writes the file.

mod support;

use support::{Worker, folder};
use tidekv_core::units::Bytes;
use tidekv_shm::{PoolName, PoolSegment, segment};

/// Opens, locks, maps, and takes all of it back each time, as kvcached's tools do. Odd rounds read, even rounds set the
/// limit; what it reads must fit together.
const TOOL: &str = r#"
import fcntl, mmap, os, struct, sys
path, rounds, limit = sys.argv[1], 0, 1000
print("@ready", flush=True)
sys.stdin.readline()
while rounds < 600:
    rounds += 1
    fd = os.open(path, os.O_RDWR)
    write = rounds % 2 == 0
    fcntl.flock(fd, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
    assert os.fstat(fd).st_size == 24, os.fstat(fd).st_size
    with mmap.mmap(fd, 24) as shm:
        total, used, prealloc = struct.unpack("qqq", shm[:24])
        assert prealloc == 2 * used, (used, prealloc)
        assert total == limit, (total, limit)
        if write:
            limit += 1000
            shm[:24] = struct.pack("qqq", limit, used, prealloc)
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
print("@%d" % limit, flush=True)
"#;

/// kvcached's rule for what is a pool, and what its `kvctl list` prints of it.
const LIST: &str = r#"
import os, struct, sys
folder = sys.argv[1]
for name in sorted(os.listdir(folder)):
    with open(os.path.join(folder, name), "rb") as file:
        data = file.read()
    if len(data) == 24 and struct.unpack("q", data[:8])[0] > 0:
        print("@%s %d %d" % ((name,) + struct.unpack("qq", data[:16])), flush=True)
"#;

#[test]
fn kvcacheds_tools_and_ours_use_one_segment_at_the_same_time() {
    let (_folder, dir) = folder();
    let pool = PoolSegment::create(&dir, &PoolName::new("pool").unwrap(), Bytes(1000)).unwrap();
    let Some(mut tool) = Worker::python(TOOL, pool.path()) else { return };
    tool.expect("ready");
    tool.tell("go");
    let mut published = 0;
    let mut used = 0;
    // Its last word is the limit that it left.
    let last = std::thread::scope(|scope| {
        let heard = scope.spawn(|| tool.hear());
        while !heard.is_finished() {
            used += 1;
            match pool.publish(Bytes(used), Bytes(2 * used)) {
                Ok(()) => published += 1,
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
            let limit = pool.limit().unwrap().0;
            assert!(limit.is_multiple_of(1000) && limit >= 1000, "{limit}");
            let view = segment::read(pool.path()).unwrap().unwrap();
            assert_eq!(view.prealloc, 2 * view.used);
        }
        heard.join().unwrap()
    });
    assert_eq!(last, "301000", "every limit it wrote was still there when it looked again");
    assert_eq!(pool.limit(), Some(Bytes(301_000)));
    assert!(published > 0);
}

#[test]
fn a_limit_that_kvcached_writes_wakes_those_who_watch() {
    let (_folder, dir) = folder();
    let pool = PoolSegment::create(&dir, &PoolName::new("pool").unwrap(), Bytes(1000)).unwrap();
    let watch = support::open(&dir).watch().unwrap();
    watch.add(pool.path()).unwrap();
    let Some(mut tool) = Worker::python(TOOL, pool.path()) else { return };
    tool.expect("ready");
    while watch.wait(std::time::Duration::ZERO).unwrap() {}
    tool.tell("go");
    // It writes through a mapping, which no event tells of; that it closes the file does.
    assert!(watch.wait(support::PATIENCE).unwrap());
    tool.expect("301000");
}

#[test]
fn kvcacheds_list_shows_our_pools() {
    let (_folder, dir) = folder();
    let a = PoolSegment::create(&dir, &PoolName::new("kvcached_vLLM_1").unwrap(), Bytes::gib(1)).unwrap();
    let _b = PoolSegment::create(&dir, &PoolName::new("kvcached_vLLM_2").unwrap(), Bytes(7)).unwrap();
    a.publish(Bytes::mib(3), Bytes::ZERO).unwrap();
    let _ledger = support::open(&dir);
    let Some(mut tool) = Worker::python(LIST, dir.path()) else { return };
    tool.expect("kvcached_vLLM_1 1073741824 3145728");
    tool.expect("kvcached_vLLM_2 7 0");
    assert!(tool.finish(), "and nothing else: the ledger is not taken for a pool");
}
