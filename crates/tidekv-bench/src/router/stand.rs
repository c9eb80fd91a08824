//! The two processes that are measured: the upstream, and `kvctl up` before it. Both end with the value.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::client;
use super::upstream::Listening;
use crate::lab::Lab;
use crate::subprocess::Subprocess;

/// For what should take no time at all.
const PATIENCE: Duration = Duration::from_secs(30);
/// What kvctl says when it knows its port.
const LISTENING: &str = "listening on http://";

pub(super) struct Stand {
    _upstream: Subprocess,
    upstream_address: String,
    router: Child,
    router_address: String,
    /// Its files go with it.
    _lab: Lab,
}

impl Stand {
    pub(super) fn build(kvctl: Option<&Path>) -> anyhow::Result<Self> {
        let kvctl = match kvctl {
            Some(kvctl) => kvctl.to_owned(),
            None => find_kvctl()?,
        };
        let lab = Lab::new()?;
        let program = tidekv_cli::program::named_path().context("finding kvbench itself, to start the upstream")?;
        let (tell, told) = mpsc::channel();
        let upstream = Subprocess::start(&program, "router-upstream", move |word: Option<Listening>| {
            word.is_some_and(|word| tell.send(word.port).is_ok())
        })?;
        let port = told.recv_timeout(PATIENCE).context("the upstream does not listen")?;
        let config = lab.path().join("router.yaml");
        // Something serves at the port, so that the command is never started.
        let text =
            format!("instances: [{{name: up, model: up, engine: command, command: [/bin/false, --port, {port}]}}]\n");
        fs::write(&config, text).with_context(|| format!("writing {}", config.display()))?;
        let (router, router_address) = start_router(&kvctl, &config, lab.path())?;
        let stand = Self {
            _upstream: upstream,
            upstream_address: format!("127.0.0.1:{port}"),
            router,
            router_address,
            _lab: lab,
        };
        stand.wait_until_ready()?;
        Ok(stand)
    }

    pub(super) fn upstream(&self) -> &str {
        &self.upstream_address
    }

    pub(super) fn router(&self) -> &str {
        &self.router_address
    }

    fn wait_until_ready(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while client::is_answered(&self.router_address).is_err() {
            ensure!(Instant::now() < deadline, "the router does not reach the upstream");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Has the router end in order, which is a part of what it is to do.
    pub(super) fn take_down(mut self) -> anyhow::Result<()> {
        kill_process(Pid::from_child(&self.router), Signal::TERM).context("telling kvctl to stop")?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.router.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("kvctl up ended with {status}"),
                None => ensure!(Instant::now() < deadline, "kvctl up does not end"),
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        // Ended already, or to be ended now.
        let _ = self.router.kill();
        let _ = self.router.wait();
    }
}

fn find_kvctl() -> anyhow::Result<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join("kvctl")));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join("kvctl")).collect::<Vec<_>>();
    let found = beside.into_iter().chain(on_path).find(|file| file.is_file());
    found.context("there is no kvctl beside kvbench or on PATH: build it, or give one with --kvctl")
}

fn start_router(kvctl: &Path, config: &Path, dir: &Path) -> anyhow::Result<(Child, String)> {
    let mut command = Command::new(kvctl);
    command.args(["up", "--port", "0", "--config"]).arg(config);
    command.env("KVCACHED_RUNTIME_DIR", dir).env_remove("KVCACHED_WEB_API_KEY");
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    // Whatever this benchmark dies of.
    tidekv_fork::end_with_parent(&mut command);
    let mut child = command.spawn().with_context(|| format!("running {}", kvctl.display()))?;
    let stdout = child.stdout.take().context("kvctl has no output")?;
    let (tell, told) = mpsc::channel();
    thread::Builder::new().name("router-output".to_owned()).spawn(move || {
        // Read to the end, so that it never waits for us.
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let _ = line.strip_prefix(LISTENING).map(|address| tell.send(address.to_owned()));
        }
    })?;
    match told.recv_timeout(PATIENCE) {
        Ok(address) => Ok((child, address)),
        Err(_) => {
            let _ = child.kill();
            let status = child.wait()?;
            bail!("{} up does not listen ({status}): is it built with its feature `serve`?", kvctl.display());
        }
    }
}
