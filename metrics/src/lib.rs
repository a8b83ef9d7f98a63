//! What the daemons count, as Prometheus reads it.
//!
//! ```text
//!   a daemon's definitions (families!) ──▶ docs/metrics.md
//!            │
//!   scrape ──▶ serve ──▶ the daemon reads its counters ──▶ Samples ──▶ OpenMetrics text
//! ```
//!
//! Nothing here runs between scrapes: a daemon reads the counters that it keeps anyway when somebody asks.
//!
//! - [`family`]: what a metric is called and means, and the [`families!`] that define a daemon's;
//! - [`samples`]: the values of one scrape;
//! - [`ledger`]: values by names that clients choose, in bounded number;
//! - [`options`]: where to listen, and who may scrape;
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
