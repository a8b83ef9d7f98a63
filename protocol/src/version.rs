//! Which version of the wire two peers speak.
//!
//! Every connection begins with both peers' [`Version`] and the fingerprint of that version: a hash of the
//! operations table, of the structures and numbers of the link, and of the channel's header, computed when a
//! peer was compiled. The rules:
//!
//! - **Another major version is refused**, with an error that names both versions.
//! - **An older minor version is served.** The session speaks the older peer's version: the newer peer omits
//!   what the older one lacks, that is, everything that the table marks with a later `since`. A client
//!   library answers a call for which that leaves no operation with `CUDA_ERROR_NOT_SUPPORTED`.
//! - **The newer peer compares fingerprints**, since it alone knows both versions; peers of equal version
//!   both do. A difference means that the two were built from different sources, and is refused.
//!
//! The wire only grows. An entry never changes in place and no number is used twice: a change is a new
//! opcode, a new kind of frame or a new structure, with the next minor version as its `since`. The snapshot
//! `protocol/wire.txt` holds every entry, and a test compares it with the source.
//!
//! Until the version is frozen ([`FROZEN`]), an entry may be changed deliberately: the fingerprint keeps
//! builds of different dates apart.

pub mod rules;

pub use self::rules::{Mismatch, Speaks, Version};
use crate::schema::{Hash, Layout, Number, Numbers};
use crate::{channel, data, device, link, native, ops};

/// The version of this build.
pub const VERSION: Version = Version { major: 2, minor: 8 };

/// Whether the entries of [`VERSION`] may no longer change. See the module's documentation.
pub const FROZEN: bool = false;

/// The structures that peers exchange as they lie in memory.
pub const LAYOUTS: &[&[Layout]] = &[link::LAYOUTS, channel::LAYOUTS, native::LAYOUTS, device::SHARED_LAYOUTS];

/// The numbers that peers agree on.
pub const NUMBERS: &[&[Numbers]] = &[
    link::NUMBERS,
    device::NUMBERS,
    data::NUMBERS,
    &[device::Answer::NUMBERS, channel::State::NUMBERS, channel::SlotState::NUMBERS, LIMITS],
];

macro_rules! limits {
    ($($module:ident $(:: $rest:ident)+ $(since $since:literal)?),* $(,)?) => {
        Numbers {
            name: "limits",
            values: &[$(Number {
                name: concat!(stringify!($module) $(, "::", stringify!($rest))+),
                value: crate::$module $(:: $rest)+ as u64,
                since: 0 $(+ $since)?,
            }),*],
        }
    };
}

/// Sizes, limits and addresses that both peers have compiled in. A constant that a later minor version adds
/// is marked: `link::NEW since 1`.
const LIMITS: Numbers = limits! {
    channel::MAGIC, channel::RECORD_HEADER, channel::MAX_RECORD, channel::NO_SLOT, channel::PAD, channel::SLOT_SIZE,
    channel::MAX_PAYLOAD, channel::PROGRESS_SIZE, channel::MAX_DEVICES, channel::MAX_CONTEXTS, channel::MAX_STREAMS,
    channel::REASON_SIZE, channel::MAX_SERVERS, channel::SERVER_NAME_SIZE, link::MAX_DEVICE_LIST, link::MAGIC, link::MAX_FRAME, link::MAX_DATA, link::EAGER_PIECE, link::EAGER, link::MAX_QUESTION,
    link::EAGER_FLAG, link::ATTACH_FUTEX, link::ATTACH_SUCCESSION, link::REGION_OWN_MEMORY, link::REGION_READ_ONLY, link::MAX_QUEUES,
    link::GRANTED_SLOTS, link::COMMANDS_AHEAD, link::SLOT_DATA, link::ARENA_KEY, native::MAGIC,
    device::REGISTER_READ_ONLY, ops::memory::FIRST_WINDOW, ops::memory::WINDOW_SIZE, ops::memory::DEVICE_PART,
    ops::memory::SPACE, ops::memory::SPACE_SIZE, ops::memory::SPACE_ALIGN, ops::memory::MOST_PATCHES,
    ops::memory::MIRROR_PAGE, ops::stream::memory_op::MOST, ops::array::MOST, ops::green::MAX_GROUPS,
    ops::nvml::MAX_OUTPUT, ops::nvml::FIELD_SIZE, ops::nvml::MAX_FIELDS, link::COMPRESSED_FLAG since 1,
    link::DIRECT_VERBS since 2, ops::memory::MOST_REMEMBERED since 4,
    ops::memory::MOST_REMEMBERED_BYTES since 4, ops::memory::MOST_CHANGES since 4,
    ops::nvml::MOST_PROCESSES since 8, ops::memory::WATCH_TELLS since 8,
};

/// The fingerprint of `VERSION.major` with this minor number, as this build knows it.
const fn fingerprint(minor: u16) -> u64 {
    let mut hash = Hash::new().number(VERSION.major as u64).number(minor as u64);
    let mut group = 0;
    while group < ops::CHAPTERS.len() {
        let rows = ops::CHAPTERS[group];
        let mut at = 0;
        while at < rows.len() {
            if rows[at].since <= minor {
                hash = rows[at].hash(hash);
            }
            at += 1;
        }
        group += 1;
    }
    let mut at = 0;
    while at < ops::DATA_SHAPES.len() {
        let (since, shape) = &ops::DATA_SHAPES[at];
        if *since <= minor {
            hash = hash.fields(shape.fields());
        }
        at += 1;
    }
    let mut at = 0;
    while at < ops::nvml::QUERIES.len() {
        if ops::nvml::QUERIES[at].since <= minor {
            hash = ops::nvml::QUERIES[at].hash(hash);
        }
        at += 1;
    }
    let mut group = 0;
    while group < LAYOUTS.len() {
        let mut at = 0;
        while at < LAYOUTS[group].len() {
            if LAYOUTS[group][at].since <= minor {
                hash = hash.layout(&LAYOUTS[group][at]);
            }
            at += 1;
        }
        group += 1;
    }
    let mut group = 0;
    while group < NUMBERS.len() {
        let mut at = 0;
        while at < NUMBERS[group].len() {
            hash = hash.numbers(&NUMBERS[group][at], minor);
            at += 1;
        }
        group += 1;
    }
    hash.finish()
}

/// The fingerprints of all minor versions that this build can speak.
static FINGERPRINTS: [u64; VERSION.minor as usize + 1] = {
    let mut all = [0; VERSION.minor as usize + 1];
    let mut minor = 0;
    while minor < all.len() {
        all[minor] = fingerprint(minor as u16);
        minor += 1;
    }
    all
};

/// What this build can speak.
pub const OURS: Speaks<'static> = Speaks { version: VERSION, fingerprints: &FINGERPRINTS };

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A peer whose version is 2.`minor`, with made-up fingerprints.
    fn peer(minor: usize) -> Speaks<'static> {
        const ALL: [u64; 4] = [10, 11, 12, 13];
        Speaks::new(2, &ALL[..=minor])
    }

    fn meet(a: &Speaks<'_>, b: &Speaks<'_>) -> (Result<Version, Mismatch>, Result<Version, Mismatch>) {
        (a.agree(b.version(), b.fingerprint()), b.agree(a.version(), a.fingerprint()))
    }

    #[test]
    fn this_build_agrees_with_itself() {
        assert_eq!(meet(&OURS, &OURS), (Ok(VERSION), Ok(VERSION)));
    }

    #[test]
    fn another_major_version_is_refused_with_both_named() {
        let older = Speaks::new(1, &[0]);
        let (ours, theirs) = meet(&peer(3), &older);
        let text = ours.unwrap_err().describe("the client speaks", "this server speaks");
        assert!(
            text.contains("client speaks version 1.0") && text.contains("server speaks version 2.3"),
            "{text}"
        );
        assert!(theirs.is_err());
    }

    #[test]
    fn an_older_minor_version_is_served() {
        let version = Version { major: 2, minor: 2 };
        assert_eq!(meet(&peer(3), &peer(2)), (Ok(version), Ok(version)));
    }

    #[test]
    fn the_newer_peer_notices_another_build_of_the_older_version() {
        let stranger = Speaks::new(2, &[10, 11, 99]);
        let (newer, older) = meet(&peer(3), &stranger);
        assert_eq!(newer.unwrap_err().fingerprints, Some((12, 99)));
        // It cannot know the newer peer's fingerprint, and leaves the decision to the newer peer.
        assert_eq!(older, Ok(stranger.version()));
    }

    #[test]
    fn equal_versions_of_different_builds_are_refused_by_both() {
        let (one, other) = meet(&peer(1), &Speaks::new(2, &[10, 99]));
        let text = one.unwrap_err().describe("the client speaks", "this server speaks");
        assert!(text.contains("different sources") && other.is_err(), "{text}");
    }

    #[test]
    fn a_relay_says_the_version_of_its_client() {
        let relay = peer(3).at_most(peer(1).version());
        assert_eq!((relay.version(), relay.fingerprint()), (peer(1).version(), 11));
        assert_eq!(meet(&relay, &peer(2)), (Ok(peer(1).version()), Ok(peer(1).version())));
        assert_eq!(peer(1).at_most(peer(3).version()).version(), peer(1).version());
    }

    proptest! {
        #[test]
        fn peers_of_one_source_always_agree_on_the_older_version(a in 0usize..4, b in 0usize..4) {
            let older = Version { major: 2, minor: a.min(b) as u16 };
            prop_assert_eq!(meet(&peer(a), &peer(b)), (Ok(older), Ok(older)));
        }

        /// Whatever version a client announces, its relay announces one whose fingerprint it has.
        #[test]
        fn a_relay_has_the_fingerprint_of_the_version_that_it_announces(major: u16, minor: u16, ours in 0usize..4) {
            let relay = peer(ours).at_most(Version { major, minor });
            prop_assert!(relay.version() <= peer(ours).version());
            prop_assert_eq!(relay.fingerprint(), 10 + u64::from(relay.version().minor));
        }

        /// Whatever a peer announces, the result is a version that both have, or a refusal.
        #[test]
        fn no_announcement_leads_beyond_the_versions_of_both(major in 0u16..4, minor: u16, fingerprint: u64, ours in 0usize..4) {
            let theirs = Version { major, minor };
            if let Ok(version) = peer(ours).agree(theirs, fingerprint) {
                prop_assert!(major == 2 && version <= theirs && version <= peer(ours).version());
            }
        }
    }
}
