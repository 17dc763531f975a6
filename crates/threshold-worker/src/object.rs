//! The Durable Object: it executes commands on its own records, in the SQLite database that Cloudflare gives it.
//!
//! The database, and the one alarm that an object has, may be shared with a class of JavaScript that extends this one: only
//! Threshold's own table is dropped, and another author's alarm is never set later than it was.
//!
//! A command is executed by synchronous SQL in one event without an await. Cloudflare holds the answer back until what was
//! written is durable.

mod check;
mod classes;
pub(crate) mod moving;
mod packed;
pub mod records;
mod rows;

use threshold_core::command::{Command, execute};
use threshold_core::{Answer, Format, Span, Timestamp};
use worker::{Headers, Method, Request, Response, Result, ScheduledTime, State, console_error};

use crate::clock::DateClock;
use check::{CHECK, Check};
use records::{Change, ObjectRecords, RowError};
use rows::{Database, Replaced};

pub use classes::{RateLimiter, SessionDO, TenantDO, ThresholdObject};
use threshold_limiter::Clock;

/// The path of commands. A Worker sends them; nothing else can reach an object.
pub(crate) const COMMAND: &str = "/command";
/// The header with the time of a test.
#[cfg(feature = "vectors")]
pub(crate) const NOW: &str = "x-threshold-now";

/// The longest time between two clean-ups.
const CLEAN_UP: Span = Span::DAY;

/// The state of every class.
#[derive(Debug)]
struct Object {
    state: State,
    database: Database,
}

impl Object {
    fn new(state: State) -> Self {
        let database = Database::new(state.storage().sql());
        Self { state, database }
    }

    async fn fetch(&self, request: Request) -> Result<Response> {
        match (request.method(), request.path().as_str()) {
            (Method::Post, COMMAND) => self.command(request).await,
            (Method::Post, CHECK) => self.check(request).await,
            (Method::Post, moving::READ | moving::WRITE | moving::DELETE) => self.carry(request).await,
            _ => Response::error("not found", 404),
        }
    }

    /// Checks the limit of the object itself.
    async fn check(&self, mut request: Request) -> Result<Response> {
        let now = self.now(&request);
        let check = match Check::read(&request.bytes().await?) {
            Ok(check) => check,
            Err(error) => return json(error.status, error.to_json()),
        };
        let (answer, until) = match self.execute(&check.command(), now) {
            Ok(executed) => executed,
            Err(error) => return refused(&error),
        };
        self.schedule(until, now).await?;
        match check.answer(&answer) {
            Some(body) => json(200, body),
            None => Response::error("not a check", 500),
        }
    }

    async fn command(&self, mut request: Request) -> Result<Response> {
        let now = self.now(&request);
        let command = match Command::from_bytes(&request.bytes().await?) {
            Ok(command) => command,
            // The Worker may be of another version than the object for some minutes after a deployment.
            Err(error) => return Response::error(error.to_string(), 400),
        };
        match self.execute(&command, now) {
            Ok((answer, until)) => {
                self.schedule(until, now).await?;
                Response::from_bytes(answer.to_bytes(Format::PRESENT))
            }
            Err(error) => refused(&error),
        }
    }

    /// Moves records out of this object or into it.
    async fn carry(&self, mut request: Request) -> Result<Response> {
        let (now, path) = (self.now(&request), request.path());
        let Some(asked) = moving::from_bytes(&request.bytes().await?) else {
            return Response::error("no records", 400);
        };
        let carried = self.database.open().and_then(|()| {
            let mut records = ObjectRecords::new(&self.database);
            let found = records.carry(&path, asked, now)?;
            Ok((found, self.save(records)?))
        });
        match carried {
            Ok((found, until)) => {
                self.schedule(until, now).await?;
                Response::from_bytes(moving::to_bytes(&found))
            }
            Err(error) => Response::error(error.to_string(), 500),
        }
    }

    #[cfg(feature = "vectors")]
    fn now(&self, request: &Request) -> Timestamp {
        let given = request.headers().get(NOW).ok().flatten().and_then(|micros| micros.parse().ok());
        given.map_or_else(|| DateClock.now(), Timestamp::from_micros)
    }

    #[cfg(not(feature = "vectors"))]
    fn now(&self, _: &Request) -> Timestamp {
        DateClock.now()
    }

    /// Executes a command. Returns the answer, and the latest end of what was written.
    fn execute(
        &self,
        command: &Command,
        now: Timestamp,
    ) -> core::result::Result<(Answer, Option<Timestamp>), RowError> {
        self.database.open()?;
        let mut records = ObjectRecords::new(&self.database);
        let answer = execute(command, &mut records, now)?;
        Ok((answer, self.save(records)?))
    }

    /// Writes what has changed. Returns its latest end.
    fn save(&self, records: ObjectRecords<'_, Database>) -> core::result::Result<Option<Timestamp>, RowError> {
        let changes = records.into_changes();
        let until = changes.iter().filter_map(|(_, change)| match change {
            Change::Write { until, .. } => Some(*until),
            Change::Delete => None,
        });
        let until = until.max();
        self.database.write(changes)?;
        Ok(until)
    }

    /// Makes sure that a clean-up comes after the latest record has ended, or after a day.
    async fn schedule(&self, until: Option<Timestamp>, now: Timestamp) -> Result<()> {
        match until {
            Some(until) => self.arm(Some(until.since(now)), None).await,
            None => Ok(()),
        }
    }

    /// Sets the alarm for the clean-up of what lasts for another while. Where nothing does, the table is gone, and the alarm that it
    /// said was `replaced` is set again. Setting an alarm is billed like a row, so it is left where one comes within a day: every
    /// alarm cleans up.
    async fn arm(&self, lasts: Option<Span>, replaced: Option<Replaced>) -> Result<()> {
        let (storage, now) = (self.state.storage(), DateClock.now());
        let set = storage.get_alarm().await?.map(rows::from_millis);
        let latest = now.plus(CLEAN_UP);
        if lasts.is_some() && set.is_some_and(|set| set <= latest) {
            return Ok(());
        }
        let replaced = if lasts.is_some() { self.database.replaced()? } else { replaced };
        let theirs = match (set, replaced) {
            (Some(set), Some(replaced)) if set == replaced.ours => Some(replaced.theirs),
            // The other author has set it since.
            (Some(set), _) => Some(set),
            (None, replaced) => replaced.map(|replaced| replaced.theirs).filter(|theirs| *theirs > now),
        };
        let ours = lasts.map(|lasts| rows::in_millis(now.plus(lasts.min(CLEAN_UP).max(Span::SECOND))));
        let next = theirs.filter(|theirs| ours.is_none() || *theirs <= latest).or(ours);
        if ours.is_some() {
            let replaced = theirs.zip(ours).filter(|_| next == ours);
            self.database.replace(replaced.map(|(theirs, ours)| Replaced { ours, theirs }))?;
        }
        match next.filter(|_| next != set) {
            Some(next) => storage.set_alarm(ScheduledTime::new(rows::to_date(next))).await,
            None => Ok(()),
        }
    }

    /// Cleans up. Every alarm does, and a class that extends this one may ask for it at any time.
    async fn alarm(&self) -> Result<Response> {
        let now = DateClock.now();
        match self.clean_up(now) {
            Ok((until, replaced)) => self.arm(until.map(|until| until.since(now)), replaced).await?,
            // The class that extends this one has an alarm to go on with. The next command sets another one for the clean-up.
            Err(error) => {
                console_error!("{}", serde_json::json!({"event": "clean_up_failed", "reason": error.to_string()}));
            }
        }
        Response::ok("")
    }

    /// Ends expired reservations, deletes rows whose time is over, and the table with the last of them. Returns the latest end of the
    /// others, and the alarm that was replaced.
    fn clean_up(&self, now: Timestamp) -> core::result::Result<(Option<Timestamp>, Option<Replaced>), RowError> {
        if !self.database.exists()? {
            return Ok((None, None));
        }
        let replaced = self.database.replaced()?;
        let mut records = ObjectRecords::new(&self.database);
        threshold_core::command::expire(&mut records, now)?;
        self.database.write(records.into_changes())?;
        let until = self.database.delete_silent(now)?;
        if until.is_none() {
            self.database.remove()?;
        }
        Ok((until, replaced))
    }
}

fn refused(error: &RowError) -> Result<Response> {
    Response::error(error.to_string(), if matches!(error, RowError::Full) { 507 } else { 500 })
}

fn json(status: u16, body: String) -> Result<Response> {
    let headers = Headers::new();
    headers.set("content-type", "application/json")?;
    Ok(Response::ok(body)?.with_status(status).with_headers(headers))
}
