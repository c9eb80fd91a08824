//! What a pool's memory is good for at the moment.

use crate::units::Bytes;

/// What a pool holds, in three parts: `held = needed + cached + idle`. Every figure of memory in use that tidekv
/// shows is one of these; only what kvcached shows as well keeps kvcached's meaning (`used` is `needed + cached`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// What running requests need, and what is about to be mapped for them.
    pub needed: Bytes,
    /// What the engine said that it only keeps in case (cached prefixes). A neighbour that waits may have it.
    pub cached: Bytes,
    /// Mapped, with nothing in it.
    pub idle: Bytes,
}

impl MemoryUse {
    /// The parts of `held`, of which `idle` bytes hold nothing and `cached` bytes of the rest are only kept. Figures that
    /// another process wrote may not fit each other; the parts always add up to `held`.
    pub fn of(held: Bytes, cached: Bytes, idle: Bytes) -> Self {
        let idle = idle.min(held);
        let filled = held.saturating_sub(idle);
        let cached = cached.min(filled);
        Self { needed: filled.saturating_sub(cached), cached, idle }
    }

    /// Memory that a pool holds for nothing that could be given up: its owner is dead, and it is on its way back.
    pub fn all_needed(held: Bytes) -> Self {
        Self { needed: held, ..Self::default() }
    }

    /// All of it.
    pub fn held(&self) -> Bytes {
        [self.cached, self.idle].into_iter().fold(self.needed, |sum, part| Bytes(sum.0.saturating_add(part.0)))
    }

    /// What kvcached calls used.
    pub fn used(&self) -> Bytes {
        Bytes(self.needed.0.saturating_add(self.cached.0))
    }

    /// Two pools as one.
    pub fn plus(self, other: Self) -> Self {
        let sum = |a: Bytes, b: Bytes| Bytes(a.0.saturating_add(b.0));
        Self {
            needed: sum(self.needed, other.needed),
            cached: sum(self.cached, other.cached),
            idle: sum(self.idle, other.idle),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_add_up_whatever_was_written() {
        for (held, cached, idle) in [(10, 3, 2), (10, 20, 2), (10, 3, 20), (0, 5, 5), (10, 0, 0), (u64::MAX, 7, 9)] {
            let usage = MemoryUse::of(Bytes(held), Bytes(cached), Bytes(idle));
            assert_eq!(usage.held(), Bytes(held), "{usage:?}");
            assert_eq!(usage.used().0 + usage.idle.0, held);
        }
        assert_eq!(MemoryUse::of(Bytes(10), Bytes(3), Bytes(2)).needed, Bytes(5));
    }
}
