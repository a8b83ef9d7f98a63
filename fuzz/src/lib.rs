//! What the fuzz targets share: each is a function of any input, with one of two `main`s.
//!
//! - With libFuzzer, which finds inputs by coverage (`cargo xtask test fuzz`, `cargo fuzz run TARGET`).
//! - With `--cfg standalone`, [`run`] below: all inputs that are kept, others made from them, and random
//!   ones, the same each time. CI runs every target so, because libFuzzer takes another compilation of
//!   everything with its sanitizer.

pub use arbitrary;
#[cfg(not(standalone))]
pub use libfuzzer_sys;

/// A fuzz target: `target!(|input: &[u8]| { … })`, or with any other type that can be made from bytes
/// ([`arbitrary::Arbitrary`]). It panics if it finds a fault.
#[macro_export]
macro_rules! target {
    (|$input:ident: $type:ty| $body:block) => {
        #[cfg(not(standalone))]
        $crate::libfuzzer_sys::fuzz_target!(|$input: $type| $body);

        #[cfg(standalone)]
        fn main() {
            $crate::run(|bytes| {
                let data = $crate::arbitrary::Unstructured::new(bytes);
                // Too short an input is none, as with libFuzzer.
                let Ok($input) = <$type as $crate::arbitrary::Arbitrary>::arbitrary_take_rest(data) else {
                    return;
                };
                $body
            });
        }
    };
}

/// Runs a target on what `arguments` of this process say: all inputs in the folders that they name, then as
/// many others as the first one says. If it panics, its input is written to a file and the process ends with
/// status 1.
#[cfg(standalone)]
pub fn run(target: impl Fn(&[u8])) {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    let mut arguments = std::env::args().skip(1);
    let count: u32 = arguments.next().and_then(|text| text.parse().ok()).expect("the number of inputs");
    let mut kept = Vec::new();
    for folder in arguments {
        let files = std::fs::read_dir(&folder).expect("a folder of inputs");
        let mut files: Vec<_> = files.map(|file| file.expect("an input").path()).collect();
        files.sort();
        kept.extend(files.iter().map(|file| std::fs::read(file).expect("an input")));
    }
    let mut random = fastrand::Rng::with_seed(1);
    let others = (0..count).map(|_| next(&mut random, &kept));
    for (number, input) in kept.iter().cloned().chain(others).enumerate() {
        if catch_unwind(AssertUnwindSafe(|| target(&input))).is_err() {
            let file = std::env::temp_dir().join(format!("fuzz-{}-{number}", std::process::id()));
            std::fs::write(&file, &input).expect("a file for the input");
            eprintln!("input {number} fails; it is in {}", file.display());
            std::process::exit(1);
        }
    }
}

/// A random input, or one of those that are kept with some changes.
#[cfg(standalone)]
fn next(random: &mut fastrand::Rng, kept: &[Vec<u8>]) -> Vec<u8> {
    const LONGEST: usize = 2048;
    let changed = random.choice(kept).filter(|_| random.bool()).cloned();
    let Some(mut bytes) = changed else {
        // Most random bytes are small numbers, so that many are valid kinds, counts and lengths.
        let few = random.bool();
        let length = random.usize(..LONGEST);
        return (0..length).map(|_| if few { random.u8(..16) } else { random.u8(..) }).collect();
    };
    for _ in 0..random.usize(1..8) {
        let at = random.usize(..=bytes.len());
        let end = (at + random.usize(..32)).min(bytes.len());
        match random.u8(..5) {
            0 => bytes.truncate(at),
            1 => drop(bytes.drain(at..end)),
            2 => bytes.insert(at, random.u8(..)),
            3 => {
                let repeated = bytes[at..end].to_vec();
                bytes.splice(at..at, repeated);
            }
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << random.u8(..8);
                }
            }
        }
    }
    bytes
}
