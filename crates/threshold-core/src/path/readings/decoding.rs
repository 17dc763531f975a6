//! Decoding steps that some servers add before their router sees a path.

use super::router::symbols_of;
use crate::path::{decoded_bytes, escape};

/// The bytes of a path after percent-decoding once, each with whether it was escaped.
pub(super) type Characters = Vec<(u8, bool)>;

/// A step that some servers take beside percent-decoding the path once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decoding {
    /// Percent-decoding twice: nginx with `$uri` in `proxy_pass` sends the decoded path to a server that decodes it again.
    Twice,
    /// Dropping bytes that are not UTF-8, as Bottle does.
    Utf8Only,
    /// Case folding of letters beyond ASCII to ASCII letters, as regular expressions that ignore case do.
    FoldsCase,
}

impl Decoding {
    /// All steps, in the order in which a server takes them.
    const ALL: [Self; 3] = [Self::Twice, Self::Utf8Only, Self::FoldsCase];

    /// Returns the steps that change this path, also where only an earlier step makes them matter.
    pub(super) fn that_matter(characters: &Characters) -> Vec<Self> {
        let mut present = characters.clone();
        let changes = |decoding: &Self| {
            let after = decoding.apply(&present);
            // Compared as routers see them: a step that only changes how a character was escaped is no difference.
            let changes = symbols_of(&after) != symbols_of(&present);
            present = after;
            changes
        };
        // No step changes a path of plain ASCII without an escaped `%`.
        let may_matter = characters.iter().any(|(value, escaped)| *value >= 0x80 || *escaped && *value == b'%');
        if may_matter { Self::ALL.into_iter().filter(changes).collect() } else { Vec::new() }
    }

    pub(super) fn apply(self, characters: &Characters) -> Characters {
        match self {
            Self::Twice => decode_again(characters),
            Self::Utf8Only => without_invalid_utf8(characters),
            Self::FoldsCase => fold_case(characters),
        }
    }
}

/// Percent-decodes the decoded path once more; returns it unchanged where it has no escape.
fn decode_again(characters: &Characters) -> Characters {
    let bytes: Vec<u8> = characters.iter().map(|(value, _)| *value).collect();
    let is_escaped_twice = |(at, (value, escaped)): (usize, &(u8, bool))| {
        let behind = bytes.get(at.saturating_add(1)..).unwrap_or_default();
        // A `%` that began no valid escape counts as escaped too: the first decoding may have made one of it, as of
        // `%%36c`.
        *value == b'%' && *escaped && escape(behind).is_some()
    };
    if !characters.iter().enumerate().any(is_escaped_twice) {
        return characters.clone();
    }
    decoded_bytes(&bytes).collect()
}

fn without_invalid_utf8(characters: &Characters) -> Characters {
    let bytes: Vec<u8> = characters.iter().map(|(value, _)| *value).collect();
    let mut rest = characters.as_slice();
    let mut valid = Characters::with_capacity(characters.len());
    for chunk in bytes.utf8_chunks() {
        // `rest` moves beside the chunks, so that each byte keeps whether it was escaped.
        let (own, others) = rest.split_at_checked(chunk.valid().len()).unwrap_or((rest, &[]));
        valid.extend_from_slice(own);
        rest = others.get(chunk.invalid().len()..).unwrap_or_default();
    }
    valid
}

/// Replaces the letters beyond ASCII that fold to an ASCII letter. They are the ones that Python's `re.IGNORECASE` documents;
/// Unicode's other case foldings have no more.
fn fold_case(characters: &Characters) -> Characters {
    let mut folded = Characters::with_capacity(characters.len());
    let mut rest = characters.as_slice();
    while let Some((first, others)) = rest.split_first() {
        let value = |at: usize| rest.get(at).map_or(0, |(value, _)| *value);
        let (letter, length) = match (value(0), value(1), value(2)) {
            // U+0130 and U+0131, the dotted and the dotless i of Turkish.
            (0xc4, 0xb0 | 0xb1, _) => (b'i', 2),
            // U+017F, the long s.
            (0xc5, 0xbf, _) => (b's', 2),
            // U+212A, the kelvin sign.
            (0xe2, 0x84, 0xaa) => (b'k', 3),
            _ => {
                folded.push(*first);
                rest = others;
                continue;
            }
        };
        folded.push((letter, true));
        rest = rest.get(length..).unwrap_or_default();
    }
    folded
}
