//! Options for where a daemon serves its metrics, and which token a scraper needs.

use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use thiserror::Error;

/// The same options for both daemons.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// Where to serve metrics to Prometheus: tcp:ADDRESS:PORT, which needs metrics.token_file, or unix:PATH.
    /// Not served by default
    #[arg(id = "metrics.listen", long = "metrics-listen", value_name = "ADDRESS")]
    pub listen: Option<Place>,
    /// File with the token required to read the metrics over tcp: 16 to 1024 printable characters. It must
    /// not be readable by everybody. Read again for each request. None by default
    #[arg(id = "metrics.token_file", long = "metrics-token-file", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

/// Where metrics are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// An address and a port of this machine.
    Tcp(String, u16),
    /// A Unix socket, whose permissions say who may read.
    Unix(PathBuf),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Tcp(host, port) if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Place::Tcp(host, port) => write!(f, "tcp:{host}:{port}"),
            Place::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Place, String> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Place::Unix(path.into()));
        }
        let tcp = || {
            let (host, port) = text.strip_prefix("tcp:")?.rsplit_once(':')?;
            let port: u16 = port.parse().ok()?;
            let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            // Without brackets, the end of an IPv6 address would be ambiguous.
            let host = bare.or((!host.contains(':')).then_some(host)).filter(|host| !host.is_empty())?;
            Some(Place::Tcp(host.to_owned(), port))
        };
        tcp().ok_or_else(|| format!("{text:?} is neither tcp:ADDRESS:PORT nor unix:PATH"))
    }
}

/// What is wrong with the options.
#[derive(Debug, Error)]
pub enum OptionsError {
    /// Anybody could read the metrics.
    #[error(
        "metrics.listen: {0} needs metrics.token_file, because anybody who reaches the port could read who runs what; make one with: (umask 077; openssl rand -hex 32 > FILE)"
    )]
    NoToken(Place),
    /// There is no token in the file.
    #[error("metrics.token_file: {}: {why}", path.display())]
    Token {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

impl Options {
    /// Checks that the metrics are not served to everyone by mistake.
    pub fn check(&self) -> Result<(), OptionsError> {
        match (&self.listen, &self.token_file) {
            (Some(place @ Place::Tcp(..)), None) => Err(OptionsError::NoToken(place.clone())),
            (_, Some(path)) => token(path).map(drop),
            _ => Ok(()),
        }
    }
}

/// Reads the token.
pub fn token(path: &Path) -> Result<String, OptionsError> {
    let wrong = |why: String| OptionsError::Token { path: path.to_owned(), why };
    let mode =
        std::fs::metadata(path).map_err(|e| wrong(format!("cannot be read: {e}")))?.permissions().mode();
    if mode & 0o007 != 0 {
        return Err(wrong(format!("everybody may open it (mode {:o}); chmod o= it", mode & 0o777)));
    }
    let text = std::fs::read_to_string(path).map_err(|e| wrong(format!("cannot be read: {e}")))?;
    let token = text.trim();
    if !(16..=1024).contains(&token.len()) || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(wrong("does not contain 16 to 1024 printable characters".into()));
    }
    Ok(token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_written() {
        for text in ["tcp:127.0.0.1:9720", "tcp:[::1]:9720", "tcp:localhost:0", "unix:/run/rgpu/metrics.sock"]
        {
            assert_eq!(text.parse::<Place>().map(|place| place.to_string()), Ok(text.to_owned()));
        }
        for text in
            ["", "unix:", "tcp:127.0.0.1", "tcp::9720", "tcp:::1:9720", "127.0.0.1:9720", "tcp:a:99999"]
        {
            assert!(text.parse::<Place>().is_err(), "{text}");
        }
    }

    #[test]
    fn metrics_are_not_served_over_tcp_without_a_secret_token() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let options = |listen: &str, token_file: Option<PathBuf>| Options {
            listen: Some(listen.parse().unwrap()),
            token_file,
        };
        let error = options("tcp:127.0.0.1:1", None).check().unwrap_err().to_string();
        assert!(error.contains("metrics.token_file") && error.contains("openssl"), "{error}");
        assert!(options("unix:/x", None).check().is_ok());
        assert!(options("tcp:127.0.0.1:1", Some(file.clone())).check().is_err(), "there is no file");
        std::fs::write(&file, "0123456789abcdef\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = options("tcp:127.0.0.1:1", Some(file.clone())).check().unwrap_err().to_string();
        assert!(error.contains("everybody may open it"), "{error}");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(options("tcp:127.0.0.1:1", Some(file.clone())).check().is_ok());
        assert_eq!(token(&file).unwrap(), "0123456789abcdef");
        std::fs::write(&file, "short").unwrap();
        assert!(token(&file).is_err());
    }
}
