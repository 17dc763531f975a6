//! A made-up log, the same each time: a few heavy clients, many light ones, some lines a little late.

use std::io::{self, Write};

/// Numbers that look random: splitmix64.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % below
    }

    /// The smaller, the likelier.
    fn skewed(&mut self, below: u64) -> u64 {
        let most = self.roll(below) + 1;
        self.roll(most)
    }
}

/// Writes so many lines, a thousand for each second of the log.
pub(crate) fn write(out: &mut impl Write, lines: u64) -> io::Result<()> {
    let mut dice = Dice(7);
    for index in 0..lines {
        let late = if dice.roll(10) == 0 { dice.roll(3) } else { 0 };
        let second = (index / 1_000).saturating_sub(late);
        let (day, hour, minute) = (1 + second / 86_400 % 28, second / 3_600 % 24, second / 60 % 60);
        let client = dice.skewed(200_000);
        let user = dice.skewed(50_000);
        let tenant = user % 500;
        let method = ["GET", "GET", "GET", "POST"][usize::try_from(dice.roll(4)).unwrap_or(0)];
        writeln!(
            out,
            "10.{}.{}.{} t{tenant} u{user} [{day:02}/May/2026:{hour:02}:{minute:02}:{:02} +0000] \"{method} /api/items/{}?page={} \
             HTTP/1.1\" 200 {} \"https://example.com/\" \"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like \
             Gecko) Chrome/126.0.0.0 Safari/537.36\"",
            client >> 16,
            client >> 8 & 255,
            client & 255,
            second % 60,
            dice.roll(40),
            dice.roll(9),
            dice.roll(90_000),
        )?;
    }
    Ok(())
}
