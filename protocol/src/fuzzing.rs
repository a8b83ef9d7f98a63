//! Turns a fuzzer's bytes into a program of steps, for the targets in `fuzz/` and for the tests that run the
//! same programs; and random numbers, for tests.

use std::path::Path;

use crate::data::kind;
use crate::ops::OpInfo;
use crate::schema::{Field, Shape};

/// Numbers that are often limits.
const EDGES: [u64; 16] =
    [0, 1, 2, 3, 7, 8, 63, 64, 4096, 0xffff, 1 << 20, 1 << 21, 1 << 31, u32::MAX as u64, 1 << 63, u64::MAX];

/// The programs of a target's tests: its seeds, and `count` generated ones (or `RGPU_FUZZ_PROGRAMS`) of all
/// lengths up to `longest`. They are the same in every run.
pub fn programs(target: &str, count: usize, longest: usize) -> Vec<Vec<u8>> {
    let count = std::env::var("RGPU_FUZZ_PROGRAMS").ok().and_then(|text| text.parse().ok()).unwrap_or(count);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(target);
    let seeds = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut programs: Vec<_> = seeds.filter_map(|seed| std::fs::read(seed.path()).ok()).collect();
    let mut state = 1u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    programs.extend((0..count).map(|number| (0..longest * number / count).map(|_| byte()).collect()));
    programs
}

/// Random numbers that a seed determines, by SplitMix64.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number less than `n`; 0 if that is 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.number() % n.max(1) as u64) as usize
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// Chooses a number for a field from the field's name and its type's name.
pub type Values<'v> = dyn FnMut(&str, &str, &mut Steps<'_>) -> u64 + 'v;

/// Takes values from the front of the bytes. After the last byte, every value is 0.
#[derive(Debug)]
pub struct Steps<'a>(&'a [u8]);

impl<'a> Steps<'a> {
    /// The program that these bytes stand for.
    pub fn new(bytes: &'a [u8]) -> Steps<'a> {
        Steps(bytes)
    }

    /// Whether the program has ended.
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let n = N.min(self.0.len());
        let (now, rest) = self.0.split_at(n);
        array[..n].copy_from_slice(now);
        self.0 = rest;
        array
    }

    /// A byte.
    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `n`, which is at most 256.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n.max(1)
    }

    /// One of some values.
    ///
    /// # Panics
    /// When there are none.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// A number: small, at a limit or next to one, or any.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..128 => small.into(),
            edge @ 128..176 => {
                let edge = usize::from(edge - 128);
                EDGES[edge / 3].wrapping_add(edge as u64 % 3).wrapping_sub(1)
            }
            176..208 => self.u16().into(),
            208..240 => u64::from(self.u16()) << 10,
            _ => self.u64(),
        }
    }

    /// Some bytes: their length in one byte, then the bytes.
    pub fn bytes(&mut self) -> &'a [u8] {
        let n = usize::from(self.byte()).min(self.0.len());
        let (now, rest) = self.0.split_at(n);
        self.0 = rest;
        now
    }

    /// Appends the body of a request: fields of the right shapes.
    pub fn request(&mut self, info: &OpInfo, values: &mut Values<'_>, body: &mut Vec<u8>) {
        self.fields(info.request, values, body);
    }

    fn fields(&mut self, fields: &[Field], values: &mut Values<'_>, body: &mut Vec<u8>) {
        fields.iter().for_each(|field| self.put(field.name, &field.shape, values, body));
    }

    fn put(&mut self, name: &str, shape: &Shape, values: &mut Values<'_>, body: &mut Vec<u8>) {
        match shape {
            Shape::Scalar { name: "bool", .. } => body.push(self.byte() & 1),
            Shape::Scalar { name: kind, bytes } => {
                let value = values(name, kind, self).to_le_bytes();
                body.extend_from_slice(&value[..*bytes]);
            }
            Shape::Bytes { .. } => self.put_bytes(body),
            Shape::Array { of, count } => (0..*count).for_each(|_| self.put(name, of, values, body)),
            Shape::List { of } => {
                let count = self.below(4);
                body.extend_from_slice(&(count as u32).to_le_bytes());
                (0..count).for_each(|_| self.put(name, of, values, body));
            }
            Shape::Optional { of } => {
                let some = self.byte() & 1;
                body.push(some);
                (0..some).for_each(|_| self.put(name, of, values, body));
            }
            Shape::Struct { fields, .. } => self.fields(fields, values, body),
            Shape::Data { name: kind, .. } => {
                let kinds: &[u32] = match *kind {
                    "HostIn" => &[
                        kind::INLINE,
                        kind::ARENA,
                        kind::REGION,
                        kind::LATE + kind::ARENA,
                        kind::LATE + kind::REGION,
                    ],
                    _ => &[kind::ARENA, kind::REGION],
                };
                let kind = self.pick(kinds);
                body.extend_from_slice(&kind.to_le_bytes());
                if kind == kind::INLINE {
                    return self.put_bytes(body);
                }
                let region = values("region", "u32", self) as u32;
                body.extend_from_slice(&region.to_le_bytes());
                for part in ["offset", "len"] {
                    let number = values(part, "HostRange", self);
                    body.extend_from_slice(&number.to_le_bytes());
                }
            }
        }
    }

    fn put_bytes(&mut self, body: &mut Vec<u8>) {
        let bytes = self.bytes();
        body.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        body.extend_from_slice(bytes);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ops;
    use proptest::prelude::*;

    #[test]
    fn a_program_that_has_ended_gives_zeros() {
        let mut steps = Steps::new(&[2, 7, 8, 9]);
        assert_eq!(steps.bytes(), [7, 8]);
        assert_eq!((steps.u64(), steps.is_over()), (9, true));
        assert_eq!((steps.number(), steps.bytes(), steps.below(3)), (0, &[][..], 0));
    }

    proptest! {
        #[test]
        fn requests_decode_unless_a_value_is_invalid(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            for info in ops::all() {
                let mut body = Vec::new();
                // 1 is a valid value of nearly every field.
                Steps::new(&bytes).request(info, &mut |_, _, _| 1, &mut body);
                if let Err(e) = (info.visit_data)(&body, &mut |_| {}) {
                    let text = e.to_string();
                    prop_assert!(text.contains("UTF-8") || text.contains("not a valid value"), "{}: {}", info.name, text);
                }
            }
        }
    }
}
