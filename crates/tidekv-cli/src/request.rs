//! The command line after checking: sizes are sizes, names are names, and whatever is refused is refused before
//! anything is looked at.

use std::time::Duration;

use anyhow::{Context, bail};
use tidekv_core::units::Bytes;
use tidekv_shm::{RuntimeDir, UNLIMITED};

use crate::cli::{Cli, Command, ShareArgs, WaitArgs};
use crate::text::{Percent, parse_duration};

/// What to do, and in which folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Where segments and ledgers lie.
    pub dir: RuntimeDir,
    /// What to do.
    pub action: Action,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Show pools.
    List {
        /// These, or all.
        names: Vec<String>,
        /// As JSON.
        json: bool,
    },
    /// Set a limit.
    Limit {
        /// Of this pool.
        name: String,
        /// To this.
        limit: Limit,
        /// And wait for it.
        wait: Option<Duration>,
    },
    /// Show a share, or change it.
    Share {
        /// Of this pool.
        name: String,
        /// In these points; none to show it.
        change: ShareChange,
    },
    /// Remove a segment.
    Delete {
        /// Of this pool.
        name: String,
        /// Also if it is alive.
        force: bool,
    },
    /// Remove what is left behind.
    Gc {
        /// Or only say so.
        dry_run: bool,
    },
    /// Have idle memory given back.
    Trim {
        /// By this pool.
        name: String,
        /// And wait for it.
        wait: Option<Duration>,
    },
}

/// A limit as it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// So many bytes. They fit the segment's signed word.
    Size(Bytes),
    /// So much of the device.
    Percent(Percent),
}

/// Which terms of sharing to change, and to what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareChange {
    /// The weight, at least 1.
    pub weight: Option<u32>,
    /// The floor.
    pub floor: Option<Bytes>,
    /// The ceiling; [`UNLIMITED`] to take it away.
    pub ceiling: Option<Bytes>,
    /// The priority.
    pub priority: Option<i32>,
}

impl ShareChange {
    /// Whether nothing is to be changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Request {
    /// Checks what was typed.
    pub fn new(cli: &Cli) -> anyhow::Result<Self> {
        let dir = cli.dir.as_ref().map_or_else(RuntimeDir::from_env, RuntimeDir::at);
        let action = match &cli.command {
            Command::List(args) => {
                let names = args.names.iter().map(|name| pool_name(name)).collect::<Result<_, _>>()?;
                Action::List { names, json: args.json }
            }
            Command::Limit(args) => {
                let limit = Limit::Size(segment_size(&args.size)?);
                Action::Limit { name: pool_name(&args.name)?, limit, wait: wait(&args.wait)? }
            }
            Command::LimitPercent(args) => {
                let limit = Limit::Percent(args.percent.parse()?);
                Action::Limit { name: pool_name(&args.name)?, limit, wait: wait(&args.wait)? }
            }
            Command::Share(args) => Action::Share { name: pool_name(&args.name)?, change: share_change(args)? },
            Command::Delete(args) => Action::Delete { name: pool_name(&args.name)?, force: args.force },
            Command::Gc(args) => Action::Gc { dry_run: args.dry_run },
            Command::Trim(args) => Action::Trim { name: pool_name(&args.name)?, wait: wait(&args.wait)? },
        };
        Ok(Self { dir, action })
    }
}

/// A pool's name. As with kvcached, a path stands for its last part.
fn pool_name(text: &str) -> anyhow::Result<String> {
    let name = text.rsplit('/').next().unwrap_or(text);
    if name.is_empty() {
        bail!("{text:?} is not the name of a pool");
    }
    Ok(name.to_owned())
}

fn segment_size(text: &str) -> anyhow::Result<Bytes> {
    let size: Bytes = text.parse()?;
    if i64::try_from(size.0).is_err() {
        bail!("{text:?} is too large: a limit is below 8 EiB");
    }
    Ok(size)
}

fn wait(args: &WaitArgs) -> anyhow::Result<Option<Duration>> {
    args.wait.as_deref().map(parse_duration).transpose().context("--wait")
}

fn share_change(args: &ShareArgs) -> anyhow::Result<ShareChange> {
    let weight = args.weight.as_deref().map(|text| match text.trim().parse() {
        Ok(0) | Err(_) => bail!("--weight: {text:?} is not a whole number from 1 to {}", u32::MAX),
        Ok(weight) => Ok(weight),
    });
    let priority = args.priority.as_deref().map(|text| {
        text.trim().parse().with_context(|| format!("--priority: {text:?} is not a whole number of 32 bits"))
    });
    let ceiling = args.ceiling.as_deref().map(|text| match text {
        "none" => Ok(UNLIMITED),
        size => size.parse(),
    });
    Ok(ShareChange {
        weight: weight.transpose()?,
        floor: args.floor.as_deref().map(str::parse).transpose().context("--floor")?,
        ceiling: ceiling.transpose().context("--ceiling")?,
        priority: priority.transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(args: &[&str]) -> anyhow::Result<Action> {
        let args = ["kvctl"].iter().chain(args).map(Into::into);
        Ok(Request::new(&Cli::parse_args(args)?)?.action)
    }

    fn refusal(args: &[&str]) -> String {
        format!("{:#}", request(args).unwrap_err())
    }

    #[test]
    fn what_people_type() {
        assert_eq!(
            request(&["limit", "/dev/shm/VLLM", "1.5GiB", "--wait", "200ms"]).unwrap(),
            Action::Limit {
                name: "VLLM".to_owned(),
                limit: Limit::Size(Bytes(3 << 29)),
                wait: Some(Duration::from_millis(200))
            }
        );
        assert_eq!(
            request(&["trim", "VLLM", "--wait"]).unwrap(),
            Action::Trim { name: "VLLM".to_owned(), wait: Some(Duration::from_secs(5)) }
        );
        let Action::Share { change, .. } = request(&["share", "a", "--priority", "-3", "--ceiling", "none"]).unwrap()
        else {
            panic!("not a share");
        };
        assert_eq!(change, ShareChange { priority: Some(-3), ceiling: Some(UNLIMITED), ..ShareChange::default() });
        assert!(matches!(request(&["share", "a"]).unwrap(), Action::Share { change, .. } if change.is_empty()));
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        for (args, part) in [
            (&["limit", "a", "-1G"][..], "negative"),
            (&["limit", "a", "G"], "no number"),
            (&["limit", "a", "12X"], "not a unit"),
            (&["limit", "a", "9E"], "not a unit"),
            (&["limit", "a", "8192P"], "8 EiB"),
            (&["limit", "", "1G"], "not the name"),
            (&["limit", "a/", "1G"], "not the name"),
            (&["limit", "a", "1G", "--wait", "soon"], "not a duration"),
            (&["limit-percent", "a", "-5"], "out of range"),
            (&["limit-percent", "a", "120"], "out of range"),
            (&["share", "a", "--weight", "0"], "--weight"),
            (&["share", "a", "--weight", "1.5"], "--weight"),
            (&["share", "a", "--floor", "-1"], "--floor"),
            (&["share", "a", "--ceiling", "G"], "--ceiling"),
            (&["share", "a", "--priority", "high"], "--priority"),
        ] {
            let refusal = refusal(args);
            assert!(refusal.contains(part), "{args:?}: {refusal}");
        }
    }
}
