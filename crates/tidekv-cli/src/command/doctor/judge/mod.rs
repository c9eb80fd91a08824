//! From facts to judgements: pure functions, one or a few for each kind of check.

mod container;
mod cpu;
mod environment;
mod gpu;
mod host_memory;
mod shared_files;

#[cfg(test)]
mod tests;

pub use environment::known_variables;
pub(super) use gpu::pool_of;

use super::check::Check;
use super::facts::Facts;

/// Everything, in the order of the report.
pub(super) fn all(facts: &Facts) -> Vec<Check> {
    let mut checks = gpu::judge(facts);
    checks.extend(shared_files::judge(facts));
    checks.extend(host_memory::judge(facts));
    checks.extend(cpu::judge(&facts.kernel));
    checks.extend(container::judge(&facts.kernel));
    checks.extend(environment::judge(&facts.environment));
    checks.push(environment::versions(facts.python.as_ref()));
    checks
}

/// At most this many names in a line.
const NAMED_MAX: usize = 4;

/// `a; b and 3 more`. What is listed has commas of its own.
fn some_of<T: std::fmt::Display>(items: &[T]) -> String {
    let named: Vec<String> = items.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    match items.len().saturating_sub(NAMED_MAX) {
        0 => named.join("; "),
        more => format!("{} and {more} more", named.join("; ")),
    }
}

/// `1 file`, `2 files`.
fn count(number: usize, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}
