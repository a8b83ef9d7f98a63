//! A chunk that comes compressed. Its bytes are received whole and decompressed into memory of this module's;
//! from there they go where they would have gone if they had come as they are.

use lz4_flex::block::decompress_into;

/// See the module's text. Its memory is used for one chunk after the other.
#[derive(Debug, Default)]
pub(crate) struct Decompressor {
    /// Bytes of the chunk.
    len: usize,
    /// Its compressed bytes are the first `whole` of these, of which `got` have come.
    compressed: Vec<u8>,
    whole: usize,
    got: usize,
    /// Memory for the chunk, whose first `ready` bytes it is.
    plain: Vec<u8>,
    ready: usize,
}

/// Has `memory` have `len` bytes at least. What they are does not matter.
fn reserve(memory: &mut Vec<u8>, len: usize) {
    if memory.len() < len {
        memory.resize(len, 0);
    }
}

impl Decompressor {
    /// Begins a chunk of `len` bytes, for which so many compressed ones are to come. The error: nobody sends
    /// that.
    pub(crate) fn begin(&mut self, len: u32, compressed: u32) -> Result<(), String> {
        self.clear();
        if compressed == 0 || compressed >= len {
            return Err(format!("{compressed} compressed bytes in place of {len}"));
        }
        (self.len, self.whole) = (len as usize, compressed as usize);
        reserve(&mut self.compressed, self.whole);
        Ok(())
    }

    /// There is no chunk that comes compressed.
    pub(crate) fn clear(&mut self) {
        (self.whole, self.got, self.ready) = (0, 0, 0);
    }

    /// Where the next compressed bytes go. Empty: none are to come.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        &mut self.compressed[self.got..self.whole]
    }

    /// Compressed bytes that have come.
    pub(crate) fn got(&self) -> usize {
        self.got
    }

    /// `n` bytes have come to where [`room`](Self::room) said. True: the chunk is there. The error: they are
    /// not what the chunk compresses to.
    pub(crate) fn filled(&mut self, n: usize) -> Result<bool, String> {
        self.got += n;
        if self.got < self.whole {
            return Ok(false);
        }
        reserve(&mut self.plain, self.len);
        let wrong = match decompress_into(&self.compressed[..self.whole], &mut self.plain[..self.len]) {
            Ok(len) if len == self.len => {
                self.ready = len;
                return Ok(true);
            }
            Ok(len) => format!("they are {len} bytes"),
            Err(e) => e.to_string(),
        };
        Err(format!("{} bytes do not decompress to {}: {wrong}", self.whole, self.len))
    }

    /// The chunk. Empty: it has not come, or comes as it is.
    pub(crate) fn plain(&self) -> &[u8] {
        &self.plain[..self.ready]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Receives `compressed` in steps of these sizes. The chunk, if it is one.
    fn receive(
        of: &mut Decompressor,
        len: u32,
        says: u32,
        compressed: &[u8],
        steps: &[usize],
    ) -> Option<Vec<u8>> {
        of.begin(len, says).ok()?;
        let (mut rest, mut steps) = (compressed, steps.iter().cycle());
        loop {
            let room = of.room();
            let n = room.len().min(*steps.next()?).min(rest.len());
            let (now, behind) = rest.split_at(n);
            room[..n].copy_from_slice(now);
            rest = behind;
            if n == 0 {
                return None;
            }
            if of.filled(n).ok()? {
                return Some(of.plain().to_vec());
            }
            assert!(of.plain().is_empty());
        }
    }

    proptest! {
        #[test]
        fn a_chunk_comes_in_any_steps_one_after_the_other(
            chunks in prop::collection::vec((1usize..5000, 1u8..9), 1..5), steps in prop::collection::vec(1usize..700, 1..9),
        ) {
            let mut decompressor = Decompressor::default();
            for (len, every) in chunks {
                let plain: Vec<u8> = (0..len).map(|i| (i / (8 * usize::from(every))) as u8).collect();
                let compressed = lz4_flex::block::compress(&plain);
                let got = receive(&mut decompressor, len as u32, compressed.len() as u32, &compressed, &steps);
                prop_assert_eq!(got, (compressed.len() < len).then_some(plain));
            }
        }

        /// Whatever comes, a chunk is as long as its header says or there is none.
        #[test]
        fn any_bytes_are_survived(len in 0u32..3000, says in 0u32..3000, honest: bool, bytes in prop::collection::vec(any::<u8>(), 0..3000), step in 1usize..3000) {
            let mut decompressor = Decompressor::default();
            let says = if honest { bytes.len() as u32 } else { says };
            if let Some(plain) = receive(&mut decompressor, len, says, &bytes, &[step]) {
                prop_assert_eq!(plain.len(), len as usize);
            }
            prop_assert!(decompressor.compressed.len() < 3000 && decompressor.plain.len() <= len as usize);
            // What was wrong has no effect on the next one.
            let plain = vec![1; 500];
            let compressed = lz4_flex::block::compress(&plain);
            prop_assert_eq!(receive(&mut decompressor, 500, compressed.len() as u32, &compressed, &[step]), Some(plain));
        }
    }
}
