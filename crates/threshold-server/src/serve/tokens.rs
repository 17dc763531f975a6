//! Who may call: tokens from the environment, compared without telling how much of one was right.

use anyhow::bail;
use http::HeaderValue;
use subtle::{Choice, ConstantTimeEq as _};

/// The shortest token, in characters: of 16 at random, nobody tries all.
const SHORTEST: usize = 16;

/// The tokens of callers and of operators.
#[derive(Default)]
pub(crate) struct Tokens {
    callers: Vec<Box<str>>,
    operators: Vec<Box<str>>,
    /// Those of operators who may look and change nothing.
    readers: Vec<Box<str>>,
}

/// What somebody has shown who wants to be an operator.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Shown {
    /// A token of an operator.
    Operator(String),
    /// A token for looking.
    Reader,
    /// Nothing is asked for: the server has no tokens, and is open to this machine alone.
    Open,
    /// Nothing that opens anything.
    Nothing,
}

impl Tokens {
    /// Reads `THRESHOLD_TOKEN`, `THRESHOLD_ADMIN_TOKEN` and `THRESHOLD_READ_TOKEN`.
    pub(crate) fn from_environment() -> anyhow::Result<Self> {
        let read = |name: &str| match std::env::var(name) {
            Ok(text) => list(name, &text),
            Err(std::env::VarError::NotPresent) => Ok(Vec::new()),
            Err(std::env::VarError::NotUnicode(_)) => bail!("{name} is not text"),
        };
        Ok(Self {
            callers: read("THRESHOLD_TOKEN")?,
            operators: read("THRESHOLD_ADMIN_TOKEN")?,
            readers: read("THRESHOLD_READ_TOKEN")?,
        })
    }

    /// Whether callers need a token.
    pub(crate) fn ask_callers(&self) -> bool {
        !self.callers.is_empty()
    }

    /// Whether a request with this `Authorization` may call. An operator may do what a caller may.
    pub(crate) fn admit_caller(&self, authorization: Option<&HeaderValue>) -> bool {
        !self.ask_callers() || authorization.and_then(bearer).is_some_and(|shown| self.know(shown))
    }

    /// Whether a proxy with this `X-Threshold-Token` may call.
    pub(crate) fn admit_proxy(&self, token: Option<&HeaderValue>) -> bool {
        !self.ask_callers() || token.is_some_and(|token| self.know(token.as_bytes().trim_ascii()))
    }

    /// Whether there are any tokens, of whomever.
    pub(crate) fn are_some(&self) -> bool {
        !(self.callers.is_empty() && self.operators.is_empty() && self.readers.is_empty())
    }

    /// Whether this `Authorization` has any token of this server: of a caller, an operator, or one who looks.
    pub(crate) fn know_any(&self, authorization: &HeaderValue) -> bool {
        let all = self.callers.iter().chain(&self.operators).chain(&self.readers);
        bearer(authorization).is_some_and(|shown| is_one_of(all, shown))
    }

    fn know(&self, shown: &[u8]) -> bool {
        is_one_of(self.callers.iter().chain(&self.operators), shown)
    }

    /// What a request with this `Authorization` may do as an operator. A caller's token opens nothing here.
    pub(crate) fn operator(&self, authorization: Option<&HeaderValue>) -> Shown {
        if !self.are_some() {
            return Shown::Open;
        }
        let Some(shown) = authorization.and_then(bearer) else { return Shown::Nothing };
        let (changes, looks) = (is_one_of(self.operators.iter(), shown), is_one_of(self.readers.iter(), shown));
        match (changes, looks) {
            (true, _) => Shown::Operator(String::from_utf8_lossy(shown).into_owned()),
            (false, true) => Shown::Reader,
            (false, false) => Shown::Nothing,
        }
    }
}

/// Every token is compared to its end: how long this takes says nothing about them.
fn is_one_of<'t>(tokens: impl Iterator<Item = &'t Box<str>>, shown: &[u8]) -> bool {
    tokens.fold(Choice::from(0), |found, token| found | token.as_bytes().ct_eq(shown)).into()
}

/// A token that is printed is a token that is known.
impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokens({} callers, {} operators)", self.callers.len(), self.operators.len())
    }
}

fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, token) = value.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

/// Several tokens, by commas or white space, so that one can be replaced by another while both are in use.
fn list(name: &str, text: &str) -> anyhow::Result<Vec<Box<str>>> {
    let tokens = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|token| !token.is_empty());
    let tokens: Vec<Box<str>> = tokens.map(Into::into).collect();
    if tokens.is_empty() {
        bail!("{name} is set and holds no token: unset it to ask for none, or make one with `openssl rand -hex 32`");
    }
    if tokens.iter().any(|token| !token.bytes().all(|byte| byte.is_ascii_graphic())) {
        bail!("{name} has a token that no header can carry; use letters, digits and signs of ASCII");
    }
    if tokens.iter().any(|token| token.len() < SHORTEST) {
        bail!(
            "{name} has a token of fewer than {SHORTEST} characters, which can be guessed: make one with `openssl rand -hex 32`"
        );
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(callers: &str, operators: &str, authorization: Option<&'static str>, admitted: bool) {
        let read = |text: &str| if text.is_empty() { Vec::new() } else { list("TOKEN", text).unwrap() };
        let tokens = Tokens { callers: read(callers), operators: read(operators), readers: Vec::new() };
        assert_eq!(tokens.admit_caller(authorization.map(HeaderValue::from_static).as_ref()), admitted);
    }

    #[test]
    fn a_caller_shows_one_of_the_tokens() {
        const A: &str = "a-caller-token-1";
        check("", "", None, true);
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
    fn an_operator_shows_an_operators_token_and_a_caller_never_is_one() {
        let read = |text| list("TOKEN", text).unwrap();
        let tokens = Tokens {
            callers: read("a-caller-token-1"),
            operators: read("boss-token-12345"),
            readers: read("eye-token-123456"),
        };
        let shown = |tokens: &Tokens, text| tokens.operator(Some(&HeaderValue::from_static(text)));
        assert!(shown(&tokens, "Bearer boss-token-12345") == Shown::Operator("boss-token-12345".to_owned()));
        assert!(shown(&tokens, "Bearer eye-token-123456") == Shown::Reader);
        for wrong in [
            "Bearer a-caller-token-1",
            "Bearer boss-token-1234",
            "Bearer boss-token-123451",
            "Bearer",
            "boss-token-12345",
        ] {
            assert!(shown(&tokens, wrong) == Shown::Nothing, "{wrong}");
        }
        assert!(tokens.operator(None) == Shown::Nothing);
        let only_callers = Tokens { callers: read("a-caller-token-1"), ..Tokens::default() };
        assert!(shown(&only_callers, "Bearer a-caller-token-1") == Shown::Nothing);
        assert!(Tokens::default().operator(None) == Shown::Open);
    }

    #[test]
    fn a_token_that_no_header_carries_is_refused_without_being_told() {
        let error = list("THRESHOLD_TOKEN", "caf\u{e9}-s3cret").unwrap_err().to_string();
        assert!(error.contains("THRESHOLD_TOKEN") && !error.contains("s3cret"), "{error}");
    }

    /// A server that was to ask for a token asked for none.
    #[test]
    fn a_variable_that_is_set_holds_a_token() {
        for empty in ["", " ", ",", ", ,", "\n,\t"] {
            let error = list("THRESHOLD_ADMIN_TOKEN", empty).unwrap_err().to_string();
            assert!(error.contains("THRESHOLD_ADMIN_TOKEN") && error.contains("no token"), "{error}");
        }
    }

    #[test]
    fn a_short_token_is_refused_without_being_told() {
        assert_eq!(list("THRESHOLD_TOKEN", "0123456789abcdef").unwrap().len(), 1);
        for short in ["0123456789abcde", "0123456789abcdef, x9", "x9 0123456789abcdef"] {
            let error = list("THRESHOLD_READ_TOKEN", short).unwrap_err().to_string();
            assert!(error.contains("THRESHOLD_READ_TOKEN") && error.contains("16"), "{error}");
            assert!(!error.contains("0123") && !error.contains("x9"), "{error}");
        }
    }
}
