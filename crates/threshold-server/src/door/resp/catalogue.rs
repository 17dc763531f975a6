//! The commands that the door has, as `COMMAND` lists them.

use super::decode::Arguments;
use super::reply::Replies;

/// A command.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) command: Command,
    pub(super) name: &'static str,
    /// The number of arguments with the name; if negative, the least number.
    arity: i64,
    flags: &'static [&'static str],
    /// The place of the first and last key, and the step between keys.
    keys: [i64; 3],
    group: &'static str,
    summary: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Command {
    Throttle,
    Auth,
    Client,
    Catalogue,
    Discard,
    Echo,
    Exec,
    Hello,
    Info,
    Multi,
    Ping,
    Quit,
    Reset,
    Select,
    Unwatch,
    Watch,
}

const NO_KEYS: [i64; 3] = [0, 0, 0];

/// All commands. The one that decides is found first.
static COMMANDS: [Entry; 16] = [
    Entry {
        command: Command::Throttle,
        name: "cl.throttle",
        // As redis-cell registers it: it checks the number itself, and answers with its usage.
        arity: -1,
        flags: &["write"],
        keys: [1, 1, 1],
        group: "module",
        summary: "Decides one cost under one limit: key, max_burst, count, period in seconds, quantity.",
    },
    Entry {
        command: Command::Auth,
        name: "auth",
        arity: -2,
        flags: &["noscript", "loading", "stale", "fast", "no_auth", "allow_busy"],
        keys: NO_KEYS,
        group: "connection",
        summary: "Authenticates the connection with a token of the server.",
    },
    Entry {
        command: Command::Client,
        name: "client",
        arity: -2,
        flags: &[],
        keys: NO_KEYS,
        group: "connection",
        summary: "Names the connection: SETNAME, GETNAME, SETINFO, ID.",
    },
    Entry {
        command: Command::Catalogue,
        name: "command",
        arity: -1,
        flags: &["loading", "stale"],
        keys: NO_KEYS,
        group: "server",
        summary: "Lists the commands: COUNT, DOCS, INFO, LIST.",
    },
    Entry {
        command: Command::Discard,
        name: "discard",
        arity: 1,
        flags: &["noscript", "loading", "stale", "fast", "allow_busy"],
        keys: NO_KEYS,
        group: "transactions",
        summary: "Ends what MULTI has begun.",
    },
    Entry {
        command: Command::Echo,
        name: "echo",
        arity: 2,
        flags: &["loading", "stale", "fast"],
        keys: NO_KEYS,
        group: "connection",
        summary: "Returns its argument.",
    },
    Entry {
        command: Command::Exec,
        name: "exec",
        arity: 1,
        flags: &["noscript", "loading", "stale", "skip_slowlog"],
        keys: NO_KEYS,
        group: "transactions",
        summary: "Ends what MULTI has begun with an error: there are no transactions.",
    },
    Entry {
        command: Command::Hello,
        name: "hello",
        arity: -1,
        flags: &["noscript", "loading", "stale", "fast", "no_auth", "allow_busy"],
        keys: NO_KEYS,
        group: "connection",
        summary: "Chooses version 2 or 3 of the protocol.",
    },
    Entry {
        command: Command::Info,
        name: "info",
        arity: -1,
        flags: &["loading", "stale"],
        keys: NO_KEYS,
        group: "server",
        summary: "Describes the server.",
    },
    Entry {
        command: Command::Multi,
        name: "multi",
        arity: 1,
        flags: &["noscript", "loading", "stale", "fast", "allow_busy"],
        keys: NO_KEYS,
        group: "transactions",
        summary: "Begins commands that are refused until EXEC or DISCARD: there are no transactions.",
    },
    Entry {
        command: Command::Ping,
        name: "ping",
        arity: -1,
        flags: &["fast"],
        keys: NO_KEYS,
        group: "connection",
        summary: "Returns PONG, or its argument.",
    },
    Entry {
        command: Command::Quit,
        name: "quit",
        arity: -1,
        flags: &["noscript", "loading", "stale", "fast", "no_auth", "allow_busy"],
        keys: NO_KEYS,
        group: "connection",
        summary: "Closes the connection.",
    },
    Entry {
        command: Command::Reset,
        name: "reset",
        arity: 1,
        flags: &["noscript", "loading", "stale", "fast", "no_auth", "allow_busy"],
        keys: NO_KEYS,
        group: "connection",
        summary: "Resets the connection to its state at the start.",
    },
    Entry {
        command: Command::Select,
        name: "select",
        arity: 2,
        flags: &["loading", "stale", "fast"],
        keys: NO_KEYS,
        group: "connection",
        summary: "Accepts the database 0, the only one.",
    },
    Entry {
        command: Command::Unwatch,
        name: "unwatch",
        arity: 1,
        flags: &["noscript", "loading", "stale", "fast", "allow_busy"],
        keys: NO_KEYS,
        group: "transactions",
        summary: "Does nothing: there are no transactions.",
    },
    Entry {
        command: Command::Watch,
        name: "watch",
        arity: -2,
        flags: &["noscript", "loading", "stale", "fast", "allow_busy"],
        keys: [1, -1, 1],
        group: "transactions",
        summary: "Is an error: there are no transactions.",
    },
];

impl Entry {
    pub(super) fn find(name: &[u8]) -> Option<&'static Self> {
        COMMANDS.iter().find(|entry| entry.name.as_bytes().eq_ignore_ascii_case(name))
    }

    /// Whether the command may have this many arguments, its name included.
    pub(super) fn accepts(&self, arguments: usize) -> bool {
        let arguments = i64::try_from(arguments).unwrap_or(i64::MAX);
        if self.arity < 0 { arguments >= self.arity.saturating_neg() } else { arguments == self.arity }
    }

    /// Whether a client may call it before it has authenticated.
    pub(super) fn needs_no_auth(&self) -> bool {
        self.flags.contains(&"no_auth")
    }

    fn describe(&self, replies: &mut Replies) {
        replies.array(10);
        replies.bulk(self.name.as_bytes());
        replies.integer(self.arity);
        replies.set(self.flags.len());
        for flag in self.flags {
            replies.simple(flag);
        }
        for place in self.keys {
            replies.integer(place);
        }
        // Categories of access, tips, the places of keys and subcommands: clients do without them.
        replies.set(0);
        replies.array(0);
        replies.array(0);
        replies.array(0);
    }

    fn document(&self, replies: &mut Replies) {
        replies.bulk(self.name.as_bytes());
        replies.map(2);
        replies.bulk(b"summary");
        replies.bulk(self.summary.as_bytes());
        replies.bulk(b"group");
        replies.bulk(self.group.as_bytes());
    }
}

/// What is wrong with a call of `COMMAND`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mistake {
    UnknownSubcommand,
    /// The number of arguments of this subcommand.
    Count(&'static str),
    Syntax,
}

/// Answers `COMMAND` and its subcommands.
pub(super) fn answer(arguments: &Arguments<'_>, replies: &mut Replies) -> Result<(), Mistake> {
    let Some(subcommand) = arguments.get(1) else {
        replies.array(COMMANDS.len());
        COMMANDS.iter().for_each(|entry| entry.describe(replies));
        return Ok(());
    };
    let is = |name: &str| subcommand.eq_ignore_ascii_case(name.as_bytes());
    let names_any = arguments.len() > 2;
    if is("COUNT") {
        if names_any {
            return Err(Mistake::Count("count"));
        }
        replies.integer(i64::try_from(COMMANDS.len()).unwrap_or(i64::MAX));
    } else if is("LIST") {
        let listed = listed(arguments)?;
        replies.array(listed.len());
        listed.into_iter().for_each(|entry| replies.bulk(entry.name.as_bytes()));
    } else if is("INFO") && !names_any {
        replies.array(COMMANDS.len());
        COMMANDS.iter().for_each(|entry| entry.describe(replies));
    } else if is("INFO") {
        replies.array(arguments.len().saturating_sub(2));
        for name in arguments.from(2) {
            match Entry::find(name) {
                Some(entry) => entry.describe(replies),
                None => replies.null(),
            }
        }
    } else if is("DOCS") {
        // Each at most once, so that a long list of names has no long answer.
        let is_named = |entry: &&Entry| {
            !names_any || arguments.from(2).any(|name| entry.name.as_bytes().eq_ignore_ascii_case(name))
        };
        let named: Vec<&Entry> = COMMANDS.iter().filter(is_named).collect();
        replies.map(named.len());
        named.into_iter().for_each(|entry| entry.document(replies));
    } else {
        return Err(Mistake::UnknownSubcommand);
    }
    Ok(())
}

/// Returns the commands of `COMMAND LIST`, which may have `FILTERBY`. No command is one of a module, or has a category.
fn listed(arguments: &Arguments<'_>) -> Result<Vec<&'static Entry>, Mistake> {
    let is = |place: usize, name: &str| {
        arguments.get(place).is_some_and(|argument| argument.eq_ignore_ascii_case(name.as_bytes()))
    };
    match (arguments.len(), arguments.get(4)) {
        (2, _) => Ok(COMMANDS.iter().collect()),
        (5, Some(pattern)) if is(2, "FILTERBY") && is(3, "PATTERN") => {
            Ok(COMMANDS.iter().filter(|entry| matches(pattern, entry.name.as_bytes())).collect())
        }
        (5, _) if is(2, "FILTERBY") && (is(3, "MODULE") || is(3, "ACLCAT")) => Ok(Vec::new()),
        _ => Err(Mistake::Syntax),
    }
}

/// Whether a name matches a pattern with `*` and `?`. It goes back only to the last `*`, so that no pattern takes long.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut left, mut rest) = (pattern, name);
    let mut last_star: Option<(&[u8], &[u8])> = None;
    loop {
        match (left, rest) {
            ([b'*', after @ ..], _) => {
                last_star = Some((after, rest));
                left = after;
            }
            ([wanted, after @ ..], [byte, others @ ..]) if *wanted == b'?' || wanted.eq_ignore_ascii_case(byte) => {
                (left, rest) = (after, others);
            }
            ([], []) => return true,
            _ => {
                let Some((after, [_, others @ ..])) = last_star else { return false };
                last_star = Some((after, others));
                (left, rest) = (after, others);
            }
        }
    }
}
