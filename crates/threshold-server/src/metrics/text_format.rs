//! Prometheus' text format 0.0.4, for scrapers that do not read OpenMetrics.

use std::fmt::Write as _;

/// Converts OpenMetrics text, as the registry writes it. A counter is named after its series there, and `info` is a gauge; series are
/// written alike.
pub(crate) fn in_text_format(openmetrics: &str) -> String {
    let mut text = String::with_capacity(openmetrics.len());
    // The registry writes the help of a metric before its type, which decides the name on both lines.
    let mut help = "";
    for line in openmetrics.lines() {
        if let Some(line) = line.strip_prefix("# HELP ") {
            help = line.split_once(' ').map_or("", |(_, help)| help);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|line| line.split_once(' ')) {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                kind => ("", kind),
            };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}");
        } else if !line.starts_with('#') {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    /// Woken by a counter without `_total` on either line, by `info`, and by a comment that is left in.
    #[test]
    fn a_metric_is_named_after_its_series_and_has_a_type_of_the_format() {
        let metrics = Metrics::new();
        let (openmetrics, text) = (metrics.text(), in_text_format(&metrics.text()));
        let samples =
            |text: &str| text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(samples(&text), samples(&openmetrics));
        let (mut types, mut current) = (0, "");
        for line in text.lines() {
            let Some(line) = line.strip_prefix("# ") else {
                assert!(line.starts_with(current), "{line} is not of {current}");
                continue;
            };
            match line.split(' ').collect::<Vec<_>>().as_slice() {
                ["HELP", _, words @ ..] => assert!(words.len() >= 2, "{line}"),
                ["TYPE", name, kind] => {
                    let is_counter = *kind == "counter" && name.ends_with("_total");
                    assert!(is_counter || matches!(*kind, "gauge" | "histogram"), "{line}");
                    (types, current) = (types + 1, name);
                }
                _ => panic!("{line}"),
            }
        }
        assert_eq!(types, openmetrics.matches("# TYPE ").count());
        assert!(text.contains("# TYPE threshold_build_info gauge\nthreshold_build_info{"), "{text}");
        assert!(text.contains("# TYPE threshold_blocks_total counter\nthreshold_blocks_total{"), "{text}");
    }

    #[test]
    fn a_metric_without_a_type_is_untyped() {
        let openmetrics = "# HELP a One.\n# TYPE a unknown\n# UNIT a seconds\na 1\n# EOF\n";
        assert_eq!(in_text_format(openmetrics), "# HELP a One.\n# TYPE a untyped\na 1\n");
    }
}
