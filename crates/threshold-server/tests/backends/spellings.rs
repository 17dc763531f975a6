//! Random spellings of a limited path, by which clients try to reach a route without matching its rule.

use std::collections::HashSet;
use std::fmt;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};

/// A request target, and the tricks in it.
#[derive(Debug, Clone)]
pub(crate) struct Spelling {
    pub(crate) target: Vec<u8>,
    pub(crate) tricks: Vec<&'static str>,
}

impl fmt::Display for Spelling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.target.escape_ascii())
    }
}

/// Returns this many different spellings of `/api/login`. The same seed gives the same ones.
pub(crate) fn spellings(seed: u64, count: usize) -> Vec<Spelling> {
    let mut random = StdRng::seed_from_u64(seed);
    let (mut seen, mut all) = (HashSet::new(), Vec::with_capacity(count));
    while all.len() < count {
        let spelling = Writer { random: &mut random, tricks: Vec::new() }.spelling();
        if seen.insert(spelling.target.clone()) {
            all.push(spelling);
        }
    }
    all
}

/// Texts that a router, a proxy or a framework may take for `/`. The first four are likely.
const SEPARATORS: [&str; 14] = [
    "/",
    "//",
    "%2f",
    "%2F",
    "\\",
    "%5c",
    "%5C",
    "/%2f",
    "%252f",
    "%c0%af",
    "%e0%80%af",
    "%ef%bc%8f",
    "%u002f",
    "\u{2215}",
];

/// Texts at the end of a segment that may be ignored or end it.
const ENDINGS: [&str; 34] = [
    "%00",
    "%0a",
    "%0A",
    "%0d",
    "%0d%0a",
    "%0a%0a",
    "%09",
    "%0b",
    "%0c",
    "%1c",
    "%1f",
    "%7f",
    "%20",
    "%20%20",
    "%a0",
    "%85",
    "%c2%a0",
    "%c2%85",
    "%e2%80%a8",
    "%e2%80%8b",
    "%ef%bb%bf",
    "+",
    ".",
    "%2e",
    "..",
    ":",
    "%3a",
    ",",
    "~",
    "!",
    "%",
    "%25",
    "%2",
    ".json",
];

/// Characters that some servers accept, and others refuse, escape or cut.
const RAW: &[u8] = b"\"<>^`{|}'[]()*$&=@;:,+!~\\#?%\t \x01\x0b\x1f\x7f\x80\xa0\xc0\xff";

struct Writer<'a> {
    random: &'a mut StdRng,
    tricks: Vec<&'static str>,
}

impl Writer<'_> {
    fn spelling(mut self) -> Spelling {
        let mut target = String::new();
        if self.chance(0.2) {
            self.trick("detour before");
            target.push_str(&self.detour());
        }
        let letters = self.letters();
        for (at, segment) in ["api", "login"].into_iter().enumerate() {
            target.push_str(&self.separator(at));
            target.push_str(&self.segment(segment, letters));
        }
        target.push_str(&self.suffix());
        target.push_str(&self.tail());
        if self.chance(0.04) {
            self.trick("absolute form");
            let origin =
                self.one_of(&["http://site", "http://site:80", "HTTP://SITE", "https://site", "http://u@site"]);
            target.insert_str(0, origin);
        }
        let mut target = target.into_bytes();
        if self.chance(0.05) {
            self.trick("raw character");
            let at = self.random.random_range(1..=target.len());
            target.insert(at, RAW.choose(self.random).copied().unwrap());
        }
        Spelling { target, tricks: self.tricks }
    }

    /// Returns the text before a segment.
    fn separator(&mut self, at: usize) -> String {
        if !self.chance(0.2) {
            return "/".to_owned();
        }
        match self.random.random_range(0..4) {
            0 => {
                self.trick("separator");
                // Few servers accept a target that does not begin with a slash.
                let first = if at == 0 && self.chance(0.8) { "/" } else { "" };
                format!("{first}{}", self.any_separator())
            }
            1 => {
                self.trick("dot segment");
                format!("{}{}{}", self.likely_separator(), self.dots(1), self.likely_separator())
            }
            2 => {
                self.trick("parameters");
                format!("{}/", self.parameters())
            }
            _ => {
                self.trick("detour between");
                let detour = self.detour();
                format!("{detour}{}", self.likely_separator())
            }
        }
    }

    /// Returns a segment and a dot segment that cancels it; sometimes many, or a long one.
    fn detour(&mut self) -> String {
        match self.random.random_range(0..40) {
            0 => {
                self.trick("many dot segments");
                let times = self.random.random_range(2..=14);
                return (0..times).map(|at| format!("/x{at}/{}", self.dots(2))).collect();
            }
            1 => {
                self.trick("long segment");
                let length = self.random.random_range(100..=6_000);
                return format!("/{}/{}", "x".repeat(length), self.dots(2));
            }
            _ => {}
        }
        let name = self.one_of(&["health", "x", "api", "api/login", "static", "%78", "", "."]);
        let levels = if name.contains('/') { 2 } else { 1 };
        let mut detour = format!("/{name}");
        for _ in 0..levels {
            detour.push_str(self.likely_separator());
            detour.push_str(&self.dots(2));
        }
        detour
    }

    fn any_separator(&mut self) -> &'static str {
        self.one_of(&SEPARATORS)
    }

    /// Returns a separator, mostly a plain one, so that several in a row are still valid for some server.
    fn likely_separator(&mut self) -> &'static str {
        match self.random.random_range(0..10) {
            0..7 => "/",
            7 => self.any_separator(),
            8 => "\\",
            _ => "%2f",
        }
    }

    /// Returns a dot segment, which may be escaped or have parameters.
    fn dots(&mut self, count: usize) -> String {
        let mut dots: String = (0..count)
            .map(|_| match self.random.random_range(0..20) {
                0..13 => ".",
                13..16 => "%2e",
                16..18 => "%2E",
                18 => "%252e",
                _ => "%c0%ae",
            })
            .collect();
        if self.chance(0.15) {
            dots.push_str(&self.parameters());
        }
        dots
    }

    fn parameters(&mut self) -> String {
        self.one_of(&[";", ";x", ";a=b", ";/", ";.", "%3b", "%3Ba=b", ";%2f", ";a;b"]).to_owned()
    }

    /// Chooses how letters are written.
    fn letters(&mut self) -> Letters {
        let (name, style) = match self.random.random_range(0..20) {
            0..10 => return Letters { share: 0.0, style: Style::Upper },
            10..14 => ("case", Style::Upper),
            14..17 => ("escaped letter", Style::Escaped),
            17 => ("letter escaped twice", Style::EscapedTwice),
            18 => ("case, escaped", Style::UpperEscaped),
            _ => ("unicode letter", Style::LookAlike),
        };
        self.trick(name);
        Letters { share: *[0.15, 0.5, 1.0].choose(self.random).unwrap(), style }
    }

    fn segment(&mut self, segment: &str, letters: Letters) -> String {
        segment.chars().map(|letter| self.letter(letter, letters)).collect()
    }

    fn letter(&mut self, letter: char, letters: Letters) -> String {
        if !self.chance(letters.share) {
            return letter.to_string();
        }
        match letters.style {
            Style::Upper => letter.to_ascii_uppercase().to_string(),
            Style::Escaped => self.escaped(letter),
            Style::EscapedTwice => self.escaped(letter).replace('%', "%25"),
            Style::UpperEscaped => self.escaped(letter.to_ascii_uppercase()),
            Style::LookAlike => self.look_alike(letter),
        }
    }

    fn escaped(&mut self, letter: char) -> String {
        let code = u32::from(letter);
        if self.chance(0.5) { format!("%{code:02x}") } else { format!("%{code:02X}") }
    }

    /// Returns a full-width or overlong letter, or one that case folding or normalisation turns into the plain one.
    fn look_alike(&mut self, letter: char) -> String {
        let code = u32::from(letter);
        let wide = char::from_u32(0xff00 + code - 0x20).unwrap_or(letter);
        match (self.random.random_range(0..4), letter) {
            (0, _) => wide.to_string(),
            (1, _) => format!("%c1%{:02x}", code.wrapping_sub(0x40) | 0x80),
            (2, _) => format!("%u00{code:02x}"),
            (_, 'i') => "%c4%b1".to_owned(),
            (_, 'l') => "%e2%85%bc".to_owned(),
            _ => wide.to_string().bytes().map(|byte| format!("%{byte:02x}")).collect(),
        }
    }

    /// Returns the text after the last segment.
    fn suffix(&mut self) -> String {
        match self.random.random_range(0..20) {
            0..10 => String::new(),
            10..12 => {
                self.trick("trailing slash");
                self.one_of(&["/", "//", "///", "/.", "/./", "%2f", "\\", "%5c"]).to_owned()
            }
            12..15 => {
                self.trick("ending");
                let count = self.random.random_range(1..=2);
                (0..count).map(|_| self.one_of(&ENDINGS)).collect()
            }
            15 => {
                self.trick("parameters");
                self.parameters()
            }
            16 => {
                self.trick("away and back");
                let detour = self.detour();
                let end = self.one_of(&["", "/", "/.", "%0a"]);
                format!("{detour}{end}")
            }
            _ => {
                self.trick("away");
                self.away()
            }
        }
    }

    /// Returns dot segments that lead to another path when they are resolved.
    fn away(&mut self) -> String {
        let mut away = String::new();
        for _ in 0..self.random.random_range(1..=3) {
            away.push_str(self.likely_separator());
            away.push_str(&self.dots(2));
        }
        let to = self.one_of(&["health", "other", "", "x/y", "api/other", "api/login", "login", "."]);
        format!("{away}{}{to}", self.likely_separator())
    }

    /// Returns a query or a fragment.
    fn tail(&mut self) -> String {
        if !self.chance(0.35) {
            return String::new();
        }
        self.trick("query");
        let number: u32 = self.random.random();
        let start = self.one_of(&["?", "?", "?", "?", "?", "#", "??", "?#", "#?", "%3f", "%23", "?x=1&n="]);
        let middle =
            self.one_of(&["", "", "", "a=", "/../../health", "/..;/", "\\..\\", "%2f..", "http://site/health"]);
        format!("{start}{middle}{number:x}")
    }

    fn trick(&mut self, name: &'static str) {
        if !self.tricks.contains(&name) {
            self.tricks.push(name);
        }
    }

    fn chance(&mut self, share: f64) -> bool {
        self.random.random_bool(share)
    }

    fn one_of(&mut self, all: &[&'static str]) -> &'static str {
        all.choose(self.random).copied().unwrap()
    }
}

/// How letters are written, and how many of them.
#[derive(Clone, Copy)]
struct Letters {
    share: f64,
    style: Style,
}

#[derive(Clone, Copy)]
enum Style {
    Upper,
    Escaped,
    EscapedTwice,
    UpperEscaped,
    LookAlike,
}
