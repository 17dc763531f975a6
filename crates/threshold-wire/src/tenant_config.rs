//! `tenant.config.json`: the rate limits in a tenant's own configuration, which apply above the policy.

use std::fmt;

use serde::de::{Unexpected, Visitor};
use serde::{Deserialize, Deserializer};
use threshold_core::Policy;
use threshold_core::policy::SettingError;

use crate::{Object, field_of};

/// The largest file, in bytes. An application may keep much more in it than these limits.
pub const MAX_BYTES: usize = 1 << 20;

/// The limit that `rateLimit.perMinute` overrides: that of requests without another category.
const PER_MINUTE: &str = "requests";
/// The limit that `rateLimit.burst` overrides: that of rules with `limit = "tier:burst"`.
const BURST: &str = "burst";

/// The limits of one tenant.
///
/// ```
/// use threshold_wire::tenant_config::TenantConfig;
///
/// let config = TenantConfig::parse(br#"{"name": "Acme", "rateLimit": {"perMinute": 120, "burst": 5}}"#)?;
/// assert_eq!((config.per_minute, config.burst), (Some(120), Some(5)));
/// # Ok::<(), threshold_wire::tenant_config::TenantConfigError>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TenantConfig {
    /// `rateLimit.perMinute`: the limit of requests in a minute; `None` leaves the policy's.
    pub per_minute: Option<u64>,
    /// `rateLimit.burst`: the limit of requests in any one second; `None` leaves the policy's.
    pub burst: Option<u64>,
}

/// Why the text is not a configuration, or does not fit the policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantConfigError {
    place: Option<(usize, usize)>,
    field: Option<String>,
    message: String,
}

impl TenantConfig {
    /// Parses the text of a file. Fields other than `rateLimit` belong to the application and are ignored;
    /// unknown ones inside of it are errors, because a mistyped limit would limit nothing.
    ///
    /// # Errors
    /// With line, column and field, if the text is too large or is not JSON, and if a limit is unknown or not a whole number of at
    /// least 1.
    pub fn parse(text: &[u8]) -> Result<Self, TenantConfigError> {
        if text.len() > MAX_BYTES {
            return Err(TenantConfigError::new(None, format!("the file is larger than {MAX_BYTES} bytes")));
        }
        let Object(File { rate_limit }) = serde_json::from_slice(text).map_err(|error| refusal(text, &error))?;
        let Object(RateLimit { per_minute, burst }) = rate_limit.unwrap_or(Object(RateLimit::default()));
        let number = |count: Option<Count>| count.map(|Count(number)| number);
        Ok(Self { per_minute: number(per_minute), burst: number(burst) })
    }

    /// Puts these limits above those of the policy's file, below the settings of operators
    /// ([`Policy::override_tenant`]).
    ///
    /// # Errors
    /// With the field, if a limit does not fit the policy, which then stays unchanged.
    pub fn apply(&self, policy: &mut Policy, tenant: &str) -> Result<(), TenantConfigError> {
        let per_minute = self.per_minute.map(|count| (PER_MINUTE, format!("{count}/min")));
        let burst = self.burst.map(|count| (BURST, format!("{count}/s")));
        let limits: Vec<(&str, String)> = per_minute.into_iter().chain(burst).collect();
        let limits = limits.iter().map(|(name, limit)| (*name, limit.as_str()));
        policy.override_tenant(tenant, limits).map_err(|error| unfit(&error))
    }
}

impl TenantConfigError {
    fn new(field: Option<String>, message: String) -> Self {
        Self { place: None, field, message }
    }

    /// Returns the line and the column, from 1, if the error is about a place in the text.
    #[must_use]
    pub fn place(&self) -> Option<(usize, usize)> {
        self.place
    }

    /// Returns the field that the error is about, such as `rateLimit.burst`.
    #[must_use]
    pub fn field(&self) -> Option<&str> {
        self.field.as_deref()
    }
}

/// `LINE:COLUMN: FIELD: MESSAGE`, so that a file name and a colon before it make the form of compilers.
impl fmt::Display for TenantConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((line, column)) = self.place {
            write!(f, "{line}:{column}: ")?;
        }
        if let Some(field) = &self.field {
            write!(f, "{field}: ")?;
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for TenantConfigError {}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an object")]
struct File {
    rate_limit: Option<Object<RateLimit>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default, expecting = "an object")]
struct RateLimit {
    per_minute: Option<Count>,
    burst: Option<Count>,
}

/// A whole number of at least 1.
#[derive(Clone, Copy)]
struct Count(u64);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl Visitor<'_> for Read {
            type Value = u64;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number of at least 1")
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<u64, E> {
                // In a policy 0 means unlimited. Here it might as well mean "none at all", so that it is refused.
                if number > 0 { Ok(number) } else { Err(E::invalid_value(Unexpected::Unsigned(number), &self)) }
            }
        }
        deserializer.deserialize_u64(Read).map(Self)
    }
}

fn refusal(text: &[u8], error: &serde_json::Error) -> TenantConfigError {
    let (message, place) = (error.to_string(), (error.line(), error.column().max(1)));
    let suffix = format!(" at line {} column {}", error.line(), error.column());
    let message = message.strip_suffix(suffix.as_str()).unwrap_or(&message);
    // A syntax error is about the text, whichever field it is in.
    let field = if error.is_data() { field_of::<Object<File>>(text, error).1 } else { None };
    TenantConfigError { place: Some(place), field, message: message.to_owned() }
}

/// Names the field of the file in place of the limit that the policy has no rule for.
fn unfit(error: &SettingError) -> TenantConfigError {
    let field = error.field();
    match field.strip_prefix("limits.") {
        Some(BURST) => {
            let message = match error {
                SettingError::UnknownCategory(_) | SettingError::NoTierRule(_) => {
                    "no rule of the policy has limit = \"tier:burst\", so this would change nothing".to_owned()
                }
                other => other.to_string(),
            };
            TenantConfigError::new(Some("rateLimit.burst".to_owned()), message)
        }
        Some(_) => TenantConfigError::new(Some("rateLimit.perMinute".to_owned()), error.to_string()),
        None => TenantConfigError::new(None, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use threshold_core::plan::Verb;
    use threshold_core::{Facts, Ledger, Span, Timestamp};

    #[track_caller]
    fn check(text: &str, expected: Result<(Option<u64>, Option<u64>), &str>) {
        let parsed = TenantConfig::parse(text.as_bytes());
        let parsed = parsed.map(|config| (config.per_minute, config.burst)).map_err(|error| error.to_string());
        assert_eq!(parsed, expected.map_err(str::to_owned), "{text}");
    }

    #[test]
    fn the_fields_of_the_application_are_ignored() {
        check(
            r#"{"name": "Acme", "prompt": {"rate": [1]}, "rateLimit": {"perMinute": 120, "burst": 5}}"#,
            Ok((Some(120), Some(5))),
        );
        check(r#"{"rateLimit": {"burst": 1}}"#, Ok((None, Some(1))));
        for text in ["{}", r#"{"rateLimit": null}"#, r#"{"rateLimit": {"perMinute": null}}"#, r#"{"ratelimit": 3}"#] {
            check(text, Ok((None, None)));
        }
    }

    /// A tenant that wrote `perMinutes` was limited by its tier, and its owner looked for the reason in the policy.
    #[test]
    fn an_error_says_line_column_and_field() {
        check(
            "{\n  \"rateLimit\": {\"perMinutes\": 120}\n}",
            Err("2:28: rateLimit.perMinutes: unknown field `perMinutes`, expected `perMinute` or `burst`"),
        );
        check(
            "{\n  \"rateLimit\": {\n    \"perMinute\": 0\n  }\n}",
            Err("3:18: rateLimit.perMinute: invalid value: integer `0`, expected a whole number of at least 1"),
        );
        check(
            r#"{"rateLimit": {"burst": "5"}}"#,
            Err("1:27: rateLimit.burst: invalid type: string \"5\", expected a whole number of at least 1"),
        );
        check(
            r#"{"rateLimit": {"burst": 1.5}}"#,
            Err("1:27: rateLimit.burst: invalid type: floating point `1.5`, expected a whole number of at least 1"),
        );
        check(r#"{"rateLimit": {"burst": 1}, "rateLimit": {}}"#, Err("1:39: rateLimit: duplicate field `rateLimit`"));
        check(r#"{"rateLimit": [120, 5]}"#, Err("1:14: rateLimit: invalid type: sequence, expected an object"));
        check("{\"rateLimit\": ", Err("1:14: EOF while parsing a value"));
        check("[]", Err("1:1: invalid type: sequence, expected an object"));
        let large = format!("{{\"prompt\": \"{}\"}}", "x".repeat(MAX_BYTES));
        check(&large, Err("the file is larger than 1048576 bytes"));
    }

    /// A tenant with 2,000 a minute and a burst of 50 got the 60 of its tier: a log holds 1,024.
    ///
    /// Woken by: `measured_as` in `Policy::given_limit`.
    #[test]
    fn a_limit_that_is_too_large_for_a_log_is_a_window_and_keeps_its_burst() {
        let preset = include_str!("../../../policies/chat-tenants.toml");
        let mut policy = Policy::parse(preset, &|_| None).unwrap();
        let config = TenantConfig::parse(br#"{"rateLimit": {"perMinute": 2000, "burst": 50}}"#).unwrap();
        config.apply(&mut policy, "acme").unwrap();
        let (mut ledger, start) = (Ledger::default(), Timestamp::from_secs(1_767_225_600));
        let mut admitted = |second| {
            let facts = Facts { tenant: Some("acme"), user: Some("u1"), ..Facts::default() };
            let now = start.plus(Span::from_secs(second));
            (0..60).filter(|_| ledger.decide(&policy, Verb::Check, &facts, now).unwrap().decision.allowed()).count()
        };
        assert_eq!((0..50).map(&mut admitted).collect::<Vec<_>>(), [vec![50; 40], vec![0; 10]].concat());
    }

    #[test]
    fn an_error_names_the_field_that_does_not_fit_the_policy() {
        let fit = |policy: &str, config: TenantConfig| {
            let mut policy = Policy::parse(policy, &|_| None).unwrap();
            config.apply(&mut policy, "acme").map_err(|error| error.to_string())
        };
        let minute = "[identity]\ndefault_tier = 't'\n[tiers.t]\nrequests = '60/min'\n[[rule]]\nname = 'm'\nper = ['tenant']\n\
                      limit = 'tier'\nalgorithm = 'sliding-log'\n";
        let config = |per_minute, burst| TenantConfig { per_minute, burst };
        assert_eq!(fit(minute, config(Some(1_024), None)), Ok(()));
        let large = fit(minute, config(Some(1_000_000_000_000_000), None)).unwrap_err();
        assert!(large.starts_with("rateLimit.perMinute: "), "{large}");
        assert_eq!(
            fit(minute, config(None, Some(5))),
            Err("rateLimit.burst: no rule of the policy has limit = \"tier:burst\", so this would change nothing"
                .to_owned())
        );
        let fixed = "[[rule]]\nname = 'm'\nper = ['tenant']\nlimit = '60/min'\n";
        assert_eq!(
            fit(fixed, config(Some(5), None)),
            Err("rateLimit.perMinute: no rule of the policy has limit = \"tier\", so this would change nothing"
                .to_owned())
        );
        let log = format!(
            "{minute}[[rule]]\nname = 'b'\nper = ['tenant']\nlimit = 'tier:burst'\nalgorithm = 'sliding-log'\n"
        );
        assert_eq!(fit(&log, config(Some(2_000), Some(50))), Ok(()));
        assert_eq!(fit(&log, config(Some(120), Some(2_000))), Ok(()));
        let both = format!("{minute}[[rule]]\nname = 'b'\nper = ['tenant']\nlimit = 'tier:burst'\n");
        assert_eq!(fit(&both, config(Some(120), Some(5))), Ok(()));
    }
}
