//! Converts the OpenMetrics text of `/metrics` into the messages of OpenTelemetry.
//!
//! The text has every metric with its type, and the registry shows its metrics in no other way. Counters and gauges keep the names
//! that they have there, so that a query finds them whichever way they came.

use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, Sum,
};

use super::spans::text;

/// The labels of a sample.
type Labels = Vec<(String, String)>;

/// A line with a value.
#[derive(Debug)]
struct Sample<'t> {
    name: &'t str,
    labels: Labels,
    value: &'t str,
}

/// The metrics of one name, as the lines that begin with `#` describe them.
#[derive(Debug, Default)]
struct Family<'t> {
    name: &'t str,
    kind: &'t str,
    help: &'t str,
    unit: &'t str,
    samples: Vec<Sample<'t>>,
}

/// Converts a text whose sums began at `start`.
pub(super) fn from_text(openmetrics: &str, start: u64, now: u64) -> Vec<Metric> {
    let mut families: Vec<Family<'_>> = Vec::new();
    for line in openmetrics.lines() {
        if let Some(described) = line.strip_prefix("# ") {
            let mut words = described.splitn(3, ' ');
            let (Some(what), Some(name), text) = (words.next(), words.next(), words.next().unwrap_or_default()) else {
                continue;
            };
            if families.last().is_none_or(|family| family.name != name) {
                families.push(Family { name, ..Family::default() });
            }
            let Some(family) = families.last_mut() else { continue };
            match what {
                "HELP" => family.help = text,
                "TYPE" => family.kind = text,
                "UNIT" => family.unit = text,
                _ => {}
            }
        } else if let (Some(family), Some(sample)) = (families.last_mut(), sample(line)) {
            family.samples.push(sample);
        }
    }
    families.iter().filter(|family| !family.samples.is_empty()).map(|family| family.metric(start, now)).collect()
}

impl Family<'_> {
    fn metric(&self, start: u64, now: u64) -> Metric {
        // When a series began is in the messages themselves.
        let samples = || self.samples.iter().filter(|sample| !sample.name.ends_with("_created"));
        let points =
            |start_time_unix_nano| samples().map(|sample| sample.point(start_time_unix_nano, now)).collect::<Vec<_>>();
        let aggregation_temporality = AggregationTemporality::Cumulative.into();
        let name = match (self.kind, samples().next()) {
            ("counter" | "gauge" | "info" | "unknown", Some(sample)) => sample.name,
            _ => self.name,
        };
        let data = match self.kind {
            "counter" => Data::Sum(Sum { data_points: points(start), aggregation_temporality, is_monotonic: true }),
            "histogram" => {
                Data::Histogram(Histogram { data_points: self.histograms(start, now), aggregation_temporality })
            }
            _ => Data::Gauge(Gauge { data_points: points(0) }),
        };
        // As UCUM spells it.
        let unit = if self.unit == "seconds" { "s" } else { self.unit };
        Metric {
            name: name.to_owned(),
            description: self.help.to_owned(),
            unit: unit.to_owned(),
            data: Some(data),
            ..Metric::default()
        }
    }

    /// Returns a point for each set of labels. Its samples follow each other.
    fn histograms(&self, start: u64, now: u64) -> Vec<HistogramDataPoint> {
        let mut points: Vec<(Labels, HistogramDataPoint)> = Vec::new();
        for sample in &self.samples {
            let mut labels = sample.labels.clone();
            let bound = labels.iter().position(|(name, _)| name == "le").map(|at| labels.remove(at).1);
            if points.last().is_none_or(|(own, _)| *own != labels) {
                let attributes = attributes(&labels);
                let times = (start, now);
                let point = HistogramDataPoint {
                    attributes,
                    start_time_unix_nano: times.0,
                    time_unix_nano: times.1,
                    ..HistogramDataPoint::default()
                };
                points.push((labels, point));
            }
            let Some((_, point)) = points.last_mut() else { continue };
            match (sample.name.strip_prefix(self.name), bound) {
                (Some("_sum"), _) => point.sum = sample.value.parse().ok(),
                (Some("_count"), _) => point.count = sample.value.parse().unwrap_or(0),
                (Some("_bucket"), Some(bound)) => {
                    // The text counts each value in every bucket above it too, the message does not.
                    let below: u64 = point.bucket_counts.iter().sum();
                    let total: u64 = sample.value.parse().unwrap_or(0);
                    point.bucket_counts.push(total.saturating_sub(below));
                    point.explicit_bounds.extend(bound.parse::<f64>().ok().filter(|bound| bound.is_finite()));
                }
                _ => {}
            }
        }
        points.into_iter().map(|(_, point)| point).collect()
    }
}

impl Sample<'_> {
    fn point(&self, start_time_unix_nano: u64, time_unix_nano: u64) -> NumberDataPoint {
        let value = self.value.parse().map(Value::AsInt).ok();
        let value = value.or_else(|| self.value.parse().map(Value::AsDouble).ok());
        NumberDataPoint {
            attributes: attributes(&self.labels),
            start_time_unix_nano,
            time_unix_nano,
            value,
            ..NumberDataPoint::default()
        }
    }
}

fn attributes(labels: &Labels) -> Vec<opentelemetry_proto::tonic::common::v1::KeyValue> {
    labels.iter().map(|(name, value)| text(name, value)).collect()
}

/// Parses `name{label="value"} 7`.
fn sample(line: &str) -> Option<Sample<'_>> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at_checked(end)?;
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Labels::new(), rest),
    };
    // An exemplar may follow, or a time.
    Some(Sample { name, labels, value: rest.split_whitespace().next()? })
}

/// Parses labels up to the closing brace, and returns the text behind it.
fn labels(mut text: &str) -> Option<(Labels, &str)> {
    let mut labels = Labels::new();
    loop {
        text = text.trim_start_matches(',');
        if let Some(rest) = text.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, rest) = text.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = rest.chars();
        loop {
            match chars.next()? {
                '"' => break,
                '\\' => value.push(match chars.next()? {
                    'n' => '\n',
                    other => other,
                }),
                other => value.push(other),
            }
        }
        labels.push((name.to_owned(), value));
        text = chars.as_str();
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::common::v1::any_value;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::family::Family;
    use prometheus_client::metrics::gauge::Gauge as OwnGauge;
    use prometheus_client::metrics::histogram::Histogram as OwnHistogram;
    use prometheus_client::registry::{Registry, Unit};

    use super::*;

    fn attribute<'a>(point: &'a [opentelemetry_proto::tonic::common::v1::KeyValue], key: &str) -> &'a str {
        let found = point.iter().find(|pair| pair.key == key).unwrap();
        match found.value.as_ref().unwrap().value.as_ref().unwrap() {
            any_value::Value::StringValue(text) => text,
            other => panic!("{other:?}"),
        }
    }

    /// As the registry writes them, and not as somebody remembers the format.
    #[test]
    fn every_kind_of_metric_is_converted() {
        let mut registry = Registry::with_prefix("threshold");
        let counters = Family::<Vec<(String, String)>, Counter>::default();
        let odd = "a \"quoted\" \\ {name}, and\na line";
        counters.get_or_create(&vec![("rule".to_owned(), odd.to_owned())]).inc_by(7);
        registry.register("decisions", "Decisions, by rule", counters);
        let gauge: OwnGauge = OwnGauge::default();
        gauge.set(-3);
        registry.register("keys", "Keys", gauge);
        let times =
            Family::<Vec<(String, String)>, OwnHistogram>::new_with_constructor(|| OwnHistogram::new([0.5, 1.0]));
        for (verb, values) in [("check", &[0.1, 0.2, 0.7, 5.0][..]), ("peek", &[0.6])] {
            let series = times.get_or_create(&vec![("verb".to_owned(), verb.to_owned())]);
            values.iter().for_each(|value| series.observe(*value));
        }
        registry.register_with_unit("decision", "Time", Unit::Seconds, times);
        let mut openmetrics = String::new();
        encode(&mut openmetrics, &registry).unwrap();

        let metrics = from_text(&openmetrics, 1, 2);
        let names: Vec<_> = metrics.iter().map(|metric| (metric.name.as_str(), metric.unit.as_str())).collect();
        assert_eq!(
            names,
            [("threshold_decisions_total", ""), ("threshold_keys", ""), ("threshold_decision_seconds", "s")],
            "{openmetrics}"
        );
        let [Some(Data::Sum(sum)), Some(Data::Gauge(gauge)), Some(Data::Histogram(histogram))] =
            [0, 1, 2].map(|at| metrics[at].data.clone())
        else {
            panic!("{metrics:?}")
        };
        assert_eq!(metrics[0].description, "Decisions, by rule.");
        assert!(sum.is_monotonic && sum.aggregation_temporality == AggregationTemporality::Cumulative as i32);
        let [point] = sum.data_points.as_slice() else { panic!("{sum:?}") };
        assert_eq!((point.value, point.start_time_unix_nano, point.time_unix_nano), (Some(Value::AsInt(7)), 1, 2));
        assert_eq!(attribute(&point.attributes, "rule"), odd);
        assert_eq!(gauge.data_points[0].value, Some(Value::AsInt(-3)));
        let mut points = histogram.data_points;
        points.sort_by_key(|point| point.count);
        let [peek, check] = points.as_slice() else { panic!("{points:?}") };
        assert_eq!((&*check.bucket_counts, check.count, check.sum), (&[2, 1, 1][..], 4, Some(6.0)));
        assert_eq!((&*peek.bucket_counts, &*peek.explicit_bounds), (&[0, 1, 0][..], &[0.5, 1.0][..]));
        assert_eq!(attribute(&check.attributes, "verb"), "check");
        assert_eq!(check.attributes.len(), 1, "the bound is no attribute");
    }

    #[test]
    fn text_that_is_none_is_skipped() {
        for text in
            ["", "\n\n", "# EOF\n", "# TYPE\n", "a 1\n", "# TYPE a counter\na{b=\"c\n", "# TYPE a counter\na{b=\"\\"]
        {
            assert_eq!(from_text(text, 1, 2), [], "{text}");
        }
    }
}
