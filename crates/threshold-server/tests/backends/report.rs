//! The results of all spellings, as tables for a failing test.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::site::Ended;
use super::spellings::Spelling;

/// How many spellings a failure shows. The file has all of them.
const SHOWN: usize = 60;

/// All spellings with their results in several runs. The first run has no limit.
pub(crate) struct Report<'a> {
    spellings: &'a [Spelling],
    times: Vec<(&'static str, Vec<Ended>)>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(spellings: &'a [Spelling]) -> Self {
        Self { spellings, times: Vec::new() }
    }

    /// Adds the results of a run.
    pub(crate) fn add(&mut self, name: &'static str, ended: Vec<Ended>) {
        assert_eq!(ended.len(), self.spellings.len(), "each spelling ends in one way");
        self.times.push((name, ended));
    }

    /// Returns how many ran the login without a limit.
    pub(crate) fn reached(&self) -> usize {
        ran(&self.times[0].1)
    }

    /// For each run: how many ran the login, and how many had which status.
    pub(crate) fn summary(&self) -> String {
        let times = self.times.iter().map(|(name, ended)| {
            let mut statuses = BTreeMap::<u16, usize>::new();
            ended.iter().for_each(|ended| *statuses.entry(ended.status).or_default() += 1);
            let statuses: Vec<String> = statuses.iter().map(|(status, count)| format!("{status}: {count}")).collect();
            format!("{name}: {} ran the login ({})", ran(ended), statuses.join(", "))
        });
        times.collect::<Vec<_>>().join("; ")
    }

    /// Returns the spellings that ran the login over its limit, the shortest first.
    pub(crate) fn passed(&self) -> String {
        let mut text = String::new();
        for (name, ended) in &self.times[1..] {
            let both = self.spellings.iter().zip(ended).filter(|(_, ended)| ended.ran);
            let mut passed: Vec<&Spelling> = both.map(|(spelling, _)| spelling).collect();
            passed.sort_by_key(|spelling| spelling.target.len());
            writeln!(text, "odd_paths = \"{name}\": {} spellings got past", passed.len()).unwrap();
            for spelling in passed.iter().take(SHOWN) {
                writeln!(text, "  {spelling}    ({})", spelling.tricks.join(", ")).unwrap();
            }
        }
        text
    }

    /// For each trick: how many spellings use it, and how many of these ran the login in each run.
    pub(crate) fn tricks(&self) -> String {
        let mut rows = BTreeMap::<&str, Vec<usize>>::new();
        for (at, spelling) in self.spellings.iter().enumerate() {
            for trick in &spelling.tricks {
                let row = rows.entry(trick).or_insert_with(|| vec![0; self.times.len() + 1]);
                row[0] += 1;
                for (count, (_, ended)) in row[1..].iter_mut().zip(&self.times) {
                    *count += usize::from(ended[at].ran);
                }
            }
        }
        let names = ["sent"].into_iter().chain(self.times.iter().map(|(name, _)| *name));
        let mut text = format!("{:24}{}\n", "", names.map(|name| format!("{name:>20}")).collect::<String>());
        for (trick, row) in rows {
            let row: String = row.iter().map(|count| format!("{count:>20}")).collect();
            writeln!(text, "{trick:24}{row}").unwrap();
        }
        text
    }

    /// Writes all results to a file beside the build, and returns its path.
    pub(crate) fn write(&self, name: &str) -> PathBuf {
        let mut text = String::from("spelling\ttricks");
        self.times.iter().for_each(|(name, _)| write!(text, "\t{name}").unwrap());
        for (at, spelling) in self.spellings.iter().enumerate() {
            write!(text, "\n{spelling}\t{}", spelling.tricks.join(", ")).unwrap();
            for (_, ended) in &self.times {
                let Ended { status, ran } = &ended[at];
                write!(text, "\t{status}{}", if *ran { " login" } else { "" }).unwrap();
            }
        }
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("spellings-{name}.tsv"));
        std::fs::write(&path, text).unwrap();
        path
    }
}

fn ran(ended: &[Ended]) -> usize {
    ended.iter().filter(|ended| ended.ran).count()
}
