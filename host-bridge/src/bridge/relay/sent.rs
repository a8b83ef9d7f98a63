//! What is sent on a data connection: part of a stream that is kept until the server has it.

use std::sync::Arc;

use protocol::link::{COMPRESSED_FLAG, DataHeader, HASH_FLAG};
use zerocopy::IntoBytes;

use super::compressed::Compressed;
use super::flows::{Carries, Chunk};
use crate::journal::Piece;

const HEADER: usize = size_of::<DataHeader>();
/// The most bytes of a [`Head`]: a header and a hash.
const MOST_HEAD: usize = HEADER + 32;

/// See the module's text.
#[derive(Debug)]
pub(in crate::bridge) enum Sent<M> {
    /// A part of a piece of `In` data, or a question about it.
    Chunk(Chunk<M>),
    /// A part of a piece, and its bytes as they are sent.
    Compressed(Chunk<M>, Arc<Compressed>),
    /// A header without data of the client's, and perhaps the hash behind it.
    Plain(DataHeader, Option<[u8; 32]>),
}

impl<M> Clone for Sent<M> {
    fn clone(&self) -> Sent<M> {
        match self {
            Sent::Chunk(chunk) => Sent::Chunk(chunk.clone()),
            Sent::Compressed(chunk, bytes) => Sent::Compressed(chunk.clone(), Arc::clone(bytes)),
            Sent::Plain(header, hash) => Sent::Plain(*header, *hash),
        }
    }
}

/// What stands before the bytes of what is sent: the header, and a hash or the number of compressed bytes.
#[derive(Debug, Clone, Copy)]
pub(in crate::bridge) struct Head {
    bytes: [u8; MOST_HEAD],
    len: usize,
}

impl Head {
    fn new(header: DataHeader, more: &[u8]) -> Head {
        let (mut bytes, len) = ([0; MOST_HEAD], HEADER + more.len());
        bytes[..HEADER].copy_from_slice(header.as_bytes());
        bytes[HEADER..len].copy_from_slice(more);
        Head { bytes, len }
    }

    pub(in crate::bridge) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    pub(in crate::bridge) fn as_mut_bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl<M> Sent<M> {
    /// Says that so many bytes of the stream to the bridge have come.
    pub(in crate::bridge) fn received(bytes: u64) -> Sent<M> {
        Sent::Plain(DataHeader { seq: 0, offset: bytes, piece: 0, len: 0 }, None)
    }

    /// Bytes behind what stands before them.
    pub(in crate::bridge) fn len(&self) -> u64 {
        match self {
            Sent::Chunk(chunk) => chunk.sends(),
            Sent::Compressed(_, bytes) => bytes.len(),
            Sent::Plain(..) => 0,
        }
    }

    /// The part of a piece, or the question about it.
    pub(in crate::bridge) fn chunk(&self) -> Option<&Chunk<M>> {
        match self {
            Sent::Chunk(chunk) | Sent::Compressed(chunk, _) => Some(chunk),
            Sent::Plain(..) => None,
        }
    }

    pub(in crate::bridge) fn header(&self) -> DataHeader {
        match self {
            Sent::Chunk(chunk) => chunk.header(),
            Sent::Compressed(chunk, _) => {
                let header = chunk.header();
                DataHeader { len: header.len | COMPRESSED_FLAG, ..header }
            }
            Sent::Plain(header, _) => *header,
        }
    }

    fn hash(&self) -> Option<&[u8; 32]> {
        match self {
            Sent::Chunk(Chunk { carries: Carries::Hash(hash), .. }) => Some(hash),
            Sent::Plain(header, Some(hash)) if header.len & HASH_FLAG != 0 => Some(hash),
            _ => None,
        }
    }

    /// What stands before its bytes.
    pub(in crate::bridge) fn head(&self) -> Head {
        let header = self.header();
        match (self, self.hash()) {
            (Sent::Compressed(_, bytes), _) => Head::new(header, (bytes.len() as u32).as_bytes()),
            (_, Some(hash)) => Head::new(header, hash),
            (_, None) => Head::new(header, &[]),
        }
    }

    /// What the ledger notes beside the header: the hash, or where the compressed bytes are and how many.
    pub(super) fn noted(&self) -> Option<[u8; 32]> {
        match self {
            Sent::Compressed(_, bytes) => {
                let mut words = [0; 32];
                words[..8].copy_from_slice(bytes.at().as_bytes());
                words[8..16].copy_from_slice(bytes.len().as_bytes());
                Some(words)
            }
            _ => self.hash().copied(),
        }
    }
}

impl<M> Piece for Sent<M> {
    fn stream_len(&self) -> u64 {
        self.head().as_bytes().len() as u64 + self.len()
    }
}
