//! The tokens of callers, operators and read-only operators, from the environment. They are compared in constant time.

use std::fmt;

use anyhow::bail;
use http::HeaderValue;
use subtle::{Choice, ConstantTimeEq as _};

/// The shortest token, in characters: 16 random hexadecimal digits are 64 bits, too many to guess over a network.
const MIN_LENGTH: usize = 16;

/// The tokens of callers and of operators.
#[derive(Default)]
pub(crate) struct Tokens {
    callers: Vec<Box<str>>,
    operators: Vec<Box<str>>,
    /// Read-only tokens of operators.
    readers: Vec<Box<str>>,
}

/// How many tokens of each kind are set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenCounts {
    pub(crate) callers: usize,
    pub(crate) operators: usize,
    pub(crate) readers: usize,
}

impl fmt::Display for TokenCounts {
    /// Says for whom tokens are set, and never what they are.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { callers, operators, readers } = *self;
        if (callers, operators, readers) == (0, 0, 0) {
            return f.write_str("none: open to this machine alone");
        }
        let shown = |count: usize| if count == 0 { "none".to_owned() } else { count.to_string() };
        write!(f, "callers {}, operators {}, read-only {}", shown(callers), shown(operators), shown(readers))?;
        if callers == 0 { f.write_str("; callers need none: open to this machine alone") } else { Ok(()) }
    }
}

/// What a request may do as an operator.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum OperatorAccess {
    /// Everything: it has this operator's token.
    Operator(String),
    /// Only read: it has a read-only token.
    Reader,
    /// Everything: the server has no tokens, and accepts connections from this machine only.
    Open,
    /// Nothing: it has no operator's token.
    Denied,
}

impl Tokens {
    /// Reads `THRESHOLD_TOKEN`, `THRESHOLD_ADMIN_TOKEN` and `THRESHOLD_READ_TOKEN`.
    pub(crate) fn from_environment() -> anyhow::Result<Self> {
        // From the environment and not from arguments, which every user of the machine can read in the list of
        // processes.
        let read = |name: &str| match std::env::var(name) {
            Ok(text) => parse_list(name, &text),
            Err(std::env::VarError::NotPresent) => Ok(Vec::new()),
            Err(std::env::VarError::NotUnicode(_)) => bail!("{name} is not UTF-8"),
        };
        Ok(Self {
            callers: read("THRESHOLD_TOKEN")?,
            operators: read("THRESHOLD_ADMIN_TOKEN")?,
            readers: read("THRESHOLD_READ_TOKEN")?,
        })
    }

    /// Tokens of callers alone.
    #[cfg(test)]
    pub(crate) fn of_callers(token: &str) -> Self {
        Self { callers: vec![token.into()], ..Self::default() }
    }

    #[cfg(test)]
    pub(crate) fn of_operators(operator: &str, reader: &str) -> Self {
        Self { operators: vec![operator.into()], readers: vec![reader.into()], ..Self::default() }
    }

    #[cfg(test)]
    pub(crate) fn of_each(caller: &str, operator: &str, reader: &str) -> Self {
        Self { callers: vec![caller.into()], ..Self::of_operators(operator, reader) }
    }

    /// Whether callers must send a token.
    pub(crate) fn require_from_callers(&self) -> bool {
        !self.callers.is_empty()
    }

    /// Whether a request with this `Authorization` may call the API. An operator's token is accepted too.
    pub(crate) fn admit_caller(&self, authorization: Option<&HeaderValue>) -> bool {
        !self.require_from_callers() || authorization.and_then(bearer).is_some_and(|shown| self.is_caller_token(shown))
    }

    /// Whether a proxy with this `X-Threshold-Token` may call forward auth.
    pub(crate) fn admit_proxy(&self, token: Option<&HeaderValue>) -> bool {
        !self.require_from_callers() || token.is_some_and(|token| self.is_caller_token(token.as_bytes().trim_ascii()))
    }

    /// Whether a Redis client with this password may call `CL.THROTTLE`.
    pub(crate) fn admit_password(&self, password: &[u8]) -> bool {
        !self.require_from_callers() || self.is_caller_token(password)
    }

    /// Returns how many tokens of each kind are set.
    pub(crate) fn counts(&self) -> TokenCounts {
        let Self { callers, operators, readers } = self;
        TokenCounts { callers: callers.len(), operators: operators.len(), readers: readers.len() }
    }

    /// Whether an operator can have a token.
    pub(crate) fn any_for_operators(&self) -> bool {
        !(self.operators.is_empty() && self.readers.is_empty())
    }

    /// Whether the server has any tokens.
    pub(crate) fn any_configured(&self) -> bool {
        !(self.callers.is_empty() && self.operators.is_empty() && self.readers.is_empty())
    }

    /// Whether this `Authorization` has any token of this server.
    pub(crate) fn is_any_known(&self, authorization: &HeaderValue) -> bool {
        let all = self.callers.iter().chain(&self.operators).chain(&self.readers);
        bearer(authorization).is_some_and(|shown| matches_any(all, shown))
    }

    fn is_caller_token(&self, shown: &[u8]) -> bool {
        matches_any(self.callers.iter().chain(&self.operators), shown)
    }

    /// Returns what a request with this `Authorization` may do as an operator. A caller's token may do nothing.
    pub(crate) fn operator_access(&self, authorization: Option<&HeaderValue>) -> OperatorAccess {
        // Not `any_for_operators`: if only callers have tokens, operators have no access, instead of access without a
        // token.
        if !self.any_configured() {
            return OperatorAccess::Open;
        }
        let Some(shown) = authorization.and_then(bearer) else { return OperatorAccess::Denied };
        // Both lists are compared in any case, so that the time does not tell which of them has the token.
        let (changes, looks) = (matches_any(self.operators.iter(), shown), matches_any(self.readers.iter(), shown));
        match (changes, looks) {
            // A token in both lists has the wider access.
            (true, _) => OperatorAccess::Operator(String::from_utf8_lossy(shown).into_owned()),
            (false, true) => OperatorAccess::Reader,
            (false, false) => OperatorAccess::Denied,
        }
    }
}

/// Compares with every token in constant time, so that the time taken tells a client nothing about them (a timing attack).
fn matches_any<'t>(tokens: impl Iterator<Item = &'t Box<str>>, shown: &[u8]) -> bool {
    // No early return at a match. Only the length of a token can be told from the time, and it is not a secret.
    tokens.fold(Choice::from(0), |found, token| found | token.as_bytes().ct_eq(shown)).into()
}

/// Prints only the number of tokens: debug output may end up in a log.
impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokens({} callers, {} operators)", self.callers.len(), self.operators.len())
    }
}

fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    // The scheme is compared without case, as RFC 9110 has it, and the token exactly.
    let (scheme, token) = value.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// Parses a list of tokens, separated by commas or white space. Two at once allow for rotation.
fn parse_list(name: &str, text: &str) -> anyhow::Result<Vec<Box<str>>> {
    let tokens = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|token| !token.is_empty());
    let tokens: Vec<Box<str>> = tokens.map(Into::into).collect();
    // An empty variable is most often a secret that was not mounted. To take it for no token would open the server.
    if tokens.is_empty() {
        bail!("{name} is set but has no token: unset it to require none, or generate one with `openssl rand -hex 32`");
    }
    if tokens.iter().any(|token| !token.bytes().all(|byte| byte.is_ascii_graphic())) {
        bail!("{name} has a token with characters that a header cannot carry: use visible ASCII characters");
    }
    if tokens.iter().any(|token| token.len() < MIN_LENGTH) {
        bail!(
            "{name} has a token of fewer than {MIN_LENGTH} characters, which can be guessed: generate one with `openssl rand \
             -hex 32`"
        );
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(callers: &str, operators: &str, authorization: Option<&'static str>, admitted: bool) {
        let read = |text: &str| if text.is_empty() { Vec::new() } else { parse_list("TOKEN", text).unwrap() };
        let tokens = Tokens { callers: read(callers), operators: read(operators), readers: Vec::new() };
        assert_eq!(tokens.admit_caller(authorization.map(HeaderValue::from_static).as_ref()), admitted);
    }

    #[test]
    fn a_caller_needs_one_of_the_tokens() {
        const A: &str = "a-caller-token-1";
        check("", "", None, true);
        // A token for operators alone leaves callers as they were.
        check("", "boss-token-12345", None, true);
        check(A, "", None, false);
        check(A, "", Some("Bearer a-caller-token-1"), true);
        check(A, "", Some("bearer  a-caller-token-1 "), true);
        check("a-caller-token-1, b-caller-token-2\nc-caller-token-3", "", Some("Bearer c-caller-token-3"), true);
        check(A, "boss-token-12345", Some("Bearer boss-token-12345"), true);
        for wrong in [
            "Bearer a-caller-token-",
            "Bearer a-caller-token-11",
            "Bearer ",
            "Bearer",
            "Basic a-caller-token-1",
            "a-caller-token-1",
            "Bearer a-caller-token-1,b-caller-token-2",
        ] {
            check("a-caller-token-1,b-caller-token-2", "", Some(wrong), false);
        }
    }

    #[test]
    fn an_operator_needs_an_operators_token_and_a_callers_is_not_enough() {
        let read = |text| parse_list("TOKEN", text).unwrap();
        let tokens = Tokens {
            callers: read("a-caller-token-1"),
            operators: read("boss-token-12345"),
            readers: read("eye-token-123456"),
        };
        let shown = |tokens: &Tokens, text| tokens.operator_access(Some(&HeaderValue::from_static(text)));
        assert!(shown(&tokens, "Bearer boss-token-12345") == OperatorAccess::Operator("boss-token-12345".to_owned()));
        assert!(shown(&tokens, "Bearer eye-token-123456") == OperatorAccess::Reader);
        for wrong in [
            "Bearer a-caller-token-1",
            "Bearer boss-token-1234",
            "Bearer boss-token-123451",
            "Bearer",
            "boss-token-12345",
        ] {
            assert!(shown(&tokens, wrong) == OperatorAccess::Denied, "{wrong}");
        }
        assert!(tokens.operator_access(None) == OperatorAccess::Denied);
        // No operator can have a token here. That must not mean that everyone is one.
        let only_callers = Tokens { callers: read("a-caller-token-1"), ..Tokens::default() };
        assert!(shown(&only_callers, "Bearer a-caller-token-1") == OperatorAccess::Denied);
        assert!(Tokens::default().operator_access(None) == OperatorAccess::Open);
    }

    #[test]
    fn a_token_that_a_header_cannot_carry_is_refused_and_not_printed() {
        let error = parse_list("THRESHOLD_TOKEN", "caf\u{e9}-s3cret").unwrap_err().to_string();
        assert!(error.contains("THRESHOLD_TOKEN") && !error.contains("s3cret"), "{error}");
    }

    /// With an empty variable, the server once required no token.
    #[test]
    fn a_variable_that_is_set_must_have_a_token() {
        for empty in ["", " ", ",", ", ,", "\n,\t"] {
            let error = parse_list("THRESHOLD_ADMIN_TOKEN", empty).unwrap_err().to_string();
            assert!(error.contains("THRESHOLD_ADMIN_TOKEN") && error.contains("no token"), "{error}");
        }
    }

    #[test]
    fn a_short_token_is_refused_and_not_printed() {
        assert_eq!(parse_list("THRESHOLD_TOKEN", "0123456789abcdef").unwrap().len(), 1);
        for short in ["0123456789abcde", "0123456789abcdef, x9", "x9 0123456789abcdef"] {
            let error = parse_list("THRESHOLD_READ_TOKEN", short).unwrap_err().to_string();
            assert!(error.contains("THRESHOLD_READ_TOKEN") && error.contains("16"), "{error}");
            assert!(!error.contains("0123") && !error.contains("x9"), "{error}");
        }
    }
}
