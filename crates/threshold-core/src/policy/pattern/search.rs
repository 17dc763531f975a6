//! Matches a text against a pattern, and finds what its wildcards have matched.

use super::{Captures, Pattern, Token};

/// Adds the captures among `tokens`, which match the whole text. Going from right to left, each wildcard takes as little as it
/// can, so that the first one takes as much as it can.
pub(super) fn keep_captures<'a>(tokens: &[Token], text: &'a str, separator: Option<u8>, captures: &mut Captures<'a>) {
    let before = |at: usize| {
        let last = text.get(..at)?.chars().next_back()?;
        (Some(last) != separator.map(char::from)).then(|| at.saturating_sub(last.len_utf8()))
    };
    // The start of each token, filled in from the last one.
    let mut begins = vec![text.len(); tokens.len()];
    let (mut left, mut at) = (tokens.len(), text.len());
    let mut star = None;
    while left > 0 || at > 0 {
        let token = left.checked_sub(1).and_then(|last| tokens.get(last));
        let begin = match token {
            Some(Token::Literal(literal)) => {
                text.get(..at).and_then(|text| text.strip_suffix(literal.as_ref())).map(str::len)
            }
            Some(Token::Segment { least: 0, .. }) => Some(at),
            Some(Token::Segment { .. }) => before(at),
            Some(Token::Any | Token::Deeper) | None => None,
        };
        if let Some(begin) = begin {
            left = left.saturating_sub(1);
            at = begin;
            if matches!(token, Some(Token::Segment { .. })) {
                star = Some(left);
            }
        } else {
            // The text does match, so some wildcard can take more. The last one tried is enough, as in `Search`.
            let Some((token, begin)) = star.and_then(|token| Some((token, before(*begins.get(token)?)?))) else {
                return;
            };
            (left, at) = (token, begin);
        }
        if let Some(own) = begins.get_mut(left) {
            *own = at;
        }
    }
    for (index, token) in tokens.iter().enumerate() {
        if matches!(token, Token::Segment { capture: true, .. }) {
            let begin = begins.get(index).copied().unwrap_or_default();
            let end = begins.get(index.saturating_add(1)).copied().unwrap_or(text.len());
            let _ = captures.try_push(text.get(begin..end).unwrap_or_default());
        }
    }
}

/// Decides in one pass whether a pattern matches a text.
///
/// Each wildcard takes as little as it can. On a mismatch only the last `*` of the segment and the last `**` are extended: another
/// choice for an earlier wildcard cannot help, since a later one absorbs the difference. So the work is bounded by the length of
/// the text times that of the pattern, without backtracking.
pub(super) struct Search<'p, 'a> {
    pattern: &'p Pattern,
    text: &'a [u8],
    /// The token to match next, and its position in the text.
    token: usize,
    at: usize,
    /// The token after the last `*`, and the position where it is tried.
    star: Option<(usize, usize)>,
    /// The token after the last `**`, and the position where it is tried.
    glob: Option<(usize, usize)>,
    /// The number of bytes scanned for the token after a `**`.
    #[cfg(test)]
    pub(super) scanned: usize,
}

impl<'p, 'a> Search<'p, 'a> {
    /// Searches the text after the first token, which is known to match.
    pub(super) fn after_first(pattern: &'p Pattern, after: &'a [u8]) -> Self {
        Self { token: 1, ..Self::new(pattern, after) }
    }

    pub(super) fn new(pattern: &'p Pattern, text: &'a [u8]) -> Self {
        Self {
            pattern,
            text,
            token: 0,
            at: 0,
            star: None,
            glob: None,
            #[cfg(test)]
            scanned: 0,
        }
    }

    /// Returns whether the pattern matches. `step` is called with every token that is tried and its position.
    pub(super) fn run(&mut self, mut step: impl FnMut(usize, usize)) -> bool {
        loop {
            step(self.token, self.at);
            let advanced = match self.pattern.tokens.get(self.token) {
                None if self.at == self.text.len() => return true,
                None => false,
                Some(token) => match self.advance(token) {
                    Some(Step::Done) => return true,
                    Some(Step::Never) => return false,
                    Some(Step::To(at)) => {
                        self.at = at;
                        self.token = self.token.saturating_add(1);
                        true
                    }
                    None => false,
                },
            };
            if !advanced && !self.extend() {
                return false;
            }
        }
    }

    /// Matches one token at the current position, with as little of the text as possible.
    #[inline]
    fn advance(&mut self, token: &Token) -> Option<Step> {
        let rest = self.text.get(self.at..)?;
        let next = self.token.saturating_add(1);
        let is_last = next == self.pattern.tokens.len();
        match token {
            Token::Literal(literal) => {
                rest.starts_with(literal.as_bytes()).then(|| Step::To(self.at.saturating_add(literal.len())))
            }
            Token::Segment { least, .. } => {
                // `next_character` ends at the separator, so this never leaves the segment.
                let at = if *least == 0 { self.at } else { self.next_character(self.at)? };
                self.star = Some((next, at));
                Some(Step::To(at))
            }
            Token::Any if is_last => Some(Step::Done),
            Token::Deeper if is_last => (rest.is_empty() || rest.starts_with(b"/")).then_some(Step::Done),
            Token::Deeper if !rest.starts_with(b"/") => None,
            Token::Any | Token::Deeper => {
                // The literal is nowhere in the rest, so no earlier wildcard can help by taking more. Without this a
                // search would be quadratic.
                let Some(at) = self.next_start(next, self.at) else { return Some(Step::Never) };
                (self.star, self.glob) = (None, Some((next, at)));
                Some(Step::To(at))
            }
        }
    }

    /// Extends the last wildcard that can take more of the text. Returns whether there is one.
    fn extend(&mut self) -> bool {
        // Remembered before the `*` is given up: it decides how far the `**` may skip.
        let starred = self.star.is_some();
        if let Some((token, at)) = self.star
            && let Some(at) = self.next_character(at)
        {
            self.star = Some((token, at));
            (self.token, self.at) = (token, at);
            return true;
        }
        let Some((token, at)) = self.glob else { return false };
        // A `*` cannot reach past its segment, so what follows the `**` is tried in the next segment.
        let skipped = if starred { self.separator_from(at) } else { Some(at) };
        let Some(at) = skipped.and_then(|at| self.next_start(token, at.saturating_add(1))) else { return false };
        (self.star, self.glob) = (None, Some((token, at)));
        (self.token, self.at) = (token, at);
        true
    }

    /// Returns the first position from here where the token after a `**` can begin: at the next occurrence of its literal, if it
    /// is one. After `/**` it always is, and begins with a slash.
    fn next_start(&mut self, token: usize, at: usize) -> Option<usize> {
        let rest = self.text.get(at..)?;
        let Some(Token::Literal(literal)) = self.pattern.tokens.get(token) else { return Some(at) };
        let literal = literal.as_bytes();
        let first = literal.first()?;
        let mut starts = rest.iter().enumerate().filter(|(_, byte)| *byte == first).map(|(start, _)| start);
        let start = starts.find(|start| rest.get(*start..).is_some_and(|rest| rest.starts_with(literal)));
        #[cfg(test)]
        {
            self.scanned = self.scanned.saturating_add(start.unwrap_or(rest.len()));
        }
        start.map(|start| at.saturating_add(start))
    }

    /// Returns the position after the character here; `None` if the segment ends here.
    fn next_character(&self, at: usize) -> Option<usize> {
        let (first, rest) = self.text.get(at..)?.split_first()?;
        // A character is skipped whole, so that a capture never ends inside of one.
        let continues = rest.iter().take_while(|byte| (0x80..0xc0).contains(*byte)).count();
        (Some(*first) != self.pattern.separator).then(|| at.saturating_add(1).saturating_add(continues))
    }

    /// Returns the position of the next separator.
    fn separator_from(&self, at: usize) -> Option<usize> {
        let separator = self.pattern.separator?;
        let rest = self.text.get(at..)?;
        rest.iter().position(|byte| *byte == separator).map(|ahead| at.saturating_add(ahead))
    }
}

/// The result of matching one token.
enum Step {
    /// The pattern matches, whatever the rest of the text is.
    Done,
    /// The rest of the text does not contain a required literal, so the pattern cannot match.
    Never,
    /// The token matches up to this position.
    To(usize),
}
