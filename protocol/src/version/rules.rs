//! Versions, and how two peers agree on one. The [module above](super) has the rules.

use std::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A version of the wire. In frames and structures it is two `u16`s, the major number first.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Version {
    /// Peers with different major numbers do not talk to each other.
    pub major: u16,
    /// Counts what was added since `major.0`.
    pub minor: u16,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What a peer can speak: its own version and every older one with the same major number.
#[derive(Debug, Clone, Copy)]
pub struct Speaks<'a> {
    pub(super) version: Version,
    /// For each minor number up to the version's.
    pub(super) fingerprints: &'a [u64],
}

impl<'a> Speaks<'a> {
    /// A peer that speaks `major.0` and as many further minor versions as there are fingerprints after the
    /// first.
    pub const fn new(major: u16, fingerprints: &'a [u64]) -> Speaks<'a> {
        Speaks { version: Version { major, minor: (fingerprints.len() - 1) as u16 }, fingerprints }
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The fingerprint of its version.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprints[usize::from(self.version.minor)]
    }

    /// The same peer, limited to this version: a relay that speaks for a client of this version.
    #[must_use]
    pub fn at_most(self, version: Version) -> Speaks<'a> {
        let Version { major, minor } = self.version;
        let minor = if version.major == major { minor.min(version.minor) } else { minor };
        Speaks { version: Version { major, minor }, ..self }
    }

    /// Checks what a peer has announced. Returns the version that the two speak.
    ///
    /// # Errors
    /// [`Mismatch`] if they cannot talk to each other.
    pub fn agree(&self, theirs: Version, fingerprint: u64) -> Result<Version, Mismatch> {
        self.check_major(theirs)?;
        match self.fingerprints.get(usize::from(theirs.minor)) {
            // The newer peer compares.
            _ if theirs.minor > self.version.minor => Ok(self.version),
            Some(known) if *known == fingerprint => Ok(theirs),
            known => {
                let ours = known.copied().unwrap_or_default();
                Err(Mismatch { ours: self.version, theirs, fingerprints: Some((ours, fingerprint)) })
            }
        }
    }

    /// The checks of [`agree`](Self::agree) that need no fingerprint.
    ///
    /// # Errors
    /// [`Mismatch`] if the peer has another major version.
    pub fn check_major(&self, theirs: Version) -> Result<(), Mismatch> {
        if theirs.major == self.version.major {
            Ok(())
        } else {
            Err(Mismatch { ours: self.version, theirs, fingerprints: None })
        }
    }
}

/// Why two peers cannot talk to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    /// The version of the peer that noticed.
    pub ours: Version,
    /// The other's version.
    pub theirs: Version,
    /// The fingerprints of version `theirs` that the noticing peer and the other one have, if these differ.
    pub fingerprints: Option<(u64, u64)>,
}

impl Mismatch {
    /// The message for the user. `they` and `we` name the peers and end in "speak" or "speaks", as in "the
    /// client speaks".
    pub fn describe(&self, they: &str, we: &str) -> String {
        let Mismatch { ours, theirs, fingerprints } = self;
        match fingerprints {
            None => format!(
                "{they} version {theirs} of rgpu, {we} version {ours}: install the same release on both"
            ),
            Some((known, said)) => format!(
                "{they} version {theirs} of rgpu, {we} version {ours}, but they were built from different sources \
                 (fingerprints {said:016x} and {known:016x}): install the same release on both"
            ),
        }
    }
}
