//! `kvctl share`.

use tidekv_core::units::Bytes;
use tidekv_shm::UNLIMITED;

use crate::common::{Victim, World};

fn line<'a>(text: &'a str, title: &str) -> &'a str {
    let line = text.lines().find(|line| line.starts_with(title)).unwrap_or_else(|| panic!("no {title} in {text}"));
    line[title.len()..].trim()
}

#[test]
fn shown_when_nothing_is_to_be_changed() {
    let world = World::new();
    let (a, b) = (world.pool("a", Bytes::gib(1)), world.pool("b", Bytes::gib(1)));
    world.device(Bytes::gib(2), Bytes::mib(300));
    a.uses(Bytes::mib(200), Bytes::mib(80));
    b.change(|entry| (entry.weight, entry.demand) = (2, Bytes::mib(500)));
    let before = (world.entry("a"), world.entry("b"));
    let ran = world.kvctl(&["share", "a"]);
    let (code, text) = ran.quiet();
    assert_eq!(code, 0);
    assert_eq!(line(text, "IPC"), format!("a (group 0, pid {}, alive) on host", std::process::id()));
    assert_eq!((line(text, "Weight"), line(text, "Ceiling"), line(text, "Limit")), ("1", "none", "1 GiB"));
    assert_eq!((line(text, "Fair share"), line(text, "Owes")), ("100 MiB", "180 MiB"));
    assert_eq!(line(text, "Holds"), "280 MiB: 200 MiB needed, 0 B cached, 80 MiB idle");
    assert_eq!((world.entry("a"), world.entry("b")), before, "nothing was written");
}

#[test]
fn every_term_can_be_set_and_the_others_stay() {
    let world = World::new();
    let _pool = world.pool("a", Bytes::gib(1));
    world.device(Bytes::gib(2), Bytes::gib(1));
    let ran = world.kvctl(&["share", "a", "--weight", "4", "--floor", "64M"]);
    assert_eq!(line(ran.quiet().1, "Floor"), "64 MiB");
    let ran = world.kvctl(&["share", "a", "--priority", "-2", "--ceiling", "1.5GiB"]);
    assert_eq!(ran.quiet().0, 0);
    let entry = world.entry("a");
    assert_eq!((entry.weight, entry.priority), (4, -2));
    assert_eq!((entry.floor, entry.ceiling), (Bytes::mib(64), Bytes(3 << 29)));
    assert_eq!(world.kvctl(&["share", "a", "--ceiling", "none"]).code, 0);
    assert_eq!(world.entry("a").ceiling, UNLIMITED);
}

#[test]
fn floors_that_do_not_fit_are_refused_and_lower_ones_never() {
    let world = World::new();
    let _pools = [world.pool("a", Bytes::gib(8)), world.pool("b", Bytes::gib(8))];
    world.device(Bytes::gib(2), Bytes::gib(1));
    assert_eq!(world.kvctl(&["share", "a", "--floor", "768M"]).code, 0);
    let ran = world.kvctl(&["share", "b", "--floor", "512M", "--weight", "9"]);
    let error = ran.error();
    assert!(error.contains("of a budget of 1 GiB, 768 MiB are other pools' floors"), "{error}");
    assert_eq!((world.entry("b").floor, world.entry("b").weight), (Bytes::ZERO, 1), "all or nothing");
    assert_eq!(world.kvctl(&["share", "b", "--floor", "256M"]).code, 0);

    let ran = world.kvctl(&["share", "b", "--ceiling", "128M"]);
    assert!(ran.error().contains("a floor of 256 MiB is above the ceiling of 128 MiB"));
    // The budget shrank below the floors: a step in the right direction is allowed.
    world.device(Bytes::gib(2), Bytes::mib(100));
    assert_eq!(world.kvctl(&["share", "a", "--floor", "700M"]).code, 0);
    world.kvctl(&["share", "a", "--floor", "701M"]).error();
}

#[test]
fn who_has_no_share() {
    let world = World::new();
    assert_eq!(world.kvctl(&["share", "nobody"]).code, 1);
    world.kvcached_segment("theirs", [1 << 30, 0, 0]);
    assert!(world.kvctl(&["share", "theirs"]).error().contains("kvcached's own"));
    Victim::spawn(&world, "victim").kill();
    assert_eq!(
        line(world.kvctl(&["share", "victim"]).quiet().1, "Holds"),
        "80 MiB: 80 MiB needed, 0 B cached, 0 B idle",
        "nobody can have it yet"
    );
    let ran = world.kvctl(&["share", "victim", "--weight", "2"]);
    assert!(ran.code == 1 && ran.stderr.contains("no living owner"), "{ran:?}");
    for flags in [["--weight", "0"], ["--weight", "-1"], ["--floor", "-1"], ["--ceiling", "x"], ["--priority", "1.5"]] {
        world.kvctl(&[&["share", "victim"], &flags[..]].concat()).error();
    }
}
