//! The pools of instances: what they are called, and on which terms they share.

use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::supervisor::{Supervisor, run, two_models};

/// What `kvctl list NAMES --json` says.
fn list(dir: &Path, names: &[&str]) -> Vec<Value> {
    let (code, text, error) = run(dir, &[&["list", "--json"], names].concat());
    assert_eq!(code, 0, "{error}");
    serde_json::from_str(&text).unwrap()
}

fn names(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["ipc"].as_str().unwrap()).collect()
}

/// Instance and pool, as `kvctl ps --json` says of the supervisor with this router.
fn instances_and_pools(up: &Supervisor) -> Vec<(String, Value)> {
    let (code, text, error) = run(up.dir.path(), &["ps", "--json"]);
    assert_eq!(code, 0, "{error}");
    let rows: Value = serde_json::from_str(&text).unwrap();
    let own = format!("http://{}", up.address);
    let own = rows.as_array().unwrap().iter().find(|row| row["router"] == own).unwrap();
    let instances = own["instances"].as_array().unwrap();
    instances.iter().map(|one| (one["name"].as_str().unwrap().to_owned(), one["pool"].clone())).collect()
}

/// Pools were called `kvcached_kvserve_<pid>`: another name after each restart, and none that says what it is for.
#[test]
fn a_pool_has_its_instances_name_and_answers_to_it_everywhere() {
    let up = Supervisor::start(&two_models(""));
    up.wait_until_ready("a");
    up.wait_until_ready("b");
    let dir = up.dir.path();
    assert_eq!(names(&list(dir, &[])), ["kvcached_a", "kvcached_b"]);
    assert_eq!(names(&list(dir, &["a"])), ["kvcached_a"]);
    let pools = instances_and_pools(&up);
    assert_eq!(pools, [("a".into(), "kvcached_a".into()), ("b".into(), "kvcached_b".into())]);
    let (_, table, _) = run(dir, &["ps"]);
    assert!(table.contains("Pool") && table.contains("kvcached_b"), "{table}");

    let (code, text, error) = run(dir, &["limit", "a", "32M", "--wait", "60s"]);
    assert!(code == 0 && text.contains("kvcached_a"), "{text}{error}");
    assert_eq!(list(dir, &["kvcached_a"])[0]["limit_bytes"], 32 << 20);
    assert_eq!(run(dir, &["share", "a", "--weight", "3"]).0, 0);
    assert_eq!(list(dir, &["a"])[0]["weight"], 3);
    for args in [
        &["trim", "a", "--wait", "60s"][..],
        &["events", "a"],
        &["kvtop", "--once", "a"],
        &["watch", "--count", "1", "a"],
        &["limit-percent", "a", "1"],
        &["delete", "a", "--force"],
    ] {
        let (code, text, error) = run(dir, args);
        assert!(matches!(code, 0 | 3) && text.contains("kvcached_a"), "{args:?}: {code} {text}{error}");
        assert!(!text.contains("kvcached_b"), "{args:?}: {text}");
    }
    let (code, _, error) = run(dir, &["limit", "aa", "1M"]);
    assert!(code == 1 && error.contains("'aa' not found"), "{error}");
}

#[test]
fn a_name_of_a_living_pool_gets_a_suffix_and_that_is_said() {
    let first = Supervisor::start(&two_models(""));
    first.wait_until_ready("a");
    let second = first.start_beside(&two_models(""));
    second.wait_for_line("a > its pool is called kvcached_a-2: kvcached_a is another's");
    second.wait_until_ready("a");
    second.wait_until_ready("b");
    let expected = [("a".into(), "kvcached_a-2".into()), ("b".into(), "kvcached_b-2".into())];
    assert_eq!(instances_and_pools(&second), expected);
    assert_eq!(names(&list(second.dir.path(), &["a-2", "a"])), ["kvcached_a-2", "kvcached_a"]);
}

/// Two names may be one when they are written as names of pools, and a name of the configuration's own stands.
#[test]
fn instances_of_one_supervisor_never_share_a_name() {
    let one = |name: &str, more: &str| {
        format!("  - {{name: {name}, model: 'synthetic:tiny', engine: kvserve, engine_args: '--threads 1'{more}}}\n")
    };
    let named = one("c", ", kvcached_env: [KVCACHED_IPC_NAME=mine]");
    let up = Supervisor::start(&format!("instances:\n{}{}{named}", one("'x y'", ""), one("x-y", "")));
    for name in ["x y", "x-y", "c"] {
        up.wait_until_ready(name);
    }
    let pools: Vec<Value> = instances_and_pools(&up).into_iter().map(|(_, pool)| pool).collect();
    assert_eq!(pools, ["kvcached_x-y", "kvcached_x-y-2", "mine"]);
}

const WITH_TERMS: &str = "instances:\n  - name: a\n    model: synthetic:tiny\n    engine: kvserve\n    \
                          engine_args: --threads 1\n    pool: {limit: 48M, weight: 4, priority: 2, floor: 8M, ceiling: 56M}\n";

/// What the configuration says of a pool holds before the first request, also after a restart of the instance and of the supervisor.
#[test]
fn limits_and_shares_of_the_configuration_survive_restarts() {
    let mut up = Supervisor::start(WITH_TERMS);
    for life in ["the first", "after a kill of the instance", "after a restart of the supervisor"] {
        if life.contains("instance") {
            assert_eq!(run(up.dir.path(), &["limit", "a", "16M"]).0, 0, "an order for this life");
            let pid = i32::try_from(up.status("a")["pid"].as_u64().unwrap()).unwrap();
            kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
            up.wait_for("a", "its restart", |status| status["restarts"] == 1);
        } else if life.contains("supervisor") {
            up.signal(Signal::TERM);
            assert_eq!(up.wait().code(), Some(0));
            up = up.start_beside(WITH_TERMS);
        }
        up.wait_until_ready("a");
        let rows = list(up.dir.path(), &[]);
        assert_eq!(names(&rows), ["kvcached_a"], "{life}");
        let terms = ["limit_bytes", "weight", "priority", "floor_bytes", "ceiling_bytes"].map(|key| &rows[0][key]);
        assert_eq!(
            terms,
            [&(48 << 20).into(), &4.into(), &2.into(), &(8 << 20).into(), &Value::from(56 << 20)],
            "{life}"
        );
    }
}

/// Floors are promises within a budget, which is known only when the pools are there.
#[test]
fn a_floor_that_does_not_fit_is_said_and_the_rest_holds() {
    let up = Supervisor::start(
        &WITH_TERMS.replace("floor: 8M, ceiling: 56M", "floor: 40T, ceiling: 50T").replace("48M", "48T"),
    );
    up.wait_for_line("a > its pool kvcached_a has no floor: a floor of 40 TiB does not fit");
    up.wait_until_ready("a");
    let rows = list(up.dir.path(), &["a"]);
    assert_eq!((&rows[0]["weight"], &rows[0]["floor_bytes"]), (&4.into(), &Value::from(0)));
}
