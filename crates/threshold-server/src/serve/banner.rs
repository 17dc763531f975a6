//! The banner: the facts about a server that an operator checks after a start.

use threshold_core::policy::{AlertOn, Policy};

use super::{Listeners, StoreUrl, Tokens, policy_notes};
use crate::cli::{LogForm, ServeArgs};
use crate::signals::sinks::{Lines, Sinks};
use threshold_rehearsal::source::Source;

/// A started server.
pub(super) struct Banner<'a> {
    pub(super) args: &'a ServeArgs,
    pub(super) source: &'a Source,
    pub(super) policy: &'a Policy,
    pub(super) tokens: &'a Tokens,
    pub(super) listeners: &'a Listeners,
    pub(super) store: StoreUrl,
    /// The number of tenants with limits of their own from `--tenants`.
    pub(super) tenants: Option<usize>,
    pub(super) sinks: &'a Sinks,
}

impl Banner<'_> {
    /// Prints the banner to standard output, and logs the same facts. With `--log json` there is only the log, so that whatever
    /// reads the output of the process as JSON can parse all of it. With `--events-to stdout` the banner goes to standard error.
    pub(super) fn announce(&self) -> anyhow::Result<()> {
        let scheme = if self.args.tls_cert.is_some() { "https" } else { "http" };
        let Listeners { http, admin, grpc, resp } = self.listeners;
        let http = http.url(scheme)?;
        let [admin, grpc] = [admin, grpc].map(|other| other.as_ref().map(|other| other.url(scheme)).transpose());
        let (admin, grpc) = (admin?, grpc?);
        let resp = resp.as_ref().map(|resp| resp.url("redis")).transpose()?;
        if self.args.log == LogForm::Text {
            let text = self.text(&http, [&admin, &grpc, &resp].map(Option::as_deref));
            if self.args.events_to.contains(&Lines::Stdout) {
                crate::print_to_stderr(&text);
            } else {
                crate::print(&text);
            }
        }
        let tokens = self.tokens.counts();
        tracing::info!(
            build = crate::BUILD,
            http,
            admin,
            grpc,
            resp,
            policy = self.source.name,
            rules = self.policy.rules().len(),
            tenants = self.tenants,
            store = %self.store,
            // Redis has its own bound, which the policy does not set.
            max_keys = (self.store == StoreUrl::Memory).then(|| self.policy.memory().max_keys),
            journal = self.journal(),
            caller_tokens = tokens.callers,
            operator_tokens = tokens.operators,
            read_tokens = tokens.readers,
            events = self.events(),
            alerts = self.alerts(),
            "listening"
        );
        Ok(())
    }

    fn text(&self, http: &str, [admin, grpc, resp]: [Option<&str>; 3]) -> String {
        let line = |name: &str, url: Option<&str>| url.map(|url| format!("  {name:<8}{url}\n")).unwrap_or_default();
        let (admin, grpc, resp) = (line("admin", admin), line("grpc", grpc), line("resp", resp));
        let rules = self.policy.rules().len();
        let plural = if rules == 1 { "" } else { "s" };
        let tenants = self.args.tenants.as_ref().zip(self.tenants);
        let tenants = tenants.map(|(folder, count)| format!("  tenants {}, {count} with limits\n", folder.display()));
        let tenants = tenants.unwrap_or_default();
        let exactness = policy_notes::exactness_note(self.policy);
        let keys = match self.store {
            StoreUrl::Memory => format!(", at most {} keys", self.policy.memory().max_keys),
            StoreUrl::Redis(_) => String::new(),
        };
        format!(
            "threshold {}\n  http    {http}\n{admin}{grpc}{resp}  policy  {}, {rules} rule{plural}\n{tenants}  store   {}{keys}{exactness}\n  \
             journal {}\n  events  {}\n  alerts  {}\n  tokens  {}\n",
            crate::BUILD,
            self.source.name,
            self.store,
            self.journal().unwrap_or("none".to_owned()),
            self.events(),
            self.alerts(),
            self.tokens.counts(),
        )
    }

    /// Where events go: the file beside the journal or memory, and sinks.
    fn events(&self) -> String {
        let kept = if self.args.no_db {
            "memory".to_owned()
        } else {
            self.args.db.with_extension("events").display().to_string()
        };
        std::iter::once(kept).chain(self.sinks.names.events.iter().cloned()).collect::<Vec<_>>().join(", ")
    }

    /// Where alerts go besides the log.
    fn alerts(&self) -> String {
        if AlertOn::ALL.iter().all(|on| self.policy.alert(*on).is_none()) {
            return "off".to_owned();
        }
        match self.sinks.names.alerts.as_slice() {
            [] => "log only".to_owned(),
            receivers => format!("log, {}", receivers.join(", ")),
        }
    }

    fn journal(&self) -> Option<String> {
        (!self.args.no_db).then(|| self.args.db.display().to_string())
    }
}
