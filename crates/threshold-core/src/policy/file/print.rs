//! The types of the policy file → TOML, and the span of each value in it.
//!
//! The printer records spans while it writes, so a policy that was built in code goes through the same loader as one that was
//! read from a file: findings point into the printed text, and an `allow` covers the rule it is printed in.

use std::fmt::Display;

use super::{
    AlertEntry, AlertFile, AlertsFile, AlgorithmName, AnchorName, AnswersFile, CategoryFile, ConsistencyName,
    DisclosureName, EnvoyDomainFile, EnvoyFile, EnvoyVerbName, IdentityFile, JwtFile, LadderFile, LayerName, ListsFile,
    Located, LogName, LoginFile, MatchFile, MemoryFile, ModeName, NamedEntries, OddPathsName, OnMissingName,
    OnStoreErrorName, PolicyFile, RuleFile, StrikeName, TenantFile, Text, Texts, UserScopeName, WhenFullName,
};
use crate::text::is_hidden;

impl PolicyFile {
    /// Prints the policy as TOML and sets the span of every value to where it stands in that text.
    ///
    /// Every struct is taken apart without `..`: a key that is added to the file and not printed does not compile.
    pub(crate) fn print(&mut self) -> String {
        let Self {
            allow,
            identity,
            tiers,
            tenants,
            users,
            category,
            rule,
            ladders,
            login,
            alerts,
            lists,
            answers,
            memory,
            envoy,
        } = self;
        let mut printer = Printer::default();
        printer.entries(|entries| entries.list("allow", allow));
        printer.identity(identity);
        printer.named_tables("tiers", tiers, print_limits);
        printer.named_tables("tenants", tenants, print_tenant);
        printer.named_tables("users", users, print_limits);
        for category in category {
            printer.header("[[category]]");
            printer.entries(|entries| print_category(entries, category));
        }
        printer.named_tables("ladders", ladders, print_ladder);
        if let Some(login) = login {
            let start = printer.header("[login]");
            printer.entries(|entries| print_login(entries, &mut login.value));
            login.span = start..printer.out.len();
        }
        printer.optional_table("[lists]", |entries| print_lists(entries, lists));
        printer.optional_table("[alerts]", |entries| print_alerts(entries, alerts));
        printer.optional_table("[answers]", |entries| print_answers(entries, answers));
        printer.optional_table("[memory]", |entries| print_memory(entries, memory));
        let EnvoyFile { descriptors, domains, replaces } = envoy;
        printer.optional_table("[envoy.descriptors]", |entries| print_limits(entries, descriptors));
        printer.named_tables("envoy.domains", domains, print_envoy_domain);
        printer.optional_table("[envoy.replaces]", |entries| entries.named(replaces));
        // The loader attributes a finding to the last rule that begins before it, so no table may follow the rules.
        for rule in rule {
            let start = printer.header("[[rule]]");
            printer.entries(|entries| print_rule(entries, &mut rule.value));
            rule.span = start..printer.out.len();
        }
        printer.out
    }
}

/// TOML text in the making.
#[derive(Default)]
struct Printer {
    out: String,
}

impl Printer {
    /// Begins a table and returns the offset of its header.
    fn header(&mut self, header: &str) -> usize {
        if !self.out.is_empty() {
            self.out.push('\n');
        }
        let start = self.out.len();
        self.out.push_str(header);
        self.out.push('\n');
        start
    }

    /// Prints one `key = value` per line.
    fn entries(&mut self, print: impl FnOnce(&mut Entries<'_>)) {
        print(&mut Entries { out: &mut self.out, inline: false, any: false });
    }

    /// Prints a table, or nothing if no key of it is set.
    fn optional_table(&mut self, header: &str, print: impl FnOnce(&mut Entries<'_>)) {
        let before = self.out.len();
        self.header(header);
        // The header has to be printed first, because spans are set while the entries are printed.
        let empty = self.out.len();
        self.entries(print);
        if self.out.len() == empty {
            self.out.truncate(before);
        }
    }

    /// Prints one table `[TABLE.NAME]` for each entry.
    fn named_tables<V>(
        &mut self,
        table: &str,
        entries: &mut NamedEntries<V>,
        print: impl Fn(&mut Entries<'_>, &mut V),
    ) {
        for (name, value) in &mut entries.0 {
            if !self.out.is_empty() {
                self.out.push('\n');
            }
            self.out.push('[');
            self.out.push_str(table);
            self.out.push('.');
            print_key(&mut self.out, name);
            self.out.push_str("]\n");
            self.entries(|entries| print(entries, value));
        }
    }

    fn identity(&mut self, file: &mut IdentityFile) {
        let IdentityFile {
            trusted_proxies,
            client_ip,
            ipv6_prefix,
            tenant,
            user,
            user_scope,
            tier,
            default_tier,
            secret,
            log_identifiers,
            jwt,
            odd_paths,
            private_paths,
        } = file;
        self.optional_table("[identity]", |entries| {
            entries.list("trusted_proxies", trusted_proxies);
            entries.value("client_ip", client_ip);
            entries.value("ipv6_prefix", ipv6_prefix);
            entries.value("tenant", tenant);
            entries.value("user", user);
            entries.value("user_scope", user_scope);
            entries.value("tier", tier);
            entries.value("default_tier", default_tier);
            entries.list("secret", secret);
            entries.value("log_identifiers", &mut log_identifiers.then(|| Located::from(true)));
            entries.value("odd_paths", odd_paths);
            entries.list("private_paths", private_paths);
        });
        let Some(JwtFile { alg, key, key_file, iss, aud }) = jwt else { return };
        self.header("[identity.jwt]");
        self.entries(|entries| {
            entries.required("alg", alg);
            entries.value("key", key);
            entries.value("key_file", key_file);
            entries.value("iss", iss);
            entries.value("aud", aud);
        });
    }
}

fn print_limits(entries: &mut Entries<'_>, limits: &mut NamedEntries<Text>) {
    entries.named(limits);
}

fn print_tenant(entries: &mut Entries<'_>, file: &mut TenantFile) {
    let TenantFile { overrides, spread } = file;
    entries.named(overrides);
    entries.value("spread", spread);
}

fn print_category(entries: &mut Entries<'_>, file: &mut CategoryFile) {
    let CategoryFile { name, method, path, host } = file;
    entries.required("name", name);
    entries.value("method", method);
    entries.value("path", path);
    entries.value("host", host);
}

fn print_ladder(entries: &mut Entries<'_>, file: &mut LadderFile) {
    let LadderFile { decay, rungs, warning_cookie } = file;
    entries.value("decay", decay);
    entries.list("rungs", rungs);
    entries.value("warning_cookie", warning_cookie);
}

fn print_login(entries: &mut Entries<'_>, file: &mut LoginFile) {
    let LoginFile { account, ip, locks, ceiling, on_store_error, account_place, ip_place } = file;
    entries.value("account", account);
    entries.value("ip", ip);
    if let Some(locks) = locks {
        entries.inline_table("locks", |entries| entries.named(locks));
    }
    entries.value("ceiling", ceiling);
    entries.value("on_store_error", on_store_error);
    entries.value("account_place", account_place);
    entries.value("ip_place", ip_place);
}

fn print_lists(entries: &mut Entries<'_>, file: &mut ListsFile) {
    let ListsFile { allow, deny } = file;
    entries.list("allow", allow);
    entries.list("deny", deny);
}

fn print_alerts(entries: &mut Entries<'_>, file: &mut AlertsFile) {
    let AlertsFile { edge_blocks, tenant_blocks, user_bans, ip_blocks } = file;
    let named = [
        ("edge_blocks", edge_blocks),
        ("tenant_blocks", tenant_blocks),
        ("user_bans", user_bans),
        ("ip_blocks", ip_blocks),
    ];
    for (name, alert) in named {
        match alert {
            None => {}
            Some(AlertEntry::Off(off)) => entries.required(name, off),
            Some(AlertEntry::Thresholds(AlertFile { per, warning, critical })) => {
                entries.inline_table(name, |entries| {
                    entries.required("per", per);
                    entries.required("warning", warning);
                    entries.required("critical", critical);
                });
            }
        }
    }
}

fn print_answers(entries: &mut Entries<'_>, file: &mut AnswersFile) {
    let AnswersFile { body } = file;
    entries.value("body", body);
}

fn print_memory(entries: &mut Entries<'_>, file: &mut MemoryFile) {
    let MemoryFile { max_keys, when_full } = file;
    entries.value("max_keys", max_keys);
    entries.value("when_full", when_full);
}

fn print_envoy_domain(entries: &mut Entries<'_>, file: &mut EnvoyDomainFile) {
    let EnvoyDomainFile { verb, negative_hits, overrides } = file;
    entries.value("verb", verb);
    entries.value("negative_hits", negative_hits);
    entries.value("override", overrides);
}

fn print_rule(entries: &mut Entries<'_>, file: &mut RuleFile) {
    let RuleFile {
        name,
        layer,
        matches,
        per,
        limit,
        algorithm,
        anchor,
        buckets,
        burst,
        ttl,
        cost,
        count,
        block_for,
        deny,
        fallback,
        on_missing,
        ladder,
        strike,
        ban_shared,
        mode,
        consistency,
        approximate,
        place,
        shards,
        on_store_error,
        disclosure,
        status,
        message,
        body,
        period,
        log,
        allow,
    } = file;
    entries.required("name", name);
    entries.value("layer", layer);
    print_match(entries, matches);
    entries.list("per", per);
    entries.value("limit", limit);
    entries.value("algorithm", algorithm);
    entries.value("anchor", anchor);
    entries.value("buckets", buckets);
    entries.value("burst", burst);
    entries.value("ttl", ttl);
    entries.value("cost", cost);
    entries.value("count", count);
    entries.value("block_for", block_for);
    entries.value("deny", deny);
    entries.value("fallback", fallback);
    entries.value("on_missing", on_missing);
    entries.value("ladder", ladder);
    entries.value("strike", strike);
    entries.value("ban_shared", ban_shared);
    entries.value("mode", mode);
    entries.value("consistency", consistency);
    entries.value("approximate", approximate);
    entries.value("place", place);
    entries.value("shards", shards);
    entries.value("on_store_error", on_store_error);
    entries.value("disclosure", disclosure);
    entries.value("status", status);
    entries.value("message", message);
    entries.value("body", body);
    entries.value("period", period);
    entries.value("log", log);
    entries.list("allow", allow);
}

fn print_match(entries: &mut Entries<'_>, file: &mut MatchFile) {
    let MatchFile { method, path, host, category, tenant, tier, fact } = file;
    let patterns = [("method", method), ("path", path), ("host", host), ("category", category), ("tenant", tenant)];
    let patterns = patterns.into_iter().chain([("tier", tier)]);
    let patterns: Vec<_> = patterns.filter(|(_, texts)| texts.is_some()).collect();
    if patterns.is_empty() && fact.0.is_empty() {
        return;
    }
    entries.inline_table("match", |entries| {
        for (key, texts) in patterns {
            entries.value(key, texts);
        }
        if !fact.0.is_empty() {
            entries.inline_table("fact", |entries| entries.named(fact));
        }
    });
}

/// The `key = value` pairs of one table, one per line or, in an inline table, separated by commas.
struct Entries<'o> {
    out: &'o mut String,
    inline: bool,
    any: bool,
}

impl Entries<'_> {
    fn entry(&mut self, key: impl FnOnce(&mut String), value: impl FnOnce(&mut String)) {
        if self.inline && self.any {
            self.out.push_str(", ");
        }
        self.any = true;
        key(self.out);
        self.out.push_str(" = ");
        value(self.out);
        if !self.inline {
            self.out.push('\n');
        }
    }

    fn required(&mut self, key: &str, value: &mut impl Print) {
        self.entry(|out| out.push_str(key), |out| value.print(out));
    }

    fn value(&mut self, key: &str, value: &mut Option<impl Print>) {
        if let Some(value) = value {
            self.required(key, value);
        }
    }

    /// Prints strings as a list even if there is only one, for keys that are read as lists.
    fn list(&mut self, key: &str, texts: &mut Option<Texts>) {
        if let Some(texts) = texts {
            self.entry(|out| out.push_str(key), |out| print_list(out, texts));
        }
    }

    fn named(&mut self, entries: &mut NamedEntries<impl Print>) {
        for (name, value) in &mut entries.0 {
            self.entry(|out| print_key(out, name), |out| value.print(out));
        }
    }

    fn inline_table(&mut self, key: &str, print: impl FnOnce(&mut Entries<'_>)) {
        self.entry(
            |out| out.push_str(key),
            |out| {
                out.push('{');
                let empty = out.len();
                out.push(' ');
                let mut inner = Entries { out: &mut *out, inline: true, any: false };
                print(&mut inner);
                let any = inner.any;
                if any {
                    out.push(' ');
                } else {
                    out.truncate(empty);
                }
                out.push('}');
            },
        );
    }
}

/// A value that prints itself and sets its span.
trait Print {
    fn print(&mut self, out: &mut String);
}

impl<T: Literal> Print for Located<T> {
    fn print(&mut self, out: &mut String) {
        let start = out.len();
        self.value.write(out);
        self.span = start..out.len();
    }
}

impl Print for Texts {
    fn print(&mut self, out: &mut String) {
        if let [only] = self.items.as_mut_slice() {
            only.print(out);
            // The span of the list is that of its only item, as the reader sets it for a string.
            self.span = only.span.clone();
        } else {
            print_list(out, self);
        }
    }
}

fn print_list(out: &mut String, texts: &mut Texts) {
    let start = out.len();
    out.push('[');
    let mut first = true;
    for item in &mut texts.items {
        if !first {
            out.push_str(", ");
        }
        first = false;
        item.print(out);
    }
    out.push(']');
    texts.span = start..out.len();
}

/// A value of TOML without its span.
trait Literal {
    fn write(&self, out: &mut String);
}

impl Literal for String {
    fn write(&self, out: &mut String) {
        // The reader fills in variables: a dollar sign of the text itself is written twice.
        write_string(out, &self.replace('$', "$$"));
    }
}

impl Literal for AlgorithmName {
    fn write(&self, out: &mut String) {
        write_string(out, self.0.name());
    }
}

fn write_display(out: &mut String, value: impl Display) {
    out.push_str(&value.to_string());
}

macro_rules! literals {
    (plain: $($plain:ty),+; names: $($name:ty),+ $(,)?) => {
        $(impl Literal for $plain {
            fn write(&self, out: &mut String) {
                write_display(out, self);
            }
        })+
        $(impl Literal for $name {
            fn write(&self, out: &mut String) {
                write_string(out, self.text());
            }
        })+
    };
}

literals! {
    plain: bool, u8, u16, u32, u64;
    names: LayerName, AnchorName, OnMissingName, StrikeName, ModeName, ConsistencyName, OnStoreErrorName,
        DisclosureName, LogName, UserScopeName, OddPathsName, WhenFullName, EnvoyVerbName,
}

/// Prints a bare key where TOML allows it, else a quoted one. Variables are not filled in within keys.
fn print_key(out: &mut String, key: &mut Text) {
    let start = out.len();
    let is_bare = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if !key.value.is_empty() && key.value.bytes().all(is_bare) {
        out.push_str(&key.value);
    } else {
        write_basic_string(out, &key.value);
    }
    key.span = start..out.len();
}

/// Writes a literal string if that saves escapes, as in a JSON body, else a basic one.
fn write_string(out: &mut String, text: &str) {
    let has_escapes = text.contains(['"', '\\']);
    // A literal string has no escapes, so it can hold neither a quote of its own nor a hidden character.
    if has_escapes && !text.contains('\'') && !text.contains(is_hidden) {
        out.push('\'');
        out.push_str(text);
        out.push('\'');
    } else {
        write_basic_string(out, text);
    }
}

fn write_basic_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            // TOML requires this of control characters; the others would make the text look like something else.
            c if is_hidden(c) => out.push_str(&format!("\\U{:08X}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
}
