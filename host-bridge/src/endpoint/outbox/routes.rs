//! Which stream carries what of the client's memory.
//!
//! Streams are independent of each other, and each keeps its order whatever happens to its connections. So if
//! data for some bytes is under way, later data for the same bytes takes the same stream: the later data
//! comes last. A chunk of whose bytes several streams carry some is divided.
//!
//! A chunk's stream is [chosen](Routes::choose) before the chunk is made, and it is [queued](Routes::queued)
//! when that is done. In between nothing else of the same bytes may take another stream.

use std::collections::BTreeMap;

use protocol::data::{HostRange, Place};

/// A byte of the client's memory: the memory's number, and the offset in it.
pub(in crate::endpoint) type At = (u64, u64);

/// Where a range begins.
pub(in crate::endpoint) fn begin(range: HostRange) -> At {
    let memory = match range.place {
        Place::Arena => u64::MAX,
        Place::Region(id) => id.into(),
    };
    (memory, range.offset)
}

/// What is so many bytes behind it.
pub(in crate::endpoint) fn behind((memory, offset): At, bytes: u64) -> At {
    (memory, offset + bytes)
}

/// Parts that are remembered although nothing of them is under way, at least.
const LEAST: usize = 64;

/// See the module's text.
pub(super) struct Routes {
    /// Parts of the client's memory, by where they begin. No two overlap.
    parts: BTreeMap<At, Part>,
    /// So many parts are worth a look at which of them are over.
    most: usize,
}

#[derive(Clone, Copy)]
struct Part {
    /// Its memory's offset behind it.
    end: u64,
    stream: usize,
    /// Chunks that have been given the stream and were not queued yet.
    coming: u32,
    /// Where in the stream the last of the others ends.
    upto: u64,
}

impl Part {
    /// Whether anything of it is under way. `arrived`: bytes of a stream that the bridge has.
    fn is_open(&self, arrived: impl Fn(usize) -> u64) -> bool {
        self.coming > 0 || self.upto > arrived(self.stream)
    }
}

impl Routes {
    pub(super) fn new() -> Routes {
        Routes { parts: BTreeMap::new(), most: LEAST }
    }

    /// The stream for the first bytes from `at` on, and for how many of `len`: `wish` if it may be that one.
    /// That chunk has to be [queued](Self::queued). `arrived`: bytes of a stream that the bridge has.
    pub(super) fn choose(
        &mut self,
        wish: usize,
        at: At,
        len: u64,
        arrived: impl Fn(usize) -> u64,
    ) -> (usize, u64) {
        if self.parts.len() > self.most {
            self.parts.retain(|_, part| part.is_open(&arrived));
            self.most = LEAST.max(2 * self.parts.len());
        }
        let (memory, begin) = at;
        let (mut end, mut stream, mut over) = (begin + len, None, Vec::new());
        // Of those that begin before its end, the last one ends last.
        let last = self.parts.range(..(memory, end)).next_back();
        if last.is_none_or(|((of, _), part)| *of != memory || part.end <= begin) {
            self.parts.insert(at, Part { end, stream: wish, coming: 1, upto: 0 });
            return (wish, len);
        }
        self.divide(at);
        for (known, part) in self.parts.range(at..(memory, end)) {
            if !part.is_open(&arrived) {
                over.push(*known);
            } else if *stream.get_or_insert(part.stream) != part.stream {
                end = known.1;
                break;
            }
        }
        over.iter().for_each(|known| _ = self.parts.remove(known));
        self.divide((memory, end));
        let (stream, mut at) = (stream.unwrap_or(wish), begin);
        while at < end {
            let next = self.parts.range((memory, at)..(memory, end)).next();
            let next = next.map_or(end, |((_, begin), _)| *begin);
            if at < next {
                self.parts.insert((memory, at), Part { end: next, stream, coming: 0, upto: 0 });
            }
            let Some(part) = self.parts.get_mut(&(memory, at)) else { break };
            part.coming += 1;
            at = part.end;
        }
        (stream, end - begin)
    }

    /// A chunk that was [given a stream](Self::choose) ends at `upto` of that.
    pub(super) fn queued(&mut self, (memory, begin): At, len: u64, upto: u64) {
        for (_, part) in self.parts.range_mut((memory, begin)..(memory, begin + len)) {
            part.coming = part.coming.saturating_sub(1);
            part.upto = part.upto.max(upto);
        }
    }

    /// Has no part reach from before `at` to behind it.
    fn divide(&mut self, at: At) {
        let Some(((memory, _), part)) = self.parts.range_mut(..at).next_back() else { return };
        if *memory == at.0 && part.end > at.1 {
            let behind = *part;
            part.end = at.1;
            self.parts.insert(at, behind);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAMS: usize = 3;
    const BYTES: u64 = 40;

    /// A stream of chunks: of each its bytes, its number, and where it ends.
    #[derive(Default)]
    struct Stream {
        chunks: Vec<(u64, u64, usize)>,
        /// How many have come, and of how many the sender has heard that they have.
        came: usize,
        heard: usize,
    }

    proptest! {
        /// Whatever comes first of what is under way, each byte ends as the last chunk has it that was sent
        /// for it.
        #[test]
        fn the_last_data_for_a_byte_comes_last(
            steps in prop::collection::vec((0..3u8, 0..STREAMS, 0..BYTES, 1..BYTES), 1..200)
        ) {
            let mut streams: [Stream; STREAMS] = Default::default();
            let (mut routes, mut memory) = (Routes::new(), vec![0; BYTES as usize]);
            let mut truth = memory.clone();
            routes.most = 8;
            // Chunks that have a stream and are queued later, a few at a time, those of other bytes first.
            let mut made: Vec<(u64, u64, usize, usize)> = Vec::new();
            let queue = |streams: &mut [Stream; STREAMS], routes: &mut Routes, (at, len, number, to)| {
                let stream: &mut Stream = &mut streams[to];
                stream.chunks.push((at, len, number));
                routes.queued((7, at), len, stream.chunks.len() as u64);
            };
            for (number, (step, wish, begin, len)) in steps.into_iter().enumerate() {
                let number = number + 1;
                match step {
                    0 => {
                        let (mut at, end) = (begin, BYTES.min(begin + len));
                        let overlaps = |(at, len, ..): &mut (u64, u64, usize, usize)| {
                            *at < end && begin < *at + *len
                        };
                        for made in made.extract_if(.., overlaps) {
                            queue(&mut streams, &mut routes, made);
                        }
                        while at < end {
                            let arrived = |stream: usize| streams[stream].heard as u64;
                            let (to, len) = routes.choose(wish, (7, at), end - at, arrived);
                            prop_assert!(len > 0 && at + len <= end);
                            made.push((at, len, number, to));
                            truth[at as usize..(at + len) as usize].fill(number);
                            at += len;
                        }
                    }
                    1 => {
                        let stream = &mut streams[wish];
                        if let Some((at, len, number)) = stream.chunks.get(stream.came).copied() {
                            memory[at as usize..(at + len) as usize].fill(number);
                            stream.came += 1;
                        }
                    }
                    _ => streams[wish].heard = streams[wish].came,
                }
                if number % 5 == 0 {
                    made.drain(..).for_each(|made| queue(&mut streams, &mut routes, made));
                }
            }
            made.drain(..).for_each(|made| queue(&mut streams, &mut routes, made));
            for stream in &streams {
                for (at, len, number) in &stream.chunks[stream.came..] {
                    memory[*at as usize..(at + len) as usize].fill(*number);
                }
            }
            prop_assert_eq!(memory, truth);
        }
    }

    #[test]
    fn what_has_arrived_is_forgotten_and_other_memory_is_not_looked_at() {
        let mut routes = Routes::new();
        for number in 0..10_000u64 {
            let at = (number % 2, 8 * number);
            assert_eq!(routes.choose(number as usize % 4, at, 8, |_| number), (number as usize % 4, 8));
            routes.queued(at, 8, number + 1);
        }
        assert!(routes.parts.len() <= LEAST + 1, "{} parts", routes.parts.len());
        let under_way = |_| 0;
        routes.queued((0, 0), 8, 1);
        assert_eq!(routes.choose(2, (0, u64::MAX - 9), 9, under_way), (2, 9));
        assert_eq!(routes.choose(3, (1, u64::MAX - 9), 9, under_way), (3, 9));
        assert_eq!(routes.choose(3, (0, u64::MAX - 20), 20, under_way), (2, 20), "not queued yet");
    }
}
