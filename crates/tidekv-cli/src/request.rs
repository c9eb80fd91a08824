//! The command line after checking: sizes are sizes, names are names, and whatever is refused is refused before
//! anything is looked at.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use tidekv_core::units::Bytes;
use tidekv_shm::arena::ArenaName;
use tidekv_shm::{DeviceName, RuntimeDir, UNLIMITED};

#[cfg(feature = "serve")]
use crate::cli::AccessArgs;
use crate::cli::{ArenaCommand, BudgetArgs, Cli, Command, Program, ShareArgs, Shell, TopArgs, WaitArgs};
use crate::text::{Percent, nearest, parse_duration};

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
    /// Show budgets, or set one.
    Budget(BudgetRequest),
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
        /// As JSON.
        json: bool,
    },
    /// Have idle memory given back.
    Trim {
        /// By this pool.
        name: String,
        /// Cached prefixes as well.
        cached: bool,
        /// And wait for it.
        wait: Option<Duration>,
    },
    /// Show everything, live.
    Top(TopRequest),
    /// Show pools again and again.
    Watch {
        /// These, or all.
        names: Vec<String>,
        /// Time between two looks.
        interval: Duration,
        /// Leave after so many.
        count: Option<u64>,
    },
    /// Read commands and carry them out.
    Shell,
    /// Look for what is wrong.
    Doctor {
        /// As JSON.
        json: bool,
        /// The interpreter to ask for engines.
        python: Option<PathBuf>,
    },
    /// Show what happened.
    Events {
        /// To these pools, or all.
        names: Vec<String>,
        /// And what happens from now on.
        follow: bool,
        /// How many of the past.
        last: usize,
        /// As JSON.
        json: bool,
    },
    /// Print completions.
    Completions {
        /// For this shell.
        shell: Shell,
        /// And this program.
        program: Program,
    },
    /// Write man pages.
    Man {
        /// To this folder.
        dir: PathBuf,
    },
    /// Print names of pools.
    Names {
        /// That the last of these words may become; none for all.
        words: Vec<String>,
    },
    /// Something about arenas.
    Arena(ArenaAction),
    /// Start many models.
    #[cfg(feature = "serve")]
    Up(UpRequest),
    /// Show what runs.
    Ps {
        /// As JSON.
        json: bool,
    },
    /// Stop what runs.
    Down {
        /// And wait so long.
        wait: Duration,
    },
    /// Show what an instance wrote.
    Logs {
        /// This one.
        instance: String,
        /// So many lines.
        lines: usize,
        /// And what it writes from now on.
        follow: bool,
    },
}

/// What to start, and where clients come in.
#[cfg(feature = "serve")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpRequest {
    /// The configuration.
    pub config: Option<PathBuf>,
    /// Or only say whether it is right.
    pub check: bool,
    /// Instead of what it says.
    pub host: Option<String>,
    /// Instead of what it says.
    pub port: Option<u16>,
    /// Who may ask the router.
    pub access: AccessArgs,
}

/// Which budgets to show, or which to set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetRequest {
    /// Of this device, or of all.
    pub device: Option<DeviceName>,
    /// What to set it to.
    pub size: Option<BudgetSize>,
    /// And wait for it.
    pub wait: Option<Duration>,
    /// As JSON.
    pub json: bool,
}

/// A budget as it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetSize {
    /// So many bytes.
    Given(Bytes),
    /// What the device has.
    Auto,
}

impl BudgetRequest {
    fn new(args: &BudgetArgs) -> anyhow::Result<Self> {
        let size = args.size.as_deref().map(|text| match text {
            "auto" => Ok(BudgetSize::Auto),
            size => segment_size(size).map(BudgetSize::Given),
        });
        let device = args.device.as_deref().map(DeviceName::new);
        Ok(Self { device: device.transpose()?, size: size.transpose()?, wait: wait(&args.wait)?, json: args.json })
    }
}

/// What to do with arenas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArenaAction {
    /// Show them.
    List {
        /// As JSON.
        json: bool,
    },
    /// Look for what is wrong.
    Check {
        /// In this one.
        name: ArenaName,
        /// And say it as JSON.
        json: bool,
    },
    /// Remove it.
    Delete {
        /// This one.
        name: ArenaName,
        /// Also if it is in use.
        force: bool,
    },
}

/// How to show everything, live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopRequest {
    /// These pools, or all.
    pub names: Vec<String>,
    /// Time between two looks.
    pub refresh: Duration,
    /// How pools are ordered at first.
    pub sort: SortKey,
    /// Only names that contain this, at first.
    pub filter: String,
    /// Whether the mouse is ours.
    pub mouse: bool,
    /// Whether to draw, or what to print instead.
    pub output: TopOutput,
    /// Leave after so many looks.
    pub count: Option<u64>,
}

/// Where samples go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopOutput {
    /// The whole terminal.
    Screen,
    /// One table.
    Once,
    /// An object per line.
    Json,
}

/// What pools are ordered by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortKey {
    /// Name, A first.
    Name,
    /// In use, most first.
    Used,
    /// Held, most first.
    Held,
    /// Demand that was not met, most first.
    Demand,
    /// Fair share, largest first.
    Share,
    /// Pages mapped and unmapped per second, most first.
    Rate,
    /// How close to its limit, closest first.
    Pressure,
}

impl SortKey {
    /// All of them, in the order in which a key steps through them.
    pub const ALL: [Self; 7] =
        [Self::Name, Self::Used, Self::Held, Self::Demand, Self::Share, Self::Rate, Self::Pressure];

    /// As it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Used => "used",
            Self::Held => "held",
            Self::Demand => "demand",
            Self::Share => "share",
            Self::Rate => "rate",
            Self::Pressure => "pressure",
        }
    }
}

impl TopRequest {
    /// Checks what was typed.
    pub fn new(args: &TopArgs) -> anyhow::Result<Self> {
        let output = match () {
            () if args.once => TopOutput::Once,
            () if args.json => TopOutput::Json,
            () => TopOutput::Screen,
        };
        Ok(Self {
            names: pool_names(&args.names)?,
            refresh: interval(&args.refresh).context("--refresh")?,
            sort: sort_key(&args.sort)?,
            filter: args.filter.clone().unwrap_or_default(),
            mouse: args.mouse,
            output,
            count: args.count,
        })
    }
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
        let Some(command) = &cli.command else { return Ok(Self { dir, action: Action::Shell }) };
        let action = match command {
            Command::List(args) => Action::List { names: pool_names(&args.names)?, json: args.json },
            Command::Limit(args) => {
                let limit = Limit::Size(segment_size(&args.size)?);
                Action::Limit { name: pool_name(&args.name)?, limit, wait: wait(&args.wait)? }
            }
            Command::LimitPercent(args) => {
                let limit = Limit::Percent(args.percent.parse()?);
                Action::Limit { name: pool_name(&args.name)?, limit, wait: wait(&args.wait)? }
            }
            Command::Share(args) => Action::Share { name: pool_name(&args.name)?, change: share_change(args)? },
            Command::Budget(args) => Action::Budget(BudgetRequest::new(args)?),
            Command::Delete(args) => Action::Delete { name: pool_name(&args.name)?, force: args.force },
            Command::Gc(args) => Action::Gc { dry_run: args.dry_run, json: args.json },
            Command::Arena(args) => Action::Arena(arena(&args.command)?),
            Command::Trim(args) => {
                Action::Trim { name: pool_name(&args.name)?, cached: args.cached, wait: wait(&args.wait)? }
            }
            Command::Kvtop(args) => Action::Top(TopRequest::new(args)?),
            Command::Watch(args) => {
                let interval = interval(&args.interval).context("--interval")?;
                Action::Watch { names: pool_names(&args.names)?, interval, count: args.count }
            }
            Command::Shell(_) => Action::Shell,
            Command::Doctor(args) => Action::Doctor { json: args.json, python: args.python.clone() },
            Command::Events(args) => {
                let names = pool_names(&args.names)?;
                Action::Events { names, follow: args.follow, last: args.last, json: args.json }
            }
            Command::Completions(args) => Action::Completions { shell: args.shell, program: args.program },
            #[cfg(feature = "serve")]
            Command::Up(args) => Action::Up(UpRequest {
                config: args.config.clone(),
                check: args.check,
                host: args.host.clone(),
                port: args.port,
                access: args.access.clone(),
            }),
            Command::Ps(args) => Action::Ps { json: args.json },
            Command::Down(args) => Action::Down { wait: parse_duration(&args.wait).context("--wait")? },
            Command::Logs(args) => {
                Action::Logs { instance: args.instance.clone(), lines: args.lines, follow: args.follow }
            }
            Command::Man(args) => Action::Man { dir: args.dir.clone() },
            Command::Names(args) => Action::Names { words: args.words.clone() },
        };
        Ok(Self { dir, action })
    }
}

/// A pool's name. As with kvcached, a path stands for its last part.
fn arena(command: &ArenaCommand) -> anyhow::Result<ArenaAction> {
    Ok(match command {
        ArenaCommand::List { json } => ArenaAction::List { json: *json },
        ArenaCommand::Check { arena, json } => ArenaAction::Check { name: ArenaName::new(arena)?, json: *json },
        ArenaCommand::Delete { arena, force } => ArenaAction::Delete { name: ArenaName::new(arena)?, force: *force },
    })
}

fn pool_name(text: &str) -> anyhow::Result<String> {
    let name = text.rsplit('/').next().unwrap_or(text);
    if name.is_empty() {
        bail!("{text:?} is not the name of a pool");
    }
    Ok(name.to_owned())
}

fn pool_names(texts: &[String]) -> anyhow::Result<Vec<String>> {
    texts.iter().map(|text| pool_name(text)).collect()
}

/// Time between two looks: nobody reads faster than the shortest, and each look costs something.
fn interval(text: &str) -> anyhow::Result<Duration> {
    const SHORTEST: Duration = Duration::from_millis(50);
    let interval = parse_duration(text)?;
    if interval < SHORTEST {
        bail!("{text:?} is too short: look at most every {} ms", SHORTEST.as_millis());
    }
    Ok(interval)
}

fn sort_key(text: &str) -> anyhow::Result<SortKey> {
    let names = SortKey::ALL.map(SortKey::name);
    let Some(at) = names.iter().position(|name| name.eq_ignore_ascii_case(text)) else {
        let meant = nearest(text, names).map(|name| format!(" Did you mean '{name}'?")).unwrap_or_default();
        bail!("--sort: {text:?} is none of {}.{meant}", names.join(", "));
    };
    Ok(SortKey::ALL[at])
}

/// A size that fits the signed word of a segment.
pub(crate) fn segment_size(text: &str) -> anyhow::Result<Bytes> {
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
            Action::Trim { name: "VLLM".to_owned(), cached: false, wait: Some(Duration::from_secs(5)) }
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
            (&["budget", "host", "lots"], "no number"),
            (&["budget", "host", "-1G"], "negative"),
            (&["budget", "host", "1G", "--wait", "soon"], "not a duration"),
            (&["share", "a", "--weight", "0"], "--weight"),
            (&["share", "a", "--weight", "1.5"], "--weight"),
            (&["share", "a", "--floor", "-1"], "--floor"),
            (&["share", "a", "--ceiling", "G"], "--ceiling"),
            (&["share", "a", "--priority", "high"], "--priority"),
            (&["watch", "-n", "soon"], "--interval"),
            (&["watch", "-n", "0"], "too short"),
            (&["kvtop", "-r", "1ms"], "--refresh"),
            (&["kvtop", "--sort", "hedl"], "Did you mean 'held'?"),
        ] {
            let refusal = refusal(args);
            assert!(refusal.contains(part), "{args:?}: {refusal}");
        }
    }
}
