//! Memory that a session has imported from another one. It exists once, however many sessions have it, so
//! it counts for one of them only: for the session that shares it as long as it does, and then for one of
//! those that have it.
//!
//! All of them are granted it. Which of that counts for another session is in the daemon's memory only, so
//! that an import writes nothing. An upgrade hands it over. After a crash, the next daemon counts it for each
//! of them, which is too much, but never too little.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::cuda_ipc::MAX_OF_SESSION;
use crate::worker_protocol::Token;

/// What a session has imported.
#[derive(Debug, Default)]
pub(in crate::parent) struct Imports {
    all: HashMap<Token, Import>,
    /// By device: bytes that are granted to the session and count for another one.
    elsewhere: BTreeMap<u32, u64>,
}

/// Memory that it has imported.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(in crate::parent) struct Import {
    /// Number of its device.
    pub(in crate::parent) device: u32,
    /// Its size in bytes.
    pub(in crate::parent) bytes: u64,
    /// Whether it counts for another session.
    pub(in crate::parent) elsewhere: bool,
}

impl Imports {
    /// What the previous daemon knew.
    pub(in crate::parent) fn restore(all: Vec<(Token, Import)>) -> Imports {
        let mut imports = Imports::default();
        all.into_iter().for_each(|(token, import)| imports.add(token, import));
        imports
    }

    /// Whether memory can be noted. Otherwise it counts for the session.
    pub(in crate::parent) fn may_add(&self, token: &Token) -> bool {
        self.all.len() < MAX_OF_SESSION && !self.all.contains_key(token)
    }

    /// Notes memory that the session [may add](Self::may_add).
    pub(in crate::parent) fn add(&mut self, token: Token, import: Import) {
        if import.elsewhere {
            *self.elsewhere.entry(import.device).or_default() += import.bytes;
        }
        self.all.insert(token, import);
    }

    /// The session no longer has this memory. Returns what was known of it.
    pub(in crate::parent) fn remove(&mut self, token: &Token) -> Option<Import> {
        self.count_here(token);
        self.all.remove(token)
    }

    /// From now on, this memory counts for the session.
    pub(in crate::parent) fn count_here(&mut self, token: &Token) {
        if let Some(import) = self.all.get_mut(token).filter(|import| import.elsewhere)
            && let Some(bytes) = self.elsewhere.get_mut(&import.device)
        {
            import.elsewhere = false;
            *bytes -= import.bytes;
        }
    }

    /// What is known of this memory.
    pub(in crate::parent) fn get(&self, token: &Token) -> Option<&Import> {
        self.all.get(token)
    }

    /// The memory of these that the session has.
    pub(in crate::parent) fn among(&self, tokens: &HashSet<Token>) -> Vec<Token> {
        if tokens.len() < self.all.len() {
            tokens.iter().filter(|token| self.all.contains_key(*token)).copied().collect()
        } else {
            self.all.keys().filter(|token| tokens.contains(*token)).copied().collect()
        }
    }

    /// All of it.
    pub(in crate::parent) fn all(&self) -> impl Iterator<Item = (Token, Import)> + '_ {
        self.all.iter().map(|(token, import)| (*token, *import))
    }

    /// Bytes of a device that are granted to the session and count for another one.
    pub(in crate::parent) fn elsewhere(&self, device: u32) -> u64 {
        self.elsewhere.get(&device).copied().unwrap_or(0)
    }
}
