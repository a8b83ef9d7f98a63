//! The clients that a server knows, and the tokens that it has issued: `principals.json` in the server's
//! identity folder, which only the daemon writes.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::files::{self, FileError};
use crate::fingerprint::Fingerprint;
use crate::token::Secret;

/// The file, in the identity folder.
const FILE: &str = "principals.json";
/// Maximum number of unused tokens.
const MAX_TOKENS: usize = 1024;

/// Checks the name of a principal: 1 to 63 letters, digits, `-`, `_` and `.`. Names that the server itself
/// makes contain a `:`, so no client can get such a name.
pub fn check_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 63 || !name.chars().all(fits) {
        return Err(format!("{name:?} is not a name: 1 to 63 letters, digits, '-', '_' and '.'"));
    }
    Ok(())
}

/// A client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// The principal's name.
    pub name: String,
    /// Its key.
    pub key: Fingerprint,
    /// When it joined, in seconds since 1970.
    pub since: u64,
    /// The token with which it joined. A client that has not heard the answer shows it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    redeemed: Option<Offer>,
}

/// A token that was issued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The name that the client gets.
    pub name: String,
    /// The hash of its secret.
    secret: Fingerprint,
    /// When it expires, in seconds since 1970.
    pub expires: u64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    clients: Vec<Client>,
    tokens: Vec<Offer>,
}

/// Why a client did not become a principal.
#[derive(Debug, Error)]
pub enum JoinError {
    /// No token has this secret.
    #[error(
        "the server does not know this token: it was used already, has expired, or was made by another server; make a new one with rgpuctl enroll"
    )]
    Unknown,
    /// The key belongs to another principal.
    #[error("this client's key is known already, as {0:?}: revoke that name first, or use another key")]
    Taken(String),
    /// The list cannot be written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Why a token was not issued.
#[derive(Debug, Error)]
pub enum EnrollError {
    /// The name is invalid.
    #[error("{0}")]
    Name(String),
    /// Too many tokens are unused.
    #[error("{MAX_TOKENS} tokens are unused: wait until some expire, or revoke their names")]
    TooMany,
    /// The system provides no random numbers.
    #[error("cannot make a token")]
    Random(#[source] std::io::Error),
    /// The list cannot be written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// The list.
#[derive(Debug, Clone)]
pub struct Principals {
    path: PathBuf,
    stored: Stored,
}

/// The time, in seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Principals {
    /// Reads the list in `folder`. If there is none, the server knows no clients.
    pub fn open(folder: &Path) -> Result<Principals, FileError> {
        let path = folder.join(FILE);
        let stored = match files::read(&path)? {
            Some(text) => {
                serde_json::from_slice(&text).map_err(|e| FileError::content(&path, e.to_string()))?
            }
            None => Stored::default(),
        };
        Ok(Principals { path, stored })
    }

    /// Writes `stored` to the file, and uses it once it is written.
    fn store(&mut self, stored: Stored) -> Result<(), FileError> {
        let text =
            serde_json::to_vec_pretty(&stored).map_err(|e| FileError::content(&self.path, e.to_string()))?;
        files::replace(&self.path, &text)?;
        self.stored = stored;
        Ok(())
    }

    fn copy(&self, now: u64) -> Stored {
        let tokens = self.stored.tokens.iter().filter(|offer| offer.expires > now).cloned().collect();
        Stored { clients: self.stored.clients.clone(), tokens }
    }

    /// Issues a token for `name` and returns its secret, which works once, within the time `valid`.
    pub fn enroll(&mut self, name: &str, now: u64, valid: Duration) -> Result<Secret, EnrollError> {
        check_name(name).map_err(EnrollError::Name)?;
        let secret = Secret::random().map_err(EnrollError::Random)?;
        let mut stored = self.copy(now);
        if stored.tokens.len() >= MAX_TOKENS {
            return Err(EnrollError::TooMany);
        }
        let expires = now.saturating_add(valid.as_secs());
        stored.tokens.push(Offer { name: name.to_owned(), secret: secret.hash(), expires });
        self.store(stored)?;
        Ok(secret)
    }

    /// Redeems a token: the client's key becomes the principal's. It replaces an earlier key of the same
    /// name. The same key may redeem its token again until that expires, as the answer may have been lost.
    pub fn join(&mut self, secret: &Secret, key: Fingerprint, now: u64) -> Result<String, JoinError> {
        let hash = secret.hash();
        let again = |client: &&Client| {
            let redeemed = client.redeemed.as_ref().filter(|offer| offer.expires > now);
            client.key.matches(&key) && redeemed.is_some_and(|offer| offer.secret.matches(&hash))
        };
        if let Some(client) = self.stored.clients.iter().find(again) {
            return Ok(client.name.clone());
        }
        let mut stored = self.copy(now);
        // Compares all tokens, so that the time does not reveal which one matches.
        let found: Vec<usize> =
            (0..stored.tokens.len()).filter(|at| stored.tokens[*at].secret.matches(&hash)).collect();
        let Some(at) = found.first() else { return Err(JoinError::Unknown) };
        let name = stored.tokens[*at].name.clone();
        if let Some(other) = self.find(&key).filter(|other| *other != name) {
            return Err(JoinError::Taken(other.to_owned()));
        }
        let redeemed = Some(stored.tokens.remove(*at));
        stored.clients.retain(|client| client.name != name);
        stored.clients.push(Client { name: name.clone(), key, since: now, redeemed });
        self.store(stored)?;
        Ok(name)
    }

    /// Removes a name and its tokens. Returns false if there is no such name.
    pub fn revoke(&mut self, name: &str) -> Result<bool, FileError> {
        let mut stored = self.copy(0);
        let before = stored.clients.len() + stored.tokens.len();
        stored.clients.retain(|client| client.name != name);
        stored.tokens.retain(|offer| offer.name != name);
        if stored.clients.len() + stored.tokens.len() == before {
            return Ok(false);
        }
        self.store(stored).map(|()| true)
    }

    /// The name that has this key.
    pub fn find(&self, key: &Fingerprint) -> Option<&str> {
        self.stored.clients.iter().find(|client| client.key.matches(key)).map(|client| client.name.as_str())
    }

    /// All clients.
    pub fn clients(&self) -> &[Client] {
        &self.stored.clients
    }

    /// The tokens that can be used.
    pub fn tokens(&self, now: u64) -> impl Iterator<Item = &Offer> {
        self.stored.tokens.iter().filter(move |offer| offer.expires > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn key(n: u8) -> Fingerprint {
        Fingerprint([n; 32])
    }

    #[test]
    fn a_token_works_once_before_it_expires_and_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let mut all = Principals::open(folder.path()).unwrap();
        let secret = all.enroll("host1", 1000, HOUR).unwrap();
        let late = all.enroll("host2", 1000, HOUR).unwrap();
        let mut all = Principals::open(folder.path()).unwrap();
        assert!(matches!(all.join(&Secret([1; 32]), key(1), 1001), Err(JoinError::Unknown)));
        assert_eq!(all.join(&secret, key(1), 1001).unwrap(), "host1");
        assert!(matches!(all.join(&secret, key(2), 1002), Err(JoinError::Unknown)));
        assert!(matches!(all.join(&late, key(2), 1000 + 3600), Err(JoinError::Unknown)));
        let all = Principals::open(folder.path()).unwrap();
        assert_eq!((all.find(&key(1)), all.find(&key(2))), (Some("host1"), None));
        let text = std::fs::read_to_string(folder.path().join(FILE)).unwrap();
        assert!(!text.contains(&Fingerprint(secret.0).to_string()), "the secret itself is not stored");
    }

    #[test]
    fn who_has_not_heard_that_it_joined_may_join_again_and_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        let mut all = Principals::open(folder.path()).unwrap();
        let secret = all.enroll("host1", 1000, HOUR).unwrap();
        all.join(&secret, key(1), 1001).unwrap();
        let mut all = Principals::open(folder.path()).unwrap();
        assert_eq!(all.join(&secret, key(1), 1002).unwrap(), "host1");
        assert_eq!(all.clients().len(), 1);
        assert!(matches!(all.join(&secret, key(2), 1003), Err(JoinError::Unknown)));
        assert!(matches!(all.join(&secret, key(1), 1000 + 3600), Err(JoinError::Unknown)));
        // Not after its name was revoked, or has another key.
        let next = all.enroll("host1", 1000, HOUR).unwrap();
        all.join(&next, key(2), 1004).unwrap();
        assert!(matches!(all.join(&secret, key(1), 1005), Err(JoinError::Unknown)));
        all.revoke("host1").unwrap();
        assert!(matches!(all.join(&next, key(2), 1006), Err(JoinError::Unknown)));
    }

    #[test]
    fn a_new_key_replaces_the_old_one_and_no_two_names_share_a_key() {
        let folder = tempfile::tempdir().unwrap();
        let mut all = Principals::open(folder.path()).unwrap();
        for n in [1, 2] {
            let secret = all.enroll("host1", 0, HOUR).unwrap();
            all.join(&secret, key(n), 1).unwrap();
        }
        assert_eq!((all.find(&key(1)), all.find(&key(2))), (None, Some("host1")));
        let secret = all.enroll("host2", 0, HOUR).unwrap();
        assert!(matches!(all.join(&secret, key(2), 1), Err(JoinError::Taken(name)) if name == "host1"));
        assert_eq!(all.join(&secret, key(3), 1).unwrap(), "host2");
    }

    #[test]
    fn a_revoked_name_is_forgotten_with_its_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let mut all = Principals::open(folder.path()).unwrap();
        let secret = all.enroll("host1", now(), HOUR).unwrap();
        all.join(&secret, key(1), now()).unwrap();
        let secret = all.enroll("host1", now(), HOUR).unwrap();
        assert!(all.revoke("host1").unwrap() && !all.revoke("host1").unwrap());
        assert_eq!(all.find(&key(1)), None);
        assert!(matches!(all.join(&secret, key(1), now()), Err(JoinError::Unknown)));
    }

    #[test]
    fn names_that_could_be_mistaken_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut all = Principals::open(folder.path()).unwrap();
        for name in ["", "uid:0", "a b", "ä", "a/b", &"x".repeat(64)] {
            assert!(matches!(all.enroll(name, 0, HOUR), Err(EnrollError::Name(_))), "{name}");
        }
    }

    #[test]
    fn a_damaged_list_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), "{\"clients\": []").unwrap();
        assert!(Principals::open(folder.path()).unwrap_err().to_string().contains("principals.json"));
    }
}
