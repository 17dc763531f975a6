//! One client: whether it has authenticated, its name, and its commands.

use std::fmt::Write as _;
use std::net::IpAddr;

use super::catalogue::{self, Command, Entry, Mistake};
use super::decode::{Arguments, Trust, plain_integer};
use super::reply::{Replies, Version};
use super::throttle::{LastLimit, Throttle};
use crate::door::App;
use crate::door::token_guesses::{Callers, Guesses, Refused, Shown};

/// The longest name of a connection, in bytes. Redis has no bound but that of a request.
const MAX_NAME: usize = 256;
/// How much of unknown commands and arguments an error quotes, in bytes, as in Redis.
const MAX_QUOTED: usize = 128;

const NO_AUTH: &str = "NOAUTH Authentication required.";
const NO_AUTH_HELLO: &str = "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO \
                             <proto> AUTH <user> <pass> option can be used to authenticate the client and select the \
                             RESP protocol version at the same time";
const WRONG_PASSWORD: &str = "WRONGPASS invalid username-password pair or user is disabled.";
const NO_PASSWORD_NEEDED: &str = "ERR AUTH <password> called without any password configured for the default user. \
                                  Are you sure your configuration is correct?";
/// Clients read `redis_version` to learn what the server can do: it speaks the protocol of that version.
const INFO: &str = concat!(
    "# Server\r\nredis_version:7.0.0\r\nredis_mode:standalone\r\nserver_name:threshold\r\nthreshold_version:",
    env!("CARGO_PKG_VERSION"),
    "\r\n\r\n# Replication\r\nrole:master\r\n"
);
/// To each command between `MULTI` and `EXEC`, so that `EXEC` fails as after any command that Redis does not queue.
const DISCARDED: &str = "ERR discarded: this server has no transactions, send commands without MULTI";
const ABORTED: &str = "EXECABORT Transaction discarded because of previous errors.";
const BAD_NAME: &str = "ERR Client names cannot contain spaces, newlines or special characters.";

/// What becomes of a connection after a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Continue,
    /// The command was not executed: the replies before it are written first, because its own may be delayed.
    AfterReplies,
    /// The replies so far are written, and the connection is closed.
    Close,
}

/// A client of the door.
#[derive(Debug)]
pub(super) struct Session<'a> {
    app: &'a App,
    peer: IpAddr,
    /// The number of the connection.
    id: i64,
    trust: Trust,
    /// Whether `MULTI` was called and neither `EXEC` nor `DISCARD` since: commands are refused, and charge nothing.
    in_transaction: bool,
    name: Box<[u8]>,
    last_limit: LastLimit,
}

impl<'a> Session<'a> {
    pub(super) fn new(app: &'a App, peer: IpAddr, id: i64) -> Self {
        let (trust, name, last_limit) = (Trust::Authenticated, Box::default(), LastLimit::default());
        let mut session = Self { app, peer, id, trust, in_transaction: false, name, last_limit };
        session.reset();
        session
    }

    pub(super) fn trust(&self) -> Trust {
        self.trust
    }

    fn reset(&mut self) {
        self.name = Box::default();
        self.in_transaction = false;
        self.trust =
            if self.app.token_guesses.require_from_callers() { Trust::Unauthenticated } else { Trust::Authenticated };
    }

    /// Executes a command, and appends its reply.
    pub(super) async fn execute(&mut self, arguments: Arguments<'_>, replies: &mut Replies) -> Next {
        // An empty line or array.
        let Some(name) = arguments.get(0) else { return Next::Continue };
        let Some(entry) = Entry::find(name) else { return self.unknown(name, &arguments, replies) };
        if self.trust == Trust::Unauthenticated && !entry.needs_no_auth() {
            replies.error(NO_AUTH);
            return Next::Continue;
        }
        if !entry.accepts(arguments.len()) {
            replies.error(format_args!("ERR wrong number of arguments for '{}' command", entry.name));
            return Next::Continue;
        }
        match entry.command {
            Command::Multi | Command::Exec | Command::Discard | Command::Watch => {
                self.transaction(entry.command, replies);
            }
            command if self.in_transaction && !matches!(command, Command::Quit | Command::Reset) => {
                replies.error(DISCARDED);
            }
            Command::Unwatch => replies.simple("OK"),
            Command::Auth | Command::Hello if !replies.bytes.is_empty() => return Next::AfterReplies,
            Command::Throttle => self.throttle(&arguments, replies).await,
            Command::Auth => return self.auth(&arguments, replies).await,
            Command::Hello => return self.hello(&arguments, replies).await,
            Command::Client => self.client(&arguments, replies),
            Command::Catalogue => match catalogue::answer(&arguments, replies) {
                Ok(()) => {}
                Err(Mistake::UnknownSubcommand) => unknown_subcommand(entry.name, &arguments, replies),
                Err(Mistake::Count(subcommand)) => wrong_count("command", subcommand, replies),
                Err(Mistake::Syntax) => replies.error("ERR syntax error"),
            },
            Command::Echo => replies.bulk(arguments.get(1).unwrap_or_default()),
            Command::Info => replies.verbatim(INFO),
            Command::Ping => match (arguments.get(1), arguments.len()) {
                (None, _) => replies.simple("PONG"),
                (Some(text), 2) => replies.bulk(text),
                _ => replies.error("ERR wrong number of arguments for 'ping' command"),
            },
            Command::Quit => {
                replies.simple("OK");
                return Next::Close;
            }
            Command::Reset => {
                self.reset();
                replies.version = Version::Resp2;
                replies.simple("RESET");
            }
            Command::Select => match plain_integer(arguments.get(1).unwrap_or_default()) {
                Some(0) => replies.simple("OK"),
                Some(_) => replies.error("ERR DB index is out of range"),
                None => replies.error("ERR value is not an integer or out of range"),
            },
        }
        Next::Continue
    }

    /// There are no transactions, but where one begins and ends: a client that has sent all of its commands at once, as most do, must
    /// not be charged for those after a `MULTI` that failed.
    fn transaction(&mut self, command: Command, replies: &mut Replies) {
        match (command, self.in_transaction) {
            (Command::Multi, false) => replies.simple("OK"),
            (Command::Multi, true) => replies.error("ERR MULTI calls can not be nested"),
            (Command::Exec, true) => replies.error(ABORTED),
            (Command::Exec, false) => replies.error("ERR EXEC without MULTI"),
            (Command::Discard, true) => replies.simple("OK"),
            (Command::Discard, false) => replies.error("ERR DISCARD without MULTI"),
            (_, true) => replies.error("ERR WATCH inside MULTI is not allowed"),
            (_, false) => replies.error("ERR nothing can be watched: this server has no transactions"),
        }
        self.in_transaction = match command {
            Command::Multi => true,
            Command::Exec | Command::Discard => false,
            _ => self.in_transaction,
        };
    }

    async fn throttle(&mut self, arguments: &Arguments<'_>, replies: &mut Replies) {
        let throttle = match Throttle::read(arguments, &mut self.last_limit) {
            Ok(throttle) => throttle,
            Err(error) => return replies.error(error),
        };
        // On a store in memory this is ready at the first poll.
        match self.app.desk.check_limit(throttle.key, &throttle.limit, throttle.cost()).await {
            Ok(decision) => throttle.answer(&decision, replies),
            Err(error) => replies.error(format_args!("UNAVAILABLE {error}")),
        }
    }

    async fn auth(&mut self, arguments: &Arguments<'_>, replies: &mut Replies) -> Next {
        let password = match arguments.len() {
            2 if !self.app.token_guesses.require_from_callers() => {
                replies.error(NO_PASSWORD_NEEDED);
                return Next::Continue;
            }
            2 => arguments.get(1),
            // There are no users besides: whatever the name, the token decides.
            3 => arguments.get(2),
            _ => {
                replies.error("ERR syntax error");
                return Next::Continue;
            }
        };
        match self.authenticate(password.unwrap_or_default()).await {
            Ok(()) => {
                replies.simple("OK");
                Next::Continue
            }
            Err(refusal) => refusal.reply(replies),
        }
    }

    /// Compares a password with the tokens of callers. A wrong one is counted as it is over HTTP.
    async fn authenticate(&mut self, password: &[u8]) -> Result<(), Refusal> {
        let shown = Shown::Password(password);
        match self.app.token_guesses.admit(shown, Callers::Only, Some(self.peer), self.app).await {
            Ok(()) => {
                self.trust = Trust::Authenticated;
                Ok(())
            }
            Err(Refused::Wrong(Guesses::Many)) => Err(Refusal::LastWrong),
            Err(Refused::TooMany) => Err(Refusal::TooMany),
            Err(Refused::Wrong(Guesses::Few) | Refused::Missing | Refused::ReadOnly) => Err(Refusal::Wrong),
        }
    }

    async fn hello(&mut self, arguments: &Arguments<'_>, replies: &mut Replies) -> Next {
        let hello = match Hello::read(arguments) {
            Ok(hello) => hello,
            Err(error) => {
                replies.error(error);
                return Next::Continue;
            }
        };
        if let Some(password) = hello.password
            && let Err(refusal) = self.authenticate(password).await
        {
            return refusal.reply(replies);
        }
        if self.trust == Trust::Unauthenticated {
            replies.error(NO_AUTH_HELLO);
            return Next::Continue;
        }
        if let Some(name) = hello.name
            && let Err(error) = self.set_name(name)
        {
            replies.error(error);
            return Next::Continue;
        }
        replies.version = hello.version.unwrap_or(replies.version);
        replies.map(7);
        let texts = [
            ("server", "threshold"),
            ("version", env!("CARGO_PKG_VERSION")),
            ("mode", "standalone"),
            ("role", "master"),
        ];
        for (key, value) in texts {
            replies.bulk(key.as_bytes());
            replies.bulk(value.as_bytes());
        }
        replies.bulk(b"proto");
        replies.integer(replies.version.number());
        replies.bulk(b"id");
        replies.integer(self.id);
        replies.bulk(b"modules");
        replies.array(0);
        Next::Continue
    }

    fn client(&mut self, arguments: &Arguments<'_>, replies: &mut Replies) {
        let subcommand = arguments.get(1).unwrap_or_default();
        let is = |name: &str| subcommand.eq_ignore_ascii_case(name.as_bytes());
        match arguments.len() {
            3 if is("SETNAME") => match self.set_name(arguments.get(2).unwrap_or_default()) {
                Ok(()) => replies.simple("OK"),
                Err(error) => replies.error(error),
            },
            2 if is("GETNAME") && self.name.is_empty() => replies.null(),
            2 if is("GETNAME") => replies.bulk(&self.name),
            2 if is("ID") => replies.integer(self.id),
            4 if is("SETINFO") => set_info(arguments, replies),
            _ => match ["getname", "id", "setinfo", "setname"].into_iter().find(|name| is(name)) {
                Some(name) => wrong_count("client", name, replies),
                None => unknown_subcommand("client", arguments, replies),
            },
        }
    }

    fn set_name(&mut self, name: &[u8]) -> Result<(), String> {
        if name.len() > MAX_NAME {
            return Err(format!("ERR Client names have at most {MAX_NAME} bytes"));
        }
        if !name.iter().all(u8::is_ascii_graphic) {
            return Err(BAD_NAME.to_owned());
        }
        self.name = name.into();
        Ok(())
    }

    fn unknown(&self, name: &[u8], arguments: &Arguments<'_>, replies: &mut Replies) -> Next {
        // A browser was made to send HTTP here, and its body may hold commands. Redis closes the connection too.
        if name.eq_ignore_ascii_case(b"host:") || name.eq_ignore_ascii_case(b"post") {
            if let Some(left_out) = self.app.refused.sample(self.app.desk.now()) {
                tracing::warn!(left_out, "RESP connection closed: HTTP, perhaps sent by a browser for a web page");
            }
            return Next::Close;
        }
        // Names of commands are no secret, and a client that has not authenticated may learn that there is none.
        let mut quoted = String::new();
        for argument in arguments.from(1) {
            let Some(left) = MAX_QUOTED.checked_sub(quoted.len()).filter(|left| *left > 0) else { break };
            // Writing to a string does not fail.
            let _ = write!(quoted, "'{}' ", shown(argument, left));
        }
        let name = shown(name, MAX_QUOTED);
        replies.error(format_args!("ERR unknown command '{name}', with args beginning with: {quoted}"));
        Next::Continue
    }
}

/// Why a client is not authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    Wrong,
    /// One of many, after which the client has to connect again.
    LastWrong,
    TooMany,
}

impl Refusal {
    fn reply(self, replies: &mut Replies) -> Next {
        match self {
            Self::Wrong => {
                replies.error(WRONG_PASSWORD);
                Next::Continue
            }
            // A pipeline of guesses would keep the connection busy for a second each.
            Self::LastWrong => {
                replies.error(WRONG_PASSWORD);
                Next::Close
            }
            Self::TooMany => {
                replies.error("ERR too many wrong tokens");
                Next::Close
            }
        }
    }
}

/// A call of `HELLO`.
#[derive(Debug, Default)]
struct Hello<'a> {
    /// The present version if it names none.
    version: Option<Version>,
    password: Option<&'a [u8]>,
    name: Option<&'a [u8]>,
}

impl<'a> Hello<'a> {
    fn read(arguments: &Arguments<'a>) -> Result<Self, String> {
        let mut hello = Self::default();
        let Some(version) = arguments.get(1) else { return Ok(hello) };
        hello.version = match plain_integer(version) {
            Some(2) => Some(Version::Resp2),
            Some(3) => Some(Version::Resp3),
            Some(_) => return Err("NOPROTO unsupported protocol version".to_owned()),
            None => return Err("ERR Protocol version is not an integer or out of range".to_owned()),
        };
        let mut options = arguments.from(2);
        while let Some(option) = options.next() {
            if option.eq_ignore_ascii_case(b"auth")
                && let (Some(_), Some(password)) = (options.next(), options.next())
            {
                hello.password = Some(password);
            } else if option.eq_ignore_ascii_case(b"setname")
                && let Some(name) = options.next()
            {
                hello.name = Some(name);
            } else {
                return Err(format!("ERR Syntax error in HELLO option '{}'", shown(option, MAX_QUOTED)));
            }
        }
        Ok(hello)
    }
}

/// Accepts the name and version of the client's library, which nothing here shows.
fn set_info(arguments: &Arguments<'_>, replies: &mut Replies) {
    let [option, value] = [2, 3].map(|place| arguments.get(place).unwrap_or_default());
    let is_known = ["lib-name", "lib-ver"].into_iter().any(|name| option.eq_ignore_ascii_case(name.as_bytes()));
    let shown = shown(option, MAX_QUOTED);
    if !is_known {
        replies.error(format_args!("ERR Unrecognized option '{shown}'"));
    } else if !value.iter().all(u8::is_ascii_graphic) {
        replies.error(format_args!("ERR {shown} cannot contain spaces, newlines or special characters."));
    } else {
        replies.simple("OK");
    }
}

fn wrong_count(command: &str, subcommand: &str, replies: &mut Replies) {
    replies.error(format_args!("ERR wrong number of arguments for '{command}|{subcommand}' command"));
}

fn unknown_subcommand(command: &str, arguments: &Arguments<'_>, replies: &mut Replies) {
    let subcommand = shown(arguments.get(1).unwrap_or_default(), MAX_QUOTED);
    let command = command.to_ascii_uppercase();
    replies.error(format_args!("ERR unknown subcommand '{subcommand}'. Try {command} HELP."));
}

/// The beginning of what a client sent, for an error.
fn shown(bytes: &[u8], most: usize) -> String {
    String::from_utf8_lossy(bytes.get(..most).unwrap_or(bytes)).into_owned()
}
