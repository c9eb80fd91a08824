//! A completion script: what clap_complete makes of the definitions, and the names of pools.
//!
//! Names change by the minute, so the script asks `kvctl names` for them when Tab is pressed. Where a name is asked for
//! is decided there, by the same code as at kvctl's prompt; the script only passes its words on.

use std::fmt::Write as _;

use clap_complete::{Generator, shells};

use crate::cli::{Shell, is_pool_name};

/// Whether a program takes names of pools, and as what `kvctl names` knows its words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pools {
    /// It takes none.
    None,
    /// Its words are those of kvctl.
    OfKvctl,
    /// Its words are those behind this subcommand of kvctl.
    OfSubcommand(&'static str),
}

/// The script that completes the words of `program` in `shell`.
pub fn completions(shell: Shell, program: &clap::Command, pools: Pools) -> String {
    let name = program.get_name().to_owned();
    let mut program = without_hidden(program);
    program.set_bin_name(&name);
    program.build();
    let script = match shell {
        Shell::Bash => made_by(shells::Bash, &program),
        Shell::Zsh => made_by(shells::Zsh, &program),
        Shell::Fish => made_by(shells::Fish, &program),
    };
    let ask = match pools {
        Pools::None => return script,
        Pools::OfKvctl => "kvctl names --".to_owned(),
        Pools::OfSubcommand(subcommand) => format!("kvctl names -- {subcommand}"),
    };
    match shell {
        Shell::Bash => script + &bash_names(&name, &ask),
        Shell::Zsh => zsh_with_names(&script, &name),
        Shell::Fish => script + &fish_names(&program, &ask),
    }
}

/// clap_complete would offer hidden commands too.
fn without_hidden(program: &clap::Command) -> clap::Command {
    let shown = program.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let copy = clap::Command::new(program.get_name().to_owned()).args(program.get_arguments().cloned());
    copy.version(program.get_version().unwrap_or_default().to_owned()).subcommands(shown)
}

fn made_by(generator: impl Generator, program: &clap::Command) -> String {
    let mut script = Vec::new();
    generator.generate(program, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Wraps clap's function: its words, and then the names.
fn bash_names(name: &str, ask: &str) -> String {
    format!(
        r#"
# Names of pools, asked when they are wanted: kvctl knows where a name belongs.
_{name}_and_pools() {{
    _{name} "$@"
    local pool
    while IFS= read -r pool; do
        COMPREPLY+=("$(printf %q "$pool")")
    done < <({ask} "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null)
}}
complete -F _{name}_and_pools -o bashdefault -o default {name}
"#
    )
}

/// zsh knows which argument it is at: there it calls a function of ours instead of its default.
fn zsh_with_names(script: &str, name: &str) -> String {
    let is_pool = |line: &str| line.starts_with("':name -- ") || line.starts_with("'*::names -- ");
    let mut whole = String::with_capacity(script.len());
    for line in script.lines() {
        let line = match line.strip_suffix(":_default' \\") {
            Some(argument) if is_pool(argument) => format!("{argument}:_{name}_pools' \\"),
            _ => line.to_owned(),
        };
        whole += &line;
        whole.push('\n');
        // Right behind the first line, which must stay the first.
        if line.starts_with("#compdef") {
            whole += &format!(
                "\n# Names of pools, asked when they are wanted.\n\
                 _{name}_pools() {{\n    \
                     local -a pools\n    \
                     pools=(${{(f)\"$(kvctl names 2>/dev/null)\"}})\n    \
                     compadd -M 'm:{{a-zA-Z}}={{A-Za-z}}' -a pools\n\
                 }}\n"
            );
        }
    }
    whole
}

/// clap's script has nothing for the arguments of fish; where they are pools, files are not wanted either.
fn fish_names(program: &clap::Command, ask: &str) -> String {
    let name = program.get_name();
    let names = format!("-f -a '({ask} (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'");
    let mut lines = "\n# Names of pools, asked when they are wanted: kvctl knows where a name belongs.\n".to_owned();
    if program.get_positionals().any(is_pool_name) {
        let _ = writeln!(lines, "complete -c {name} {names}");
    }
    for command in program.get_subcommands().filter(|command| command.get_positionals().any(is_pool_name)) {
        let using = format!("__fish_{name}_using_subcommand {}", command.get_name());
        let _ = writeln!(lines, "complete -c {name} -n \"{using}\" {names}");
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, TopCli};
    use clap::CommandFactory;

    #[test]
    fn hidden_commands_are_not_offered() {
        let words = ["visible", "secret"].map(|name| clap::Command::new(name).hide(name == "secret"));
        let program = clap::Command::new("demo").subcommands(words);
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = completions(shell, &program, Pools::None);
            assert!(script.contains("visible") && !script.contains("secret"), "{script}");
        }
    }

    #[test]
    fn pools_are_asked_for_as_often_as_the_definitions_have_them() {
        let kvctl = Cli::command();
        let takers = kvctl.get_subcommands().filter(|command| command.get_positionals().any(is_pool_name)).count();
        assert!(takers > 5);
        let count = |shell, part: &str| completions(shell, &kvctl, Pools::OfKvctl).matches(part).count();
        assert_eq!(count(Shell::Zsh, ":_kvctl_pools' \\"), takers);
        assert_eq!(count(Shell::Fish, "kvctl names --"), takers);
        assert_eq!(count(Shell::Bash, "kvctl names --"), 1);
        let kvtop = |shell| completions(shell, &TopCli::command(), Pools::OfSubcommand("kvtop"));
        assert!(kvtop(Shell::Zsh).contains(":_kvtop_pools' \\"));
        assert!(kvtop(Shell::Fish).contains("complete -c kvtop -f -a '(kvctl names -- kvtop "));
        assert!(!completions(Shell::Bash, &kvctl, Pools::None).contains("kvctl names --"));
    }
}
