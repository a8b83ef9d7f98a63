//! What one side has changed of bytes that both have, found by comparison, and how the host's changes get to
//! the server.

use std::ops::Range;

use crate::abi::result::Result;
use crate::process::context::Context;
use client::counters::{self, COUNTERS};
use client::ops::memory::{HostChange, HostPatch, MOST_PATCHES, WordPatch};

/// Words in a row from which on they are sent as a row.
const LONG_ROW: usize = 8;
/// Maximum words of one [`HostChange`].
const IN_CHANGE: usize = 4 << 10;
/// Maximum number of rows for changes that are described byte by byte.
const FEW: usize = 1024;

/// Sends changed words. It is not known which of them the program changed last. Most likely it is those that
/// stand alone, such as flags, so they go last.
pub(super) fn send(context: &Context, mut words: Vec<WordPatch>) -> Result {
    words.sort_by_key(|patch| patch.address);
    let mut rows: Vec<&[WordPatch]> = words.chunk_by(|a, b| a.address + 8 == b.address).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.len()));
    let long = |row: &&[WordPatch]| row.len() >= LONG_ROW && context.session().knows::<HostChange>();
    let (long, short) = rows.split_at(rows.partition_point(long));
    for row in long.iter().flat_map(|row| row.chunks(IN_CHANGE)) {
        let masks: Vec<u8> = row.iter().map(|patch| byte_mask(patch.mask)).collect();
        let bytes: Vec<u8> = row.iter().flat_map(|patch| patch.value.to_le_bytes()).collect();
        counters::add(&COUNTERS.mirror_bytes, (masks.len() + bytes.len()) as u64);
        let (masks, bytes) = (&masks[..], &bytes[..]);
        context.session().append(&HostChange {
            context: context.id,
            address: row[0].address,
            masks,
            bytes,
        })?;
    }
    for words in short.concat().chunks(MOST_PATCHES) {
        counters::add(&COUNTERS.mirror_bytes, size_of_val(words) as u64);
        context.session().append(&HostPatch { context: context.id, words: words.to_vec() })?;
    }
    Ok(())
}

/// The bytes that a mask of whole bytes selects, one bit for each.
fn byte_mask(mask: u64) -> u8 {
    mask.to_le_bytes().iter().enumerate().fold(0, |bits, (n, byte)| bits | u8::from(*byte != 0) << n)
}

/// Bytes as words.
pub(super) fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes)).collect()
}

/// The words of 8 bytes that differ, from `address`, a multiple of 8.
pub(super) fn changes(address: u64, before: &[u8], now: &[u8]) -> Vec<WordPatch> {
    let (before, now) = (words(before), words(now));
    let each = before.iter().zip(&now).enumerate();
    each.filter_map(|(i, (before, now))| change(address + 8 * i as u64, *before, *now, u64::MAX)).collect()
}

/// Where bytes differ, as rows of bytes. If there are many, as rows of 8-byte words, which neighboring
/// changes mostly fill.
pub(super) fn rows(before: &[u8], now: &[u8]) -> Vec<Range<usize>> {
    let of = |grain: usize| {
        let mut rows: Vec<Range<usize>> = Vec::new();
        for (i, (before, now)) in before.chunks(grain).zip(now.chunks(grain)).enumerate() {
            if before == now {
                continue;
            }
            let (start, end) = (i * grain, i * grain + now.len());
            match rows.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => rows.push(start..end),
            }
        }
        rows
    };
    let words = of(8);
    if words.len() > FEW {
        return words;
    }
    let bytes = of(1);
    if bytes.len() > FEW { words } else { bytes }
}

/// The write that turns one word into another, in the bytes of a mask. `None` if they are equal.
pub(super) fn change(address: u64, before: u64, now: u64, mask: u64) -> Option<WordPatch> {
    let bytes = ((before ^ now) & mask).to_le_bytes().map(|byte| if byte == 0 { 0 } else { 0xff });
    let mask = u64::from_le_bytes(bytes);
    (mask != 0).then_some(WordPatch { address, mask, value: now })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rows_are_exact_while_they_are_few() {
        let before = [7u8; 64];
        let mut now = before;
        (now[0], now[1], now[9], now[63]) = (1, 1, 1, 1);
        assert_eq!(rows(&before, &now), [0..2, 9..10, 63..64]);
        assert!(rows(&before, &before).is_empty());
    }

    #[test]
    fn many_changes_become_rows_of_whole_words() {
        let before = vec![7u8; 8 * 4 * FEW + 3];
        let mut now = before.clone();
        now.iter_mut().step_by(4).for_each(|byte| *byte = 1);
        assert_eq!(rows(&before, &now), vec![Range { start: 0, end: before.len() }]);
        now[8..16].copy_from_slice(&before[8..16]);
        assert_eq!(rows(&before, &now), [0..8, 16..before.len()]);
    }

    proptest! {
        #[test]
        fn changes_carry_what_one_side_wrote_and_keep_what_the_other_did(
            before in proptest::collection::vec(any::<u8>(), 64),
            writes in proptest::collection::vec((0usize..64, any::<u8>(), any::<bool>()), 0..20),
        ) {
            let (mut host, mut device, mut both) = (before.clone(), before.clone(), before.clone());
            let mut whose = [None; 64];
            for (at, value, by_host) in writes {
                // Each byte is written by one side only.
                if *whose[at].get_or_insert(by_host) == by_host {
                    both[at] = value;
                    if by_host { host[at] = value } else { device[at] = value }
                }
            }
            for patch in changes(0x1000, &before, &host) {
                let at = (patch.address - 0x1000) as usize;
                let word: [u8; 8] = device[at..at + 8].try_into().unwrap();
                device[at..at + 8].copy_from_slice(&patch.apply(u64::from_le_bytes(word)).to_le_bytes());
            }
            prop_assert_eq!(device, both);
        }
    }
}
