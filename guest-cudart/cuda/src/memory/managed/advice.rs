//! Advice on managed memory. It is stored and returned by queries. Prefetching to a device sends it the
//! host's copies. Prefetching to the host does nothing: blocks are fetched when they are touched.

use std::ops::Range;

use crate::abi::result::Result;
use crate::abi::types::MemLocation;
use crate::process::driver;
use client::Status;

/// `CU_DEVICE_CPU`, `CU_DEVICE_INVALID`.
pub(crate) const CPU: i32 = -1;
pub(crate) const NOWHERE: i32 = -2;

/// `CUmemLocationType`.
pub(crate) mod location {
    pub const INVALID: u32 = 0;
    pub const DEVICE: u32 = 1;
    pub const HOST: u32 = 2;
    pub const HOST_NUMA: u32 = 3;
    pub const HOST_NUMA_CURRENT: u32 = 4;
}

/// A place: `CUmemLocation`'s type and number.
pub(crate) type Place = (u32, i32);

pub(crate) const NO_PLACE: Place = (location::INVALID, NOWHERE);

/// The advice on some bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Advice {
    pub read_mostly: bool,
    pub preferred: Place,
    pub accessed_by: Vec<i32>,
    pub prefetched: Place,
}

impl Default for Advice {
    fn default() -> Advice {
        Advice { read_mostly: false, preferred: NO_PLACE, accessed_by: Vec::new(), prefetched: NO_PLACE }
    }
}

/// Advice on the parts of a piece; the rest has none.
#[derive(Debug, Default)]
pub(crate) struct Advised(Vec<(Range<u64>, Advice)>);

impl Advised {
    /// Changes the advice on a range.
    pub fn change(&mut self, range: &Range<u64>, change: impl Fn(&mut Advice)) {
        let mut parts = Vec::new();
        let mut covered = range.start;
        for (part, advice) in std::mem::take(&mut self.0) {
            let inside = part.start.max(range.start)..part.end.min(range.end);
            if inside.is_empty() {
                parts.push((part, advice));
                continue;
            }
            if covered < inside.start {
                parts.push((covered..inside.start, Advice::default()));
            }
            covered = inside.end;
            for rest in [part.start..inside.start, inside.end..part.end] {
                if !rest.is_empty() {
                    parts.push((rest, advice.clone()));
                }
            }
            parts.push((inside, advice));
        }
        if covered < range.end {
            parts.push((covered..range.end, Advice::default()));
        }
        parts.sort_by_key(|(part, _)| part.start);
        for (part, advice) in &mut parts {
            if range.start <= part.start && part.end <= range.end {
                change(advice);
            }
        }
        parts.retain(|(_, advice)| *advice != Advice::default());
        parts.dedup_by(|next, before| {
            let joined = before.0.end == next.0.start && before.1 == next.1;
            if joined {
                before.0.end = next.0.end;
            }
            joined
        });
        self.0 = parts;
    }

    /// The advice that all bytes of a range have.
    pub fn of(&self, range: &Range<u64>) -> Vec<Advice> {
        let mut found = Vec::new();
        let mut covered = range.start;
        for (part, advice) in
            self.0.iter().filter(|(part, _)| part.start < range.end && range.start < part.end)
        {
            if covered < part.start {
                found.push(Advice::default());
            }
            covered = part.end;
            found.push(advice.clone());
        }
        if covered < range.end {
            found.push(Advice::default());
        }
        found
    }
}

/// A location that a program passes.
pub(crate) fn place(l: MemLocation) -> Result<Place> {
    match l.kind {
        location::DEVICE => driver::device(l.id).map(|_| (location::DEVICE, l.id)),
        location::HOST | location::HOST_NUMA_CURRENT => Ok((location::HOST, CPU)),
        location::HOST_NUMA if l.id >= 0 => Ok((location::HOST_NUMA, l.id)),
        _ => Err(Status::INVALID_VALUE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_has_the_last_advice_that_was_given_on_it(steps in proptest::collection::vec((0u64..40, 1u64..20, 0i32..3), 0..60), start in 0u64..50, len in 1u64..20) {
            let mut advised = Advised::default();
            let mut model = vec![NO_PLACE; 80];
            for (start, len, device) in steps {
                let at = if device == 0 { NO_PLACE } else { (location::DEVICE, device) };
                advised.change(&(start..start + len), |a| a.preferred = at);
                model[start as usize..(start + len) as usize].fill(at);
            }
            let mut expected = model[start as usize..(start + len) as usize].to_vec();
            expected.dedup();
            let mut found: Vec<Place> = advised.of(&(start..start + len)).iter().map(|a| a.preferred).collect();
            found.dedup();
            prop_assert_eq!(found, expected);
        }
    }
}
