//! The settings of a Worker, from its bindings.

use http::Uri;
use threshold_core::policy::{Consistency, RecordPlace, Rule};
use threshold_core::{Policy, PolicyError, Secret, Secrets};
use threshold_limiter::tower::NoTokenVerifier;
use worker::wasm_bindgen::JsValue;
use worker::{Env, js_sys};

use crate::store::{DEFAULT_BINDING, DEFAULT_NAMESPACE};

/// The KV namespace with the policy.
pub const POLICY_KV: &str = "THRESHOLD_CONFIG";
/// The key of the policy in it.
pub const POLICY_KEY: &str = "policy.toml";
/// The variable with the policy, where no namespace is bound.
pub const POLICY: &str = "THRESHOLD_POLICY";
/// The secret that stored keys are digested with.
pub const SECRET: &str = "THRESHOLD_SECRET";
/// The secret before it, during a rotation.
pub const OLD_SECRET: &str = "THRESHOLD_SECRET_OLD";
/// The token of callers of the API.
pub const TOKEN: &str = "THRESHOLD_TOKEN";
/// The service binding of the upstream.
pub const UPSTREAM: &str = "UPSTREAM";
/// The variable with the URL of the upstream, where no service is bound.
pub const UPSTREAM_URL: &str = "UPSTREAM_URL";

/// The shortest token.
const MIN_TOKEN: usize = 16;

/// Why a Worker cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// There is no policy.
    #[error(
        "no policy: `wrangler kv key put --binding {POLICY_KV} --remote {POLICY_KEY} --path {POLICY_KEY}` puts one into the KV \
         namespace {POLICY_KV}, or set the variable {POLICY}"
    )]
    NoPolicy,
    /// KV failed.
    #[error("the policy cannot be read from {POLICY_KV}: {0}")]
    Kv(String),
    /// The policy is not valid.
    #[error("the policy is not valid: {0}")]
    Policy(#[from] PolicyError),
    /// There is no secret.
    #[error("no secret: set {SECRET} with `wrangler secret put {SECRET}`, at least 32 random bytes")]
    NoSecret,
    /// A secret is too short, or both are the same.
    #[error("{0} cannot be used: {1}")]
    Secret(&'static str, String),
    /// The token is too short.
    #[error("{TOKEN} has fewer than {MIN_TOKEN} characters")]
    ShortToken,
    /// The URL of the upstream is not one.
    #[error("{UPSTREAM_URL} is a scheme and a host without a path, such as https://app.example.com")]
    Upstream,
    /// There is neither an upstream nor a token.
    #[error(
        "nothing to do: bind the service {UPSTREAM} or set {UPSTREAM_URL} to guard it, or set {TOKEN} to serve the API"
    )]
    NoUpstream,
    /// A rule names a binding that is not a namespace of Durable Objects.
    #[error("{rule} needs the binding {binding} of a Durable Object")]
    NoObjects {
        /// The rule, or `[login]`.
        rule: String,
        /// The name of the binding.
        binding: String,
    },
    /// An eventual rule names a binding that is not a KV namespace.
    #[error("the rule \"{rule}\" is eventual and needs the binding {binding} of a KV namespace")]
    NoNamespace {
        /// The name of the rule.
        rule: String,
        /// The name of the binding.
        binding: String,
    },
    /// An eventual rule counts by the outcome of requests.
    #[error("the rule \"{0}\" is eventual and has `count`: KV gives nothing back, so every request would count")]
    CountsByOutcome(String),
    /// The key of tokens cannot be used.
    #[error("[identity.jwt]: {0}")]
    Key(String),
    /// The policy takes names from tokens, and nothing verifies them.
    #[error(transparent)]
    Tokens(#[from] NoTokenVerifier),
}

/// The settings of a Worker.
#[derive(Debug)]
pub struct Config {
    text: String,
    pub(crate) secret: Secrets,
    pub(crate) token: Option<String>,
    pub(crate) upstream: Option<Uri>,
}

impl Config {
    /// Reads the settings.
    ///
    /// # Errors
    /// Fails where one is missing or invalid.
    pub async fn read(env: &Env) -> Result<Self, ConfigError> {
        let token = text(env, TOKEN);
        if token.as_ref().is_some_and(|token| token.chars().count() < MIN_TOKEN) {
            return Err(ConfigError::ShortToken);
        }
        let upstream = text(env, UPSTREAM_URL).map(|url| url.parse::<Uri>().map_err(|_| ConfigError::Upstream));
        let upstream = upstream.transpose()?;
        let is_origin = |url: &Uri| {
            url.scheme().is_some() && url.authority().is_some() && url.path() == "/" && url.query().is_none()
        };
        if upstream.as_ref().is_some_and(|url| !is_origin(url)) {
            return Err(ConfigError::Upstream);
        }
        Ok(Self { text: policy(env).await?, secret: secrets(env)?, token, upstream })
    }

    /// Checks that the bindings of all rules exist and are of the right kind. A missing one would fail every request, or let it pass
    /// unlimited.
    ///
    /// # Errors
    /// Fails for the first rule whose binding is missing, and for one that its store cannot keep.
    pub fn check_bindings(&self, env: &Env, policy: &Policy) -> Result<(), ConfigError> {
        for rule in policy.rules() {
            if rule.consistency == Consistency::Eventual {
                check_namespace(env, rule)?;
                continue;
            }
            let binding = rule.place.as_ref().map_or(DEFAULT_BINDING, RecordPlace::binding);
            if env.durable_object(binding).is_err() {
                return Err(ConfigError::NoObjects {
                    rule: format!("the rule \"{}\"", rule.name),
                    binding: binding.to_owned(),
                });
            }
        }
        for binding in policy.login_bindings() {
            let binding = binding.unwrap_or(DEFAULT_BINDING);
            if env.durable_object(binding).is_err() {
                return Err(ConfigError::NoObjects { rule: "[login]".to_owned(), binding: binding.to_owned() });
            }
        }
        Ok(())
    }

    /// Parses the policy.
    ///
    /// # Errors
    /// Fails where it is not valid.
    pub fn policy(&self, env: &Env) -> Result<Policy, ConfigError> {
        Ok(Policy::parse(&self.text, &|name| text(env, name))?)
    }
}

fn check_namespace(env: &Env, rule: &Rule) -> Result<(), ConfigError> {
    let binding = rule.place.as_ref().map_or(DEFAULT_NAMESPACE, RecordPlace::binding);
    let field = |of: &JsValue, name: &str| js_sys::Reflect::get(of, &name.into()).unwrap_or(JsValue::UNDEFINED);
    let namespace = field(env, binding);
    // Buckets and objects have `get` too, and only a namespace has these two.
    if namespace.is_undefined() || !["put", "getWithMetadata"].iter().all(|name| field(&namespace, name).is_function())
    {
        return Err(ConfigError::NoNamespace { rule: rule.name.to_string(), binding: binding.to_owned() });
    }
    if rule.count.is_some() {
        return Err(ConfigError::CountsByOutcome(rule.name.to_string()));
    }
    Ok(())
}

/// Returns a variable or a secret.
pub(crate) fn text(env: &Env, name: &str) -> Option<String> {
    // An empty one is unset, as on a server.
    env.var(name).ok().map(|value| value.to_string()).filter(|value| !value.is_empty())
}

async fn policy(env: &Env) -> Result<String, ConfigError> {
    if let Ok(namespace) = env.kv(POLICY_KV) {
        let found = namespace.get(POLICY_KEY).text().await.map_err(|error| ConfigError::Kv(error.to_string()))?;
        if let Some(text) = found {
            return Ok(text);
        }
    }
    text(env, POLICY).ok_or(ConfigError::NoPolicy)
}

fn secrets(env: &Env) -> Result<Secrets, ConfigError> {
    let secret = |name: &'static str| {
        text(env, name).map(|text| {
            Secret::new(text.as_bytes()).ok_or_else(|| ConfigError::Secret(name, "it is too short".to_owned()))
        })
    };
    let present = Secrets::new(secret(SECRET).transpose()?.ok_or(ConfigError::NoSecret)?);
    match secret(OLD_SECRET).transpose()? {
        None => Ok(present),
        Some(old) => present.with_old(old).map_err(|error| ConfigError::Secret(OLD_SECRET, error.to_string())),
    }
}
