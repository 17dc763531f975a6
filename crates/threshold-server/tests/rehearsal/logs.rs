//! Generates traffic from a seed.

/// A random number generator: splitmix64.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % below
    }

    /// Returns a number below the bound; smaller ones are more likely.
    pub(crate) fn skewed(&mut self, below: u64) -> u64 {
        let most = self.roll(below) + 1;
        self.roll(most)
    }
}

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub(crate) second: u64,
    pub(crate) ip: String,
    pub(crate) user: Option<String>,
    pub(crate) tenant: String,
    pub(crate) method: &'static str,
    pub(crate) path: String,
    pub(crate) status: u16,
    /// The size of the request, which only JSON logs have.
    pub(crate) bytes: Option<u64>,
}

/// 17 May 2015, 10:00 UTC.
pub(crate) const START: u64 = 1_431_856_800;

/// Requests of a few heavy and many light clients, ten in nine seconds, some of them written late.
pub(crate) fn events(seed: u64, count: usize) -> Vec<Event> {
    let mut dice = Dice(seed);
    let mut events = Vec::new();
    for index in 0..u64::try_from(count).unwrap() {
        let late = if dice.roll(5) == 0 { dice.roll(20) } else { 0 };
        let login = dice.roll(8) == 0;
        events.push(Event {
            second: (START + index * 9 / 10).saturating_sub(late),
            ip: format!("203.0.113.{}", if dice.roll(3) == 0 { dice.roll(2) } else { dice.skewed(40) }),
            user: (dice.roll(3) > 0).then(|| format!("u{}", dice.skewed(12))),
            tenant: format!("t{}", dice.roll(3)),
            method: if login { "POST" } else { "GET" },
            path: if login { "/login".to_owned() } else { format!("/items/{}", dice.roll(50)) },
            status: if login && dice.roll(2) == 0 { 401 } else { 200 },
            bytes: None,
        });
    }
    events
}

/// The same requests with sizes, of which some are 0 and a few enormous, and with one item in eight that does not exist.
pub(crate) fn with_sizes_and_misses(seed: u64, count: usize) -> Vec<Event> {
    let mut dice = Dice(!seed);
    let mut events = events(seed, count);
    for event in &mut events {
        event.bytes = Some(match dice.roll(200) {
            0 => 60_000,
            1..=20 => 0,
            _ => dice.skewed(2_500),
        });
        if event.status == 200 && dice.roll(8) == 0 {
            event.status = 404;
        }
    }
    events
}

/// Writes JSON lines.
pub(crate) fn json_lines(events: &[Event]) -> String {
    let line = |event: &Event| {
        let Event { second, ip, user, tenant, method, path, status, bytes } = event;
        let user = user.as_ref().map_or_else(|| "null".to_owned(), |user| format!("\"{user}\""));
        let bytes = bytes.map_or_else(String::new, |bytes| format!(",\"request_length\":{bytes}"));
        format!(
            "{{\"time\":{second},\"remote_addr\":\"{ip}\",\"user\":{user},\"tenant\":\"{tenant}\",\
             \"request\":\"{method} {path} HTTP/1.1\",\"status\":{status}{bytes}}}\n"
        )
    };
    events.iter().map(line).collect()
}

/// Writes the combined log format, which has no tenants.
pub(crate) fn combined_lines(events: &[Event]) -> String {
    events.iter().map(|event| combined_line(event) + "\n").collect()
}

fn combined_line(event: &Event) -> String {
    let Event { second, ip, user, method, path, status, .. } = event;
    let of_day = second % 86_400;
    let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
    let user = user.as_deref().unwrap_or("-");
    format!(
        "{ip} - {user} [17/May/2015:{hour:02}:{minute:02}:{second:02} +0000] \"{method} {path} HTTP/1.1\" {status} 12 \
         \"-\" \"curl/8\""
    )
}
