//! What is sent on a data connection: part of a stream that is kept until the server has it.

use protocol::link::{DataHeader, HASH_FLAG};

use super::flows::{Carries, Chunk};
use crate::journal::Piece;

/// See the module's text.
#[derive(Debug)]
pub(in crate::bridge) enum Sent<M> {
    /// A part of a piece of `In` data, or a question about it.
    Chunk(Chunk<M>),
    /// A header without data of the client's, and perhaps the hash behind it.
    Plain(DataHeader, Option<[u8; 32]>),
}

impl<M> Clone for Sent<M> {
    fn clone(&self) -> Sent<M> {
        match self {
            Sent::Chunk(chunk) => Sent::Chunk(chunk.clone()),
            Sent::Plain(header, hash) => Sent::Plain(*header, *hash),
        }
    }
}

impl<M> Sent<M> {
    /// Says that so many bytes of the stream to the bridge have come.
    pub(in crate::bridge) fn received(bytes: u64) -> Sent<M> {
        Sent::Plain(DataHeader { seq: 0, offset: bytes, piece: 0, len: 0 }, None)
    }

    /// Bytes of the client's memory in it.
    pub(in crate::bridge) fn len(&self) -> u64 {
        if let Sent::Chunk(chunk) = self { chunk.sends() } else { 0 }
    }

    /// What stands before them.
    pub(in crate::bridge) fn header(&self) -> DataHeader {
        match self {
            Sent::Chunk(chunk) => chunk.header(),
            Sent::Plain(header, _) => *header,
        }
    }

    /// What stands between the header and them.
    pub(in crate::bridge) fn hash(&self) -> Option<&[u8; 32]> {
        match self {
            Sent::Chunk(Chunk { carries: Carries::Hash(hash), .. }) => Some(hash),
            Sent::Plain(header, Some(hash)) if header.len & HASH_FLAG != 0 => Some(hash),
            _ => None,
        }
    }
}

impl<M> Piece for Sent<M> {
    fn stream_len(&self) -> u64 {
        (size_of::<DataHeader>() + self.hash().map_or(0, |hash| hash.len())) as u64 + self.len()
    }
}
