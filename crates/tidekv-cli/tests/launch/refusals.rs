//! What `kvctl up` refuses, in one sentence and before it starts anything.

use std::fs;

use crate::supervisor::{run, two_models};

#[test]
fn a_wrong_configuration_is_an_error_with_its_line_and_nothing_is_started() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("models.yaml");
    let path = file.to_str().unwrap();
    let text = two_models("router:\n  router_prot: 0");
    fs::write(&file, text).unwrap();
    for args in [&["up", "--config", path][..], &["up", "--config", path, "--check"]] {
        let (code, out, error) = run(folder.path(), args);
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(error.contains(":2:3: router_prot: there is no such key: did you mean router_port?"), "{error}");
        assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "the configuration alone");
}

#[test]
fn a_right_one_is_checked_without_starting_anything() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("models.yaml");
    fs::write(&file, two_models("kvcached: {page_sise_mb: 2}")).unwrap();
    let (code, out, error) = run(folder.path(), &["up", "--check", "--config", file.to_str().unwrap()]);
    assert_eq!(code, 0, "{error}");
    assert!(out.contains("a: kvserve synthetic:tiny --threads 1 --port 0"), "{out}");
    assert!(error.contains("did you mean KVCACHED_PAGE_SIZE_MB?"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn others_can_reach_it_only_with_a_key() {
    let folder = tempfile::tempdir().unwrap();
    let (code, _, error) = run(folder.path(), &["up", "--host", "0.0.0.0", "--port", "0"]);
    assert!(code == 2 && error.contains("KVCACHED_WEB_API_KEY"), "{error}");
    let (code, _, error) = run(folder.path(), &["up", "--api-key", "hunter2"]);
    assert!(code == 2 && error.contains("--api-key-file FILE, or set KVCACHED_WEB_API_KEY"), "{error}");
    assert!(!error.contains("hunter2"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_taken_port_is_said_and_nothing_is_started() {
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (code, _, error) = run(folder.path(), &["up", "--port", &port]);
    assert!(code == 2 && error.contains(&format!("port {port} of 127.0.0.1 is taken")), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
