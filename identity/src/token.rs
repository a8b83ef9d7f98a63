//! The text that `rgpuctl enroll` prints and `rgpuctl join` takes.
//!
//! It contains everything that the other machine needs: the server's addresses, the fingerprint of its key,
//! and a secret that the server accepts once. Anyone who reads a token before it is used can join with it; a
//! used token is worthless.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::{SecureRandom, SystemRandom};
use subtle::ConstantTimeEq;
use thiserror::Error;

use crate::fingerprint::Fingerprint;

/// The beginning of every token. A later format will have another number.
const PREFIX: &str = "rgpu1-";
/// Bytes of the checksum at the end, which detects typing errors and cut tokens.
const CHECK: usize = 4;
/// Maximum bytes of a token's text.
const MAX_TEXT: usize = 4096;

/// Maximum bytes of a token's addresses, with one between any two. A terminal takes no line of more than 4095
/// characters, and [`MAX_TEXT`] is no more.
pub const MAX_ADDRESSES: usize = 2048;

/// A secret of 32 random bytes. It is neither printed nor logged.
#[derive(Clone, Copy)]
pub struct Secret(pub [u8; 32]);

impl Secret {
    /// A new random secret.
    pub fn random() -> std::io::Result<Secret> {
        let mut bytes = [0; 32];
        SystemRandom::new()
            .fill(&mut bytes)
            .map_err(|_| std::io::Error::other("the system gives no random numbers"))?;
        Ok(Secret(bytes))
    }

    /// Compares both, in a time that does not depend on where they differ.
    pub fn matches(&self, other: &[u8; 32]) -> bool {
        self.0.ct_eq(other).into()
    }

    /// The secret as text: 64 hexadecimal digits.
    pub fn to_text(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The secret from the text of [`to_text`](Self::to_text).
    pub fn from_text(text: &str) -> Option<Secret> {
        if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        let mut bytes = [0; 32];
        for (place, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * place..2 * place + 2], 16).ok()?;
        }
        Some(Secret(bytes))
    }

    /// Its hash, which is all that a server stores.
    pub fn hash(&self) -> Fingerprint {
        Fingerprint::hash(&self.0)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// An invitation to a server.
#[derive(Debug, Clone)]
pub struct Token {
    /// The fingerprint of the server's key.
    pub server: Fingerprint,
    /// The secret by which the server recognizes the client.
    pub secret: Secret,
    /// Addresses of the server: `tcp:HOST:PORT`, to try in this order.
    pub addresses: Vec<String>,
}

impl Token {
    /// How many of these addresses a token has room for.
    pub fn room_for(addresses: &[String]) -> usize {
        let mut bytes = 0;
        let fits = |address: &&String| {
            bytes += address.len() + 1;
            bytes <= MAX_ADDRESSES + 1
        };
        addresses.iter().take_while(fits).count()
    }
}

/// Why a text is not a token.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TokenError {
    /// It does not look like a token.
    #[error("this is not a token of rgpuctl enroll, which begins with {PREFIX}")]
    Other,
    /// It is damaged.
    #[error("the token is damaged or incomplete: copy it again, all of it")]
    Damaged,
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = [&self.server.0[..], &self.secret.0, self.addresses.join("\n").as_bytes()].concat();
        let check = Fingerprint::hash(&bytes);
        bytes.extend_from_slice(&check.0[..CHECK]);
        write!(f, "{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Token, TokenError> {
        let text = text.trim();
        let body = text.strip_prefix(PREFIX).ok_or(TokenError::Other)?;
        if body.len() > MAX_TEXT {
            return Err(TokenError::Damaged);
        }
        let bytes = URL_SAFE_NO_PAD.decode(body).map_err(|_| TokenError::Damaged)?;
        let (content, check) = bytes.split_last_chunk::<CHECK>().ok_or(TokenError::Damaged)?;
        if Fingerprint::hash(content).0[..CHECK] != check[..] {
            return Err(TokenError::Damaged);
        }
        let (server, rest) = content.split_first_chunk::<32>().ok_or(TokenError::Damaged)?;
        let (secret, addresses) = rest.split_first_chunk::<32>().ok_or(TokenError::Damaged)?;
        let addresses = str::from_utf8(addresses).map_err(|_| TokenError::Damaged)?;
        Ok(Token {
            server: Fingerprint(*server),
            secret: Secret(*secret),
            addresses: addresses.split('\n').filter(|a| !a.is_empty()).map(str::to_owned).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_token_reads_back_as_written(
            server in any::<[u8; 32]>(), secret in any::<[u8; 32]>(),
            addresses in proptest::collection::vec("tcp:[a-z0-9.]{1,20}:[0-9]{1,5}", 0..5),
        ) {
            let token = Token { server: Fingerprint(server), secret: Secret(secret), addresses };
            let back: Token = format!(" {token}\n").parse().unwrap();
            prop_assert!(back.server == token.server && back.secret.matches(&secret));
            prop_assert_eq!(back.addresses, token.addresses);
        }

        #[test]
        fn no_text_is_a_panic(text in "\\PC{0,200}") {
            prop_assert!(text.parse::<Token>().is_err());
            let prefixed = format!("{PREFIX}{text}");
            prop_assert!(prefixed.parse::<Token>().is_err());
        }

        #[test]
        fn a_changed_or_cut_token_is_damaged(at in 0usize..100, cut: bool) {
            let token = Token { server: Fingerprint([3; 32]), secret: Secret([5; 32]), addresses: vec!["tcp:a:1".into()] };
            let mut text = token.to_string().into_bytes();
            let at = PREFIX.len() + at % (text.len() - PREFIX.len());
            if cut {
                text.truncate(at);
            } else {
                text[at] = if text[at] == b'A' { b'B' } else { b'A' };
            }
            prop_assert_eq!(String::from_utf8(text).unwrap().parse::<Token>().unwrap_err(), TokenError::Damaged);
        }
    }

    #[test]
    fn a_token_with_all_addresses_that_there_is_room_for_reads_back() {
        for address in ["10.0.0.1:9700", "[2001:db8:85a3:8d3:1319:8a2e:370:7348]:9700", "a"] {
            let all = vec![format!("tcp:{address}"); 3000];
            let room = Token::room_for(&all);
            assert!((1..3000).contains(&room) && Token::room_for(&all[..room]) == room);
            let token = Token {
                server: Fingerprint([3; 32]),
                secret: Secret([5; 32]),
                addresses: all[..room].to_vec(),
            };
            let text = token.to_string();
            assert!(text.len() < 4095, "{} characters", text.len());
            assert_eq!(text.parse::<Token>().unwrap().addresses.len(), room);
        }
    }

    #[test]
    fn a_secret_is_not_printed() {
        assert_eq!(format!("{:?}", Secret([77; 32])), "Secret(…)");
    }
}
