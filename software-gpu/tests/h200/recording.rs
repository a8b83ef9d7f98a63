//! The results of a recording, by the cases' hashes.

use std::collections::HashMap;

/// Reads the recording in this file of `tests/h200`.
pub fn recording(file: &str) -> HashMap<u64, Vec<u8>> {
    let path = format!("{}/tests/h200/{file}", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(path).expect("the recording is part of the repository");
    let mut map = HashMap::new();
    let mut at = 128;
    while at + 12 <= bytes.len() {
        let hash = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let len = u32::from_le_bytes(bytes[at + 8..at + 12].try_into().unwrap()) as usize;
        map.insert(hash, bytes[at + 12..at + 12 + len].to_vec());
        at += 12 + len;
    }
    assert_eq!(at, bytes.len(), "the recording is cut off");
    map
}
