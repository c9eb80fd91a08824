//! Two processes: one computes KV blocks ("prefill"), the other reads them in place ("decode").
//!
//! `cargo run --release -p tidekv-shm --example prefill_decode`
//!
//! ```text
//!   prefill                                       decode
//!   makes an arena, starts decode                 attaches, subscribes
//!   allocates a block, writes it, publishes it    hears of it, takes it, checks every byte, lets go
//!   is held up at 4 blocks outstanding            keeps the first four until it hears that prefill is held up
//!   publishes "end", waits for decode             ends
//!   deletes the arena
//! ```
//!
//! Each block is as large as 16 tokens of a small model need: 16 layers, 4 KiB for each token's keys and values.

use std::error::Error;
use std::io::{self, Write};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use tidekv_core::units::Bytes;
use tidekv_shm::RuntimeDir;
use tidekv_shm::arena::{Arena, ArenaConfig, ArenaName, Prefault};
use tidekv_shm::exchange::{
    Delivery, Exchange, ExchangeConfig, Key, Meta, News, PublishError, PublishOptions, Subscription,
};

const BLOCKS: u64 = 64;
const TOKENS: u32 = 16;
const BLOCK_BYTES: usize = 16 * 4096 * TOKENS as usize;
/// Blocks that prefill may be ahead of decode.
const AHEAD: u64 = 4;
/// Longer than anything takes; only a failure reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

type Failure = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let dir = RuntimeDir::from_env();
    let mut arguments = std::env::args().skip(1);
    if let (Some("decode"), Some(name)) = (arguments.next().as_deref(), arguments.next()) {
        return decode(&dir, &ArenaName::new(&name)?);
    }
    let name = ArenaName::new(&format!("prefill-decode-{}", std::process::id()))?;
    let start = || Command::new(std::env::current_exe()?).args(["decode", name.as_str()]).spawn();
    let outcome = prefill(&dir, &name, start);
    // Also after a failure nothing stays.
    Arena::unlink(&dir, &name)?;
    outcome
}

fn say(who: &str, what: &str) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{who:8} {what}")
}

/// The bytes of a block: what a model would compute.
fn keys_and_values(number: u64) -> Vec<u8> {
    let words = (0..BLOCK_BYTES as u64 / 8).map(|at| (number << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

fn hello_key() -> Key {
    Key::of_name("decode is here")
}

fn held_up_key() -> Key {
    Key::of_name("prefill is held up")
}

fn end_key() -> Key {
    Key::of_name("end of the sequence")
}

/// Publishes the blocks of one sequence to a process that `start` starts.
pub(crate) fn prefill(
    dir: &RuntimeDir,
    name: &ArenaName,
    start: impl FnOnce() -> io::Result<Child>,
) -> Result<(), Failure> {
    let config = ArenaConfig { limit: Bytes::mib(64), ..ArenaConfig::default() };
    let arena = Arena::create(dir, name, &config, Prefault::Background)?;
    let exchange = Exchange::open(&arena, &ExchangeConfig::default())?;
    let mut ready = exchange.subscribe()?;
    let mut decode = start()?;
    let outcome = publish_all(&arena, &exchange, &mut ready);
    if outcome.is_err() {
        // It may be waiting for what never comes.
        let _ = decode.kill();
    }
    let status = decode.wait()?;
    outcome?;
    if !status.success() {
        return Err(format!("decode ended with {status}").into());
    }
    say("prefill", "decode has read everything, and everything it held came back")?;
    Ok(())
}

fn publish_all(arena: &Arena, exchange: &Exchange, ready: &mut Subscription) -> Result<(), Failure> {
    let mut local = arena.local()?;
    let budget = Bytes(AHEAD * BLOCK_BYTES as u64);
    let mut publisher = exchange.publisher(PublishOptions { budget, delivery: Delivery::Lossless });
    // Without a budget, so that it is never held up.
    let mut notes = exchange.publisher(PublishOptions::default());
    // Whoever subscribes later does not hear what was published before.
    if ready.wait(Instant::now() + PATIENCE)?.is_none() {
        return Err("decode did not come".into());
    }
    let mut held_up = 0;
    for number in 0..BLOCKS {
        let handle = local.alloc(BLOCK_BYTES)?;
        let bytes = keys_and_values(number);
        arena.block(handle)?.copy_in(0, &bytes)?;
        let meta = Meta {
            bytes: BLOCK_BYTES as u64,
            tokens: TOKENS,
            crc32c: Some(tidekv_shm::copy::crc32c(&bytes)),
            extra: number,
        };
        let key = Key(u128::from(number));
        match publisher.publish(key, handle, meta) {
            Ok(()) => {}
            Err(full @ PublishError::Full(_)) => {
                held_up += 1;
                if held_up == 1 {
                    say("prefill", &format!("held up at block {number}: {full}"))?;
                    notes.publish(held_up_key(), local.alloc(1)?, Meta::of_bytes(0))?;
                }
                publisher.publish_by(key, handle, meta, Instant::now() + PATIENCE)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let end = local.alloc(1)?;
    publisher.publish_by(end_key(), end, Meta::of_bytes(0), Instant::now() + PATIENCE)?;
    say("prefill", &format!("published {BLOCKS} blocks of {} KiB, held up {held_up} times", BLOCK_BYTES >> 10))?;
    // What is taken need not wait for the publisher, but what is not taken yet goes with it.
    let deadline = Instant::now() + PATIENCE;
    while publisher.settle()? > Bytes(0) {
        if Instant::now() >= deadline {
            return Err("decode did not take everything".into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Reads what prefill publishes until it hears of the end.
pub(crate) fn decode(dir: &RuntimeDir, name: &ArenaName) -> Result<(), Failure> {
    let arena = Arena::attach(dir, name, Prefault::Off)?;
    let exchange = Exchange::open(&arena, &ExchangeConfig::default())?;
    let mut subscription = exchange.subscribe()?;
    // Tells prefill that from now on nothing is missed.
    let mut local = arena.local()?;
    let mut hello = exchange.publisher(PublishOptions::default());
    hello.publish(hello_key(), local.alloc(1)?, Meta::of_bytes(0))?;
    let (mut blocks, mut tokens, mut kept) = (0, 0, Vec::new());
    loop {
        let news = subscription.wait(Instant::now() + PATIENCE)?.ok_or("prefill fell silent")?;
        let News::Published { key, meta } = news else { return Err(format!("lossless, and yet: {news:?}").into()) };
        // Our own is for prefill to hear of.
        if key == hello_key() {
            continue;
        }
        let block = exchange.take(key)?.ok_or("somebody else takes blocks too")?;
        if key == held_up_key() {
            kept.clear();
            continue;
        }
        if key == end_key() {
            break;
        }
        let mut bytes = vec![0; BLOCK_BYTES];
        block.copy_out(&mut bytes)?;
        if block.is_intact()? != Some(true) || bytes != keys_and_values(meta.extra) {
            return Err(format!("block {} has other bytes than were published", meta.extra).into());
        }
        blocks += 1;
        tokens += meta.tokens;
        // Later ones are let go at once.
        if blocks <= AHEAD {
            kept.push(block);
        }
    }
    say("decode", &format!("took {blocks} blocks, {tokens} tokens, every byte as it was published"))?;
    Ok(())
}
