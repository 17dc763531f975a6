//! Tests the page that `threshold replay --html` writes.

use crate::kinds;
use crate::logs::{combined_lines, events, json_lines, with_sizes_and_misses};
use crate::running::{Scratch, threshold};

/// Writes the page of a replay and returns it with the JSON of the same run.
fn page_of(policy: &Scratch, log: &Scratch, more: &[&str]) -> (String, serde_json::Value) {
    let page = Scratch::new("out.html", "");
    let args = ["replay", policy.path(), log.path(), "--json", "--html", page.path()];
    let answer = threshold(&[&args, more].concat()).json();
    (std::fs::read_to_string(page.path()).unwrap(), answer)
}

/// Returns the cells of the table of rules, row by row, without markup.
fn table(page: &str) -> Vec<Vec<String>> {
    let table = page.split("<h2>Rules</h2>").nth(1).unwrap().split("</table>").next().unwrap();
    let cell = |text: &str| text.split("</td>").next().unwrap().split('>').nth(1).unwrap().replace(',', "");
    table.split("<tr>").skip(2).map(|row| row.split("<td").skip(1).map(cell).collect()).collect()
}

/// The cards said 1,988 denied and banned, and the rows of the table had 1,121 together: the penalties had no row.
#[test]
fn the_rows_of_the_table_add_up_to_the_cards() {
    let policy = Scratch::new("table.toml", kinds::POLICY);
    let log = Scratch::new("table.json", json_lines(&with_sizes_and_misses(1, 4_000)));
    let (page, answer) = page_of(&policy, &log, &[]);
    let mut rows = table(&page);
    let last = rows.pop().unwrap();
    assert_eq!((rows.len(), last.len(), last[0].as_str()), (7, 5, "all"), "{rows:?} {last:?}");
    for (column, verdict) in ["denied", "banned", "warned", "slowed"].into_iter().enumerate() {
        let sum: u64 = rows.iter().map(|row| row[5 + column].parse::<u64>().unwrap()).sum();
        assert_eq!(last[1 + column], sum.to_string(), "{verdict}");
        assert_eq!(answer[verdict], sum, "{verdict}");
        assert!(sum > 0, "{verdict}");
    }
}

/// Two pages of one log could not be compared: each run drew another key for its digests, and a rule had the colour of its
/// rank.
#[test]
fn digests_and_colours_stay_the_same() {
    let policy = Scratch::new("same.toml", kinds::POLICY);
    let log = Scratch::new("same.json", json_lines(&with_sizes_and_misses(2, 2_000)));
    let (first, _) = page_of(&policy, &log, &[]);
    assert!(first.contains("#") && first == page_of(&policy, &log, &[]).0);
    let digests = |page: &str| -> std::collections::BTreeSet<String> {
        page.split("<span>").filter_map(|part| part.split_once("ip #")?.1.get(..16)).map(str::to_owned).collect()
    };
    assert!(!digests(&first).is_empty());
    // Under another policy the same addresses have the same digests; in another log they have others.
    let other = Scratch::new("other.toml", kinds::POLICY.replace("5/10min", "4/10min"));
    assert!(!digests(&first).is_disjoint(&digests(&page_of(&other, &log, &[]).0)));
    let fewer = Scratch::new("fewer.json", json_lines(&with_sizes_and_misses(2, 1_990)));
    assert!(digests(&first).is_disjoint(&digests(&page_of(&policy, &fewer, &[]).0)));
    let colour = |page: &str, rule: &str| {
        let key = page.split("class=\"key\"").nth(1).unwrap().split("</p>").next().unwrap();
        let own = key.split("<span>").find(|part| part.contains(&format!(">{rule}<"))).map(str::to_owned);
        own.unwrap_or_else(|| panic!("{rule} has no colour: {key}"))
    };
    // "pace" stops the most with a lower limit, and keeps its colour.
    let tight = Scratch::new("tight.toml", kinds::POLICY.replace("8/2min", "1/2min"));
    assert_eq!(colour(&first, "pace"), colour(&page_of(&tight, &log, &[]).0, "pace"));
}

/// The plots had no scale: only a bar's tooltip gave its figure, and nothing said that some heights are logarithmic.
#[test]
fn plots_have_axes_units_and_figures() {
    let policy = Scratch::new("axes.toml", "[[rule]]\nname = \"address\"\nper = [\"ip\"]\nlimit = \"6/min\"\n");
    let log = Scratch::new("axes.log", combined_lines(&events(9, 4_000)));
    let (page, _) = page_of(&policy, &log, &["--tz", "Asia/Kolkata"]);
    for part in [
        "requests per 30 s",
        "requests stopped per 30 s",
        "and the next 30 s: ",
        ">15:30</text>",
        ">16:20</text>",
        "logarithmic",
        "at least 30 % and less than 40 %: ",
        ">over</text>",
        "in the busiest hour, linear",
        "All weeks of the log together, in Asia/Kolkata",
        "Sun 15:00 to 16:00: ",
        "class=\"scroll\"",
    ] {
        assert!(page.contains(part), "{part} is missing:\n{page}");
    }
}

#[test]
fn the_time_zone_is_that_of_the_option_or_utc() {
    let policy = Scratch::new("zone.toml", "[[rule]]\nname = \"a\"\nper = [\"ip\"]\nlimit = \"6/min\"\n");
    let log = Scratch::new("zone.log", combined_lines(&events(9, 100)));
    let from = |zone: &[&str]| {
        let args = ["replay", policy.path(), log.path(), "--json"];
        threshold(&[&args, zone].concat()).json()["from"].as_str().unwrap().to_owned()
    };
    assert!(from(&[]).ends_with('Z'));
    assert!(from(&["--tz", "Europe/Berlin"]).ends_with("+02:00"));
    assert!(from(&["--tz", "-0330"]).ends_with("-03:30"));
    let run = threshold(&["replay", policy.path(), log.path(), "--tz", "Berlin"]);
    assert!(run.code == 2 && run.err.contains("\"Berlin\" is no time zone"), "{}", run.err);
}
