//! The keys of servers and clients, and which keys each of them trusts.
//!
//! ```text
//!   client (host, VM, user)                       server
//!   key.pem, made by `rgpuctl join`   ◀─ pins ──  principals.json: name ─ fingerprint of the client's key
//!   servers.json: address ─ fingerprint ─ pins ─▶ key.pem, made at the first start
//! ```
//!
//! Connections use TLS 1.3, and both sides prove that they have their keys. Each side trusts the other by the
//! SHA-256 of its public key (a *pin*), or by a certificate of the operator's certification authority, if
//! there is one. A **principal** is the name under which the server knows a client; it never depends on what
//! the client says about itself.
//!
//! In reading order:
//! - [`fingerprint`]: the names of keys;
//! - [`key`]: a private key with its certificate, in files or in memory;
//! - [`authority`]: certificates of an authority;
//! - [`tls`]: rustls configurations for every connection;
//! - [`token`]: the text that `rgpuctl enroll` prints;
//! - [`principals`]: the clients that a server knows, and the tokens that it has issued;
//! - [`servers`]: the servers that a client knows;
//! - [`remote`]: a client's key in another process;
//! - [`files`]: reads and writes the files of all these.

pub mod authority;
pub mod files;
pub mod fingerprint;
pub mod key;
pub mod principals;
pub mod remote;
pub mod servers;
pub mod tls;
pub mod token;

pub use authority::Authority;
pub use fingerprint::Fingerprint;
pub use key::Identity;
pub use principals::Principals;
pub use servers::{ClientFiles, Credentials, Source};
pub use token::{Secret, Token};
