//! How much memory an engine's KV cache may have: from what was asked for and what the device has to what its pool is opened with.
//!
//! ```text
//!   card   [ weights, contexts, other programs | pools, ours and all others ......................... | 5 % ]
//!          └─ no pool holds it ────────────────┴─ the budget, as it is at any moment ─────────────────┘
//!                                               └ a part of the card (0.95), less what no pool holds ┘
//! ```
//!
//! A budget that somebody gave holds as it is. Where nobody gave one, it is derived: the pools watch what the device has free and share the
//! rest. Then a GPU's reservation, which is addresses alone, is as large as the part of the card ever gets; a static cache is what is
//! left of it now. On the processor one server is content with [`HOST_DEFAULT`]: that bounds itself and no neighbour. Decisions here are pure: numbers in, numbers out.

use tidekv_core::geometry::{Capacity, Geometry, GeometryConfig, GeometryError};
use tidekv_core::units::{Buffer, Bytes};
use tidekv_mem::MemoryInfo;
use tidekv_pool::DEFAULT_UTILIZATION;

use super::start::StartError;
use crate::config::{KvBudget, KvChoice, KvMode};

/// A reservation has no more: bookkeeping costs some bytes for each block, and only toy models could have so many.
const MAX_TOKENS: u64 = 1 << 26;
/// What a server takes on the processor at most where nobody gave a budget: enough for some hundred thousand tokens of a small model, and
/// little enough for a laptop.
const HOST_DEFAULT: Bytes = Bytes::gib(1);

/// What a pool is opened with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Room {
    /// What all pools of the device may hold together, where it was given.
    pub(super) budget: Option<Bytes>,
    /// The part of the device that they may use, where it was given.
    pub(super) utilization: Option<f64>,
    pub(super) mode: KvMode,
    /// Addresses for so much.
    pub(super) reservation: Bytes,
}

impl Room {
    /// `card` is what the GPU has, with the weights on it; `None` on the processor.
    pub(super) fn new(kv: KvChoice, budget: KvBudget, card: Option<MemoryInfo>) -> Result<Self, StartError> {
        let (given, most, now, utilization) = match (budget, card) {
            (KvBudget::Given(bytes), _) => (Some(bytes), bytes, bytes, None),
            (KvBudget::Derived { host: Some(host), utilization }, None) => (Some(host), host, host, utilization),
            (KvBudget::Derived { host: None, utilization }, None) => (None, HOST_DEFAULT, HOST_DEFAULT, utilization),
            (KvBudget::Derived { utilization, .. }, Some(card)) => {
                let share = card.total.part(utilization.unwrap_or(DEFAULT_UTILIZATION));
                let used = card.total.saturating_sub(card.free);
                (None, share, share.saturating_sub(used), utilization)
            }
        };
        let mode = kv.within(now);
        match mode {
            KvMode::Static(size) if size > most => Err(StartError::OverBudget { size, budget: most }),
            KvMode::Static(reservation) => Ok(Self { budget: given, utilization, mode, reservation }),
            KvMode::Elastic => Ok(Self { budget: given, utilization, mode, reservation: most }),
        }
    }

    /// The largest geometry within the reservation. One that nobody asked for in bytes is made as small as kernels need it.
    pub(super) fn geometry(&self, config: GeometryConfig) -> Result<GeometryConfig, GeometryError> {
        let mut reservation = self.reservation;
        if self.budget.is_none() && self.mode == KvMode::Elastic {
            let block = u64::from(config.shape.layers) * 2 * config.shape.block_bytes(Buffer::Key)?.0;
            reservation =
                reservation.min(Bytes((MAX_TOKENS / u64::from(config.shape.block_tokens)).saturating_mul(block)));
        }
        loop {
            let config = GeometryConfig { capacity: Capacity::Budget(reservation), ..config };
            match Geometry::new(&config) {
                Err(GeometryError::TooManyIds { .. }) if self.budget.is_none() => {
                    reservation = Bytes(reservation.0 / 2)
                }
                Err(error) => return Err(error),
                Ok(_) => return Ok(config),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidekv_core::geometry::{ChunkChoice, KvShape, Layout};

    use super::*;

    const HOST: Bytes = Bytes::gib(1);
    const DERIVED: KvBudget = KvBudget::Derived { utilization: None, host: None };
    const CARD: MemoryInfo = MemoryInfo { total: Bytes::gib(100), free: Bytes::gib(80) };

    #[test]
    fn a_given_budget_holds_wherever_it_is() {
        let given = KvBudget::Given(Bytes::gib(3));
        for card in [None, Some(CARD)] {
            let room = Room::new(KvChoice::Elastic, given, card).unwrap();
            assert_eq!((room.budget, room.utilization), (Some(Bytes::gib(3)), None));
            assert_eq!((room.mode, room.reservation), (KvMode::Elastic, Bytes::gib(3)));
            let all = Room::new(KvChoice::Static(None), given, card).unwrap();
            assert_eq!((all.mode, all.reservation), (KvMode::Static(Bytes::gib(3)), Bytes::gib(3)));
            let part = Room::new(KvChoice::Static(Some(HOST)), given, card).unwrap();
            assert_eq!((part.mode, part.reservation, part.budget), (KvMode::Static(HOST), HOST, Some(Bytes::gib(3))));
            let over = Room::new(KvChoice::Static(Some(Bytes::gib(4))), given, card).unwrap_err();
            assert!(matches!(over, StartError::OverBudget { .. }), "{over}");
        }
    }

    #[test]
    fn without_one_a_server_is_content_with_little_of_the_processor_and_with_its_part_of_a_gpu() {
        let room = Room::new(KvChoice::Elastic, DERIVED, None).unwrap();
        assert_eq!((room.budget, room.reservation), (None, HOST_DEFAULT), "a default is nobody else's budget");
        let told = KvBudget::Derived { utilization: Some(0.5), host: Some(HOST) };
        let room = Room::new(KvChoice::Elastic, told, None).unwrap();
        assert_eq!((room.budget, room.utilization, room.reservation), (Some(HOST), Some(0.5), HOST));
        let room = Room::new(KvChoice::Elastic, told, Some(CARD)).unwrap();
        assert_eq!((room.budget, room.utilization, room.reservation), (None, Some(0.5), Bytes::gib(50)));
        let room = Room::new(KvChoice::Elastic, DERIVED, Some(CARD)).unwrap();
        assert_eq!((room.budget, room.utilization, room.reservation), (None, None, Bytes::gib(95)));
        // Weights and everybody else hold 20 of the 95.
        let fixed = Room::new(KvChoice::Static(None), DERIVED, Some(CARD)).unwrap();
        assert_eq!(
            (fixed.budget, fixed.mode, fixed.reservation),
            (None, KvMode::Static(Bytes::gib(75)), Bytes::gib(75))
        );
        let over = Room::new(KvChoice::Static(Some(Bytes::gib(96))), DERIVED, Some(CARD)).unwrap_err();
        assert!(matches!(over, StartError::OverBudget { budget, .. } if budget == Bytes::gib(95)), "{over}");
        let full = MemoryInfo { total: Bytes::gib(100), free: Bytes::gib(2) };
        let none = Room::new(KvChoice::Static(None), DERIVED, Some(full)).unwrap();
        assert_eq!(none.reservation, Bytes::ZERO, "the geometry says that this is not a page");
    }

    fn shape(layers: u32, heads: u32, head_size: u32, block_tokens: u32) -> GeometryConfig {
        GeometryConfig {
            shape: KvShape::heads(layers, heads, head_size, 2, block_tokens),
            layout: Layout::Slab,
            granularity: Bytes::mib(2),
            chunk: ChunkChoice::Auto,
            capacity: Capacity::Pages(1),
        }
    }

    proptest! {
        /// Any model fits any card: a geometry is found, within the card, with ids that kernels can use.
        #[test]
        fn a_derived_reservation_suits_every_model(
            layers in 1u32..100, heads in 1u32..17, head in 0u32..5, block in 0u32..4, gib in 1u64..200,
        ) {
            let config = shape(layers, heads, 16 << head, 8 << block);
            let card = MemoryInfo { total: Bytes::gib(gib), free: Bytes::gib(gib) };
            let room = Room::new(KvChoice::Elastic, DERIVED, Some(card)).unwrap();
            let geometry = Geometry::new(&room.geometry(config).unwrap()).unwrap();
            let mapped = geometry.page_bytes().0 * u64::from(geometry.page_count());
            prop_assert!(mapped <= room.reservation.0);
            let tokens = u64::from(geometry.block_count()) * u64::from(config.shape.block_tokens);
            prop_assert!(tokens <= MAX_TOKENS);
            // Nothing is given away: all of the card, or half of what can be counted.
            let slots = u64::from(geometry.id_count()) * u64::from(config.shape.block_tokens);
            let page = geometry.page_bytes().0;
            prop_assert!(
                mapped + page > room.reservation.0 || slots >= 1 << 29 || tokens >= MAX_TOKENS / 4,
                "{} of {}, {} slots, {} tokens", mapped, room.reservation.0, slots, tokens
            );
        }
    }

    #[test]
    fn a_llama_8b_gets_all_of_an_h200_and_a_toy_what_can_be_counted() {
        let card = MemoryInfo { total: Bytes::gib(140), free: Bytes::gib(124) };
        let room = Room::new(KvChoice::Elastic, DERIVED, Some(card)).unwrap();
        let large = Geometry::new(&room.geometry(shape(32, 8, 128, 16)).unwrap()).unwrap();
        assert!(large.page_bytes().0 * u64::from(large.page_count()) > Bytes::gib(132).0);
        let toy = Geometry::new(&room.geometry(shape(4, 2, 16, 16)).unwrap()).unwrap();
        assert!((1 << 25..=1 << 26).contains(&(u64::from(toy.block_count()) * 16)));
    }
}
