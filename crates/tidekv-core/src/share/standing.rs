//! How a pool stands among its neighbours, in a word and in a sentence: one place for all who show it.

use super::{PoolClaim, fair_shares, grantable, owed_with_cached};
use crate::units::Bytes;

/// How a pool stands against its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Standing {
    /// It holds what it may and waits for nothing.
    Within,
    /// It uses more than its share, and nobody asks for it.
    Above,
    /// It is giving memory back because others need it.
    Gives,
    /// It waits for memory.
    Waits,
}

impl Standing {
    /// The word, as JSON and screens have it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Within => "within-share",
            Self::Above => "above-share",
            Self::Gives => "gives-back",
            Self::Waits => "waits",
        }
    }
}

/// How pool `me` stands, and why, in a sentence: none where there is nothing to say. `names` are those of `pools`, and somebody gave
/// the budget where it `is_given`.
///
/// # Panics
///
/// Where `me` is out of range or a name is missing.
pub fn standing(
    budget: Bytes,
    is_given: bool,
    pools: &[PoolClaim],
    names: &[&str],
    me: usize,
) -> (Standing, Option<String>) {
    let (mine, name) = (&pools[me], names[me]);
    let shares = fair_shares(budget, pools);
    let above = |at: usize| pools[at].in_use.saturating_sub(shares[at]);
    let others = || (0..pools.len()).filter(|&at| at != me);
    let giver = |at: usize| match (owed_with_cached(budget, pools, at, is_given), above(at)) {
        (Bytes::ZERO, _) => None,
        (owed, Bytes::ZERO) => Some(format!("{} gives back {owed} that it does not need", names[at])),
        (_, above) => Some(format!("{} is {above} above its share and gives back", names[at])),
    };
    if mine.demand > Bytes::ZERO {
        let why = if mine.ceiling.saturating_sub(mine.held) < mine.demand && mine.ceiling < budget {
            format!("it may hold no more than {}", mine.ceiling)
        } else if let free @ Bytes(1..) = grantable(budget, pools, me) {
            format!("{free} are free for it")
        } else {
            let givers: Vec<String> = others().filter_map(giver).collect();
            match others().max_by_key(|&at| pools[at].held).filter(|_| givers.is_empty()) {
                None if givers.is_empty() => format!("the budget of {budget} is used up"),
                None => givers.join(", "),
                Some(_) if mine.held >= shares[me] => {
                    format!("it has its share of {}, and nothing is free", shares[me])
                }
                Some(most) => format!("{} holds {} and gives nothing back", names[most], pools[most].held),
            }
        };
        return (Standing::Waits, Some(format!("{name} waits for {}: {why}", mine.demand)));
    }
    if let Some(gives) = giver(me) {
        let wants = |at: usize| pools[at].demand.max(pools[at].wish);
        let why = match others().max_by_key(|&at| wants(at)).filter(|&at| wants(at) > Bytes::ZERO) {
            Some(at) => format!("{} waits for {}", names[at], wants(at)),
            None => format!("pools hold more than their budget of {budget}"),
        };
        return (Standing::Gives, Some(format!("{gives}: {why}")));
    }
    match above(me) {
        Bytes::ZERO => (Standing::Within, None),
        above => (Standing::Above, Some(format!("{name} is {above} above its share of {}", shares[me]))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn pool(held: u64, in_use: u64, demand: u64) -> PoolClaim {
        let [held, in_use, demand] = [held, in_use, demand].map(|mib| Bytes(mib * MIB));
        PoolClaim { held, in_use, demand, page: Bytes::mib(2), ..PoolClaim::default() }
    }

    /// What is said of each of two pools, chat and batch, on 256 MiB.
    fn said(chat: PoolClaim, batch: PoolClaim) -> [(Standing, String); 2] {
        [0, 1].map(|me| {
            let (word, why) = standing(Bytes::mib(256), false, &[chat, batch], &["chat", "batch"], me);
            (word, why.unwrap_or_default())
        })
    }

    #[test]
    fn who_waits_and_for_whom() {
        let [chat, batch] = said(pool(64, 64, 16), pool(192, 192, 0));
        let line = "chat waits for 16 MiB: batch is 16 MiB above its share and gives back";
        assert_eq!((chat.0, chat.1.as_str()), (Standing::Waits, line));
        let line = "batch is 16 MiB above its share and gives back: chat waits for 16 MiB";
        assert_eq!((batch.0, batch.1.as_str()), (Standing::Gives, line));
    }

    #[test]
    fn what_is_only_kept_is_given_without_being_above_a_share() {
        let cached = PoolClaim { cached: Bytes::mib(128), ..pool(128, 128, 0) };
        let [chat, batch] = said(pool(128, 128, 16), cached);
        assert_eq!(chat.1, "chat waits for 16 MiB: batch gives back 16 MiB that it does not need");
        assert_eq!(
            (batch.0, batch.1.as_str()),
            (Standing::Gives, "batch gives back 16 MiB that it does not need: chat waits for 16 MiB")
        );
        let [chat, _] = said(pool(128, 128, 16), pool(128, 64, 0));
        assert_eq!(chat.1, "chat waits for 16 MiB: batch gives back 16 MiB that it does not need");
    }

    #[test]
    fn a_wait_that_no_neighbour_ends() {
        let [chat, _] = said(PoolClaim { ceiling: Bytes::mib(32), ..pool(32, 32, 16) }, pool(0, 0, 0));
        assert_eq!(chat.1, "chat waits for 16 MiB: it may hold no more than 32 MiB");
        let [chat, _] = said(pool(64, 64, 16), pool(64, 64, 0));
        assert_eq!(chat.1, "chat waits for 16 MiB: 128 MiB are free for it");
        let [chat, batch] = said(pool(128, 128, 16), pool(128, 128, 0));
        assert_eq!(chat.1, "chat waits for 16 MiB: it has its share of 128 MiB, and nothing is free");
        assert_eq!((batch.0, batch.1.as_str()), (Standing::Within, ""));
        let alone = standing(Bytes::mib(8), false, &[pool(8, 8, 2)], &["chat"], 0);
        assert_eq!(alone.1.unwrap(), "chat waits for 2 MiB: the budget of 8 MiB is used up");
        let dead = PoolClaim::returning(Bytes::mib(192));
        assert_eq!(
            said(pool(64, 64, 16), dead)[0].1,
            "chat waits for 16 MiB: it has its share of 64 MiB, and nothing is free"
        );
    }

    #[test]
    fn a_budget_that_shrank_and_nothing_to_say() {
        let (word, why) = standing(Bytes::mib(8), false, &[pool(16, 4, 0)], &["chat"], 0);
        let line = "chat gives back 8 MiB that it does not need: pools hold more than their budget of 8 MiB";
        assert_eq!((word, why.as_deref()), (Standing::Gives, Some(line)));
        assert_eq!(said(pool(64, 64, 0), pool(64, 32, 0)).map(|(word, _)| word), [Standing::Within; 2]);
    }
}
