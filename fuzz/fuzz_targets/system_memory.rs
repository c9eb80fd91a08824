//! The files in which a kernel tells what memory there is: no text panics, more is never free than there is, and
//! figures written as the kernel writes them, amid any other lines, come back exactly.
//!
//! An input is three numbers of eight bytes, then text: a seed is a text file whose first 24 bytes do not matter.

#![no_main]

use std::path::Component;

use libfuzzer_sys::fuzz_target;
use tidekv_mem::host::system_memory::{parse_group_memory, parse_groups, parse_meminfo};

fuzz_target!(|input: (u64, u64, u64, &str)| {
    let (a, b, c, text) = input;
    any_text(text);
    meminfo_figures(a, b, text);
    group_figures(a, b, c, text);
    group_names(text);
});

fn any_text(text: &str) {
    if let Some(memory) = parse_meminfo(text) {
        assert!(memory.free <= memory.total, "{memory:?}");
    }
    let mut parts = text.splitn(3, '\n');
    let mut part = || parts.next().unwrap_or_default();
    if let Some(memory) = parse_group_memory(part(), part(), part()) {
        assert!(memory.free <= memory.total, "{memory:?}");
    }
}

fn meminfo_figures(total_kib: u64, available_kib: u64, noise: &str) {
    // The first line of a name counts, so the noise may not bring its own.
    let noise: Vec<_> = noise.lines().filter(|line| !line.starts_with("Mem")).collect();
    let noise = noise.join("\n");
    let text = format!("{noise}\nMemTotal:       {total_kib} kB\n{noise}\nMemAvailable: {available_kib} kB\n{noise}");
    let parsed = parse_meminfo(&text).map(|memory| (memory.total.0, memory.free.0));
    let kib = |count: u64| count.checked_mul(1024);
    let expected = kib(total_kib).zip(kib(available_kib)).map(|(total, available)| (total, available.min(total)));
    assert_eq!(parsed, expected, "{text:?}");
}

fn group_figures(limit: u64, usage: u64, inactive: u64, noise: &str) {
    let noise: Vec<_> = noise.lines().filter(|line| !line.contains("inactive_file")).collect();
    let noise = noise.join("\n");
    for name in ["inactive_file", "total_inactive_file"] {
        let stat = format!("{noise}\n{name} {inactive}\n{noise}");
        let memory =
            parse_group_memory(&format!("{limit}\n"), &format!("{usage}\n"), &stat).expect("all figures are there");
        let used = u128::from(usage).saturating_sub(u128::from(inactive));
        assert_eq!(memory.total.0, limit);
        assert_eq!(u128::from(memory.free.0), u128::from(limit).saturating_sub(used), "{stat:?}");
    }
    assert_eq!(parse_group_memory("max\n", &usage.to_string(), &noise), None, "a group without a limit bounds nothing");
}

fn group_names(text: &str) {
    let groups = parse_groups(text);
    assert!(groups.len() <= text.lines().count());
    for group in groups {
        let inside = group.path().components().all(|part| matches!(part, Component::Normal(_)));
        assert!(inside, "{group:?} leads out of the hierarchy");
    }
    // A plain name is found in both generations, whatever stands around it.
    let name: String = text.chars().filter(char::is_ascii_alphanumeric).take(20).collect();
    let own = format!("0::/{name}\n7:cpu,memory:/{name}/below\n");
    let around = parse_groups(text).len();
    assert_eq!(parse_groups(&format!("{own}{text}")).len(), around + 2);
}
