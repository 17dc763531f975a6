//! The variables of the environment that OpenTelemetry defines for exporters.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use http::{HeaderName, HeaderValue, Uri};
use percent_encoding::percent_decode_str;

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// Where to export to, and how.
#[derive(Debug)]
pub(super) struct Settings {
    /// The URL that spans are posted to.
    pub(super) traces: Option<String>,
    /// The URL that metrics are posted to.
    pub(super) metrics: Option<String>,
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    pub(super) timeout: Duration,
    pub(super) certificate: Option<PathBuf>,
    /// The attributes of this service, with its name.
    pub(super) resource: Vec<(String, String)>,
    pub(super) sampler: Sampler,
    /// How long spans wait for a batch.
    pub(super) span_delay: Duration,
    pub(super) metric_interval: Duration,
}

/// Which spans are exported.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sampler {
    /// Whether a caller that records its span has this one recorded too, and one that does not has not.
    is_parent_based: bool,
    /// Traces are taken whose last 63 bits are below this.
    below: u64,
}

impl Sampler {
    /// Takes all operations, except those whose caller does not record its own span.
    const DEFAULT: Self = Self { is_parent_based: true, below: 1 << 63 };

    /// Returns whether a span is exported. All spans of a trace have the same answer, on every node.
    pub(super) fn takes(self, parent: Option<bool>, trace: u128) -> bool {
        match parent.filter(|_| self.is_parent_based) {
            Some(is_sampled) => is_sampled,
            None => {
                let last = u64::try_from(trace & u128::from(u64::MAX)).unwrap_or(u64::MAX);
                last >> 1 < self.below
            }
        }
    }

    fn read(name: Option<&str>, argument: Option<&str>) -> anyhow::Result<Self> {
        let Some(name) = name else { return Ok(Self::DEFAULT) };
        let (is_parent_based, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name),
        };
        let below = match root {
            "always_on" => Self::DEFAULT.below,
            "always_off" => 0,
            "traceidratio" => ratio(argument.unwrap_or("1"))?,
            _ => bail!(
                "OTEL_TRACES_SAMPLER is unknown: use always_on, always_off, traceidratio, or one of them after parentbased_"
            ),
        };
        Ok(Self { is_parent_based, below })
    }
}

/// Returns a ratio of 2^63.
fn ratio(text: &str) -> anyhow::Result<u64> {
    let ratio: Option<f64> = text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
    let ratio = ratio.context("OTEL_TRACES_SAMPLER_ARG is no number from 0 to 1")?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 2^63")]
    Ok((ratio * 9_223_372_036_854_775_808.0) as u64)
}

impl Settings {
    /// Reads the variables. Returns `None` if nothing is to be exported.
    pub(super) fn read(variable: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<Option<Self>> {
        // An empty variable counts as unset, as the specification says.
        let read = |name: &str| variable(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        if read("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let endpoint = |signal: &str, path: &str| -> anyhow::Result<Option<String>> {
            if read(&format!("OTEL_{signal}_EXPORTER")).is_some_and(|exporter| exporter == "none") {
                return Ok(None);
            }
            let own = format!("OTEL_EXPORTER_OTLP_{signal}_ENDPOINT");
            if let Some(url) = read(&own) {
                return checked(url, &own).map(Some);
            }
            let url = read(ENDPOINT).map(|base| format!("{}{path}", base.trim_end_matches('/')));
            url.map(|url| checked(url, ENDPOINT)).transpose()
        };
        let (traces, metrics) = (endpoint("TRACES", "/v1/traces")?, endpoint("METRICS", "/v1/metrics")?);
        if traces.is_none() && metrics.is_none() {
            return Ok(None);
        }
        if read("OTEL_EXPORTER_OTLP_PROTOCOL").is_some_and(|protocol| protocol != "http/protobuf") {
            bail!("OTEL_EXPORTER_OTLP_PROTOCOL is not supported: only http/protobuf is");
        }
        let millis = |name: &str, default: u64| -> anyhow::Result<Duration> {
            let number = read(name).map(|text| text.parse().ok().filter(|millis| *millis > 0));
            let number = number.unwrap_or(Some(default));
            Ok(Duration::from_millis(number.with_context(|| format!("{name} is no number of milliseconds"))?))
        };
        let headers = read("OTEL_EXPORTER_OTLP_HEADERS").unwrap_or_default();
        let mut resource = pairs(&read("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default(), "OTEL_RESOURCE_ATTRIBUTES")?;
        let name = read("OTEL_SERVICE_NAME");
        if name.is_some() || resource.iter().all(|(key, _)| key != "service.name") {
            resource.retain(|(key, _)| key != "service.name");
            resource.push(("service.name".to_owned(), name.unwrap_or_else(|| "threshold".to_owned())));
        }
        Ok(Some(Self {
            traces,
            metrics,
            headers: header_fields(&headers)?,
            timeout: millis("OTEL_EXPORTER_OTLP_TIMEOUT", 10_000)?,
            certificate: read("OTEL_EXPORTER_OTLP_CERTIFICATE").map(PathBuf::from),
            resource,
            sampler: Sampler::read(read("OTEL_TRACES_SAMPLER").as_deref(), read("OTEL_TRACES_SAMPLER_ARG").as_deref())?,
            span_delay: millis("OTEL_BSP_SCHEDULE_DELAY", 5_000)?,
            metric_interval: millis("OTEL_METRIC_EXPORT_INTERVAL", 60_000)?,
        }))
    }
}

/// Checks a URL. It is not part of the message, because it may contain a password.
fn checked(url: String, name: &str) -> anyhow::Result<String> {
    let parsed: Option<Uri> = url.parse().ok();
    let is_usable =
        parsed.is_some_and(|url| matches!(url.scheme_str(), Some("http" | "https")) && url.host().is_some());
    if is_usable { Ok(url) } else { bail!("{name} is no URL that begins with http:// or https://") }
}

/// Reads `name=value,name=value`, where values are percent-encoded.
fn pairs(text: &str, name: &str) -> anyhow::Result<Vec<(String, String)>> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let pair = |part: &str| {
        let (key, value) = part.split_once('=')?;
        let value = percent_decode_str(value.trim()).decode_utf8().ok()?;
        Some((key.trim().to_owned(), value.into_owned()))
    };
    parts.map(|part| pair(part).with_context(|| format!("{name} is not written as name=value,name=value"))).collect()
}

fn header_fields(text: &str) -> anyhow::Result<Vec<(HeaderName, HeaderValue)>> {
    const NAME: &str = "OTEL_EXPORTER_OTLP_HEADERS";
    let field = |(key, value): (String, String)| {
        let value = HeaderValue::try_from(value).ok().map(|mut value| {
            value.set_sensitive(true);
            value
        });
        Some((HeaderName::try_from(key).ok()?, value?))
    };
    pairs(text, NAME)?
        .into_iter()
        .map(|pair| field(pair).with_context(|| format!("{NAME} has a name or a value that no header can have")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> anyhow::Result<Option<Settings>> {
        Settings::read(&|name| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_standard_variables_are_read() {
        let settings = read(&[
            (ENDPOINT, "http://collector:4318/"),
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "https://other.example/push"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc, x-org=7"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "250"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=a,deployment.environment=prod"),
            ("OTEL_SERVICE_NAME", "edge"),
        ]);
        let settings = settings.unwrap().unwrap();
        assert_eq!(settings.traces.as_deref(), Some("http://collector:4318/v1/traces"));
        assert_eq!(settings.metrics.as_deref(), Some("https://other.example/push"));
        let headers: Vec<_> =
            settings.headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(headers, [("authorization", "Bearer abc"), ("x-org", "7")]);
        assert_eq!(settings.timeout, Duration::from_millis(250));
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(settings.resource, [pair("deployment.environment", "prod"), pair("service.name", "edge")]);
        assert_eq!(settings.sampler, Sampler::DEFAULT);
    }

    #[test]
    fn without_an_endpoint_nothing_is_exported() {
        assert!(read(&[]).unwrap().is_none());
        assert!(read(&[(ENDPOINT, " ")]).unwrap().is_none());
        assert!(read(&[(ENDPOINT, "http://a"), ("OTEL_SDK_DISABLED", "TRUE")]).unwrap().is_none());
        let one = read(&[(ENDPOINT, "http://a"), ("OTEL_METRICS_EXPORTER", "none")]).unwrap().unwrap();
        assert_eq!((one.traces.as_deref(), one.metrics), (Some("http://a/v1/traces"), None));
    }

    /// The message names the variable, and shows nothing of its value.
    #[test]
    fn wrong_variables_are_errors() {
        for (name, value) in [
            (ENDPOINT, "hunter2:4317"),
            (ENDPOINT, "ftp://hunter2"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "hunter2"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=hunter2%0A"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "hunter2"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_TRACES_SAMPLER", "hunter2"),
            ("OTEL_RESOURCE_ATTRIBUTES", "hunter2"),
        ] {
            let variables = [(name, value), (ENDPOINT, "http://a")];
            let error = read(&variables).unwrap_err().to_string();
            assert!(error.starts_with(name) && !error.contains("hunter2"), "{name}: {error}");
        }
        for ratio in ["x", "-0.1", "1.1", "NaN"] {
            let error = Sampler::read(Some("traceidratio"), Some(ratio)).unwrap_err().to_string();
            assert!(error.starts_with("OTEL_TRACES_SAMPLER_ARG"), "{error}");
        }
    }

    #[test]
    fn a_sampler_follows_the_parent_or_the_ratio() {
        let traces = || (0..1_000_u128).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835));
        let count = |sampler: Sampler, parent| traces().filter(|trace| sampler.takes(parent, *trace)).count();
        let read = |name, argument| Sampler::read(Some(name), argument).unwrap();
        for (sampler, [no_parent, sampled, unsampled]) in [
            (Sampler::DEFAULT, [1_000, 1_000, 0]),
            (read("always_on", None), [1_000, 1_000, 1_000]),
            (read("always_off", None), [0, 0, 0]),
            (read("parentbased_always_off", None), [0, 1_000, 0]),
            (read("traceidratio", Some("0")), [0, 0, 0]),
            (read("parentbased_traceidratio", Some("1")), [1_000, 1_000, 0]),
        ] {
            let counts = [None, Some(true), Some(false)].map(|parent| count(sampler, parent));
            assert_eq!(counts, [no_parent, sampled, unsampled], "{sampler:?}");
        }
        let quarter = count(read("parentbased_traceidratio", Some("0.25")), None);
        assert!((200..300).contains(&quarter), "{quarter} of 1,000");
    }
}
