//! Configurations as people write them, right and wrong.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tidekv_core::units::Bytes;
use tidekv_serve::router::EngineKind;

use super::plan::{Plan, Program};
use super::{ConfigError, parse, read};
use crate::request::ShareChange;

fn plan(text: &str) -> Plan {
    parse(text, Path::new(".")).unwrap_or_else(|problem| panic!("{problem:?}"))
}

/// `LINE:COLUMN key: text`.
fn problem(text: &str) -> String {
    let problem = parse(text, Path::new(".")).unwrap_err();
    let place = problem.place.map_or_else(String::new, |(line, column)| format!("{line}:{column} "));
    format!("{place}{}: {}", problem.key.unwrap_or_default(), problem.text)
}

const KVCACHED: &str = r#"
kvcached:
  kvcached_gpu_utilization: 0.95
  kvcached_page_prealloc_enabled: true
  Min_Reserved_Pages: 5
  KVCACHED_MAX_RESERVED_PAGES: 10
router:
  enable_router: true
  router_port: 8080
  router_host: localhost
sleep_manager:
  idle_threshold_seconds: 300
  check_interval_seconds: 60
  auto_sleep_enabled: true
  wakeup_on_request: true
  min_sleep_duration: 80
launch_delay_seconds: 2
instances:
  - name: instance1
    model: meta-llama/Llama-3.2-1B
    engine: vllm
    kvcached_env:
      - "ENABLE_KVCACHED=true"
      - "KVCACHED_IPC_NAME=VLLM"
    engine_env:
      - "VLLM_SERVER_DEV_MODE=1"
    engine_args:
      - "--disable-log-requests"
      - "--host=localhost"
      - "--port=12346"
      - "--gpu-memory-utilization 0.5"
      - "--enable-sleep-mode"
  - model: Qwen/Qwen3-0.6B
    engine: SGL
    args: "--port 30001 --mem-fraction-static 0.5 --chat-template 'a b'"
"#;

#[test]
fn a_configuration_of_kvcached() {
    let plan = plan(KVCACHED);
    assert!(plan.warnings.is_empty(), "{:?}", plan.warnings);
    assert_eq!((plan.router.is_enabled, plan.router.host.as_str(), plan.router.port), (true, "localhost", 8080));
    assert!(plan.sleep.is_automatic && plan.sleep.wakes_on_request);
    assert_eq!((plan.sleep.min_sleep, plan.launch_delay), (Duration::from_secs(80), Duration::from_secs(2)));
    let [first, second] = plan.instances.as_slice() else { panic!("{plan:?}") };
    assert_eq!((first.spec.name.as_str(), first.spec.engine), ("instance1", EngineKind::Vllm));
    assert_eq!((first.host.as_str(), first.port), ("localhost", 12346));
    assert_eq!(first.program, Program::File("python3".into()));
    assert_eq!(first.args[..4], ["-m", "vllm.entrypoints.openai.api_server", "--model", "meta-llama/Llama-3.2-1B"]);
    assert!(first.args.windows(2).any(|pair| pair == ["--gpu-memory-utilization", "0.5"]));
    let variable = |name: &str| first.variables.iter().rfind(|pair| pair.0 == name).map(|pair| pair.1.as_str());
    for (name, value) in [
        ("KVCACHED_GPU_UTILIZATION", "0.95"),
        ("KVCACHED_PAGE_PREALLOC_ENABLED", "true"),
        ("KVCACHED_MIN_RESERVED_PAGES", "5"),
        ("KVCACHED_MAX_RESERVED_PAGES", "10"),
        ("KVCACHED_IPC_NAME", "VLLM"),
        ("VLLM_SERVER_DEV_MODE", "1"),
    ] {
        assert_eq!(variable(name), Some(value), "{name}");
    }
    assert_eq!((second.spec.name.as_str(), second.spec.engine), ("Qwen3-0.6B", EngineKind::Sglang));
    assert_eq!(second.args[second.args.len() - 2..], ["--chat-template", "a b"]);
    assert_eq!(second.port, 30001);
}

#[test]
fn without_a_file_there_are_two_synthetic_models() {
    let plan = super::without_file();
    assert_eq!((plan.router.host.as_str(), plan.router.port), ("127.0.0.1", 8080));
    let names: Vec<_> = plan.instances.iter().map(|one| one.spec.name.as_str()).collect();
    assert_eq!(names, ["tiny", "tiny-2"]);
    assert!(plan.instances.iter().all(|one| one.port == 0 && one.program == Program::Kvserve));
    assert_eq!(plan.instances[0].args, ["synthetic:tiny", "--port", "0"]);
}

#[test]
fn arguments_and_variables_in_every_form() {
    let one = |extra: &str| {
        let text = format!("instances:\n  - {{model: m, engine: kvserve, {extra}}}\n");
        plan(&text).instances.remove(0)
    };
    let args = |extra: &str| one(extra).args[1..].join("|");
    assert_eq!(args("engine_args: ['--a b', ['--c', 'd e'], 5]"), "--a|b|--c|d e|5|--port|0");
    assert_eq!(args("args: \"--a='b c' --port=7\""), "--a=b c|--port=7");
    assert_eq!(args("engine_args: ['--json', '{\"a\": 1}']"), "--json|{\"a\": 1}|--port|0");
    assert_eq!(one("engine_env: {A: 1, B: true, C: x y}").variables.len(), 3);
    assert_eq!(one("engine_env: ['A=b=c']").variables, [("A".to_owned(), "b=c".to_owned())]);
    let named = one("engine_args: '--served-model-name chat'");
    assert_eq!((named.spec.served_name.as_str(), named.spec.model.as_str()), ("chat", "m"));
}

#[test]
fn a_command_of_ones_own() {
    let plan = plan("instances: [{model: m, engine: command, command: [my-server, --port, 9001, 'x y']}]");
    let one = &plan.instances[0];
    assert_eq!((one.program.clone(), one.port), (Program::File("my-server".into()), 9001));
    assert_eq!(one.args, ["--port", "9001", "x y"]);
}

#[test]
fn problems_have_a_line_a_key_and_what_is_expected() {
    let instance = "instances:\n  - model: m\n    engine: kvserve\n";
    for (text, expected) in [
        (
            format!("router:\n  router_prot: 1\n{instance}"),
            "2:3 router_prot: there is no such key: did you mean router_port?",
        ),
        (format!("rooter: {{}}\n{instance}"), "1:1 rooter: there is no such key: did you mean router?"),
        (format!("{instance}    engine_arg: x\n"), "4:5 engine_arg: there is no such key: did you mean engine_args?"),
        (format!("router:\n  router_port: eighty\n{instance}"), "2:16 router_port: "),
        (format!("router:\n  router_port: 70000\n{instance}"), "2:16 router_port: "),
        ("instances:\n  - engine: kvserve\n".to_owned(), "model: is required and not there"),
        ("router: {}\n".to_owned(), "instances: is required and not there"),
        ("instances: []\n".to_owned(), "instances: there is none"),
        ("instances:\n  - model: m\n    engine: vlm\n".to_owned(), "3:13 engine: \"vlm\" is none of"),
        (format!("{instance}    engine_env: [NOPE]\n"), "expected NAME=VALUE"),
        (format!("router: {{body_budget: 1M}}\n{instance}"), "body_budget: expected at least 64M"),
        (format!("{instance}    max_concurrency: 0\n"), "4:22 max_concurrency: expected 1 or more"),
        (format!("{instance}    slo: {{ttft_ms: 0}}\n"), "ttft_ms: expected milliseconds above 0"),
        (format!("{instance}    using_venv: true\n"), "venv_path: using_venv needs"),
        (format!("{instance}    venv_path: /no/such\n"), "4:16 venv_path: /no/such has no bin/python"),
        (format!("{instance}    engine_args: '--port x'\n"), "engine_args: --port x is not a port"),
        (format!("{instance}    engine_args: a\n    args: b\n"), "5:11 args: engine_args is there too"),
        (format!("{instance}    command: x\n"), "command: is for engine: command alone"),
        (format!("sleep_manager:\n  min_sleep_duration: -1\n{instance}"), "2:23 min_sleep_duration: expected seconds"),
        (format!("sleep_manager: {{level: 3}}\n{instance}"), "level: expected 1"),
        (format!("{instance}  - {{model: a/m, engine: kvserve}}\n"), "name: another instance is called m"),
        (format!("{instance}    name: default\n"), "default has a meaning of its own"),
        (format!("{instance}    args: '--port 8080'\n"), "port 8080 is the router's"),
        (
            format!("{instance}    args: '--port 7'\n  - {{model: n, engine: vllm, args: '--port 7'}}\n"),
            "n and m both have port 7",
        ),
        ("instances: [{model: m, engine: command, command: [a]}]".to_owned(), "must have --port PORT"),
        ("instances: [{model: m, engine: vllm, args: '--port 0'}]".to_owned(), "kvserve alone"),
        ("instances:\n - model: m\n\tengine: x\n".to_owned(), "found a tab"),
        ("instances: [{model: m, engine: kvserve}]\ninstances: []\n".to_owned(), "2:"),
        (format!("{instance}    pool:\n      limt: 1G\n"), "5:7 limt: there is no such key: did you mean limit?"),
        (format!("{instance}    pool:\n      limit: much\n"), "5:14 limit: expected a size such as 512M: "),
        (format!("{instance}    pool:\n      limit: -1\n"), "5:14 limit: expected a size such as 512M: "),
        (format!("{instance}    pool:\n      weight: 0\n"), "5:15 weight: expected a whole number of 1 or more"),
        (format!("{instance}    pool:\n      weight: 1.5\n"), "5:15 weight: "),
        (format!("{instance}    pool:\n      priority: high\n"), "5:17 priority: "),
        (format!("{instance}    pool: {{limit: 1G, floor: 2G}}\n"), "4:30 floor: 2 GiB is above the limit of 1 GiB"),
        (format!("{instance}    pool: 1G\n"), "4:11 pool: "),
    ] {
        let found = problem(&text);
        assert!(found.contains(expected), "{text}\n  {found}\n  {expected}");
    }
}

#[test]
fn a_pool_is_named_after_its_instance_and_has_the_terms_of_the_file() {
    let one = |more: &str| {
        let text = format!("instances: [{{name: chat 1, model: m, engine: kvserve{more}}}]");
        let pool = plan(&text).instances.remove(0).pool;
        (pool.name.to_string(), pool.is_named, pool.limit, pool.share)
    };
    let none = ShareChange::default();
    assert_eq!(one(""), ("kvcached_chat-1".to_owned(), false, None, none));
    let share = ShareChange { weight: Some(2), floor: Some(Bytes::mib(64)), priority: Some(-1), ceiling: None };
    let terms = ", pool: {limit: 1.5G, weight: 2, floor: 67108864, priority: -1}";
    assert_eq!(one(terms), ("kvcached_chat-1".to_owned(), false, Some(Bytes::mib(1536)), share));
    for named in [", kvcached_env: [KVCACHED_IPC_NAME=x]", ", engine_args: '--pool-name x'"] {
        assert_eq!(one(named), ("x".to_owned(), true, None, none));
    }
}

#[test]
fn what_nobody_reads_is_a_warning_with_what_was_meant() {
    let plan = plan("kvcached: {page_size: 2, enable_kvcached: true}\ninstances: [{model: m, engine: kvserve}]");
    assert_eq!(plan.warnings.len(), 1);
    assert!(plan.warnings[0].contains("did you mean KVCACHED_PAGE_SIZE_MB?"), "{:?}", plan.warnings);
}

#[test]
fn a_virtual_environment_beside_the_file() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("venv/bin")).unwrap();
    std::fs::write(folder.path().join("venv/bin/python"), "").unwrap();
    let path = folder.path().join("models.yaml");
    std::fs::write(&path, "instances: [{model: m, engine: vllm, using_venv: true, venv_path: ./venv}]").unwrap();
    let plan = read(&path).unwrap();
    let Program::File(python) = &plan.instances[0].program else { panic!("{plan:?}") };
    assert!(python.is_absolute() && python.ends_with("venv/bin/python"));
    assert!(plan.instances[0].variables.iter().any(|(name, value)| name == "PATH" && value.contains("venv/bin:")));
}

#[test]
fn an_error_names_the_file() {
    let error = read(Path::new("/no/such.yaml")).unwrap_err();
    assert!(error.to_string().starts_with("/no/such.yaml: cannot be read"), "{error}");
    let error = ConfigError {
        path: PathBuf::from("a.yaml"),
        place: Some((2, 3)),
        key: Some("k".to_owned()),
        problem: "p".to_owned(),
    };
    assert_eq!(error.to_string(), "a.yaml:2:3: k: p");
}

#[test]
fn names_and_sites_of_the_router() {
    let instances = "instances: [{model: 'synthetic:tiny', engine: kvserve}]\n";
    let router = "router: {allowed_hosts: [chat.example.com], allowed_origins: ['https://app.example']}\n";
    let plan = plan(&format!("{router}{instances}")).router;
    assert_eq!(plan.allowed_hosts, ["chat.example.com".parse().unwrap()]);
    assert_eq!(plan.allowed_origins, ["https://app.example".parse().unwrap()]);
    let wrong = problem(&format!("router:\n  allowed_hosts: ['http://chat']\n{instances}"));
    assert!(wrong.starts_with("2:19 allowed_hosts: \"http://chat\" is not a host name"), "{wrong}");
    assert!(problem(&format!("router: {{allowed_origins: ['*']}}\n{instances}")).contains("name the sites"));
}
