//! The banner: the facts about a server that an operator checks after a start.

use threshold_core::policy::Policy;

use super::{Listener, StoreUrl, Tokens, policy_support};
use crate::cli::{LogForm, ServeArgs};
use crate::signals::sinks::Lines;
use crate::source::Source;

/// A started server.
pub(super) struct Banner<'a> {
    pub(super) args: &'a ServeArgs,
    pub(super) source: &'a Source,
    pub(super) policy: &'a Policy,
    pub(super) tokens: &'a Tokens,
    pub(super) http: &'a Listener,
    pub(super) admin: Option<&'a Listener>,
    pub(super) store: StoreUrl,
    /// The number of tenants with limits of their own from `--tenants`.
    pub(super) tenants: Option<usize>,
}

impl Banner<'_> {
    /// Prints the banner to standard output, and logs the same facts. With `--log json` there is only the log, so that whatever
    /// reads the output of the process as JSON can parse all of it. With `--events-to stdout` the banner goes to standard error.
    pub(super) fn announce(&self) -> anyhow::Result<()> {
        let scheme = if self.args.tls_cert.is_some() { "https" } else { "http" };
        let http = self.http.url(scheme)?;
        let admin = self.admin.map(|admin| admin.url(scheme)).transpose()?;
        if self.args.log == LogForm::Text {
            let text = self.text(&http, admin.as_deref());
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
            "listening"
        );
        Ok(())
    }

    fn text(&self, http: &str, admin: Option<&str>) -> String {
        let admin = admin.map(|admin| format!("  admin   {admin}\n")).unwrap_or_default();
        let rules = self.policy.rules().len();
        let plural = if rules == 1 { "" } else { "s" };
        let tenants = self.args.tenants.as_ref().zip(self.tenants);
        let tenants = tenants.map(|(folder, count)| format!("  tenants {}, {count} with limits\n", folder.display()));
        let tenants = tenants.unwrap_or_default();
        let exactness = policy_support::exactness_note(self.policy);
        let keys = match self.store {
            StoreUrl::Memory => format!(", at most {} keys", self.policy.memory().max_keys),
            StoreUrl::Redis(_) => String::new(),
        };
        format!(
            "threshold {}\n  http    {http}\n{admin}  policy  {}, {rules} rule{plural}\n{tenants}  store   {}{keys}{exactness}\n  \
             journal {}\n  tokens  {}\n",
            crate::BUILD,
            self.source.name,
            self.store,
            self.journal().unwrap_or("none".to_owned()),
            self.tokens.counts(),
        )
    }

    fn journal(&self) -> Option<String> {
        (!self.args.no_db).then(|| self.args.db.display().to_string())
    }
}
