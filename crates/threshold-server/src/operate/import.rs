//! Reads lists of bans: plain lists, CSV, and the forms of CrowdSec and Spamhaus.

mod crowdsec;
mod table;

use std::fmt::Write as _;

use anyhow::bail;
use serde::Deserialize;
use serde_json::{Value, json};
use threshold_core::address::Network;
use threshold_core::text::printable;

/// The most lines that an error describes.
const MAX_DESCRIBED: usize = 20;
/// The longest reason, in characters: the server accepts no longer one.
const MAX_REASON: usize = 1_000;

/// A ban in a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ListedBan {
    /// The number of its line, from 1; of its item, in JSON.
    pub(super) line: usize,
    /// An address or CIDR, or another name where there is a layer.
    pub(super) key: String,
    pub(super) layer: Option<String>,
    pub(super) reason: Option<String>,
    pub(super) end: Option<ListedEnd>,
}

/// The end of a ban in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ListedEnd {
    /// After so many seconds.
    After(u64),
    /// At this time, in Unix seconds.
    At(u64),
}

/// The bans of a list.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct BanFile {
    pub(super) bans: Vec<ListedBan>,
    /// Entries that are no bans of addresses, such as a captcha or a country, by the reason for leaving them out.
    pub(super) left_out: std::collections::BTreeMap<String, usize>,
    /// What is wrong with lines that cannot be read, by their numbers.
    faults: Vec<(usize, String)>,
}

impl ListedBan {
    /// Returns the ban as the server's API has it.
    pub(super) fn to_json(&self) -> Value {
        let mut ban = json!({"key": self.key, "line": self.line});
        if let Some(fields) = ban.as_object_mut() {
            fields.extend(self.layer.as_ref().map(|layer| ("layer".to_owned(), json!(layer))));
            // A list comes from outside, and one long or blank comment in it is no reason to refuse the whole.
            let reason = self.reason.as_ref().filter(|reason| !reason.trim().is_empty());
            fields.extend(reason.map(|reason| {
                let short: String = reason.trim().chars().take(MAX_REASON).collect();
                ("reason".to_owned(), json!(short))
            }));
            fields.extend(self.end.map(|end| match end {
                ListedEnd::After(seconds) => ("durationSec".to_owned(), json!(seconds)),
                ListedEnd::At(at) => ("until".to_owned(), json!(at)),
            }));
        }
        ban
    }
}

impl BanFile {
    /// Reads a list whose form is recognised by its beginning.
    ///
    /// # Errors
    /// Fails if any line cannot be read. The error describes the first of them, with their numbers.
    pub(super) fn read(text: &str) -> anyhow::Result<Self> {
        let mut file = Self::default();
        // A byte order mark would be a part of the first address, or hide the form of the list.
        let text = text.trim_start_matches('\u{feff}');
        match text.trim_start().as_bytes().first() {
            Some(b'[') => crowdsec::read_json(text, &mut file)?,
            Some(b'{') => file.read_json_lines(text),
            _ if table::has_header(text) => table::read(text, &mut file),
            _ => file.read_plain(text),
        }
        // Here as well as on the server: thousands of lines need not be sent to learn that the file is not a list of
        // addresses.
        file.check_keys();
        if file.faults.is_empty() { Ok(file) } else { bail!(file.describe_faults()) }
    }

    /// Reads one address or CIDR on each line. What follows `;`, `#` or `//` is a comment, and the reason of the ban before it:
    /// Spamhaus' DROP lists name their evidence there.
    fn read_plain(&mut self, text: &str) {
        for (line, content) in (1..).zip(text.lines()) {
            let end = [content.find([';', '#']), content.find("//")].into_iter().flatten().min();
            let (key, comment) = content.split_at_checked(end.unwrap_or(content.len())).unwrap_or((content, ""));
            let key = key.trim();
            if !key.is_empty() {
                let reason = comment.trim_start_matches([';', '#', '/', ' ', '\t']).trim();
                let reason = (!reason.is_empty()).then(|| reason.to_owned());
                self.bans.push(ListedBan { line, key: key.to_owned(), reason, ..ListedBan::default() });
            }
        }
    }

    /// Reads one JSON object on each line, as Spamhaus' DROP lists in JSON have them. The last one describes the list.
    fn read_json_lines(&mut self, text: &str) {
        #[derive(Deserialize)]
        struct Line {
            cidr: Option<String>,
            sblid: Option<String>,
            #[serde(rename = "type")]
            kind: Option<String>,
            records: Option<usize>,
        }
        let (mut last, mut is_spamhaus, mut records) = (0, false, None);
        for (line, content) in (1..).zip(text.lines()).filter(|(_, content)| !content.trim().is_empty()) {
            match serde_json::from_str::<Line>(content) {
                Ok(Line { kind: Some(kind), records: count, .. }) if kind == "metadata" => records = Some(count),
                Ok(Line { cidr: Some(key), sblid: reason, .. }) => {
                    is_spamhaus |= reason.is_some();
                    self.bans.push(ListedBan { line, key, reason, ..ListedBan::default() });
                }
                Ok(_) => self.faults.push((line, "there is no \"cidr\"".to_owned())),
                // The error counts lines within this one.
                Err(error) => {
                    let message = error.to_string();
                    let message = message.split(" at line ").next().unwrap_or_default();
                    self.faults.push((line, format!("not JSON: {message} at column {}", error.column())));
                }
            }
            last = line;
        }
        // A download that was cut off would lift the bans of its rest. The last line of a DROP list counts the others.
        let found = self.bans.len();
        match records {
            None if is_spamhaus => self.faults.push((last, "the list is cut off: its last line is missing".to_owned())),
            Some(Some(counted)) if counted != found => {
                self.faults
                    .push((last, format!("the list is cut off: it has {counted} records, and {found} were read")));
            }
            _ => {}
        }
    }

    /// Adds a fault for each key that is not an address or CIDR.
    fn check_keys(&mut self) {
        let is_address = |ban: &&ListedBan| ban.layer.as_deref().is_none_or(|layer| matches!(layer, "edge" | "ip"));
        let wrong = self.bans.iter().filter(is_address).filter(|ban| ban.key.parse::<Network>().is_err());
        let faults = wrong.map(|ban| (ban.line, format!("\"{}\" is not an address or CIDR", printable(&ban.key))));
        let faults: Vec<(usize, String)> = faults.collect();
        self.faults.extend(faults);
        // By line: faults of the form and of keys are found in two passes.
        self.faults.sort();
    }

    fn describe_faults(&self) -> String {
        let mut text = format!("nothing was imported: {} lines cannot be read", self.faults.len());
        for (line, fault) in self.faults.iter().take(MAX_DESCRIBED) {
            let _ = write!(text, "\n  line {line}: {fault}");
        }
        if let Some(more) = self.faults.len().checked_sub(MAX_DESCRIBED).filter(|more| *more > 0) {
            let _ = write!(text, "\n  and {more} more");
        }
        text
    }

    fn leave_out(&mut self, why: String) {
        let count = self.left_out.entry(why).or_default();
        *count = count.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ban(line: usize, key: &str, reason: Option<&str>, end: Option<ListedEnd>) -> ListedBan {
        ListedBan { line, key: key.to_owned(), layer: None, reason: reason.map(str::to_owned), end }
    }

    fn read(text: &str) -> BanFile {
        BanFile::read(text).unwrap()
    }

    #[test]
    fn a_plain_list_has_comments_and_a_comment_after_an_address_is_its_reason() {
        let text =
            "\u{feff}# blocked by hand\n\n203.0.113.7\n  198.51.100.0/24   # scrapers\n2001:db8::/32 // tests\n; end\n";
        let bans = [
            ban(3, "203.0.113.7", None, None),
            ban(4, "198.51.100.0/24", Some("scrapers"), None),
            ban(5, "2001:db8::/32", Some("tests"), None),
        ];
        assert_eq!(read(text).bans, bans);
        assert_eq!(read("").bans, []);
    }

    /// The two forms of https://www.spamhaus.org/blocklists/do-not-route-or-peer/, shortened.
    #[test]
    fn spamhaus_lists_are_read_as_text_and_as_json() {
        let text = "; Spamhaus DROP List 2026/11/16 - (c) 2026 The Spamhaus Project SLU\n; https://www.spamhaus.org/drop/drop.txt\n\
                    1.10.16.0/20 ; SBL256894\n2.56.192.0/22 ; SBL459831\n";
        let expected = |first| {
            [
                ban(first, "1.10.16.0/20", Some("SBL256894"), None),
                ban(first + 1, "2.56.192.0/22", Some("SBL459831"), None),
            ]
        };
        assert_eq!(read(text).bans, expected(3));
        let json = "{\"cidr\":\"1.10.16.0/20\",\"sblid\":\"SBL256894\",\"rir\":\"apnic\"}\n\
                    {\"cidr\":\"2.56.192.0/22\",\"sblid\":\"SBL459831\",\"rir\":\"ripencc\"}\n\
                    {\"type\":\"metadata\",\"timestamp\":1763280007,\"size\":2,\"records\":2,\"copyright\":\"(c) 2026\"}\n";
        assert_eq!(read(json).bans, expected(1));
    }

    #[test]
    fn csv_is_read_by_its_header_in_any_order() {
        let text = "reason,network,until\n\"scrapes, at night\",198.51.100.0/24,2026-12-01T00:00:00Z\n,203.0.113.7,\n";
        let bans = [
            ban(2, "198.51.100.0/24", Some("scrapes, at night"), Some(ListedEnd::At(1_796_083_200))),
            ban(3, "203.0.113.7", None, None),
        ];
        assert_eq!(read(text).bans, bans);
        let layers = read("layer,key\nuser,mallory\nedge,203.0.113.7\n").bans;
        assert_eq!(layers.iter().map(|ban| ban.layer.as_deref()).collect::<Vec<_>>(), [Some("user"), Some("edge")]);
    }

    /// `cscli decisions list -o raw` and `-o json`, and the file of `cscli decisions import`.
    #[test]
    fn crowdsec_decisions_are_read_and_what_is_no_ban_of_an_address_is_left_out() {
        let raw = "id,source,ip,reason,action,country,as,events_count,expiration,simulated,alert_id\n\
                   7,crowdsec,Ip:203.0.113.7,crowdsecurity/ssh-bf,ban,FR,1234 Example,6,3h59m55.5s,false,3\n\
                   8,cscli,Range:198.51.100.0/24,manual 'ban',ban,,,1,23h0m0s,false,4\n\
                   9,lists,Country:XX,list,ban,,,1,1h0m0s,false,5\n\
                   10,crowdsec,Ip:203.0.113.8,http-bad-user-agent,captcha,FR,1234 Example,6,1h,false,6\n\
                   11,crowdsec,Ip:203.0.113.9,crowdsecurity/ssh-bf,ban,FR,1234 Example,6,1h,true,6\n";
        let file = read(raw);
        let bans = [
            ban(2, "203.0.113.7", Some("crowdsecurity/ssh-bf"), Some(ListedEnd::After(14_396))),
            ban(3, "198.51.100.0/24", Some("manual 'ban'"), Some(ListedEnd::After(82_800))),
        ];
        assert_eq!(file.bans, bans);
        let left_out: Vec<&str> = file.left_out.keys().map(String::as_str).collect();
        assert_eq!(left_out, ["action captcha", "scope Country", "simulated"]);
        let json = r#"[{"id":3,"decisions":[{"duration":"3h59m55.5s","id":7,"origin":"crowdsec","scenario":"crowdsecurity/ssh-bf",
            "scope":"Ip","simulated":false,"type":"ban","value":"203.0.113.7"}],"source":{"cn":"FR"}},
            {"id":4,"decisions":[{"duration":"23h0m0s","origin":"cscli","scenario":"manual 'ban'","scope":"Range","type":"ban",
            "value":"198.51.100.0/24"},{"duration":"1h","scenario":"x","scope":"Ip","type":"captcha","value":"203.0.113.8"}]}]"#;
        let file = read(json);
        let keys: Vec<(&str, Option<ListedEnd>)> = file.bans.iter().map(|ban| (ban.key.as_str(), ban.end)).collect();
        let ends = [Some(ListedEnd::After(14_396)), Some(ListedEnd::After(82_800))];
        assert_eq!(keys, [("203.0.113.7", ends[0]), ("198.51.100.0/24", ends[1])]);
        assert_eq!(file.left_out.get("action captcha"), Some(&1));
        let import = read(r#"[{"duration": "4h", "scope": "ip", "type": "ban", "value": "203.0.113.7"}]"#);
        assert_eq!(import.bans, [ban(1, "203.0.113.7", None, Some(ListedEnd::After(14_400)))]);
        let csv = read("duration,scope,value\n24h,ip,203.0.113.7\n");
        assert_eq!(csv.bans, [ban(2, "203.0.113.7", None, Some(ListedEnd::After(86_400)))]);
    }

    #[test]
    fn lines_that_cannot_be_read_are_named_and_nothing_is_read() {
        let check = |text: &str, expected: &[&str]| {
            let error = BanFile::read(text).unwrap_err().to_string();
            for expected in expected {
                assert!(error.contains(expected), "{text}: {error}");
            }
        };
        check(
            "203.0.113.7\nnonsense\n203.0.113.0/33\n",
            &["2 lines cannot be read", "\n  line 2: \"nonsense\"", "line 3: "],
        );
        check("203.0.113.1 - 203.0.113.9\n", &["line 1: \"203.0.113.1 - 203.0.113.9\" is not an address or CIDR"]);
        check("{\"cidr\":\"203.0.113.0/24\"}\n{\"asn\":7}\n{\n", &["line 2: there is no \"cidr\"", "line 3: not JSON"]);
        check("network,until\n203.0.113.7,tomorrow\n", &["line 2: \"tomorrow\" is not a time"]);
        check("[{\"scope\":\"ip\"}]", &["line 1: there is no \"value\""]);
        check("[{]", &["JSON"]);
        // An unbalanced quote made the rest of a list one field, and the bans in it were lifted.
        check("network,reason\n203.0.113.7,\"bad\n203.0.113.8,x\n", &["line 2: a quote is not closed"]);
        // A download that was cut off lifted the bans of its rest.
        let (one, end) = (r#"{"cidr":"1.10.16.0/20","sblid":"SBL1"}"#, r#"{"type":"metadata","records":2}"#);
        check(&format!("{one}\n"), &["line 1: the list is cut off: its last line is missing"]);
        check(&format!("{one}\n{end}\n"), &["line 2: the list is cut off: it has 2 records, and 1 were read"]);
        // Every error in a list of JSON objects was on "line 1".
        check(&format!("{one}\n{one}\n{{\"cidr\":}}\n{end}\n"), &["line 3: not JSON: expected value at column 9"]);
        check(&"x\n".repeat(30), &["30 lines cannot be read", "line 20: ", "and 10 more"]);
    }
}
