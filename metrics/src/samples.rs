//! The values of one scrape, and their text.

use std::collections::BTreeMap;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::family::{Family, Kind};

/// Maximum characters of a label's value, since clients choose names.
const MAX_VALUE: usize = 128;

/// A value.
#[derive(Debug, Clone)]
pub enum Value {
    /// A whole number.
    Whole(u64),
    /// Any number.
    Real(f64),
    /// Observations.
    Observed(Histogram),
}

impl From<u64> for Value {
    fn from(value: u64) -> Value {
        Value::Whole(value)
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Value {
        Value::Whole(value as u64)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Value {
        Value::Whole(value.into())
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Value {
        Value::Real(value)
    }
}

impl From<Histogram> for Value {
    fn from(value: Histogram) -> Value {
        Value::Observed(value)
    }
}

impl Value {
    fn as_f64(&self) -> f64 {
        match self {
            Value::Whole(value) => *value as f64,
            Value::Real(value) => *value,
            Value::Observed(_) => f64::NAN,
        }
    }

    /// The sum of both. It saturates, because a session may report any number.
    fn plus(&self, other: &Value) -> Value {
        match (self, other) {
            (Value::Whole(a), Value::Whole(b)) => Value::Whole(a.saturating_add(*b)),
            (a, b) => Value::Real(a.as_f64() + b.as_f64()),
        }
    }
}

/// The values of a family by the values of its labels.
type Rows = BTreeMap<Vec<String>, Value>;

/// The values of one scrape.
#[derive(Debug, Default)]
pub struct Samples(BTreeMap<&'static str, (&'static Family, Rows)>);

impl Samples {
    /// Adds a value to a family, with the values of the family's labels in their order. Values with the same
    /// labels are summed.
    pub fn add(&mut self, family: &'static Family, labels: &[&str], value: impl Into<Value>) {
        debug_assert_eq!(labels.len(), family.labels.len(), "{}", family.base);
        let (_, rows) = self.0.entry(family.base).or_insert_with(|| (family, Rows::new()));
        let value = value.into();
        let labels = labels.iter().map(|label| clean(label)).collect();
        rows.entry(labels).and_modify(|sum| *sum = sum.plus(&value)).or_insert(value);
    }

    /// The text that Prometheus reads (OpenMetrics 1.0).
    pub fn text(self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &registry);
        text
    }
}

/// A label's value, cut to the maximum and without control characters.
fn clean(value: &str) -> String {
    value.chars().take(MAX_VALUE).map(|c| if c.is_control() { '?' } else { c }).collect()
}

impl Collector for Samples {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (family, rows) in self.0.values() {
            let kind = match family.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
            };
            let unit = (!family.unit.is_empty()).then(|| Unit::Other(family.unit.to_owned()));
            let mut metric = encoder.encode_descriptor(family.base, family.help(), unit.as_ref(), kind)?;
            for (values, value) in rows {
                if values.is_empty() {
                    // For an empty label set, the encoder would write empty braces.
                    write(family.kind, value, metric)?;
                    break;
                }
                let labels: Vec<(&str, &str)> =
                    family.labels.iter().copied().zip(values.iter().map(String::as_str)).collect();
                write(family.kind, value, metric.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

fn write(kind: Kind, value: &Value, encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
    match (kind, value) {
        (_, Value::Observed(histogram)) => histogram.encode(encoder),
        (Kind::Counter, Value::Whole(value)) => ConstCounter::new(*value).encode(encoder),
        (Kind::Counter, Value::Real(value)) => ConstCounter::new(*value).encode(encoder),
        (_, Value::Whole(value)) => ConstGauge::new(*value).encode(encoder),
        (_, Value::Real(value)) => ConstGauge::new(*value).encode(encoder),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    crate::families! {
        /// Bytes that were sent.
        SENT: Counter "rgpu_x_sent" ["bytes"] { "program" };
        /// Whether it drains.
        DRAINING: Gauge "rgpu_x_draining" {};
        /// Waits.
        WAITS: Histogram "rgpu_x_wait" ["seconds"] {};
    }

    #[test]
    fn the_text_is_what_prometheus_reads() {
        assert!(ALL.iter().all(|family| family.fault().is_none()));
        let mut samples = Samples::default();
        samples.add(&SENT, &["a"], 3u64);
        samples.add(&SENT, &["a"], 4u64);
        samples.add(&SENT, &["b"], u64::MAX);
        samples.add(&SENT, &["b"], 1u64);
        samples.add(&DRAINING, &[], false);
        let waits = Histogram::new([0.5, 1.0]);
        waits.observe(0.7);
        samples.add(&WAITS, &[], waits);
        let text = samples.text();
        for line in [
            "# HELP rgpu_x_sent_bytes Bytes that were sent.",
            "# TYPE rgpu_x_sent_bytes counter",
            "# UNIT rgpu_x_sent_bytes bytes",
            "rgpu_x_sent_bytes_total{program=\"a\"} 7",
            "rgpu_x_sent_bytes_total{program=\"b\"} 18446744073709551615",
            "rgpu_x_draining 0",
            "rgpu_x_wait_seconds_bucket{le=\"1.0\"} 1",
            "# EOF",
        ] {
            assert!(text.lines().any(|have| have == line), "{line:?} is not in\n{text}");
        }
    }

    proptest! {
        #[test]
        fn a_clients_name_stays_inside_its_label(name in "\\PC*|[\"\\\\\n,}{= #a-z0-9]{0,200}") {
            let mut samples = Samples::default();
            samples.add(&SENT, &[&name], 1u64);
            let text = samples.text();
            let rows: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
            prop_assert_eq!(rows.len(), 1, "{}", text);
            let inside = rows[0].strip_prefix("rgpu_x_sent_bytes_total{program=\"").and_then(|rest| rest.strip_suffix("\"} 1"));
            let inside = inside.expect("a label");
            // Every quotation mark inside has an odd number of backslashes before it.
            let mut escaped = false;
            for c in inside.chars() {
                prop_assert!(c != '"' || escaped, "{}", inside);
                escaped = c == '\\' && !escaped;
            }
            prop_assert!(!escaped);
        }
    }
}
