//! Who decides what all pools of a device may hold together.
//!
//! ```text
//!   an operator's size        kvctl budget
//!   > a pool's size           its settings; of two pools the later one
//!   > a pool's part           of the device, less what no pool holds; of two pools the later one
//!   > the default part
//! ```
//!
//! The head has the budget itself, and whether it is a size that somebody gave: older releases know these two words alone.
//! They write the head whole, so what they do not know has a record of its own behind it, which they leave as it is. A
//! size in the head that the record does not explain was given by a pool of an older release. It holds like any other
//! pool's, unless the record has an operator's: then the head is put right by the next update.

use std::fmt;

use tidekv_core::units::Bytes;

use super::view::LedgerHeader;

/// The part of a device that pools and everybody else may fill together, unless somebody says otherwise.
pub const DEFAULT_UTILIZATION: f64 = 0.95;

/// A part is kept in millionths.
const WHOLE: f64 = 1e6;

/// Longest name of an author.
pub(super) const NAME_BYTES: usize = 80;

/// What was decided about a device's budget, and by whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetSetting {
    /// Counts the decisions; 0 where there was none.
    pub revision: u64,
    /// Who made the last one. Nobody where the default holds; and where a pool of an older release gave a size, which does not say
    /// who it is.
    pub author: Option<BudgetAuthor>,
    /// The part of the device that pools may use where no size was given, in millionths; 0 for the default.
    pub utilization: u32,
}

/// Who made a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetAuthor {
    /// With what right.
    pub right: BudgetRight,
    /// Its process, for people.
    pub pid: u32,
    /// The pool, with its group, or the tool.
    pub name: AuthorName,
}

/// With what right somebody decides. Pools do not change what an operator decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BudgetRight {
    /// A pool's settings.
    Pool,
    /// An operator.
    Operator,
}

impl BudgetAuthor {
    /// This process.
    pub fn here(right: BudgetRight, name: &str) -> Self {
        Self { right, pid: std::process::id(), name: AuthorName::new(name) }
    }
}

/// A short name. What a name of ours never has becomes `-`, since it ends up on terminals.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AuthorName {
    bytes: [u8; NAME_BYTES],
    length: usize,
}

impl AuthorName {
    /// As much of `name` as fits.
    pub fn new(name: &str) -> Self {
        Self::of_bytes(name.as_bytes())
    }

    pub(super) fn of_bytes(name: &[u8]) -> Self {
        let mut bytes = [0; NAME_BYTES];
        let length = name.len().min(NAME_BYTES);
        for (to, &byte) in bytes.iter_mut().zip(name) {
            *to = if crate::names::is_name_byte(byte) { byte } else { b'-' };
        }
        Self { bytes, length }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        str::from_utf8(&self.bytes[..self.length]).unwrap_or_default()
    }
}

impl fmt::Debug for AuthorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl LedgerHeader {
    /// Whether an operator gave a size, so that pools' settings say nothing.
    pub fn is_operators(&self) -> bool {
        let right = self.setting.author.map(|author| author.right);
        self.explicit_budget && right == Some(BudgetRight::Operator)
    }

    /// The part of the device that pools and everybody else may fill together where no size was given.
    pub fn utilization(&self) -> f64 {
        if self.setting.utilization == 0 { DEFAULT_UTILIZATION } else { f64::from(self.setting.utilization) / WHOLE }
    }

    /// Gives the device a budget of this size; without one it is derived again. Says whether that holds: a pool changes nothing
    /// where an operator gave a size.
    pub fn decide_budget(&mut self, size: Option<Bytes>, author: BudgetAuthor) -> bool {
        if author.right == BudgetRight::Pool {
            if self.is_operators() {
                return size == Some(self.budget);
            }
            if self.explicit_budget && size == Some(self.budget) {
                return true;
            }
        }
        self.setting.revision = self.setting.revision.wrapping_add(1);
        self.setting.author = Some(author);
        self.explicit_budget = size.is_some();
        match size {
            Some(size) => self.budget = size,
            None => self.derive_budget(),
        }
        true
    }

    /// Derives the budget from this part of the device, now or when no given size holds any more.
    pub fn decide_utilization(&mut self, utilization: f64, author: BudgetAuthor) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 1 to a million")]
        let millionths = (utilization * WHOLE).round().clamp(1.0, WHOLE) as u32;
        if self.setting.utilization == millionths {
            return;
        }
        self.setting.utilization = millionths;
        if !self.explicit_budget {
            self.setting.revision = self.setting.revision.wrapping_add(1);
            self.setting.author = Some(author);
            self.derive_budget();
        }
    }

    /// The budget follows what the ledger says of the device, unless a size was given or it says nothing.
    pub fn derive_budget(&mut self) {
        if !self.explicit_budget && self.total > Bytes::ZERO {
            self.budget = self.total.part(self.utilization()).saturating_sub(self.non_pool);
        }
    }

    /// What head and record say together. `size` is the one that the record was written for.
    pub(super) fn with_setting(mut self, setting: BudgetSetting, size: Option<Bytes>) -> Self {
        let operators = setting.author.is_some_and(|author| author.right == BudgetRight::Operator);
        if let Some(size) = size.filter(|_| operators) {
            (self.budget, self.explicit_budget) = (size, true);
        }
        let is_explained = self.explicit_budget.then_some(self.budget) == size;
        self.setting = BudgetSetting { author: setting.author.filter(|_| is_explained), ..setting };
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: Bytes = Bytes::gib(1);

    fn pool(name: &str) -> BudgetAuthor {
        BudgetAuthor::here(BudgetRight::Pool, name)
    }

    fn operator() -> BudgetAuthor {
        BudgetAuthor::here(BudgetRight::Operator, "kvctl")
    }

    fn device() -> LedgerHeader {
        LedgerHeader { total: GIB, non_pool: Bytes::mib(24), ..LedgerHeader::default() }
    }

    #[test]
    fn an_operators_size_stands_above_pools_sizes_and_these_above_parts() {
        let mut header = device();
        header.decide_utilization(0.5, pool("half"));
        assert_eq!((header.budget, header.explicit_budget), (Bytes::mib(512 - 24), false));
        assert!(header.decide_budget(Some(Bytes::mib(256)), pool("a")));
        assert!(header.decide_budget(Some(Bytes::mib(300)), pool("b")), "of two pools the later one");
        assert_eq!(header.setting.author, Some(pool("b")));
        header.decide_utilization(0.25, pool("quarter"));
        assert_eq!((header.budget, header.setting.author), (Bytes::mib(300), Some(pool("b"))));
        assert!(header.decide_budget(Some(Bytes::mib(100)), operator()));
        assert!(!header.decide_budget(Some(Bytes::mib(300)), pool("b")));
        assert_eq!((header.budget, header.setting.author), (Bytes::mib(100), Some(operator())));
        let revision = header.setting.revision;
        assert!(header.decide_budget(None, operator()));
        assert_eq!(
            (header.budget, header.setting.revision),
            (Bytes::mib(256 - 24), revision + 1),
            "the part that was asked for"
        );
        assert!(header.decide_budget(Some(Bytes::mib(300)), pool("c")), "an operator who says auto leaves it to pools");
    }

    #[test]
    fn saying_the_same_again_decides_nothing() {
        let mut header = device();
        header.decide_utilization(0.5, pool("a"));
        header.decide_utilization(0.5, pool("b"));
        assert_eq!((header.setting.revision, header.setting.author), (1, Some(pool("a"))));
        header.decide_budget(Some(GIB), pool("a"));
        header.decide_budget(Some(GIB), pool("b"));
        assert_eq!((header.setting.revision, header.setting.author), (2, Some(pool("a"))));
        // An operator who says what a pool said before makes it hold.
        header.decide_budget(Some(GIB), operator());
        assert!(header.is_operators() && header.setting.revision == 3);
    }

    #[test]
    fn what_an_older_release_writes_into_the_head() {
        let mut decided = device();
        decided.decide_budget(Some(Bytes::mib(256)), pool("a"));
        let older = |budget, explicit_budget| LedgerHeader { budget, explicit_budget, ..device() };
        let read = |head: LedgerHeader, decided: &LedgerHeader| {
            head.with_setting(decided.setting, decided.explicit_budget.then_some(decided.budget))
        };
        assert_eq!(read(older(Bytes::mib(256), true), &decided), decided, "nothing");
        let given = read(older(GIB, true), &decided);
        assert_eq!((given.budget, given.explicit_budget, given.setting.author), (GIB, true, None));
        decided.decide_budget(Some(Bytes::mib(100)), operator());
        assert_eq!(read(older(GIB, true), &decided), decided, "an operator's size stays");
        decided.decide_budget(None, operator());
        assert_eq!(read(older(GIB, true), &decided).setting.author, None);
    }

    #[test]
    fn names_are_cut_and_printable() {
        assert_eq!(AuthorName::new("chat_g1").as_str(), "chat_g1");
        assert_eq!(AuthorName::new("a\u{1b}[2J").as_str(), "a--2J");
        assert_eq!(AuthorName::new(&"x".repeat(200)).as_str().len(), NAME_BYTES);
    }
}
