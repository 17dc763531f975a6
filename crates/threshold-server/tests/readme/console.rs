//! Reads the commands of a page's `console` blocks and their output.

/// A command and the output that the page shows.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) command: String,
    pub(crate) output: Vec<String>,
}

/// The sections of a page, each beginning with its title.
pub(crate) fn sections(page: &str) -> impl Iterator<Item = &str> {
    page.split("\n## ")
}

/// The lines of each block in a language.
pub(crate) fn blocks<'t>(text: &'t str, language: &str) -> Vec<Vec<&'t str>> {
    let opening = format!("```{language}");
    let mut lines = text.lines();
    let mut blocks = Vec::new();
    while lines.any(|line| line == opening) {
        blocks.push(lines.by_ref().take_while(|line| *line != "```").collect());
    }
    blocks
}

/// All commands, in order. A command that ends in a backslash continues on the next line.
pub(crate) fn commands(text: &str) -> Vec<Shown> {
    let mut shown: Vec<Shown> = Vec::new();
    for line in blocks(text, "console").concat() {
        if let Some(command) = line.strip_prefix("$ ") {
            shown.push(Shown { command: command.to_owned(), output: Vec::new() });
            continue;
        }
        let last = shown.last_mut().expect("a block begins with a command");
        match last.command.strip_suffix('\\') {
            Some(begun) if last.output.is_empty() => last.command = format!("{begun}{line}"),
            _ => last.output.push(line.to_owned()),
        }
    }
    shown
}

/// Fails unless a command printed what the page shows.
#[track_caller]
pub(crate) fn assert_agree(command: &str, shown: &[String], printed: &[String]) {
    assert!(agree(shown, printed), "$ {command}\nshown:\n{}\nprinted:\n{}", shown.join("\n"), printed.join("\n"));
}

/// Returns whether a line is as shown; `…` stands for any part of it.
fn alike(shown: &str, line: &str) -> bool {
    match shown.split_once('…') {
        None => shown == line,
        Some((before, after)) => line.strip_prefix(before).is_some_and(|rest| {
            rest.char_indices().map(|(at, _)| at).chain([rest.len()]).any(|at| alike(after, rest.get(at..).unwrap()))
        }),
    }
}

/// Returns whether lines are as shown; `…` stands for any number of them.
pub(crate) fn agree(shown: &[String], lines: &[String]) -> bool {
    match shown.split_first() {
        None => lines.is_empty(),
        Some((first, rest)) if first == "…" => {
            (0..=lines.len()).any(|skip| lines.get(skip..).is_some_and(|left| agree(rest, left)))
        }
        Some((first, rest)) => lines.split_first().is_some_and(|(line, left)| alike(first, line) && agree(rest, left)),
    }
}
