//! Man pages: one for a program, one for each of its subcommands.
//!
//! clap_mangen writes name, synopsis, options and subcommands. What we say below a help text has a fixed shape, and
//! becomes sections that readers of man pages look for:
//!
//! ```text
//!   Examples:                                          EXAMPLES      kept line by line
//!     kvctl trim VLLM
//!
//!   A living pool keeps its memory ...                 NOTES         what is between
//!   Exit status: 0 deleted, 1 no such pool, ...        EXIT STATUS
//!                                                      ENVIRONMENT, SEE ALSO
//! ```

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};

/// A finished page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The name of its file, `kvctl-list.1`.
    pub file: String,
    /// The text, in roff.
    pub text: String,
}

/// What all our programs read from the environment.
const ENVIRONMENT: [(&str, &str); 4] = [
    ("KVCACHED_RUNTIME_DIR", "Folder of the shared files, if no flag names one; /dev/shm if it is unset."),
    ("NO_COLOR", "If set, nothing is coloured. Colour is used on a terminal alone."),
    (
        "KVCACHED_LOG_LEVEL",
        "What engines and benchmarks log: DEBUG, INFO, WARNING, ERROR or CRITICAL; WARNING if it is unset.",
    ),
    ("KVCACHED_LOG_FILE", "Where they also append their logs."),
];

/// The pages of `programs` and of their subcommands. They refer to each other.
pub fn pages(programs: impl IntoIterator<Item = clap::Command>) -> io::Result<Vec<Page>> {
    let mut programs: Vec<clap::Command> =
        programs.into_iter().map(|program| program.disable_help_subcommand(true)).collect();
    programs.iter_mut().for_each(clap::Command::build);
    let titles: Vec<String> = programs.iter().map(|program| program.get_name().to_owned()).collect();
    let mut pages = Vec::new();
    for program in &programs {
        let others = titles.iter().filter(|title| *title != program.get_name()).cloned();
        let children = shown(program).map(title_of);
        pages.push(page(program, &others.chain(children).collect::<Vec<_>>(), program)?);
        for subcommand in shown(program) {
            let siblings = shown(program).map(title_of).filter(|title| *title != title_of(subcommand));
            let see_also: Vec<String> = titles.iter().cloned().chain(siblings).collect();
            pages.push(page(subcommand, &see_also, program)?);
        }
    }
    Ok(pages)
}

fn shown(program: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    program.get_subcommands().filter(|command| !command.is_hide_set())
}

fn title_of(command: &clap::Command) -> String {
    command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned()
}

fn page(command: &clap::Command, see_also: &[String], program: &clap::Command) -> io::Result<Page> {
    let title = title_of(command);
    let man = Man::new(command.clone());
    let mut text = Vec::new();
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if shown(command).next().is_some() {
        man.render_subcommands_section(&mut text)?;
    }
    let mut roff = Roff::new();
    sections(&mut roff, &command.get_after_help().map(ToString::to_string).unwrap_or_default());
    environment(&mut roff);
    references(&mut roff, see_also);
    text.extend(roff.to_roff().into_bytes());
    // Each part that clap_mangen renders brings it along.
    let text = String::from_utf8_lossy(&text).replace(PREAMBLE, "");
    Ok(Page { file: format!("{title}.1"), text: format!("{PREAMBLE}{}{text}", header(&title, program)) })
}

/// An apostrophe that can be copied, in every roff.
const PREAMBLE: &str = ".ie \\n(.g .ds Aq \\(aq\n.el .ds Aq '\n";

/// The first line. By hand, because an empty date is dropped by the library, and the next word taken for it.
fn header(title: &str, program: &clap::Command) -> String {
    let version = program.get_version().unwrap_or_default();
    format!(".TH {} 1 \"\" \"{} {version}\" \"tidekv\"\n", title.to_uppercase(), program.get_name())
}

/// Examples, notes and exit status.
fn sections(roff: &mut Roff, after_help: &str) {
    let (examples, prose) = match after_help.strip_prefix("Examples:\n") {
        Some(rest) => rest.split_once("\n\n").unwrap_or((rest, "")),
        None => ("", after_help),
    };
    if !examples.is_empty() {
        roff.control("SH", ["EXAMPLES"]).control("nf", []);
        for line in examples.lines() {
            roff.text([roman(line)]);
        }
        roff.control("fi", []);
    }
    let at = prose.find("Exit status").unwrap_or(prose.len());
    let (notes, exit_status) = prose.split_at(at);
    for (heading, text) in [("NOTES", notes), ("EXIT STATUS", exit_status)] {
        if !text.trim().is_empty() {
            roff.control("SH", [heading]);
            let text = text.strip_prefix("Exit status: ").unwrap_or(text);
            roff.text([roman(text.split_whitespace().collect::<Vec<_>>().join(" "))]);
        }
    }
}

fn environment(roff: &mut Roff) {
    roff.control("SH", ["ENVIRONMENT"]);
    for (name, meaning) in ENVIRONMENT {
        roff.control("TP", []).text([bold(name)]).text([roman(meaning)]);
    }
}

fn references(roff: &mut Roff, titles: &[String]) {
    roff.control("SH", ["SEE ALSO"]);
    let mut line = Vec::new();
    for title in titles {
        if !line.is_empty() {
            line.push(roman(", "));
        }
        line.extend([italic(title), roman("(1)")]);
    }
    roff.text(line);
}

/// Writes pages to a folder, which is made if it is not there. A page is there whole or as it was before.
pub fn write_pages(dir: &Path, pages: &[Page]) -> anyhow::Result<Vec<PathBuf>> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make the folder {}", dir.display()))?;
    let mut written = Vec::new();
    for page in pages {
        let path = dir.join(&page.file);
        write_whole(&path, &page.text).with_context(|| format!("cannot write {}", path.display()))?;
        written.push(path);
    }
    Ok(written)
}

/// Under another name first, and then in place of what is there.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{}.new", std::process::id()));
    let draft = PathBuf::from(draft);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&draft)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&draft, path));
    written.inspect_err(|_| {
        // What failed is said already.
        let _ = fs::remove_file(&draft);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Arg, Command};

    fn program() -> Command {
        let go = Command::new("go").about("Move on").arg(Arg::new("name")).after_help(
            "Examples:\n  demo go VLLM    # on\n  .demo 'go'\n\nOnly forward.\nNever back. Exit status: 0 moved, 2 error.",
        );
        let hidden = Command::new("worker").hide(true);
        Command::new("demo").version("1.2").about("Show").subcommand(go).subcommand(hidden)
    }

    #[test]
    fn a_page_for_each_command_with_the_sections_of_its_help() {
        let pages = pages([program(), Command::new("other")]).unwrap();
        let files: Vec<&str> = pages.iter().map(|page| page.file.as_str()).collect();
        assert_eq!(files, ["demo.1", "demo-go.1", "other.1"]);
        let go = &pages[1].text;
        for part in [
            ".SH EXAMPLES\n.nf\n  demo go VLLM    # on\n",
            ".fi\n.SH NOTES\nOnly forward. Never back.\n",
            ".SH \"EXIT STATUS\"\n0 moved, 2 error.\n",
            ".SH ENVIRONMENT\n",
            "KVCACHED_RUNTIME_DIR",
            ".SH \"SEE ALSO\"\n\\fIdemo\\fR(1), \\fIother\\fR(1)\n",
            ".TH DEMO-GO 1 \"\" \"demo 1.2\" \"tidekv\"\n.SH NAME\n",
        ] {
            assert!(go.contains(part), "{part:?} is not in\n{go}");
        }
        assert!(pages[0].text.contains("\\fIother\\fR(1), \\fIdemo\\-go\\fR(1)"), "{}", pages[0].text);
    }

    #[test]
    fn pages_replace_what_is_there_and_leave_no_drafts() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("share/man/man1");
        let page = |text: &str| Page { file: "demo.1".to_owned(), text: text.to_owned() };
        write_pages(&dir, &[page("old, and longer")]).unwrap();
        assert_eq!(write_pages(&dir, &[page("new")]).unwrap(), [dir.join("demo.1")]);
        assert_eq!(fs::read_to_string(dir.join("demo.1")).unwrap(), "new");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);

        fs::create_dir(dir.join("taken.1")).unwrap();
        let taken = Page { file: "taken.1".to_owned(), text: String::new() };
        let error = format!("{:#}", write_pages(&dir, &[taken]).unwrap_err());
        assert!(error.contains("cannot write") && error.contains("taken.1"), "{error}");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 2, "no draft is left");
        assert!(write_pages(&dir.join("demo.1"), &[]).is_err(), "a file is no folder");
    }
}
