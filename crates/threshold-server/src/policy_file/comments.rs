//! Removes the comments of a policy.

/// Returns a text without its comments, or `None` if it is not TOML. Lines keep their numbers, which findings and the log name.
pub(super) fn removed(text: &str) -> Option<String> {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    // Outside of strings, neither a quote nor `#` has another meaning.
    while let Some(at) = rest.find(['"', '\'', '#']) {
        let (before, token) = rest.split_at(at);
        shown.push_str(before);
        if token.starts_with('#') {
            shown.truncate(shown.trim_end_matches([' ', '\t']).len());
            rest = token.find('\n').and_then(|end| token.get(end..)).unwrap_or_default();
        } else {
            let (string, after) = token.split_at_checked(string_length(token)?)?;
            shown.push_str(string);
            rest = after;
        }
    }
    shown.push_str(rest);
    // The parser confirms what was taken for a string and what for a comment.
    let parse = |text: &str| text.parse::<toml::Table>().ok();
    (parse(&shown)? == parse(text)?).then_some(shown)
}

/// Returns the length of the string that a text begins with, and its quotes.
fn string_length(text: &str) -> Option<usize> {
    let quote = text.chars().next()?;
    let long = quote.to_string().repeat(3);
    let delimiter = if text.starts_with(&long) { long.as_str() } else { long.get(..1)? };
    let mut at = delimiter.len();
    loop {
        let rest = text.get(at..)?;
        if rest.starts_with(delimiter) {
            at = at.checked_add(delimiter.len())?;
            // A string of several lines may end with one or two quotes of its own.
            let own = text.get(at..)?.chars().take(2).take_while(|c| delimiter.len() > 1 && *c == quote).count();
            return at.checked_add(own);
        }
        let mut characters = rest.chars();
        if characters.next()? == '\\' && quote == '"' {
            characters.next()?;
        }
        at = text.len().checked_sub(characters.as_str().len())?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Woken by leaving out the escapes, the long delimiters, or the quotes before them.
    #[test]
    fn comments_go_and_strings_and_line_numbers_stay() {
        for (text, expected) in [
            ("# sk_live_1\na = 1 # two\n", "\na = 1\n"),
            ("a = '''it's # kept''' # gone", "a = '''it's # kept'''"),
            ("a = \"\"\"say \"hi # kept\"\"\" # gone", "a = \"\"\"say \"hi # kept\"\"\""),
            ("a = \"\"\"b\"\"\"\" # gone", "a = \"\"\"b\"\"\"\""),
            ("a = '#' # x", "a = '#'"),
            ("a = \"# \\\" #\" # it's", "a = \"# \\\" #\""),
            ("a = '\\' # x'", "a = '\\'"),
            ("'#' = '' # \"\nb = \"\"#'''", "'#' = ''\nb = \"\""),
            (
                "a = \"\"\"\n# kept \\\"\"\" # \"\" '''\n\"\"\"\"\" # gone\nb = 2",
                "a = \"\"\"\n# kept \\\"\"\" # \"\" '''\n\"\"\"\"\"\nb = 2",
            ),
            ("a = '''#\n'' # \\''' # gone", "a = '''#\n'' # \\'''"),
            ("a = [ # one\r\n  1, # two\r\n]", "a = [\n  1,\n]"),
            ("", ""),
        ] {
            assert_eq!(removed(text).as_deref(), Some(expected), "{text}");
        }
        for broken in ["a = \"", "a = '# x", "[[rule", "a = \"\"\"\\", "# only\n="] {
            assert_eq!(removed(broken), None, "{broken}");
        }
    }

    #[test]
    fn the_presets_have_no_comments_afterwards() {
        for (name, text) in crate::init::PRESETS {
            let shown = removed(text).unwrap();
            assert!(text.contains("# ") && !shown.contains("# "), "{shown}");
            assert_eq!(shown.lines().count(), text.lines().count(), "{name}");
        }
    }
}
