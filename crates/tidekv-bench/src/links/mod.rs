//! `kvbench links DIR`: the names of the scripts that people know, as links to `kvbench`; and what it does when it is started
//! under one of them.
//!
//! | name                                                   | does what this does                                       |
//! |--------------------------------------------------------|-----------------------------------------------------------|
//! | `kvcached_map_parallel_benchmark.py`                   | `kvbench map-parallel`                                    |
//! | `kvcached_tp_ipc_benchmark.py`                         | `kvbench tp-ipc`                                          |
//! | `start_server.sh`                                      | `kvbench kvserve`: the server alone                       |
//! | `start_client.sh`                                      | `kvbench serve`: the load alone                           |
//! | `run_benchmark.sh`                                     | `kvbench latency-benefit`                                 |
//! | `bench_vllm.py`, `bench_sglang.py`                     | `kvbench gsm8k --protocol kvcached`                       |
//! | `prepare_batch.py`                                     | `kvbench prepare-batch`                                   |
//! | `test_prepare_batch.py`                                | `kvbench prepare-batch --quick`                           |
//! | `shm_allocation_bench`, `shm_address_lookup_bench`, `shm_transfer_bench` | `kvbench shm-alloc`, `shm-lookup`, `shm-transfer` |
//!
//! Arguments follow as they would follow the script. A link is made whole or not at all, and a file of the same name that
//! is no link of ours is left alone.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, ValueHint};
use tidekv_cli::exit::Outcome;

use crate::output::print;

/// A script's name, and the words that stand for it behind `kvbench`.
const NAMES: [(&str, &[&str]); 12] = [
    ("kvcached_map_parallel_benchmark.py", &["map-parallel"]),
    ("kvcached_tp_ipc_benchmark.py", &["tp-ipc"]),
    ("start_server.sh", &["kvserve"]),
    ("start_client.sh", &["serve"]),
    ("run_benchmark.sh", &["latency-benefit"]),
    ("bench_vllm.py", &["gsm8k", "--protocol", "kvcached"]),
    ("bench_sglang.py", &["gsm8k", "--protocol", "kvcached"]),
    ("prepare_batch.py", &["prepare-batch"]),
    ("test_prepare_batch.py", &["prepare-batch", "--quick"]),
    ("shm_allocation_bench", &["shm-alloc"]),
    ("shm_address_lookup_bench", &["shm-lookup"]),
    ("shm_transfer_bench", &["shm-transfer"]),
];

/// Arguments of `kvbench links`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  kvbench links ~/kvcached-names                 # then put the folder on PATH
  ~/kvcached-names/prepare_batch.py --quick      # is kvbench prepare-batch --quick
  ~/kvcached-names/shm_transfer_bench --num_transfers=100

Exit status: 0 made, 2 a file of that name is in the way, or the folder cannot be written.")]
pub struct LinksArgs {
    /// Where to; made if it is not there
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
}

/// Makes the links and says which.
pub fn run(args: &LinksArgs) -> anyhow::Result<Outcome> {
    let program = tidekv_cli::program::named_path().context("finding kvbench itself, to link to")?;
    fs::create_dir_all(&args.dir).with_context(|| format!("cannot make {}", args.dir.display()))?;
    let mut made = String::new();
    for (name, words) in NAMES {
        let path = args.dir.join(name);
        link(&program, &path)?;
        made += &format!("{} -> kvbench {}\n", path.display(), words.join(" "));
    }
    print(&made)?;
    Ok(Outcome::Done)
}

/// One link, replaced if it is a link already.
fn link(program: &Path, path: &Path) -> anyhow::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => {
            fs::remove_file(path).with_context(|| format!("cannot replace {}", path.display()))?
        }
        Ok(_) => anyhow::bail!("{} is there and is no link: it is left as it is", path.display()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot look at {}", path.display())),
    }
    symlink(program, path).with_context(|| format!("cannot make {}", path.display()))
}

/// The arguments as `kvbench` takes them, when the program was started under one of the names; else as they are.
pub fn with_own_name(mut args: Vec<OsString>) -> Vec<OsString> {
    let name = args.first().and_then(|first| Path::new(first).file_name()).and_then(|name| name.to_str());
    let known = NAMES.iter().find(|(script, _)| name == Some(script));
    if let Some((_, words)) = known {
        args.splice(0..1, ["kvbench"].iter().chain(*words).map(OsString::from));
    }
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(args: &[&str]) -> Vec<OsString> {
        with_own_name(args.iter().map(OsString::from).collect())
    }

    #[test]
    fn a_known_name_is_its_subcommand_and_others_are_left_alone() {
        assert_eq!(
            words(&["/x/prepare_batch.py", "--iterations", "5"]),
            ["kvbench", "prepare-batch", "--iterations", "5"]
        );
        assert_eq!(words(&["test_prepare_batch.py"]), ["kvbench", "prepare-batch", "--quick"]);
        assert_eq!(words(&["/usr/bin/kvbench", "vmm"]), ["/usr/bin/kvbench", "vmm"]);
        assert_eq!(words(&["other.py"]), ["other.py"]);
        assert_eq!(words(&[]), [""; 0]);
    }

    #[test]
    fn links_replace_links_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let program = Path::new("/bin/true");
        let path = dir.path().join("prepare_batch.py");
        link(program, &path).unwrap();
        link(program, &path).unwrap();
        assert_eq!(fs::read_link(&path).unwrap(), program);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "mine").unwrap();
        assert!(link(program, &path).unwrap_err().to_string().contains("left as it is"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    }

    /// A subcommand that is renamed takes its links with it.
    #[test]
    fn every_name_leads_to_a_subcommand() {
        use clap::CommandFactory;
        let command = crate::cli::Cli::command();
        for (name, words) in NAMES {
            assert!(command.find_subcommand(words[0]).is_some(), "{name} -> {}", words[0]);
        }
    }
}
