//! `threshold top`: the dashboard in a terminal.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use anyhow::bail;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Sparkline, Table};
use ratatui::{DefaultTerminal, Frame};
use serde_json::Value;
use threshold_core::text::printable;

use super::{Api, TopArgs};
use threshold_rehearsal::Report;

/// How often the figures are read again.
const INTERVAL: Duration = Duration::from_secs(1);
/// The periods of `/v1/stats`, by the keys that choose them.
const PERIODS: [(char, &str, &str); 3] =
    [('1', "min", "last minute"), ('2', "h", "last hour"), ('3', "day", "last day")];
const FIGURES: [(&str, &str); 8] = [
    ("edgeBlocks", "edge blocks"),
    ("tenantBlocks", "tenant blocks"),
    ("userBlocks", "user blocks"),
    ("endpointBlocks", "endpoint blocks"),
    ("otherBlocks", "other blocks"),
    ("warningsIssued", "warnings"),
    ("shadowBansActive", "shadow bans"),
    ("bansActive", "bans"),
];
const LISTS: [(&str, &str, &str); 4] = [
    ("topBlockedTenants", "tenant", "Tenants"),
    ("topBlockedUsers", "user", "Users"),
    ("topBlockedIps", "ip", "Addresses"),
    ("topBlockedEndpoints", "endpoint", "Endpoints"),
];

/// What the screen shows.
#[derive(Default)]
struct Screen {
    period: usize,
    stats: Value,
    series: Value,
    raised: Value,
    /// Why the last reading failed.
    problem: Option<String>,
}

pub(crate) fn run(args: &TopArgs) -> anyhow::Result<Report> {
    if !std::io::stdout().is_terminal() {
        bail!("top needs a terminal; GET /v1/stats has the same figures, and tail prints events");
    }
    let api = Api::new(&args.server)?;
    let mut screen = Screen::default();
    // Before the screen is taken: an unknown server or a wrong token is an ordinary error.
    screen.stats = api.call("GET", &screen.stats_path(), None)?;
    let mut terminal = ratatui::try_init()?;
    let watched = watch(&api, &mut screen, &mut terminal);
    ratatui::restore();
    watched?;
    Ok(Report { text: String::new(), code: 0 })
}

fn watch(api: &Api, screen: &mut Screen, terminal: &mut DefaultTerminal) -> anyhow::Result<()> {
    loop {
        screen.read(api);
        let read_at = Instant::now();
        terminal.draw(|frame| screen.draw(frame))?;
        while event::poll(INTERVAL.saturating_sub(read_at.elapsed()))? {
            let Event::Key(key) = event::read()? else {
                // The window has another size.
                terminal.draw(|frame| screen.draw(frame))?;
                continue;
            };
            let is_interrupt = key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
            match key.code {
                _ if key.kind != KeyEventKind::Press => {}
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                _ if is_interrupt => return Ok(()),
                KeyCode::Char(pressed) => {
                    if let Some(period) = PERIODS.iter().position(|(own, ..)| *own == pressed) {
                        screen.period = period;
                        break;
                    }
                }
                _ => {}
            }
        }
    }
}

impl Screen {
    fn stats_path(&self) -> String {
        format!("/v1/stats?period={}", PERIODS.get(self.period).map_or("min", |(_, period, _)| period))
    }

    /// Reads everything. What cannot be read stays as it was, with the reason above.
    fn read(&mut self, api: &Api) {
        let read = || {
            let stats = api.call("GET", &self.stats_path(), None)?;
            let series = api.call("GET", "/v1/series?period=5min", None)?;
            anyhow::Ok((stats, series, api.call("GET", "/v1/alerts?state=raised", None)?))
        };
        match read() {
            Ok((stats, series, raised)) => {
                (self.stats, self.series, self.raised, self.problem) = (stats, series, raised, None);
            }
            Err(error) => self.problem = Some(format!("{error:#}")),
        }
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let [head, charts, middle, lists, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(7),
            Constraint::Length(6),
            Constraint::Min(4),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        let period = PERIODS.get(self.period).map_or("", |(.., name)| name);
        let title = Line::from(vec![
            Span::styled(" threshold ", Style::new().add_modifier(Modifier::BOLD | Modifier::REVERSED)),
            Span::raw(format!("  {period}")),
        ]);
        frame.render_widget(title, head);
        let [allowed, blocked] = Layout::horizontal([Constraint::Ratio(1, 2); 2]).areas(charts);
        self.chart(frame, allowed, "allowed", &["allow", "warn", "slow"], Color::Green);
        self.chart(frame, blocked, "denied", &["deny", "ban"], Color::Red);
        let [figures, alerts] = Layout::horizontal([Constraint::Length(46), Constraint::Min(20)]).areas(middle);
        self.figures(frame, figures);
        self.alerts(frame, alerts);
        let columns = Layout::horizontal([Constraint::Ratio(1, 4); 4]).split(lists);
        for ((list, name, title), area) in LISTS.iter().zip(columns.iter()) {
            self.list(frame, *area, list, name, title);
        }
        let text = self
            .problem
            .as_ref()
            .map_or_else(|| "1 minute  2 hour  3 day  q quit".to_owned(), |problem| format!("{problem}; trying again"));
        let color = if self.problem.is_some() { Color::Red } else { Color::DarkGray };
        frame.render_widget(Paragraph::new(printable(&text).into_owned()).style(Style::new().fg(color)), foot);
    }

    /// Draws the decisions of the last seconds with these verdicts, the newest on the right.
    fn chart(&self, frame: &mut Frame<'_>, area: Rect, title: &str, verdicts: &[&str], color: Color) {
        let lists: Vec<Vec<u64>> = verdicts.iter().map(|verdict| self.values(verdict)).collect();
        let length = lists.iter().map(Vec::len).max().unwrap_or(0);
        let sums: Vec<u64> = (0..length).map(|at| lists.iter().filter_map(|list| list.get(at)).sum()).collect();
        let room = usize::from(area.width.saturating_sub(2));
        let shown = sums.get(length.saturating_sub(room)..).unwrap_or_default();
        let now = sums.last().copied().unwrap_or(0);
        let most = shown.iter().max().copied().unwrap_or(0);
        let block = Block::bordered().title(format!(" {title} {now}/s, at most {most}/s "));
        frame.render_widget(Sparkline::default().data(shown).style(Style::new().fg(color)).block(block), area);
    }

    fn values(&self, verdict: &str) -> Vec<u64> {
        let values = self.series.get("decisions").and_then(|all| all.get(verdict)).and_then(Value::as_array);
        values.into_iter().flatten().map(|value| value.as_u64().unwrap_or(0)).collect()
    }

    fn figures(&self, frame: &mut Frame<'_>, area: Rect) {
        let value = |name: &str| self.stats.get(name).map_or_else(|| "-".to_owned(), super::shown);
        let cell = |(name, label): &(&str, &str)| [Cell::from(label.to_string()), Cell::from(value(name))];
        let rows = FIGURES.chunks(2).map(|pair| Row::new(pair.iter().flat_map(cell).collect::<Vec<_>>()));
        let widths = [Constraint::Length(15), Constraint::Length(7), Constraint::Length(13), Constraint::Length(7)];
        frame.render_widget(Table::new(rows, widths).block(Block::bordered().title(" blocks ")), area);
    }

    fn alerts(&self, frame: &mut Frame<'_>, area: Rect) {
        let text = |value: Option<&Value>| value.map(super::shown).unwrap_or_default();
        let raised = self.raised.as_array().map_or(&[][..], Vec::as_slice);
        let lines = raised.iter().map(|alert| {
            let color = if text(alert.get("level")) == "critical" { Color::Red } else { Color::Yellow };
            let line = |key: &str| {
                format!("{} {}{key}: {}", text(alert.get("level")), text(alert.get("alert")), text(alert.get("count")))
            };
            let room = inner_width(area).saturating_sub(Span::raw(line(" ")).width());
            let key = alert.get("key").filter(|key| !key.is_null());
            let key = key.map(|key| format!(" {}", shortened(&super::shown(key), room)));
            Line::styled(line(&key.unwrap_or_default()), Style::new().fg(color))
        });
        let lines: Vec<Line<'_>> = lines.collect();
        let title = format!(" alerts: {} ", raised.len());
        frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(title)), area);
    }

    fn list(&self, frame: &mut Frame<'_>, area: Rect, list: &str, name: &str, title: &str) {
        let entries = self.stats.get(list).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let field = |entry: &Value, name: &str| entry.get(name).map(super::shown).unwrap_or_default();
        // As wide as the largest number, so that the rest is left for names.
        let number = entries.iter().map(|entry| field(entry, "blocks").len()).max().unwrap_or(0);
        let room = inner_width(area).saturating_sub(number.saturating_add(1));
        let rows = entries.iter().map(|entry| {
            Row::new([shortened(&field(entry, name), room), format!("{:>number$}", field(entry, "blocks"))])
        });
        let widths = [Constraint::Min(1), Constraint::Length(number.try_into().unwrap_or(u16::MAX))];
        let table = Table::new(rows, widths).block(Block::bordered().title(format!(" {title} ")));
        frame.render_widget(table, area);
    }
}

/// Returns the width inside of a border.
fn inner_width(area: Rect) -> usize {
    area.width.saturating_sub(2).into()
}

/// Shortens a name in its middle: names of one tenant or path often differ at their ends only.
fn shortened(name: &str, room: usize) -> String {
    if Span::raw(name).width() <= room {
        return name.to_owned();
    }
    let room = room.saturating_sub(1);
    let width = |c: char| Span::raw(c.encode_utf8(&mut [0; 4]).to_owned()).width();
    // Counts the bytes of characters that fit into some columns.
    let fitting = |characters: &mut dyn Iterator<Item = char>, columns: usize| {
        let mut used = 0_usize;
        let fits = characters.take_while(|c| {
            used = used.saturating_add(width(*c));
            used <= columns
        });
        fits.map(char::len_utf8).sum::<usize>()
    };
    let end = fitting(&mut name.chars().rev(), room.div_ceil(2));
    let begin = fitting(&mut name.chars(), room / 2);
    let end = name.len().saturating_sub(end);
    format!("{}…{}", name.get(..begin).unwrap_or_default(), name.get(end..).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::*;

    fn drawn(screen: &Screen, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    /// Woken by leaving out a list, the alerts, or `printable`.
    #[test]
    fn figures_lists_and_alerts_are_shown_and_names_cannot_control_the_terminal() {
        let screen = Screen {
            stats: json!({"edgeBlocks": 4711, "bansActive": 3, "topBlockedTenants": [{"tenant": "a\u{1b}[2Jb", "blocks": 12, "error": 0}],
                "topBlockedIps": [{"ip": "203.0.113.7", "blocks": 99, "error": 0}]}),
            series: json!({"decisions": {"allow": [1, 2, 30], "deny": [0, 5, 7], "ban": [0, 0, 1]}}),
            raised: json!([{"alert": "ip_blocks", "level": "critical", "key": "203.0.113.7", "count": 104}]),
            ..Screen::default()
        };
        let text = drawn(&screen, 110, 30);
        for expected in [
            "4711",
            "allowed 30/s",
            "denied 8/s",
            "203.0.113.7",
            "critical ip_blocks 203.0.113.7: 104",
            "alerts: 1",
            "99",
        ] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
        assert!(!text.contains('\u{1b}'), "{text}");
    }

    /// A name was cut off at its end. Woken by cutting it there, by counting characters in place of columns, and by a number of a fixed width.
    #[test]
    fn a_long_name_is_shortened_in_its_middle() {
        for (name, room, expected) in [
            ("acme", 4, "acme"),
            ("acme-west-2", 7, "acm…t-2"),
            ("acme-west-2", 6, "ac…t-2"),
            ("日本東京都", 7, "日…都"),
            ("acme", 1, "…"),
            ("acme", 0, "…"),
        ] {
            assert_eq!(shortened(name, room), expected, "{name} {room}");
        }
        let endpoint = |last: &str| format!("POST:/api/v2/organizations/members/{last}");
        let address = "2001:db8:aaaa:bbbb:cccc:dddd:eeee:1";
        let screen = Screen {
            stats: json!({"topBlockedEndpoints": [{"endpoint": endpoint("invite"), "blocks": 12}, {"endpoint": endpoint("remove"), "blocks": 9}]}),
            raised: json!([{"alert": "ip_blocks", "level": "critical", "key": address, "count": 104}]),
            ..Screen::default()
        };
        let text = drawn(&screen, 80, 30);
        for expected in ["POST:/a…/invite 12", "POST:/a…/remove  9", " 200…ee:1: 104"] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
    }

    #[test]
    fn a_small_terminal_and_a_lost_server_are_no_panic() {
        let screen =
            Screen { problem: Some("no server answers at http://127.0.0.1:1".to_owned()), ..Screen::default() };
        assert!(drawn(&screen, 100, 30).contains("trying again"));
        for (width, height) in [(1, 1), (10, 3), (40, 12), (250, 80)] {
            let _ = drawn(&screen, width, height);
        }
    }
}
