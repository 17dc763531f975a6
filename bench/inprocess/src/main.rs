//! Threshold beside its peers, in one process and one run: time, memory and allocations of a decision.

mod contenders;
mod layers;
mod memory;
mod report;
mod rounds;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use findings::grouped;
use threshold_core::limit::Algorithm;
use threshold_limiter::{KeyLimiter, LimitOptions};

use contenders::{Answer, Contender, FAR, Make, Threshold};
use layers::Layers;
use memory::counted;
use report::{Figure, Report, Row};
use rounds::{CHUNK, Entry, Pace, Series};

#[global_allocator]
static HEAP: memory::Counting = memory::Counting;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("inprocess: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// How much to measure.
struct Settings {
    pace: Pace,
    few: usize,
    many: usize,
}

impl Settings {
    fn from_env() -> Result<Self> {
        let quick = std::env::var_os("QUICK").is_some_and(|value| value != "0");
        let rounds = match std::env::var("ROUNDS") {
            Ok(text) => text.parse().ok().filter(|rounds| *rounds > 0).context("ROUNDS is a number above 0")?,
            Err(_) => {
                if quick {
                    3
                } else {
                    7
                }
            }
        };
        let (millis, visits, few, many) =
            if quick { (5, 1 << 14, 1_000, 50_000) } else { (100, 1 << 20, 10_000, 1_000_000) };
        Ok(Self { pace: Pace { rounds, budget: Duration::from_millis(millis), visits, threads: 1 }, few, many })
    }
}

/// In which order keys are visited.
#[derive(Debug, Clone, Copy)]
enum Pattern {
    Hot,
    Uniform,
    Zipf,
}

fn run() -> Result<()> {
    let settings = Settings::from_env()?;
    let mut report = Report::new(settings.pace.rounds, settings.many);
    single(1, &[Pattern::Hot], &settings, &mut report)?;
    single(settings.few, &[Pattern::Uniform], &settings, &mut report)?;
    single(settings.many, &[Pattern::Uniform, Pattern::Zipf], &settings, &mut report)?;
    layered(&settings, &mut report)?;
    moved(settings.many, &mut report)?;
    balances(settings.few, &mut report)?;
    report.publish()
}

/// One limit by key: every contender, allowed and denied, by one thread and by two.
fn single(keys: usize, patterns: &[Pattern], settings: &Settings, report: &mut Report) -> Result<()> {
    let names = names(keys);
    for answer in [Answer::Allowed, Answer::Denied] {
        progress(&format!("{} keys, {answer:?}: filling", grouped(keys)));
        let contenders = filled(&names, answer, keys == settings.many, report)?;
        for pattern in patterns {
            // Each visit brings a copy of its key, laid out in order, as each request brings its own.
            let order = visits(*pattern, keys, settings.pace.visits);
            let visits: Vec<String> = order.iter().map(|key| names[*key as usize].clone()).collect();
            let scenario = match pattern {
                Pattern::Hot => "one hot key".to_owned(),
                Pattern::Uniform => format!("{} keys, uniform", grouped(keys)),
                Pattern::Zipf => format!("{} keys, zipf", grouped(keys)),
            };
            for threads in [1, 2] {
                progress(&format!("{scenario}, {answer:?}, {threads} thread(s)"));
                let entries: Vec<Entry<'_>> =
                    contenders.iter().map(|one| entry(one.name().to_owned(), one.as_ref(), &visits)).collect();
                let series = rounds::run(&entries, Pace { threads, ..settings.pace });
                report.rows.push(Row { scenario: scenario.clone(), answer, threads, series });
            }
        }
    }
    Ok(())
}

/// A contender as somebody to measure.
fn entry<'a>(name: String, contender: &'a dyn Contender, visits: &'a [String]) -> Entry<'a> {
    Entry { name, run: Box::new(move |range| contender.check_all(&visits[range])) }
}

/// Every contender after it has seen each key; denied, after it has no more to give. Says what that took of the heap.
fn filled(names: &[String], answer: Answer, tell: bool, report: &mut Report) -> Result<Vec<Box<dyn Contender>>> {
    let mut contenders = Vec::new();
    for make in contenders::ALL {
        let (contender, bytes) = built(make, names, answer)?;
        if tell {
            // A table that doubles has just done so at 1,000,000 keys, and not yet at a tenth less: tell both.
            let fewer = &names[..report::a_tenth_less(names.len())];
            let fewer_bytes = if answer == Answer::Allowed { built(make, fewer, answer)?.1 } else { f64::NAN };
            let sample = &names[..names.len().min(10_000)];
            let (_, used) = counted(|| contender.check_all(sample));
            let each = used.allocations as f64 / sample.len() as f64;
            report.heap(contender.name(), answer, [bytes, fewer_bytes], each);
        }
        contenders.push(contender);
    }
    Ok(contenders)
}

/// A contender that has seen these keys, and how many live bytes of heap it has for each.
fn built(make: Make, names: &[String], answer: Answer) -> Result<(Box<dyn Contender>, f64)> {
    let (contender, heap) = counted(|| {
        let contender = make(answer, names.len())?;
        fill(contender.as_ref(), names, answer);
        anyhow::Ok(contender)
    });
    Ok((contender?, heap.live as f64 / names.len() as f64))
}

/// Shows every key once; denied, until there is no more to give.
fn fill(contender: &dyn Contender, names: &[String], answer: Answer) {
    for name in names {
        // At most a few times: one who never denies is found out by the rounds.
        let _ = (0..4).take_while(|_| contender.check(name) && answer == Answer::Denied).count();
    }
}

/// A whole decision from facts through four layers, one by one and in batches, beside governor's one limit.
fn layered(settings: &Settings, report: &mut Report) -> Result<()> {
    let users = names(settings.many);
    let order = visits(Pattern::Uniform, settings.many, settings.pace.visits);
    let keys: Vec<String> = order.iter().map(|key| users[*key as usize].clone()).collect();
    for answer in [Answer::Allowed, Answer::Denied] {
        progress(&format!("four layers, {answer:?}: filling"));
        let layers = Layers::new(answer, &users, &order)?;
        let [threshold, governor, ..] = contenders::ALL;
        let mut singles = Vec::new();
        for make in [governor, threshold] {
            let contender = make(answer, users.len())?;
            fill(contender.as_ref(), &users, answer);
            singles.push((format!("{}, one limit", contender.name()), contender));
        }
        let batched = Threshold(KeyLimiter::builder(Threshold::limit(answer)?).max_keys(users.len() as u64).build());
        fill(&batched, &users, answer);
        if answer == Answer::Allowed {
            // A seventh of a minute is no whole number of microseconds: Threshold then keeps a fraction as well.
            let limit = LimitOptions::new().algorithm(Algorithm::TokenBucket).parse(&format!("7/min burst {FAR}"))?;
            let fraction: Box<dyn Contender> = Box::new(Threshold(KeyLimiter::builder(limit).max_keys(users.len() as u64).build()));
            fraction.check_all(&users);
            singles.push(("threshold, one limit with a fraction".to_owned(), fraction));
        }
        for (how, allocations) in [
            ("check", counted(|| layers.check(0..CHUNK)).1.allocations),
            ("check_many", counted(|| layers.check_many(0..CHUNK)).1.allocations),
        ] {
            let name = format!("heap allocations a decision, four layers, {how}, {}", report::word(answer));
            report.figures.push(Figure { name, value: format!("{:.3}", allocations as f64 / CHUNK as f64) });
        }
        for threads in [1, 2] {
            progress(&format!("four layers, {answer:?}, {threads} thread(s)"));
            let mut entries: Vec<Entry<'_>> = Vec::new();
            for (name, single) in &singles {
                entries.push(entry(name.clone(), single.as_ref(), &keys));
            }
            let batches = "threshold, one limit, check_many of 64".to_owned();
            entries.push(Entry { name: batches, run: Box::new(|range| batched.check_batches(&keys[range])) });
            let four = |how: &str| format!("threshold, four layers, {how}");
            entries.push(Entry { name: four("check"), run: Box::new(|range| layers.check(range)) });
            entries.push(Entry { name: four("check_many of 64"), run: Box::new(|range| layers.check_many(range)) });
            let series: Vec<Series> = rounds::run(&entries, Pace { threads, ..settings.pace });
            report.layers.push(Row { scenario: "four layers".to_owned(), answer, threads, series });
        }
        if answer == Answer::Allowed {
            let name = "most slots moved by one decision: four layers, filled and measured".to_owned();
            report.figures.push(Figure { name, value: layers.most_moved().to_string() });
        }
    }
    Ok(())
}

/// The most slots that one decision moved, in three ways of filling a table.
fn moved(keys: usize, report: &mut Report) -> Result<()> {
    let names = names(keys * 2);
    // Windows, because they are in the table that moves slots; token buckets by key are in one that never does. Those of a
    // millisecond leave balances that say nothing, which are dropped as room is needed.
    let fast = LimitOptions::new().algorithm(Algorithm::FixedWindow).parse("1000000/ms")?;
    let live = LimitOptions::new().algorithm(Algorithm::FixedWindow).parse("1000000/day")?;
    for (how, limit, names) in [
        ("filled to max_keys", live, &names[..keys]),
        ("twice max_keys, all live", live, &names[..]),
        ("twice max_keys, all expired", fast, &names[..]),
    ] {
        progress(&format!("moved slots: {how}"));
        let limiter = KeyLimiter::builder(limit).max_keys(keys as u64).build();
        for name in names {
            let _ = limiter.check(name);
        }
        let name = format!("most slots moved by one decision: {how}");
        report.figures.push(Figure { name, value: limiter.usage().counts.most_moved.to_string() });
    }
    Ok(())
}

/// What a balance of each algorithm takes beyond its slot in the table, with ten requests in it.
fn balances(keys: usize, report: &mut Report) -> Result<()> {
    const USED: u64 = 10;
    let names = names(keys);
    for algorithm in Algorithm::ALL {
        let text = if algorithm.is_concurrency() { "10" } else { "10/h" };
        // Half of the table stays empty, so nothing is evicted.
        let limiter = KeyLimiter::builder(LimitOptions::new().algorithm(algorithm).parse(text)?).max_keys(keys as u64 * 2).build();
        let (_, heap) = counted(|| {
            for name in &names {
                let _ = (0..USED).filter(|_| limiter.check(name).allowed).count();
            }
        });
        let name = format!("bytes of a balance beyond its slot: {algorithm}, {USED} of {USED} used");
        report.figures.push(Figure { name, value: format!("{:.1}", heap.live as f64 / keys as f64) });
    }
    Ok(())
}

/// Keys of 24 bytes that differ throughout.
fn names(keys: usize) -> Vec<String> {
    (0..keys as u64).map(|key| format!("user:{:016x}-eu", mix(key))).collect()
}

/// The keys in the order they are visited, the same in every run.
fn visits(pattern: Pattern, keys: usize, visits: usize) -> Vec<u32> {
    let unit = |visit: u64| mix(visit ^ 0x5eed_0000_0000_0000) as f64 / u64::MAX as f64;
    let last = keys.saturating_sub(1);
    // Zipf with exponent 1: the weight of a rank is 1 / rank.
    let weights: Vec<f64> = match pattern {
        Pattern::Zipf => (1..=keys)
            .scan(0.0, |sum, rank| {
                Some({
                    *sum += 1.0 / rank as f64;
                    *sum
                })
            })
            .collect(),
        Pattern::Hot | Pattern::Uniform => Vec::new(),
    };
    let total = weights.last().copied().unwrap_or(0.0);
    let key = |visit: u64| match pattern {
        Pattern::Hot => 0,
        Pattern::Uniform => (unit(visit) * keys as f64) as usize,
        Pattern::Zipf => weights.partition_point(|sum| *sum < unit(visit) * total),
    };
    (0..visits as u64).map(|visit| key(visit).min(last) as u32).collect()
}

/// SplitMix64's finalizer: every input bit changes half of the output's.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn progress(what: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("· {what}");
    }
}
