//! `kvctl completions` and `kvctl man`, by those who read them: shells and formatters.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use clap::CommandFactory;
use tidekv_cli::cli::{Cli, is_pool_name};
use tidekv_core::units::Bytes;

use crate::common::{Pool, World, path_with_our_binaries, skipped};
use crate::tmux::Terminal;

/// Whether a program is there; says so if it is not.
fn is_here(program: &str, test: &str) -> bool {
    let path = std::env::var("PATH").unwrap();
    let here = std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    if !here {
        skipped(test, &format!("there is no {program} here"));
    }
    here
}

/// A folder with two pools and the completions of both programs for a shell.
fn world_with(shell: &str) -> (World, [Pool; 2]) {
    let world = World::new();
    let pools = ["qwen-chat", "Llama_70B"].map(|name| world.pool(name, Bytes::gib(1)));
    for program in ["kvctl", "kvtop"] {
        let ran = world.kvctl(&["completions", shell, "--program", program]);
        let (code, script) = ran.quiet();
        assert!(code == 0 && !script.is_empty());
        fs::write(world.path(&format!("{program}.{shell}")), script).unwrap();
    }
    (world, pools)
}

fn run(world: &World, program: &str, args: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(args).current_dir(world.path("")).env("PATH", path_with_our_binaries());
    command.env("KVCACHED_RUNTIME_DIR", world.path("")).env("HOME", world.path("")).output().unwrap()
}

fn lines(output: &Output) -> Vec<String> {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    text.lines().map(|line| line.trim_end().to_owned()).collect()
}

/// What bash would offer for the last of `words`: the registered function is called as bash calls it.
fn in_bash(world: &World, words: &[&str]) -> Vec<String> {
    let script = r#"
        program=$1 && source "$program.bash"
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
        registered=$(complete -p "$program") && [[ $registered =~ -F\ ([^ ]+) ]]
        "${BASH_REMATCH[1]}" "$program" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut args = vec!["--norc", "--noprofile", "-c", script, "bash"];
    args.extend(words);
    lines(&run(world, "bash", &args)).into_iter().filter(|line| !line.is_empty()).collect()
}

#[test]
fn bash_completes_commands_flags_and_pools() {
    let (world, _pools) = world_with("bash");
    assert_eq!(in_bash(&world, &["kvctl", "li"]), ["list", "limit", "limit-percent"]);
    assert_eq!(in_bash(&world, &["kvctl", "list", "--j"]), ["--json"]);
    assert_eq!(in_bash(&world, &["kvctl", "completions", "z"]), ["zsh"]);
    assert_eq!(in_bash(&world, &["kvctl", "limit", "q"]), ["qwen-chat"]);
    assert_eq!(in_bash(&world, &["kvctl", "limit", "LLA"]), ["Llama_70B"], "whatever the case");
    assert_eq!(in_bash(&world, &["kvctl", "limit", "--wait", "5s", "q"]), ["qwen-chat"]);
    assert_eq!(in_bash(&world, &["kvctl", "limit", "qwen-chat", "q"]), [""; 0], "a size");
    assert_eq!(in_bash(&world, &["kvctl", "gc", "q"]), [""; 0]);
    assert_eq!(in_bash(&world, &["kvtop", "q"]), ["qwen-chat"]);
    assert_eq!(in_bash(&world, &["kvtop", "--onc"]), ["--once"]);
    assert!(!in_bash(&world, &["kvctl", ""]).contains(&"names".to_owned()), "hidden");
    world.kvcached_segment("my pool", [1 << 30, 0, 0]);
    assert_eq!(in_bash(&world, &["kvctl", "trim", "my"]), [r"my\ pool"], "as it has to be typed");
    for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
        let found = in_bash(&world, &["kvctl", command.get_name(), "qwen"]);
        let asks = command.get_positionals().any(is_pool_name);
        assert_eq!(found.contains(&"qwen-chat".to_owned()), asks, "{}: {found:?}", command.get_name());
    }
}

#[test]
fn bash_in_a_terminal() {
    let (world, _pools) = world_with("bash");
    let terminal = Terminal::open(&world, 100, 24);
    terminal.line("PS1='bash> ' exec bash --norc --noprofile");
    terminal.wait_for("bash", |screen| screen.trim_end().ends_with("bash>"));
    terminal.line(&format!("cd '{}' && source ./kvctl.bash && clear", world.path("").display()));
    terminal.wait_for("bash", |screen| screen.trim() == "bash>");
    terminal.type_in("kvctl delete qw");
    terminal.keys(&["Tab"]);
    terminal.wait_for("the name", |screen| screen.trim() == "bash> kvctl delete qwen-chat");
}

#[test]
fn fish_completes_commands_flags_and_pools() {
    if !is_here("fish", "generate::fish_completes_commands_flags_and_pools") {
        return;
    }
    let (world, _pools) = world_with("fish");
    let in_fish = |line: &str| {
        let script = format!("source kvctl.fish; source kvtop.fish; complete -C '{line}'");
        let output = run(&world, "fish", &["--no-config", "-c", &script]);
        assert!(output.stderr.is_empty(), "{output:?}");
        // A candidate and, behind a tab, what it is.
        let words = |line: String| line.split('\t').next().unwrap().to_owned();
        lines(&output).into_iter().map(words).collect::<Vec<_>>()
    };
    assert_eq!(in_fish("kvctl limi"), ["limit", "limit-percent"]);
    assert_eq!(in_fish("kvctl list --js"), ["--json"]);
    assert_eq!(in_fish("kvctl limit q"), ["qwen-chat"]);
    assert_eq!(in_fish("kvctl limit --wait 5s q"), ["qwen-chat"]);
    assert_eq!(in_fish("kvctl limit qwen-chat q"), [""; 0]);
    assert_eq!(in_fish("kvctl watch qwen-chat Ll"), ["Llama_70B"]);
    assert_eq!(in_fish("kvtop q"), ["qwen-chat"]);
}

#[test]
fn zsh_completes_commands_flags_and_pools() {
    if !is_here("zsh", "generate::zsh_completes_commands_flags_and_pools") {
        return;
    }
    let (world, _pools) = world_with("zsh");
    let functions = world.path("functions");
    fs::create_dir(&functions).unwrap();
    for program in ["kvctl", "kvtop"] {
        fs::rename(world.path(&format!("{program}.zsh")), functions.join(format!("_{program}"))).unwrap();
    }
    let terminal = Terminal::open(&world, 100, 24);
    terminal.line("PS1='zsh> ' exec zsh -f");
    terminal.line(&format!(
        "PROMPT='zsh> '; fpath=('{}' $fpath); autoload -U compinit; compinit -D -u; clear",
        functions.display()
    ));
    terminal.wait_for("zsh", |screen| screen.trim() == "zsh>");
    for (typed, completed) in [
        ("kvctl comp", "kvctl completions"),
        ("kvctl list --js", "kvctl list --json"),
        ("kvctl limit q", "kvctl limit qwen-chat"),
        ("kvctl watch qwen-chat lla", "kvctl watch qwen-chat Llama_70B"),
        ("kvtop q", "kvtop qwen-chat"),
    ] {
        terminal.type_in(typed);
        terminal.keys(&["Tab"]);
        terminal.wait_for(completed, |screen| screen.trim_end().lines().last() == Some(&format!("zsh> {completed}")));
        terminal.keys(&["C-u"]);
        terminal.wait_for("an empty line", |screen| screen.trim_end().lines().last() == Some("zsh>"));
    }
}

/// The pages in a folder that did not exist, as the command names them.
fn man_pages(world: &World) -> Vec<String> {
    let folder = world.path("share/man1");
    let ran = world.kvctl(&["man", folder.to_str().unwrap()]);
    let (code, text) = ran.quiet();
    assert_eq!(code, 0);
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_man_page_for_every_command_and_program() {
    let world = World::new();
    let written = man_pages(&world);
    let definitions = Cli::command();
    let shown = definitions.get_subcommands().filter(|command| !command.is_hide_set());
    let mut expected: Vec<String> = shown.map(|command| format!("kvctl-{}.1", command.get_name())).collect();
    expected.extend(["kvctl.1", "kvtop.1", "kvserve.1"].map(str::to_owned));
    assert_eq!(written.len(), expected.len(), "{written:?}");
    for file in expected {
        let page = fs::read_to_string(world.path("share/man1").join(&file)).unwrap();
        for section in ["NAME", "SYNOPSIS", "OPTIONS", "EXAMPLES", "\"EXIT STATUS\"", "ENVIRONMENT", "\"SEE ALSO\""] {
            assert!(page.contains(&format!("\n.SH {section}\n")), "{file} has no {section}:\n{page}");
        }
        for variable in ["KVCACHED_RUNTIME_DIR", "NO_COLOR", "KVCACHED_LOG_LEVEL", "KVCACHED_LOG_FILE"] {
            assert!(page.contains(variable), "{file} does not name {variable}");
        }
    }
    let files = fs::read_dir(world.path("share/man1")).unwrap().count();
    assert_eq!(files, written.len(), "and nothing else is left there");
    // Again, over what is there; and where nothing can be written.
    assert_eq!(man_pages(&world), written);
    let error = world.kvctl(&["man", "/proc/nowhere"]);
    assert!(error.error().contains("cannot make the folder /proc/nowhere"), "{error:?}");
}

#[test]
fn formatters_have_nothing_to_say_against_the_pages() {
    const TEST: &str = "generate::formatters_have_nothing_to_say_against_the_pages";
    let world = World::new();
    let pages = man_pages(&world);
    let check = |program: &str, args: &[&str], page: &str| {
        let output = run(&world, program, &[args, &[page]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{program} {page}: {said}");
        output
    };
    if is_here("groff", TEST) {
        pages.iter().for_each(|page| drop(check("groff", &["-man", "-Tutf8", "-ww"], page)));
    }
    if is_here("mandoc", TEST) {
        pages.iter().for_each(|page| drop(check("mandoc", &["-Tlint", "-Werror"], page)));
    }
    if is_here("man", TEST) {
        let page = pages.iter().find(|page| Path::new(page).ends_with("kvctl-limit.1")).unwrap();
        let text = lines(&check("man", &["-P", "cat", "-l"], page)).join("\n");
        assert!(text.contains("EXAMPLES") && text.contains("kvctl limit VLLM 512MB --wait 5s"), "{text}");
        assert!(text.contains("3 accepted, and the pool"), "{text}");
    }
}
