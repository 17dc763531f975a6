//! Escapes untrusted text for a terminal, a log line or a page.
//!
//! Names, paths and policies may contain characters that terminals and browsers interpret instead of showing them: they move the
//! cursor, end a line or reverse the direction of text. Others are invisible, so that two different names look alike.

use std::borrow::Cow;

/// Returns whether a character is interpreted or invisible instead of shown: control characters (including C1, where U+009B begins
/// a terminal escape sequence), line and paragraph separators, and format characters such as those that set the text direction.
#[must_use]
pub const fn is_hidden(c: char) -> bool {
    matches!(
        c,
        '\0'..='\u{1f}'
            | '\u{7f}'..='\u{9f}'
            | '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e007f}'
    )
}

/// Escapes every hidden character as JSON does: `\n`, `\u202e`. The result is a single line.
///
/// Nothing else is escaped, not even a backslash: the text is for people. JSON text keeps its meaning.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, is_hidden)
}

/// Escapes like [`printable`], but keeps line feeds and tabs.
#[must_use]
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| is_hidden(c) && !matches!(c, '\n' | '\t'))
}

fn escaped(text: &str, hides: impl Fn(char) -> bool) -> Cow<'_, str> {
    // Nearly every text is plain, and is then returned without a copy.
    if !text.contains(&hides) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len().saturating_add(16));
    for c in text.chars() {
        match c {
            c if !hides(c) => out.push(c),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            // JSON escapes a character beyond the first plane as a surrogate pair.
            c => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}"))),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn interpreted_and_invisible_characters_are_escaped() {
        let check = |text: &str, expect: &str| assert_eq!(printable(text), expect);
        check(
            "caf\u{e9} \u{4e2d}\u{6587} \u{5d0}\u{5d1} \u{1f600} a\\b \"c\"",
            "caf\u{e9} \u{4e2d}\u{6587} \u{5d0}\u{5d1} \u{1f600} a\\b \"c\"",
        );
        check("a\u{202e}b\u{2066}c\u{2069}", "a\\u202eb\\u2066c\\u2069");
        check("a\u{2028}b\u{2029}c\nd\re\tf", "a\\u2028b\\u2029c\\nd\\re\\tf");
        check("\u{1b}[2J\u{9b}31m\u{7f}\u{85}\0", "\\u001b[2J\\u009b31m\\u007f\\u0085\\u0000");
        check("ad\u{200b}m\u{200d}in\u{feff}\u{ad}\u{61c}\u{200e}", "ad\\u200bm\\u200din\\ufeff\\u00ad\\u061c\\u200e");
        check("a\u{e0041}", "a\\udb40\\udc41");
        assert_eq!(printable_lines("a\tb\nc\r\u{202e}"), "a\tb\nc\\r\\u202e");
    }

    /// Every character that changes the direction of text (Unicode's Bidi_Control).
    #[test]
    fn every_bidi_control_is_hidden() {
        let marks = ['\u{61c}', '\u{200e}', '\u{200f}'];
        for c in marks.into_iter().chain('\u{202a}'..='\u{202e}').chain('\u{2066}'..='\u{2069}') {
            assert!(is_hidden(c), "{c:?}");
        }
        assert!(('\0'..=char::MAX).filter(|c| c.is_control()).all(is_hidden));
    }

    proptest! {
        #[test]
        fn nothing_hidden_is_left_and_json_stays_the_same(text: String, tail in "[\u{9b}\u{202e}\u{2028}\u{e0001}\n\ta]{0,8}") {
            let text = text + &tail;
            prop_assert!(!printable(&text).contains(is_hidden));
            let json = serde_json::to_string(&text).unwrap();
            let shown = printable(&json);
            prop_assert!(!shown.contains(is_hidden));
            prop_assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), text.as_str());
            let lines = printable_lines(&text);
            prop_assert_eq!(printable_lines(&lines), lines.as_ref());
        }
    }
}
