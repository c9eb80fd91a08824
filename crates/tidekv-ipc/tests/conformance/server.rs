//! The worker's side: order, greetings, a second scheduler, bad frames, places, stopping.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tidekv_ipc::broadcast::{Broadcaster, Channel, Ranks, STRATEGIES, strategy};
use tidekv_ipc::message::{Balance, Deed, Order, RefusalKind, Verdict};
use tidekv_ipc::server::{Handler, Stopper, WorkerServer};
use tidekv_ipc::{IpcError, LaneError, SocketDir};
use tidekv_shm::ring::FutexWords;

use crate::support::fake::{FakePeer, connect, order, send_with};
use crate::support::{PATIENCE, Recorder, Worker, folder, heading, is_done, listen, map, say, soon};

const CHANNELS: [Channel; 2] = [Channel::Socket, Channel::Ring];

/// A hundred orders before the first answer is read: carried out one at a time, in the order received.
#[test]
fn orders_are_carried_out_one_at_a_time_in_the_order_received() {
    #[derive(Default)]
    struct Log {
        epochs: Vec<u64>,
        inside: bool,
    }
    impl Handler for Log {
        fn handle(&mut self, order: &Order) -> Verdict {
            assert!(!self.inside);
            self.inside = true;
            self.epochs.push(order.epoch);
            std::thread::yield_now();
            self.inside = false;
            Verdict::Done
        }
        fn balance(&mut self, _: &Order) -> Balance {
            Balance::default()
        }
        fn scheduler_gone(&mut self) {}
    }
    for channel in CHANNELS {
        let (_root, dir) = folder();
        let server = WorkerServer::bind(&dir, 0, 0).unwrap();
        let stopper = server.stopper();
        let worker = std::thread::spawn(move || {
            let mut log = Log::default();
            server.serve(&mut log).unwrap();
            log.epochs
        });
        let mut scheduler = FakePeer::scheduler(&dir, 0, channel);
        let sequences: Vec<u64> = (2..102).collect();
        match channel {
            Channel::Socket => {
                let all: Vec<u8> = sequences.iter().flat_map(|n| order(*n, &map(&[1, 2]), Channel::Socket)).collect();
                scheduler.send(&all);
            }
            Channel::Ring => {
                sequences.iter().for_each(|n| scheduler.send(&order(*n, &map(&[1, 2]), Channel::Socket)));
            }
        }
        let answered: Vec<u64> = sequences.iter().map(|_| scheduler.answer().sequence).collect();
        assert_eq!(answered, sequences);
        stopper.stop();
        assert_eq!(worker.join().unwrap(), sequences, "{channel:?}");
    }
}

#[test]
fn a_second_scheduler_is_refused_in_words_and_served_when_the_first_is_gone() {
    for entry in STRATEGIES {
        let (_root, dir) = folder();
        let mut worker = Worker::start(&dir, 0, 0);
        let caster = || Broadcaster::new(dir.clone(), 0, 1, entry, None);
        let mut first = caster();
        assert_eq!(first.connect(soon()), [Ok(worker.instance)]);
        worker.expect("came");
        let mut second = caster();
        match &second.connect(soon())[0] {
            Err(LaneError::Refused(refusal)) => assert_eq!(refusal.kind, RefusalKind::Busy, "{refusal:?}"),
            other => panic!("{other:?}"),
        }
        assert!(is_done(&first.send(Ranks::All, heading(1), &map(&[1]), soon())[0]), "the first is served");
        drop(first);
        worker.expect("gone");
        assert_eq!(second.connect(soon()), [Ok(worker.instance)]);
        worker.expect("came");
        let held = &second.send(Ranks::All, heading(1), &Deed::Held, soon())[0];
        assert_eq!(held.outcome.as_ref().unwrap().verdict, Verdict::Held(vec![]), "nothing of the first's is left");
    }
}

#[test]
fn a_scheduler_that_was_killed_is_noticed_at_once() {
    for channel in CHANNELS {
        let (_root, dir) = folder();
        let mut worker = Worker::start(&dir, 0, 0);
        let mut best = Duration::MAX;
        for _ in 0..5 {
            let scheduler = FakePeer::scheduler(&dir, 0, channel);
            worker.expect("came");
            let started = Instant::now();
            drop(scheduler);
            worker.expect("gone");
            best = best.min(started.elapsed());
        }
        assert!(best < Duration::from_millis(100), "{channel:?}: {best:?}");
    }
}

/// The handler's own work goes on while nothing is ordered.
#[test]
fn a_worker_without_orders_ticks() {
    for channel in CHANNELS {
        let (_root, dir) = folder();
        let mut worker = Worker::start(&dir, 0, 0);
        let mut scheduler = FakePeer::scheduler(&dir, 0, channel);
        worker.expect("came");
        let deadline = soon();
        for sequence in 2.. {
            scheduler.send(&order(sequence, &Deed::Abort, channel));
            assert_eq!(scheduler.answer().sequence, sequence);
            let heard = worker.hear();
            let ticks = heard.rsplit_once(" after ").unwrap().1.trim_end_matches(" ticks").parse::<u32>().unwrap();
            if ticks >= 3 {
                break;
            }
            assert!(Instant::now() < deadline, "{heard}");
        }
    }
}

#[test]
fn greetings_for_somebody_else_are_refused() {
    let (_root, dir) = folder();
    let _worker = Worker::start(&dir, 0, 0);
    let said_no = |bytes: Vec<u8>| {
        let mut peer = FakePeer { stream: connect(&dir, 0), ring: None };
        peer.send(&bytes);
        let Verdict::Refused(refusal) = peer.answer().verdict else { panic!("refused") };
        assert!(peer.is_dropped());
        assert_eq!(refusal.kind, RefusalKind::Protocol);
        refusal.reason
    };
    let hello = |stage, rank| order(1, &Deed::Hello { stage, rank }, Channel::Socket);
    assert!(said_no(hello(0, 1)).contains("this is rank 0"), "another rank");
    assert!(said_no(hello(1, 0)).contains("stage"), "another stage");
    assert!(said_no(order(1, &map(&[1]), Channel::Socket)).contains("greeting"), "no greeting at all");
    let twice = [hello(0, 0), hello(0, 0)].concat();
    let mut peer = FakePeer { stream: connect(&dir, 0), ring: None };
    peer.send(&twice);
    assert_eq!(peer.answer().verdict, Verdict::Done);
    assert!(matches!(peer.answer().verdict, Verdict::Refused(_)));
    assert!(peer.is_dropped());
}

/// Truncated, oversized, of another version, random: the connection is closed, the server lives on.
#[test]
fn bad_frames_cost_their_connection_and_no_more() {
    let (_root, dir) = folder();
    let mut worker = Worker::start(&dir, 0, 0);
    for channel in CHANNELS {
        let good = order(2, &map(&[1, 2, 3]), channel);
        let changed = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        let noise: Vec<u8> = (0_u32..5000).map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
        let cases =
            [changed(0, 0), changed(4, 2), changed(6, 0x81), changed(7, 0xff), changed(11, 1), changed(48, 1), noise];
        for bad in cases {
            let mut scheduler = FakePeer::scheduler(&dir, 0, channel);
            worker.expect("came");
            scheduler.send(&bad);
            worker.expect("gone");
            assert!(scheduler.is_dropped(), "{channel:?}");
        }
        // Cut off in the middle.
        for length in [1, 63, good.len() - 1] {
            let mut scheduler = FakePeer::scheduler(&dir, 0, channel);
            worker.expect("came");
            scheduler.send(&good[..length]);
            drop(scheduler);
            worker.expect("gone");
        }
    }
    // Before the greeting nobody has come.
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 300], b""] {
        let mut stream = connect(&dir, 0);
        let _ = stream.write_all(bytes);
        drop(stream);
    }
    let scheduler = FakePeer::scheduler(&dir, 0, Channel::Socket);
    worker.expect("came");
    drop(scheduler);
    worker.expect("gone");
}

#[test]
fn a_greeting_that_promises_a_ring_must_bring_one() {
    let (_root, dir) = folder();
    let mut worker = Worker::start(&dir, 0, 0);
    let hello = order(1, &Deed::Hello { stage: 0, rank: 0 }, Channel::Ring);
    let (_words, words) = FutexWords::create().unwrap();
    let (reader, _writer) = std::io::pipe().unwrap();
    let others: [Option<OwnedFd>; 3] = [None, Some(words), Some(reader.into())];
    for other in others {
        let mut peer = FakePeer { stream: connect(&dir, 0), ring: None };
        match other {
            None => peer.send(&hello),
            Some(descriptor) => send_with(&peer.stream, &hello, &descriptor),
        }
        let Verdict::Refused(refusal) = peer.answer().verdict else { panic!("refused") };
        assert!(refusal.reason.contains("ring"), "{refusal:?}");
        assert!(peer.is_dropped());
    }
    // Bytes on the socket of a connection that uses its ring are not orders.
    let mut peer = FakePeer::scheduler(&dir, 0, Channel::Ring);
    worker.expect("came");
    peer.stream.write_all(&order(2, &map(&[1]), Channel::Socket)).unwrap();
    worker.expect("gone");
    assert!(peer.is_dropped());
}

/// Somebody who connects and says nothing does not keep others out for ever.
#[test]
fn silence_is_not_a_greeting() {
    let (_root, dir) = folder();
    let worker = Worker::start(&dir, 0, 0);
    let silent: Vec<UnixStream> = (0..2).map(|_| connect(&dir, 0)).collect();
    let mut caster = Broadcaster::new(dir, 0, 1, strategy("seq").unwrap(), None);
    assert_eq!(caster.connect(soon()), [Ok(worker.instance)]);
    drop(silent);
}

#[test]
fn stopping_ends_the_server_and_frees_its_place() {
    for channel in [None, Some(Channel::Socket), Some(Channel::Ring)] {
        let (_root, dir) = folder();
        let server = WorkerServer::bind(&dir, 0, 0).unwrap();
        assert!(matches!(WorkerServer::bind(&dir, 0, 0), Err(IpcError::Taken { .. })));
        let stopper = server.stopper();
        let served = std::thread::spawn(move || server.serve(&mut Recorder::default()));
        let scheduler = channel.map(|channel| FakePeer::scheduler(&dir, 0, channel));
        let started = Instant::now();
        stopper.stop();
        served.join().unwrap().unwrap();
        assert!(started.elapsed() < PATIENCE / 2);
        // The stopper keeps nothing alive.
        assert!(!dir.path().exists());
        WorkerServer::bind(&dir, 0, 0).unwrap();
        stopper.stop();
        assert!(scheduler.is_none_or(|mut scheduler| scheduler.is_dropped()));
    }
}

/// It was heard when no order was waiting: on a ring that keeps a scheduler's orders coming, never.
#[test]
fn a_server_stops_after_the_order_that_it_is_busy_with() {
    struct Busy {
        all_are_sent: mpsc::Receiver<()>,
        stopper: Stopper,
        epochs: Vec<u64>,
    }
    impl Handler for Busy {
        fn handle(&mut self, order: &Order) -> Verdict {
            if self.epochs.is_empty() {
                self.all_are_sent.recv_timeout(PATIENCE).unwrap();
                self.stopper.stop();
            }
            self.epochs.push(order.epoch);
            Verdict::Done
        }
        fn balance(&mut self, _: &Order) -> Balance {
            Balance::default()
        }
        fn scheduler_gone(&mut self) {}
    }
    for channel in CHANNELS {
        let (_root, dir) = folder();
        let server = WorkerServer::bind(&dir, 0, 0).unwrap();
        let stopper = server.stopper();
        let (sent, all_are_sent) = mpsc::channel();
        let worker = std::thread::spawn(move || {
            let mut busy = Busy { all_are_sent, stopper, epochs: Vec::new() };
            server.serve(&mut busy).unwrap();
            busy.epochs
        });
        let mut scheduler = FakePeer::scheduler(&dir, 0, channel);
        (2..22).for_each(|sequence| scheduler.send(&order(sequence, &map(&[1]), Channel::Socket)));
        sent.send(()).unwrap();
        assert_eq!(worker.join().unwrap(), [2], "{channel:?}");
    }
}

#[test]
fn of_processes_that_race_for_a_place_one_wins() {
    let (_root, dir) = folder();
    for _ in 0..5 {
        let mut racers: Vec<Worker> = (0..4).map(|_| Worker::in_role(&dir, "race")).collect();
        racers.iter_mut().for_each(|racer| racer.expect("ready"));
        racers.iter_mut().for_each(|racer| racer.tell("go"));
        let results: Vec<String> = racers.iter_mut().map(Worker::hear).collect();
        assert_eq!(results.iter().filter(|result| *result == "won").count(), 1, "{results:?}");
        assert_eq!(results.iter().filter(|result| *result == "taken").count(), 3, "{results:?}");
        // Killed, so that the next round finds a dead worker's file.
        racers.iter_mut().for_each(Worker::kill);
        assert!(dir.socket_path(0, 0).unwrap().exists());
    }
}

pub(crate) fn racing(dir: &SocketDir) {
    say("ready");
    listen();
    let server = WorkerServer::bind(dir, 0, 0);
    say(match &server {
        Ok(_) => "won",
        Err(IpcError::Taken { .. }) => "taken",
        Err(_) => "failed",
    });
    listen();
}

/// A worker's child does not keep its place, nor a scheduler's connection to it.
#[test]
fn children_of_a_worker_keep_nothing() {
    let (_root, dir) = folder();
    let mut parent = Worker::in_role(&dir, "fork");
    parent.expect("serving");
    let mut caster = Broadcaster::new(dir.clone(), 0, 1, strategy("seq").unwrap(), None);
    assert!(caster.connect(soon())[0].is_ok());
    parent.expect("came");
    parent.tell("start a child");
    parent.expect("child runs");
    parent.kill();
    let answers = caster.send(Ranks::All, heading(1), &Deed::Ping, soon());
    assert_eq!(answers[0].outcome.clone().map(drop), Err(LaneError::Closed));
    let worker = Worker::start(&dir, 0, 0);
    assert_eq!(caster.connect(soon()), [Ok(worker.instance)]);
}

/// Serves, and starts a child that outlives it.
pub(crate) fn forking(dir: &SocketDir) {
    let server = WorkerServer::bind(dir, 0, 0).expect("a place");
    std::thread::spawn(move || server.serve(&mut Recorder::default()));
    say("serving");
    listen();
    let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process");
    // Somebody who starts a process goes on before the kernel has closed in it what it does not inherit.
    child.stdin.as_mut().expect("piped").write_all(b"!").expect("it reads");
    child.stdout.as_mut().expect("piped").read_exact(&mut [0]).expect("it answers");
    say("child runs");
    listen();
    drop(child);
}
