//! The variables of the environment that OpenTelemetry defines for exporters.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use http::{HeaderName, HeaderValue, Uri};
use percent_encoding::percent_decode_str;
use threshold_core::event::EventId;

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// The attribute that tells processes of one service apart.
const INSTANCE: &str = "service.instance.id";

/// Where to export to, and how.
#[derive(Debug)]
pub(super) struct Settings {
    /// Where spans are posted to.
    pub(super) traces: Option<Target>,
    /// Where metrics are posted to.
    pub(super) metrics: Option<Target>,
    /// The attributes of this service, with its name and the id of this process.
    pub(super) resource: Vec<(String, String)>,
    pub(super) sampler: Sampler,
    /// How long spans wait for a batch.
    pub(super) span_delay: Duration,
    pub(super) metric_interval: Duration,
}

/// Where one kind of messages is posted to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) url: String,
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    pub(super) timeout: Duration,
    pub(super) certificate: Option<PathBuf>,
    pub(super) compression: Compression,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
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
        let traces = Target::read("TRACES", "/v1/traces", &read)?;
        let metrics = Target::read("METRICS", "/v1/metrics", &read)?;
        if traces.is_none() && metrics.is_none() {
            return Ok(None);
        }
        let mut resource = pairs(&read("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default(), "OTEL_RESOURCE_ATTRIBUTES")?;
        if resource.iter().all(|(key, _)| key != INSTANCE) {
            // One for each process, so that a collector does not take the sums of two servers for those of one.
            resource.push((INSTANCE.to_owned(), EventId::new(rand::random()).to_string()));
        }
        let name = read("OTEL_SERVICE_NAME");
        if name.is_some() || resource.iter().all(|(key, _)| key != "service.name") {
            resource.retain(|(key, _)| key != "service.name");
            resource.push(("service.name".to_owned(), name.unwrap_or_else(|| "threshold".to_owned())));
        }
        Ok(Some(Self {
            traces,
            metrics,
            resource,
            sampler: Sampler::read(read("OTEL_TRACES_SAMPLER").as_deref(), read("OTEL_TRACES_SAMPLER_ARG").as_deref())?,
            span_delay: millis("OTEL_BSP_SCHEDULE_DELAY", read("OTEL_BSP_SCHEDULE_DELAY"), 5_000)?,
            metric_interval: millis("OTEL_METRIC_EXPORT_INTERVAL", read("OTEL_METRIC_EXPORT_INTERVAL"), 60_000)?,
        }))
    }
}

impl Target {
    /// Reads where a signal goes; `None` if it is not exported. The variable of a signal takes the place of the one for all.
    fn read(signal: &str, path: &str, read: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<Option<Self>> {
        let one_of = |name: &str| -> (String, Option<String>) {
            let (own, general) = (format!("OTEL_EXPORTER_OTLP_{signal}_{name}"), format!("OTEL_EXPORTER_OTLP_{name}"));
            match read(&own) {
                Some(value) => (own, Some(value)),
                None => (general.clone(), read(&general)),
            }
        };
        let exporter = format!("OTEL_{signal}_EXPORTER");
        if read(&exporter).is_some_and(|value| value == "none") {
            return Ok(None);
        }
        // Of a signal, the whole URL; of all, its beginning.
        let url = match one_of("ENDPOINT") {
            (name, Some(base)) if name == ENDPOINT => {
                Some(checked(format!("{}{path}", base.trim_end_matches('/')), ENDPOINT)?)
            }
            (name, url) => url.map(|url| checked(url, &name)).transpose()?,
        };
        let Some(url) = url else { return Ok(None) };
        if read(&exporter).is_some_and(|value| value != "otlp") {
            bail!("{exporter} is not supported: only otlp and none are");
        }
        if let (name, Some(protocol)) = one_of("PROTOCOL")
            && protocol != "http/protobuf"
        {
            bail!("{name} is not supported: only http/protobuf is");
        }
        for unsupported in ["CLIENT_KEY", "CLIENT_CERTIFICATE"] {
            if let (name, Some(_)) = one_of(unsupported) {
                bail!("{name} is not supported: the server shows no certificate to a collector");
            }
        }
        let compression = match one_of("COMPRESSION") {
            (_, None) => Compression::None,
            (_, Some(coding)) if coding == "none" => Compression::None,
            (_, Some(coding)) if coding == "gzip" => Compression::Gzip,
            (name, Some(_)) => bail!("{name} is not supported: only gzip and none are"),
        };
        let (name, headers) = one_of("HEADERS");
        let headers = header_fields(&headers.unwrap_or_default(), &name)?;
        let (name, timeout) = one_of("TIMEOUT");
        let timeout = millis(&name, timeout, 10_000)?;
        let certificate = one_of("CERTIFICATE").1.map(PathBuf::from);
        Ok(Some(Self { url, headers, timeout, certificate, compression }))
    }
}

fn millis(name: &str, value: Option<String>, default: u64) -> anyhow::Result<Duration> {
    let number = value.map_or(Some(default), |text| text.parse().ok().filter(|millis| *millis > 0));
    Ok(Duration::from_millis(number.with_context(|| format!("{name} is no number of milliseconds"))?))
}

/// Checks a URL. It is not part of the message, because it may contain a password.
fn checked(url: String, name: &str) -> anyhow::Result<String> {
    let parsed: Option<Uri> = url.parse().ok();
    let parsed = parsed.filter(|url| matches!(url.scheme_str(), Some("http" | "https")));
    let Some(authority) = parsed.as_ref().and_then(Uri::authority).filter(|authority| !authority.host().is_empty())
    else {
        bail!("{name} is no URL that begins with http:// or https://");
    };
    // A port that is no number of 16 bits is left out by `port_u16`, and the default one would be called.
    let after_host = authority.as_str().rsplit_once('@').map_or(authority.as_str(), |(_, place)| place);
    let has_port = after_host.strip_prefix(authority.host()).is_some_and(|port| !port.is_empty());
    if has_port && authority.port_u16().is_none_or(|port| port == 0) {
        bail!("{name} has a port that is not from 1 to 65535");
    }
    Ok(url)
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

fn header_fields(text: &str, name: &str) -> anyhow::Result<Vec<(HeaderName, HeaderValue)>> {
    let field = |(key, value): (String, String)| {
        let value = HeaderValue::try_from(value).ok().map(|mut value| {
            value.set_sensitive(true);
            value
        });
        Some((HeaderName::try_from(key).ok()?, value?))
    };
    pairs(text, name)?
        .into_iter()
        .map(|pair| field(pair).with_context(|| format!("{name} has a name or a value that no header can have")))
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
        let (traces, metrics) = (settings.traces.unwrap(), settings.metrics.unwrap());
        assert_eq!(traces.url, "http://collector:4318/v1/traces");
        assert_eq!(metrics.url, "https://other.example/push");
        assert_eq!(headers_of(&traces), [("authorization", "Bearer abc"), ("x-org", "7")]);
        assert_eq!(metrics, Target { url: metrics.url.clone(), ..traces.clone() });
        assert_eq!((traces.timeout, traces.compression), (Duration::from_millis(250), Compression::None));
        let of = |key: &str| settings.resource.iter().find(|(own, _)| own == key).map(|(_, value)| value.as_str());
        assert_eq!((of("deployment.environment"), of("service.name")), (Some("prod"), Some("edge")));
        assert_eq!(of(INSTANCE).map(str::len), Some(36));
        assert_eq!(settings.sampler, Sampler::DEFAULT);
    }

    fn headers_of(target: &Target) -> Vec<(&str, &str)> {
        target.headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect()
    }

    /// Those of a signal take the place of the general ones, and are not added to them.
    ///
    /// Woken by reading the general variable first.
    #[test]
    fn each_signal_may_have_variables_of_its_own() {
        let settings = read(&[
            (ENDPOINT, "http://collector:4318"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=1"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "250"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "b=2"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "500"),
            ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip"),
            ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "ca.pem"),
            ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=node-1"),
        ]);
        let settings = settings.unwrap().unwrap();
        let (traces, metrics) = (settings.traces.unwrap(), settings.metrics.unwrap());
        assert_eq!((headers_of(&traces), headers_of(&metrics)), (vec![("b", "2")], vec![("a", "1")]));
        assert_eq!([traces.timeout, metrics.timeout], [500, 250].map(Duration::from_millis));
        assert_eq!([traces.compression, metrics.compression], [Compression::Gzip, Compression::None]);
        assert_eq!((traces.certificate, metrics.certificate), (Some("ca.pem".into()), None));
        assert_eq!(settings.resource[0], (INSTANCE.to_owned(), "node-1".to_owned()));
    }

    #[test]
    fn without_an_endpoint_nothing_is_exported() {
        assert!(read(&[]).unwrap().is_none());
        assert!(read(&[(ENDPOINT, " ")]).unwrap().is_none());
        assert!(read(&[(ENDPOINT, "http://a"), ("OTEL_SDK_DISABLED", "TRUE")]).unwrap().is_none());
        let one = read(&[(ENDPOINT, "http://a"), ("OTEL_METRICS_EXPORTER", "none")]).unwrap().unwrap();
        assert_eq!((one.traces.unwrap().url.as_str(), one.metrics), ("http://a/v1/traces", None));
        let off = [(ENDPOINT, "http://a"), ("OTEL_METRICS_EXPORTER", "none"), ("OTEL_TRACES_EXPORTER", "none")];
        assert!(read(&off).unwrap().is_none());
        // Of a signal that is off, nothing else matters.
        let off = [&off[..2], &[("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "grpc")]].concat();
        assert!(read(&off).unwrap().is_some());
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
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
            ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "hunter2"),
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://hunter2:0"),
            ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "hunter2"),
            ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "hunter2"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "hunter2"),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "hunter2"),
            ("OTEL_TRACES_EXPORTER", "hunter2"),
            ("OTEL_METRICS_EXPORTER", "prometheus"),
            (ENDPOINT, "http://hunter2:99999"),
            (ENDPOINT, "http://u:hunter2@a:65536"),
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
