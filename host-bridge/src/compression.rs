//! When a data connection compresses what it sends, to the server or to the client: where that takes less
//! time, at both ends, than the link needs for the bytes that it saves.
//!
//! ```text
//!            the link is fast, or not known yet, or the last trials were in vain
//!   chunk ─────────────────────────────────────────────────────────────────────▶ sent as it is
//!     │ otherwise                                                                     ▲
//!     ▼                                                                               │
//!   its first 64 KiB are compressed ─ that does not pay: the next trial comes later ──┤
//!     │ it pays                                                                       │
//!     ▼                                                                               │
//!   the whole chunk is compressed ─── that does not pay: the next trial comes later ──┘
//!     │ it pays
//!     ▼
//!   sent compressed; the next chunk is tried as well
//! ```
//!
//! Each trial in vain doubles what is sent before the next one, up to 64 times what was compressed in vain.
//! Of data that does not compress, 64 KiB in 4 MiB are compressed then.
//!
//! No I/O, and the rule has no clock: whoever compresses says how long that took. How fast the link is,
//! [`LinkRate`](crate::link_rate::LinkRate) says. [`Decompressor`] is the other end.

mod decompressor;

use std::time::{Duration, Instant};

use clap::ValueEnum;
use lz4_flex::block::{compress_into, get_maximum_output_size};
use serde::{Deserialize, Serialize};

pub(crate) use self::decompressor::Decompressor;

/// Bytes of a chunk that are compressed first. Shorter chunks are sent as they are.
pub(crate) const SAMPLE: u64 = 64 << 10;
/// Bytes a second from which on nothing is compressed: no compressor keeps up.
const FAST: u64 = 1 << 30;
/// So many times what was compressed in vain is sent before the next trial, at most.
const MOST_PATIENCE: u64 = 64;
/// The speed is of about the last bytes compressed, twice as many at most.
const REMEMBERED: u64 = 16 << 20;

/// When bulk data is compressed before it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CompressUse {
    /// Never
    Never,
    /// Where it saves time, on connections without TLS
    Auto,
    /// Where it saves time, on connections with TLS as well. How long a message is then tells somebody on the
    /// network how well the data compresses
    EvenTls,
    /// All that becomes shorter, over every link. For tests
    Always,
}

impl CompressUse {
    /// What comes of it in a session whose peer understands compressed data, or does not, with TLS or
    /// without.
    pub fn over(self, understood: bool, tls: bool) -> CompressUse {
        match self {
            _ if !understood => CompressUse::Never,
            // How long compressed data is tells something about it.
            CompressUse::Auto if tls => CompressUse::Never,
            when => when,
        }
    }
}

/// Compresses `plain` into the first bytes of `to`, which becomes as long as that takes at most. Gives how
/// many it made of them, if that pays. The work began at `begun`.
pub(crate) fn compress(trial: &mut Trial, plain: &[u8], to: &mut Vec<u8>, begun: Instant) -> Option<usize> {
    let most = get_maximum_output_size(plain.len());
    if to.len() < most {
        to.resize(most, 0);
    }
    let made = compress_into(plain, to).ok()?;
    trial.pays(plain.len() as u64, made as u64, begun.elapsed()).then_some(made)
}

/// Bytes that were compressed, and how long that took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Speed {
    bytes: u64,
    time: Duration,
}

impl Speed {
    fn and(self, bytes: u64, time: Duration) -> Speed {
        let mut sum = Speed { bytes: self.bytes.saturating_add(bytes), time: self.time.saturating_add(time) };
        while sum.bytes > REMEMBERED {
            sum = Speed { bytes: sum.bytes / 2, time: sum.time / 2 };
        }
        sum
    }
}

/// A chunk that is to be compressed if that pays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trial {
    /// Bytes a second that the link carries. `None`: it does not matter.
    link: Option<u64>,
    speed: Speed,
    /// Bytes that were compressed for it so far.
    work: u64,
}

impl Trial {
    /// `len` bytes were compressed to `compressed` in that time. Whether it pays to send these.
    pub(crate) fn pays(&mut self, len: u64, compressed: u64, time: Duration) -> bool {
        self.speed = self.speed.and(len, time);
        self.work += len;
        // Their length comes before them.
        let Some(saved @ 1..) = len.checked_sub(compressed + size_of::<u32>() as u64) else { return false };
        let Some(link) = self.link else { return true };
        // len / link > len / speed + compressed / link, with link and speed in bytes a second. To decompress
        // is reckoned with half as long as to compress.
        let Speed { bytes, time } = self.speed;
        let gain = u128::from(saved) * u128::from(bytes) * 1_000_000_000;
        gain > (u128::from(len) * u128::from(link)).saturating_mul(time.as_nanos() * 3 / 2)
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Compression {
    when: CompressUse,
    speed: Speed,
    /// How many times what was compressed in vain is sent before the next trial. 1: the last trial was not in
    /// vain, or there was none.
    patience: u64,
    /// Bytes to be sent before the next trial.
    pause: u64,
    /// The last trial paid.
    pays: bool,
}

impl Compression {
    pub(crate) fn new(when: CompressUse) -> Compression {
        Compression {
            when,
            speed: Speed::default(),
            patience: 1,
            pause: 0,
            pays: when == CompressUse::Always,
        }
    }

    /// Whether chunks are being compressed.
    pub(crate) fn is_on(&self) -> bool {
        self.pays
    }

    /// A chunk of `len` bytes is about to be sent over a link that carries so many bytes a second, if that is
    /// known. `None`: as it is. Otherwise the trial is told to [`tried`](Self::tried).
    pub(crate) fn tries(&mut self, len: u64, link: Option<u64>) -> Option<Trial> {
        let link = match self.when {
            CompressUse::Never => return None,
            CompressUse::Always => None,
            CompressUse::Auto | CompressUse::EvenTls => Some(link?),
        };
        if len < SAMPLE {
            return None;
        }
        if link.is_some_and(|link| link >= FAST) {
            self.pays = false;
            return None;
        }
        if self.pause > 0 {
            self.pause = self.pause.saturating_sub(len);
            return None;
        }
        Some(Trial { link, speed: self.speed, work: 0 })
    }

    /// What came of a trial with a chunk of `len` bytes.
    pub(crate) fn tried(&mut self, trial: &Trial, len: u64, paid: bool) {
        self.speed = trial.speed;
        if paid || self.when == CompressUse::Always {
            (self.patience, self.pause) = (1, 0);
        } else {
            self.patience = (2 * self.patience).min(MOST_PATIENCE);
            self.pause = (self.patience * trial.work).saturating_sub(len);
        }
        self.pays = paid || self.when == CompressUse::Always;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::link_rate::LinkRate;
    use proptest::prelude::*;

    /// Bytes a second that the compressor of these tests takes.
    const SPEED: u64 = 800_000_000;

    fn time(len: u64) -> Duration {
        Duration::from_secs_f64(len as f64 / SPEED as f64)
    }

    /// Sends chunks of these lengths, which compress to so many hundredths, the first 64 KiB and the whole.
    /// Gives the bytes that were compressed, those of them in vain, and those that were sent.
    fn send(
        rule: &mut Compression,
        link: Option<u64>,
        chunks: impl IntoIterator<Item = (u64, u64, u64)>,
    ) -> (u64, u64, u64) {
        let (mut worked, mut vain, mut sent) = (0, 0, 0);
        for (len, of_sample, of_all) in chunks {
            let Some(mut trial) = rule.tries(len, link) else {
                sent += len;
                continue;
            };
            let paid = trial.pays(SAMPLE, SAMPLE * of_sample / 100, time(SAMPLE))
                && trial.pays(len, len * of_all / 100, time(len));
            worked += trial.work;
            vain += if paid { 0 } else { trial.work };
            sent += if paid { len * of_all / 100 } else { len };
            rule.tried(&trial, len, paid);
        }
        (worked, vain, sent)
    }

    #[test]
    fn over_a_slow_link_what_compresses_is_compressed() {
        let mut rule = Compression::new(CompressUse::Auto);
        let all = 100 << 20;
        let (_, vain, sent) = send(&mut rule, Some(25_000_000), vec![(1 << 20, 40, 40); 100]);
        assert!(vain == 0 && sent <= all / 100 * 40, "{sent} of {all}, {vain}");
        assert!(rule.is_on());
    }

    #[test]
    fn a_fast_link_or_one_that_is_not_known_is_left_alone() {
        for link in [None, Some(FAST), Some(u64::MAX)] {
            let mut rule = Compression::new(CompressUse::Auto);
            let (worked, _, sent) = send(&mut rule, link, vec![(1 << 20, 1, 1); 100]);
            assert_eq!((worked, sent, rule.is_on()), (0, 100 << 20, false), "{link:?}");
        }
    }

    #[test]
    fn it_pays_exactly_where_the_link_is_slower_than_what_the_compressor_saves() {
        // At a half, the compressor saves 400 MB in a second, for which the other end is reckoned with half a
        // second more.
        for (link, pays) in [(260_000_000, true), (270_000_000, false)] {
            let mut rule = Compression::new(CompressUse::Auto);
            let mut trial = rule.tries(SAMPLE, Some(link)).unwrap();
            assert_eq!(trial.pays(SAMPLE, SAMPLE / 2, time(SAMPLE)), pays, "{link}");
        }
        let mut trial = Compression::new(CompressUse::Auto).tries(SAMPLE, Some(0)).unwrap();
        assert!(!trial.pays(SAMPLE, SAMPLE - 4, Duration::ZERO), "nothing is saved");
        assert!(trial.pays(SAMPLE, SAMPLE - 5, Duration::from_secs(1)));
    }

    /// Sends 64 MiB that compress to a 16th, in chunks of a MiB, with a window of 16 under way, over a link
    /// that carries so many bytes a second. Gives the bytes that were compressed, those that were sent before
    /// the link was known, and those that crossed it.
    fn send_over(rate: u64) -> (u64, u64, u64) {
        const CHUNK: u64 = 1 << 20;
        let (mut rule, mut link) = (Compression::new(CompressUse::Auto), LinkRate::new());
        let (mut now, mut under_way) = (Instant::now(), VecDeque::new());
        let (mut worked, mut unknown, mut sent) = (0, 0, 0);
        for number in 0..64 {
            let mut crosses = CHUNK;
            if let Some(mut trial) = rule.tries(CHUNK, link.get()) {
                let paid = trial.pays(SAMPLE, SAMPLE / 16, time(SAMPLE))
                    && trial.pays(CHUNK, CHUNK / 16, time(CHUNK));
                worked += trial.work;
                crosses = if paid { CHUNK / 16 } else { CHUNK };
                rule.tried(&trial, CHUNK, paid);
            } else if link.get().is_none() {
                unknown += CHUNK;
            }
            sent += crosses;
            if link.watched().is_none() {
                link.leaves(number, now);
            }
            under_way.push_back((number, crosses));
            if let Some((number, crosses)) = under_way.pop_front_if(|_| number >= 15) {
                now += Duration::from_secs_f64(crosses as f64 / rate as f64);
                link.arrives(&number, crosses, || now);
            }
        }
        (worked, unknown, sent)
    }

    /// What the clock of a busy machine cannot show: over a link that is known as fast, nothing is even tried
    /// of data that compresses very well.
    #[test]
    fn nothing_of_64_mib_is_compressed_over_a_fast_link_whatever_they_are() {
        for rate in [FAST + 1000, 4 << 30, 100 << 30] {
            let (worked, unknown, sent) = send_over(rate);
            assert_eq!((worked, sent), (0, 64 << 20), "{rate}");
            assert!(unknown <= 32 << 20, "{unknown} before it was known");
        }
        // The same bytes over a slow link.
        let (worked, unknown, sent) = send_over(25_000_000);
        assert!(worked >= 32 << 20 && sent <= unknown + (64 << 20) / 16, "{worked} {unknown} {sent}");
    }

    #[test]
    fn a_link_that_becomes_fast_ends_it() {
        let mut rule = Compression::new(CompressUse::Auto);
        send(&mut rule, Some(25_000_000), vec![(1 << 20, 40, 40); 3]);
        assert!(rule.is_on() && rule.tries(1 << 20, Some(FAST)).is_none() && !rule.is_on());
    }

    #[test]
    fn data_that_begins_to_compress_is_noticed() {
        let mut rule = Compression::new(CompressUse::Auto);
        send(&mut rule, Some(25_000_000), vec![(1 << 20, 100, 100); 1000]);
        let (_, _, sent) = send(&mut rule, Some(25_000_000), vec![(1 << 20, 10, 10); 100]);
        assert!(sent < 20 << 20, "{sent}");
    }

    #[test]
    fn with_tls_it_is_off_unless_it_is_asked_for_and_never_for_a_peer_that_does_not_understand_it() {
        use CompressUse::{Always, Auto, EvenTls, Never};
        for when in [Never, Auto, EvenTls, Always] {
            assert_eq!(when.over(true, false), when);
            assert_eq!(when.over(true, true), if when == Auto { Never } else { when });
            assert_eq!([when.over(false, false), when.over(false, true)], [Never; 2]);
        }
    }

    #[test]
    fn never_and_always_are_taken_at_their_word() {
        assert!(Compression::new(CompressUse::Never).tries(1 << 20, Some(1)).is_none());
        let mut rule = Compression::new(CompressUse::Always);
        let (worked, _, _) = send(&mut rule, None, vec![(SAMPLE, 100, 100); 10]);
        assert_eq!((worked, rule.is_on()), (10 * SAMPLE, true));
        let (_, _, sent) = send(&mut rule, Some(u64::MAX), vec![(SAMPLE, 50, 50); 10]);
        assert_eq!(sent, 5 * SAMPLE);
    }

    proptest! {
        /// Whatever the chunks are, of data that does not compress 64 KiB in 4 MiB are compressed, once it
        /// has begun.
        #[test]
        fn what_does_not_compress_costs_64_kib_in_4_mib(
            lens in prop::collection::vec(SAMPLE..5 << 20, 1..400), link in 1u64..FAST, few in 97u64..120,
        ) {
            // What at best 3 % of would be saved pays over no link of this rate.
            let link = link.max(SPEED / 25);
            let mut rule = Compression::new(CompressUse::Auto);
            let all: u64 = lens.iter().sum();
            let (worked, _, sent) = send(&mut rule, Some(link), lens.iter().map(|len| (*len, few, few)));
            // Six trials come before the patience is 64.
            prop_assert!(worked <= 7 * SAMPLE + all / 64, "{worked} of {all}");
            prop_assert_eq!(sent, all);
        }

        /// The same for data whose beginning misleads: what was compressed in vain is a 64th.
        #[test]
        fn misleading_beginnings_cost_no_larger_share(lens in prop::collection::vec(SAMPLE..2 << 20, 1..2000)) {
            let mut rule = Compression::new(CompressUse::Auto);
            let (longest, all) = (2 << 20, lens.iter().sum::<u64>());
            let (worked, vain, sent) = send(&mut rule, Some(100_000_000), lens.iter().map(|len| (*len, 10, 100)));
            prop_assert!(vain <= 7 * (longest + SAMPLE) + all / 64, "{vain} of {all}");
            prop_assert_eq!((worked, sent), (vain, all));
        }

        /// Nothing that is told to it makes it fail.
        #[test]
        fn no_number_is_too_large(steps in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()), 0..50)) {
            let mut rule = Compression::new(CompressUse::EvenTls);
            for (len, link, compressed, nanos) in steps {
                let Some(mut trial) = rule.tries(len, Some(link)) else { continue };
                let paid = trial.pays(len % (4 << 20), compressed % (5 << 20), Duration::from_nanos(nanos >> 8));
                rule.tried(&trial, len, paid);
            }
        }
    }
}
