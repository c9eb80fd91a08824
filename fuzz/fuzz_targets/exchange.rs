//! Exchanges whose directory anybody of the same user may have damaged. Whatever stands there, every call returns: no
//! panic, no hang, no address outside; and while nobody writes over it, what is borrowed is what was published.
//!
//! An input is a list of steps of three bytes: what, a key, and a number; a step that writes over the directory takes the
//! eight bytes behind it too.

#![no_main]

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena, ArenaConfig, ArenaName, Handle, Prefault};
use tidekv_shm::exchange::{Exchange, ExchangeConfig, Key, Meta, PublishOptions};

/// Where the arena's head says which block the directory is.
const EXCHANGE_AT: u64 = 256;

/// An arena without a name, so that nothing is left whatever ends the fuzzer, and its file.
static WORLD: LazyLock<(Arena, File)> = LazyLock::new(|| {
    let folder = format!("/dev/shm/kvcached-fuzz-exchange-{}", std::process::id());
    let (dir, name) = (RuntimeDir::at(&folder), ArenaName::new("fuzz").expect("a name"));
    let size = Bytes::mib(4);
    let config = ArenaConfig { segment: Bytes::mib(1), limit: size, initial: size, ..ArenaConfig::default() };
    let arena = Arena::create(&dir, &name, &config, Prefault::Off).expect("an arena");
    let file = File::open(arena.path()).expect("the file");
    Arena::unlink(&dir, &name).expect("its name");
    std::fs::remove_dir(folder).expect("its folder");
    (arena, file)
});

fuzz_target!(|data: &[u8]| {
    let (arena, file) = &*WORLD;
    let config = ExchangeConfig { entries: 64 };
    let exchange = Exchange::open(arena, &config).expect("a new one for every input");
    let mut bits = [0; 8];
    file.read_exact_at(&mut bits, EXCHANGE_AT).expect("a read");
    let directory = Handle::from_bits(u64::from_le_bytes(bits)).expect("a handle");
    let mut local = arena.local().expect("a cache");
    let mut publisher = exchange.publisher(PublishOptions { budget: Bytes::kib(200), ..PublishOptions::default() });
    let mut subscription = exchange.subscribe().expect("a place");
    let (mut borrowed, mut model, mut sound) = (Vec::new(), HashMap::new(), true);
    let mut rest = data;
    while let [what, key, number, behind @ ..] = rest {
        rest = behind;
        let name = Key(u128::from(*key));
        match what % 8 {
            0 | 1 => {
                let Ok(handle) = local.alloc(usize::from(*number) * 100) else { continue };
                arena.block(handle).expect("ours").copy_in(0, &[*key, *number]).expect("inside");
                let meta = Meta { tokens: u32::from(*number), ..Meta::of_bytes(2) };
                match publisher.publish(name, handle, meta) {
                    Ok(()) => drop(model.insert(*key, *number)),
                    Err(_) => local.free(handle).expect("still ours"),
                }
            }
            2 | 3 => {
                let take = what % 8 == 3;
                let found = if take { exchange.take(name) } else { exchange.borrow(name) };
                let expected = if take { model.remove(key) } else { model.get(key).copied() };
                if sound {
                    let found = found.as_ref().expect("a sound directory");
                    assert_eq!(found.as_ref().map(|found| found.meta().tokens), expected.map(u32::from));
                }
                borrowed.extend(found.ok().flatten());
            }
            4 => {
                let gone = publisher.withdraw(name).expect("the process that opened it");
                assert!(!sound || gone == model.contains_key(key));
                model.remove(key);
            }
            5 => drop(subscription.poll().expect("the process that opened it")),
            6 => {
                if !borrowed.is_empty() {
                    borrowed.swap_remove(usize::from(*number) % borrowed.len());
                }
            }
            _ => {
                let Some((bytes, behind)) = rest.split_first_chunk::<8>() else { break };
                rest = behind;
                let block = arena.block(directory).expect("held");
                let at = (usize::from(*key) << 8 | usize::from(*number)) * 8 % (block.len() - 8);
                block.copy_in(at, bytes).expect("inside");
                sound = false;
                // Whoever opens it now finds it sound or says what is wrong.
                if let Err(error) = Exchange::open(arena, &config) {
                    assert!(!error.to_string().is_empty());
                }
            }
        }
        for one in &borrowed {
            let _ = one.copy_out(&mut [0; 64]).expect("held");
        }
    }
});
