//! Real forks: a child that outlives its parent keeps neither a place nor a connection, and knows that it has none.

mod support;

use std::time::Instant;

use support::{Recorder, Worker, folder, heading, is_done, map, role, say, soon};
use tidekv_ipc::broadcast::{Broadcaster, Ranks, STRATEGIES, strategy};
use tidekv_ipc::message::Deed;
use tidekv_ipc::server::WorkerServer;
use tidekv_ipc::{LaneError, SocketDir};

/// The processes that the tests start.
#[test]
fn worker() {
    let Some((words, dir)) = role() else { return };
    match words[0].as_str() {
        "serve" => support::serve(&dir, &words),
        "fork-worker" => fork_worker(&dir),
        "fork-scheduler" => fork_scheduler(&dir, &words[1]),
        other => panic!("no role {other}"),
    }
}

/// Forks; the child does this, says how it went, and lives until the test lets go of its input.
fn in_child(child: impl FnOnce() -> bool) {
    // SAFETY: the child uses nothing that a thread of the parent may have locked: what it is given, a pipe to write to
    // and one to read from; and it ends without running any destructor.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let word: &[u8] = if child() { b"@child knows\n" } else { b"@child does not know\n" };
        rustix::io::write(rustix::stdio::stdout(), word).expect("the test listens");
        while rustix::io::read(rustix::stdio::stdin(), &mut [0; 16]).is_ok_and(|count| count > 0) {}
        // SAFETY: ends this process at once; nothing of it is needed any more.
        unsafe { libc::_exit(0) };
    }
}

fn fork_worker(dir: &SocketDir) {
    let server = WorkerServer::bind(dir, 0, 0).expect("a place");
    let stopper = server.stopper();
    say("bound");
    std::thread::spawn(move || server.serve(&mut Recorder::default()));
    // Somebody is served by now: the test says so.
    support::listen();
    in_child(|| {
        stopper.stop();
        true
    });
    std::thread::park();
}

#[test]
fn a_workers_child_keeps_neither_its_place_nor_its_connection() {
    for entry in STRATEGIES {
        let (_root, dir) = folder();
        let mut parent = Worker::in_role(&dir, "fork-worker");
        parent.expect("bound");
        let mut caster = Broadcaster::new(dir.clone(), 0, 1, entry, None);
        assert!(caster.connect(soon())[0].is_ok());
        parent.expect("came");
        parent.tell("go on");
        parent.expect("child knows");
        // The child's stopper stopped nothing of the parent's.
        assert!(is_done(&caster.send(Ranks::All, heading(1), &map(&[1]), soon())[0]));
        parent.kill();
        let outcome = caster.send(Ranks::All, heading(2), &Deed::Ping, soon())[0].outcome.clone();
        assert_eq!(outcome.map(drop), Err(LaneError::Closed), "{}", entry.name);
        let worker = Worker::start(&dir, 0, 0);
        assert_eq!(caster.connect(soon()), [Ok(worker.instance)]);
    }
}

fn fork_scheduler(dir: &SocketDir, name: &str) {
    let mut caster = Some(Broadcaster::new(dir.clone(), 0, 2, strategy(name).expect("registered"), None));
    let ping = |caster: &mut Option<Broadcaster>, error: Option<LaneError>| {
        let caster = caster.as_mut().expect("there");
        let answers = caster.send(Ranks::All, heading(1), &Deed::Ping, soon());
        answers.len() == 2 && answers.iter().all(|answer| answer.outcome.as_ref().err() == error.as_ref())
    };
    assert!(caster.as_mut().expect("there").connect(soon()).iter().all(Result::is_ok));
    assert!(ping(&mut caster, None));
    in_child(|| {
        let is_refused = ping(&mut caster, Some(LaneError::Forked))
            && caster
                .as_mut()
                .is_some_and(|caster| caster.connect(soon()) == [Err(LaneError::Forked), Err(LaneError::Forked)]);
        // Neither waits for threads that are not here nor touches memory that is not.
        drop(caster.take());
        is_refused
    });
    assert!(ping(&mut caster, None));
    say("parent goes on");
    std::thread::park();
}

#[test]
fn a_schedulers_child_keeps_nothing_and_its_workers_notice_its_end() {
    for entry in STRATEGIES {
        let (_root, dir) = folder();
        let mut workers = [0, 1].map(|rank| Worker::start(&dir, 0, rank));
        let mut parent = Worker::in_role(&dir, &format!("fork-scheduler {}", entry.name));
        let mut heard = [parent.hear(), parent.hear()];
        heard.sort();
        assert_eq!(heard, ["child knows", "parent goes on"], "{}", entry.name);
        workers.iter_mut().for_each(|worker| worker.expect("came"));
        let started = Instant::now();
        parent.kill();
        workers.iter_mut().for_each(|worker| worker.expect("gone"));
        assert!(started.elapsed() < support::PATIENCE / 2);
    }
}
