//! The ledger of a device process that a guest may have compromised: the process's successor reads it and
//! continues with it.
#![cfg_attr(not(standalone), no_main)]

use host_bridge::bridge::take_over_any;

/// The first cells of a ledger's lists, as far as their entries are likely to be found.
const FIRST: [u32; 9] = [0, 64, 256, 262_400, 327_936, 409_856, 1_589_504, 2_375_936, 2_404_608];

rgpu_fuzz::target!(|input: &[u8]| {
    let Some(([slots, lanes], words)) = input.split_first_chunk() else { return };
    let (words, _) = words.as_chunks::<11>();
    let word = |bytes: &[u8; 11]| {
        let [list, low, high, value @ ..] = *bytes;
        let first = FIRST[usize::from(list) % FIRST.len()];
        (first + u32::from(u16::from_le_bytes([low, high])), u64::from_le_bytes(value))
    };
    let words: Vec<_> = words.iter().map(word).collect();
    take_over_any(&words, usize::from(*slots) * 8, usize::from(*lanes) % 33 + 1);
});
