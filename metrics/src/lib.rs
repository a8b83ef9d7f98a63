//! The daemons' metrics for Prometheus.
//!
//! ```text
//!   a daemon's definitions (families!) ──▶ docs/metrics.md
//!            │
//!   scrape ──▶ serve ──▶ the daemon reads its counters ──▶ Samples ──▶ OpenMetrics text
//! ```
//!
//! Nothing here runs between scrapes: only a scrape makes a daemon read its counters, which it keeps anyway.
//!
//! - [`family`]: definitions of metrics, and [`families!`] for those of a daemon;
//! - [`samples`]: the values of one scrape;
//! - [`ledger`]: values by names that clients choose, limited in number;
//! - [`options`]: where to listen, and which token a scraper needs;
//! - [`serve`]: the HTTP listener.

pub mod family;
pub mod ledger;
pub mod options;
pub mod samples;
pub mod serve;

pub use family::{Family, Kind};
pub use ledger::{Key, Ledger};
pub use options::{Options, Place};
pub use prometheus_client::metrics::histogram::Histogram;
pub use samples::Samples;
