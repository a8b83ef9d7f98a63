//! Definitions of metrics: name, kind, unit, labels and help.

use std::fmt::Write;

/// How a family's values change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// They only grow. The name in Prometheus ends in `_total`.
    Counter,
    /// They go up and down.
    Gauge,
    /// Counts of observations by their size.
    Histogram,
}

/// A metric with all its label values. [`families!`](crate::families) defines them.
#[derive(Debug)]
pub struct Family {
    /// The name, without unit and `_total`.
    pub base: &'static str,
    /// How its values change.
    pub kind: Kind,
    /// The unit, which is a part of the name; empty if the value is a plain number or another project defined
    /// the name.
    pub unit: &'static str,
    /// What it means, in one line.
    pub help: &'static str,
    /// The names of its labels.
    pub labels: &'static [&'static str],
}

impl Family {
    /// The name in Prometheus. A histogram's series have a further suffix.
    pub fn name(&self) -> String {
        let unit = if self.unit.is_empty() { String::new() } else { format!("_{}", self.unit) };
        let total = if self.kind == Kind::Counter { "_total" } else { "" };
        format!("{}{unit}{total}", self.base)
    }

    /// The help text as one line.
    pub fn help(&self) -> &'static str {
        self.help.trim()
    }

    /// In what way this definition breaks Prometheus' conventions, if it does.
    pub fn fault(&self) -> Option<String> {
        let word = |text: &str, also: &str| {
            !text.is_empty()
                && !text.starts_with(|c: char| c.is_ascii_digit())
                && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || also.contains(c))
        };
        let own = self.base.starts_with("rgpu_");
        let fault = if !word(&self.base.replace(':', " "), "") {
            "the name is not one"
        } else if own && self.base.chars().any(|c| c.is_ascii_uppercase()) {
            "the name has capital letters"
        } else if ["_total", "_bytes", "_seconds", "_ratio", "_count", "_sum", "_bucket"]
            .iter()
            .any(|suffix| self.base.ends_with(suffix))
        {
            "the name ends in what the kind or the unit adds"
        } else if !["", "bytes", "seconds", "ratio"].contains(&self.unit) {
            "the unit is not a base unit"
        } else if !self.help().ends_with('.') || self.help().contains('\n') {
            "the help is not a sentence on one line"
        } else if self
            .labels
            .iter()
            .any(|label| !word(label, "") || label.starts_with("__") || *label == "le")
        {
            "a label's name is not one"
        } else {
            return None;
        };
        Some(format!("{}: {fault}", self.base))
    }
}

/// Defines a daemon's families as statics, and `ALL`, which lists them in this order. The comment becomes the
/// help text, which operators read.
///
/// ```
/// rgpu_metrics::families! {
///     /// Bytes that were sent.
///     SENT: Counter "rgpu_host_sent" ["bytes"] { "vm", "uid" };
///     /// Sessions that wait for a worker.
///     WAITING: Gauge "rgpu_server_sessions_waiting" { "kind" };
/// }
/// assert_eq!(SENT.name(), "rgpu_host_sent_bytes_total");
/// ```
#[macro_export]
macro_rules! families {
    ($($(#[doc = $help:literal])+ $name:ident: $kind:ident $base:literal $([$unit:literal])? { $($label:literal),* };)*) => {
        $(
            $(#[doc = $help])+
            pub static $name: $crate::Family = $crate::Family {
                base: $base,
                kind: $crate::Kind::$kind,
                unit: concat!($($unit)?),
                help: concat!($($help),+),
                labels: &[$($label),*],
            };
        )*

        /// All of them.
        pub static ALL: &[&$crate::Family] = &[$(&$name),*];
    };
}

/// The definitions as a table in Markdown.
pub fn table(families: &[&Family]) -> String {
    let mut out = String::from("| metric | type | labels | meaning |\n|---|---|---|---|\n");
    for family in families {
        let kind = match family.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        let (name, labels, help) = (family.name(), labels.join(", "), family.help().replace('|', "\\|"));
        // Writing to a string does not fail.
        let _ = writeln!(out, "| `{name}` | {kind} | {labels} | {help} |");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::families! {
        /// Bytes that were sent.
        SENT: Counter "rgpu_x_sent" ["bytes"] { "vm" };
        /// Temperature, under the name that others gave it.
        TEMPERATURE: Gauge "DCGM_FI_DEV_GPU_TEMP" {};
    }

    #[test]
    fn names_follow_from_kind_and_unit() {
        assert_eq!(SENT.name(), "rgpu_x_sent_bytes_total");
        assert_eq!(TEMPERATURE.name(), "DCGM_FI_DEV_GPU_TEMP");
        assert!(ALL.iter().all(|family| family.fault().is_none()));
        assert!(
            table(ALL).contains("| `rgpu_x_sent_bytes_total` | counter | `vm` | Bytes that were sent. |")
        );
    }

    #[test]
    fn broken_conventions_are_found() {
        let family = |base, unit, help| Family { base, kind: Kind::Gauge, unit, help, labels: &[] };
        for (base, unit, help) in [
            ("rgpu_Sent", "", "Sent."),
            ("rgpu_sent_bytes", "", "Sent."),
            ("rgpu_sent", "milliseconds", "Sent."),
            ("rgpu_sent", "", "sent"),
            ("rgpu-sent", "", "Sent."),
        ] {
            assert!(family(base, unit, help).fault().is_some(), "{base} {unit} {help}");
        }
    }
}
