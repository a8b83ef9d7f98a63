//! What a client asks a server that needs no session: what GPUs there are, and leases of them.
//!
//! A [`Question`] is JSON behind the hello of a connection of its own
//! ([`purpose::ASK`](protocol::link::purpose::ASK)), and its [`Answer`] is JSON in a frame behind the
//! welcome. Who asks is known as for a session: by its key, or by its user on the same machine. What cannot
//! be had is refused in the welcome.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Most GPUs that a lease has.
pub const MAX_GPUS: usize = protocol::link::MAX_DEVICE_LIST;
/// Most bytes of a lease's name, and of the part of a GPU's name that is asked for.
pub const MAX_NAME: usize = 64;

/// A question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Question {
    /// Which GPUs are there, and how busy are they?
    Inventory {},
    /// The leases that the client has.
    Leases {},
    /// A new lease.
    Lease(Wish),
    /// The lease with this key begins its time anew.
    Renew {
        /// The key, as text.
        key: String,
    },
    /// The lease with this key ends.
    Release {
        /// The key, as text.
        key: String,
    },
}

/// A lease that a client would like to have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wish {
    /// How many GPUs.
    pub gpus: u32,
    /// The server's numbers of the GPUs from which they are to be. Empty: any.
    #[serde(default)]
    pub devices: Vec<u32>,
    /// What their name has in it, in whatever case. Empty: anything.
    #[serde(default)]
    pub model: String,
    /// Whether nobody else is to use them.
    #[serde(default)]
    pub exclusive: bool,
    /// Bytes of memory on each GPU. 0: what the server's rules give the client.
    #[serde(default)]
    pub memory: u64,
    /// Its share of the GPUs' time while others want it, too. 0: what the server's rules give the client.
    #[serde(default)]
    pub weight: u32,
    /// Seconds until it ends unless it is renewed.
    pub seconds: u64,
    /// What lists call it.
    #[serde(default)]
    pub name: String,
}

/// Why a question is none.
#[derive(Debug, Error)]
pub enum QuestionError {
    /// It is no JSON, or has other fields than a question has.
    #[error("the question is not one: {0}")]
    Form(#[from] serde_json::Error),
    /// A value that no server takes.
    #[error("{0}")]
    Value(String),
}

impl Question {
    /// Reads what a client has sent, which may be anything.
    ///
    /// # Errors
    /// If it is no question, or names what there cannot be.
    pub fn parse(bytes: &[u8]) -> Result<Question, QuestionError> {
        let question: Question = serde_json::from_slice(bytes)?;
        if let Question::Lease(wish) = &question {
            wish.check().map_err(QuestionError::Value)?;
        }
        Ok(question)
    }

    /// The question as it is sent.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Only maps with keys that are not text could fail.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

impl Wish {
    fn check(&self) -> Result<(), String> {
        let Wish { gpus, devices, model, seconds, name, .. } = self;
        if !(1..=MAX_GPUS).contains(&(*gpus as usize)) {
            return Err(format!("a lease of {gpus} GPUs: it can have 1 to {MAX_GPUS}"));
        }
        if devices.len() > MAX_GPUS {
            return Err(format!("a lease from {} GPUs: at most {MAX_GPUS} can be named", devices.len()));
        }
        if *seconds == 0 {
            return Err("a lease of 0 seconds".into());
        }
        for text in [model, name] {
            if text.len() > MAX_NAME || text.chars().any(char::is_control) {
                return Err(format!("a name of more than {MAX_NAME} bytes, or with control characters"));
            }
        }
        Ok(())
    }
}

/// What a server answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// Its GPUs.
    Inventory(Vec<Gpu>),
    /// The client's leases.
    Leases(Vec<Lease>),
    /// A lease that was granted or renewed.
    Lease {
        /// What it is.
        lease: Lease,
        /// The key, as text. Sessions show it, and whoever renews or releases the lease.
        key: String,
    },
    /// The lease has ended.
    Released {
        /// Sessions that ended with it.
        sessions: usize,
    },
}

/// A GPU of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// The server's number of it.
    pub gpu: u32,
    /// Its name.
    pub model: String,
    /// Why it takes no sessions, if it does not.
    pub unhealthy: Option<String>,
    /// Bytes of its memory, if known.
    pub memory: Option<u64>,
    /// Free bytes of it, if known.
    pub memory_free: Option<u64>,
    /// Bytes that leases without exclusive use were promised.
    pub memory_leased: u64,
    /// Sessions that use it.
    pub sessions: u32,
    /// Leases that have it.
    pub leases: u32,
    /// Whether somebody has it exclusively.
    pub exclusive: bool,
    /// Percent of the time in which a kernel ran a moment ago, if known.
    pub utilization: Option<u32>,
}

/// A lease, as lists show it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// What the server calls it.
    pub id: String,
    /// Whose it is.
    pub principal: String,
    /// What its owner calls it.
    pub name: String,
    /// The server's numbers of its GPUs.
    pub devices: Vec<u32>,
    /// Whether nobody else uses them.
    pub exclusive: bool,
    /// Bytes of memory on each; 0: no limit.
    pub memory: u64,
    /// Its share of their time.
    pub weight: u32,
    /// Seconds since it was granted.
    pub seconds: u64,
    /// Seconds until it ends unless it is renewed.
    pub seconds_left: u64,
    /// Sessions that run under it.
    pub sessions: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wish() -> impl Strategy<Value = Wish> {
        let devices = proptest::collection::vec(any::<u32>(), 0..=MAX_GPUS);
        let flags = (any::<bool>(), any::<u64>(), any::<u32>(), 1u64..);
        ((1u32..=MAX_GPUS as u32, devices), "[A-Z0-9 -]{0,20}", flags, "[a-z0-9-]{0,20}").prop_map(
            |((gpus, devices), model, (exclusive, memory, weight, seconds), name)| Wish {
                gpus,
                devices,
                model,
                exclusive,
                memory,
                weight,
                seconds,
                name,
            },
        )
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_or_understood(bytes in proptest::collection::vec(any::<u8>(), 0..500)) {
            let _ = Question::parse(&bytes);
        }

        #[test]
        fn a_question_arrives_as_it_was_asked(wish in wish()) {
            let question = Question::Lease(wish);
            prop_assert_eq!(Question::parse(&question.to_bytes()).unwrap(), question);
        }

        #[test]
        fn a_question_with_a_byte_changed_is_refused_or_within_the_limits(wish in wish(), at in any::<prop::sample::Index>(), byte: u8) {
            let mut bytes = Question::Lease(wish).to_bytes();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(Question::Lease(wish)) = Question::parse(&bytes) {
                prop_assert!(wish.check().is_ok());
            }
        }
    }

    #[test]
    fn values_that_no_server_takes_are_refused_with_the_reason() {
        let good = Wish { gpus: 1, seconds: 60, ..Wish::default() };
        let named = |name: &str| Wish { name: name.into(), ..good.clone() };
        for (wish, words) in [
            (Wish { gpus: 0, ..good.clone() }, "0 GPUs"),
            (Wish { gpus: 33, ..good.clone() }, "1 to 32"),
            (Wish { seconds: 0, ..good.clone() }, "0 seconds"),
            (Wish { devices: vec![0; 33], ..good.clone() }, "33 GPUs"),
            (named(&"x".repeat(65)), "64 bytes"),
            (named("a\nb"), "control characters"),
        ] {
            let error = Question::parse(&Question::Lease(wish).to_bytes()).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        for text in ["{}", "{\"lease\":{\"gpus\":1}}", "{\"inventory\":{\"x\":1}}", "{\"inventory\":{}} {}"] {
            assert!(Question::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
