//! Who is who: the keys of servers and clients, and whom each of them trusts.
//!
//! ```text
//!   client (host, VM, user)                       server
//!   key.pem, made by `rgpuctl join`   ◀─ pins ──  principals.json: name ─ fingerprint of the client's key
//!   servers.json: address ─ fingerprint ─ pins ─▶ key.pem, made at the first start
//! ```
//!
//! A connection is TLS 1.3, and both sides prove that they have their keys. Whom to trust is decided by the SHA-256 of the other's public key (a *pin*), or by certificates of a certification
//! authority if the operator has one. A **principal** is the name that the server knows a client by: nothing that the client says about itself counts.
//!
//! In reading order:
//! - [`fingerprint`]: names of keys;
//! - [`key`]: a private key with its certificate, in files or in memory;
//! - [`authority`]: certificates of an authority;
//! - [`tls`]: rustls configurations for every connection;
//! - [`token`]: the text that `rgpuctl enroll` prints;
//! - [`principals`]: the clients that a server knows, and the tokens that it has given out;
//! - [`servers`]: the servers that a client knows;
//! - [`remote`]: a client's key that another process has;
//! - [`files`]: how these are written.

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
