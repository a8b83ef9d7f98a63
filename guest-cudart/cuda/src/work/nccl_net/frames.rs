//! What the two ends of a connection of the network plugin tell each other, and its parser, which believes
//! nothing.
//!
//! A frame is a header of 16 bytes and up to [`MAX_PAYLOAD`] bytes. After [`Frame::Bytes`], the bytes of the
//! message follow outside any frame.

use client::ops::decode_reply;
use client::ops::direct::DirectTicket;
use client::wire::{Wire, Writer};

/// Size of a frame's header in bytes: its kind (4), the size of its payload (4) and a number (8).
const HEADER: usize = 16;
/// Largest payload in bytes.
const MAX_PAYLOAD: usize = 16 << 10;
/// Largest message in bytes: NCCL sends at most 1 GiB at a time.
pub(crate) const MAX_MESSAGE: u64 = 1 << 31;
/// First bytes of a connection, with the version of this module's frames.
const MAGIC: [u8; 8] = *b"rgpuNET1";

/// Proves that a peer was given the address by this end. Random.
pub(crate) type Cookie = [u8; 16];

/// A message from one end to the other.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Frame {
    /// Sender: the first frame.
    Hello(Cookie),
    /// Sender: the key of the worker that opens a direct connection.
    Key([u8; 32]),
    /// Sender: there will be no direct connection, and why.
    NoKey(String),
    /// Receiver: where the sender's worker connects.
    Ticket(DirectTicket),
    /// Receiver: there will be no direct connection, and why.
    NoTicket(String),
    /// Sender: the direct connection is open.
    Open,
    /// Sender: it cannot be opened, and why.
    NotOpen(String),
    /// Receiver: the next message may have this many bytes, which come over this socket.
    Credit(u64),
    /// Receiver: the next message may have this many bytes, and may take the direct connection.
    DirectCredit(u64),
    /// Receiver: so many pieces have been landed in all.
    Landed(u64),
    /// Sender: the next message has this many bytes and takes the direct connection.
    Direct(u64),
    /// Sender: the next message has this many bytes, which follow.
    Bytes(u64),
    /// Receiver: it has received so many messages in all, and waits for none.
    Received(u64),
    /// Sender: there will be no more messages.
    Bye,
    /// This end has failed, and why. It closes the connection.
    Failed(String),
}

/// A peer sent something that is no frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub &'static str);

mod kind {
    pub const HELLO: u32 = 1;
    pub const KEY: u32 = 2;
    pub const NO_KEY: u32 = 3;
    pub const TICKET: u32 = 4;
    pub const NO_TICKET: u32 = 5;
    pub const OPEN: u32 = 6;
    pub const NOT_OPEN: u32 = 7;
    pub const CREDIT: u32 = 8;
    pub const DIRECT_CREDIT: u32 = 9;
    pub const LANDED: u32 = 10;
    pub const DIRECT: u32 = 11;
    pub const BYTES: u32 = 12;
    pub const FAILED: u32 = 13;
    pub const RECEIVED: u32 = 14;
    pub const BYE: u32 = 15;
}

impl Frame {
    /// Appends the frame to a buffer.
    pub fn put(&self, out: &mut Vec<u8>) {
        let text = |kind, text: &str| {
            let mut end = text.len().min(1024);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            (kind, 0, text.as_bytes()[..end].to_vec())
        };
        let (kind, number, payload) = match self {
            Frame::Hello(cookie) => (kind::HELLO, 0, [&MAGIC[..], cookie].concat()),
            Frame::Key(key) => (kind::KEY, 0, key.to_vec()),
            Frame::NoKey(why) => text(kind::NO_KEY, why),
            Frame::Ticket(ticket) => {
                let mut payload = Vec::new();
                ticket.put(&mut Writer(&mut payload));
                (kind::TICKET, 0, payload)
            }
            Frame::NoTicket(why) => text(kind::NO_TICKET, why),
            Frame::Open => (kind::OPEN, 0, Vec::new()),
            Frame::NotOpen(why) => text(kind::NOT_OPEN, why),
            Frame::Credit(most) => (kind::CREDIT, *most, Vec::new()),
            Frame::DirectCredit(most) => (kind::DIRECT_CREDIT, *most, Vec::new()),
            Frame::Landed(pieces) => (kind::LANDED, *pieces, Vec::new()),
            Frame::Direct(len) => (kind::DIRECT, *len, Vec::new()),
            Frame::Bytes(len) => (kind::BYTES, *len, Vec::new()),
            Frame::Received(messages) => (kind::RECEIVED, *messages, Vec::new()),
            Frame::Bye => (kind::BYE, 0, Vec::new()),
            Frame::Failed(why) => text(kind::FAILED, why),
        };
        out.extend(u32::to_le_bytes(kind));
        out.extend((payload.len() as u32).to_le_bytes());
        out.extend(u64::to_le_bytes(number));
        out.extend(payload);
    }

    /// The frame at the beginning of `bytes`, and its size. `None`: more bytes are needed.
    pub fn take(bytes: &[u8]) -> Result<Option<(Frame, usize)>, Malformed> {
        let Some((header, rest)) = bytes.split_at_checked(HEADER) else { return Ok(None) };
        let word =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (kind, len) = (word(0), word(4) as usize);
        let number = u64::from(word(8)) | u64::from(word(12)) << 32;
        if len > MAX_PAYLOAD {
            return Err(Malformed("a frame that is too long"));
        }
        let Some(payload) = rest.get(..len) else { return Ok(None) };
        let text = || String::from_utf8_lossy(payload).into_owned();
        let nothing = |frame| if len == 0 { Ok(frame) } else { Err(Malformed("a frame with a payload")) };
        let size = |frame: fn(u64) -> Frame| {
            if number > MAX_MESSAGE {
                Err(Malformed("a message that is too long"))
            } else {
                nothing(frame(number))
            }
        };
        let frame = match kind {
            kind::HELLO => {
                let cookie = payload.strip_prefix(&MAGIC).and_then(|cookie| cookie.try_into().ok());
                Frame::Hello(cookie.ok_or(Malformed("no greeting of this plugin"))?)
            }
            kind::KEY => Frame::Key(payload.try_into().map_err(|_| Malformed("a key of the wrong size"))?),
            kind::NO_KEY => Frame::NoKey(text()),
            kind::TICKET => Frame::Ticket(decode_reply(payload).map_err(|_| Malformed("no ticket"))?),
            kind::NO_TICKET => Frame::NoTicket(text()),
            kind::OPEN => nothing(Frame::Open)?,
            kind::NOT_OPEN => Frame::NotOpen(text()),
            kind::CREDIT => size(Frame::Credit)?,
            kind::DIRECT_CREDIT => size(Frame::DirectCredit)?,
            kind::LANDED => nothing(Frame::Landed(number))?,
            kind::DIRECT => size(Frame::Direct)?,
            kind::BYTES => size(Frame::Bytes)?,
            kind::RECEIVED => nothing(Frame::Received(number))?,
            kind::BYE => nothing(Frame::Bye)?,
            kind::FAILED => Frame::Failed(text()),
            _ => return Err(Malformed("a frame of an unknown kind")),
        };
        Ok(Some((frame, HEADER + len)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = Frame> {
        let size = || 0..=MAX_MESSAGE;
        let ticket =
            (any::<[u8; 16]>(), any::<[u8; 32]>(), any::<bool>(), prop::collection::vec(".{0,40}", 0..5))
                .prop_map(|(token, secret, encrypted, addresses)| DirectTicket {
                    token,
                    secret,
                    key: secret,
                    encrypted,
                    addresses,
                });
        prop_oneof![
            any::<Cookie>().prop_map(Frame::Hello),
            any::<[u8; 32]>().prop_map(Frame::Key),
            ".{0,200}".prop_map(Frame::NoKey),
            ticket.prop_map(Frame::Ticket),
            ".{0,200}".prop_map(Frame::NoTicket),
            Just(Frame::Open),
            ".{0,200}".prop_map(Frame::NotOpen),
            size().prop_map(Frame::Credit),
            size().prop_map(Frame::DirectCredit),
            any::<u64>().prop_map(Frame::Landed),
            size().prop_map(Frame::Direct),
            size().prop_map(Frame::Bytes),
            any::<u64>().prop_map(Frame::Received),
            Just(Frame::Bye),
            ".{0,200}".prop_map(Frame::Failed),
        ]
    }

    proptest! {
        #[test]
        fn frames_arrive_as_they_were_sent_in_pieces_of_any_size(
            frames in prop::collection::vec(frames(), 1..8),
            step in 1usize..40,
        ) {
            let mut sent = Vec::new();
            frames.iter().for_each(|frame| frame.put(&mut sent));
            let (mut came, mut heard) = (Vec::new(), Vec::new());
            for bytes in sent.chunks(step) {
                came.extend_from_slice(bytes);
                while let Some((frame, len)) = Frame::take(&came).expect("a frame") {
                    heard.push(frame);
                    came.drain(..len);
                }
            }
            prop_assert_eq!(heard, frames);
            prop_assert!(came.is_empty());
        }

        #[test]
        fn whatever_a_peer_sends_is_a_frame_or_is_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            kind in 0u32..20,
            len in 0u32..100,
            frame in frames(),
            at in any::<prop::sample::Index>(),
            with in any::<u8>(),
        ) {
            let _ = Frame::take(&bytes);
            let mut near = [&kind.to_le_bytes()[..], &len.to_le_bytes(), &bytes].concat();
            let taken = Frame::take(&near);
            if let Ok(Some((_, size))) = &taken {
                prop_assert!(*size <= near.len());
            }
            near.clear();
            frame.put(&mut near);
            let at = at.index(near.len());
            near[at] = with;
            let _ = Frame::take(&near);
        }
    }

    #[test]
    fn a_frame_is_refused_before_its_bytes_are_awaited() {
        let header = |kind: u32, len: u32, number: u64| {
            [&kind.to_le_bytes()[..], &len.to_le_bytes(), &number.to_le_bytes()].concat()
        };
        assert!(Frame::take(&header(kind::NO_KEY, MAX_PAYLOAD as u32 + 1, 0)).is_err());
        assert!(Frame::take(&header(99, 0, 0)).is_err());
        assert!(Frame::take(&header(kind::DIRECT, 0, MAX_MESSAGE + 1)).is_err());
        assert_eq!(Frame::take(&header(kind::NO_KEY, MAX_PAYLOAD as u32, 0)), Ok(None));
        assert_eq!(Frame::take(&header(kind::OPEN, 0, 0)[..15]), Ok(None));
        assert_eq!(Frame::take(&header(kind::BYTES, 0, 7)), Ok(Some((Frame::Bytes(7), HEADER))));
    }
}
