//! Records of TLS 1.3 after the handshake, in one direction each.
//!
//! rustls makes the handshake, derives the keys ([`super::handshake`]) and opens records; *ring*, which
//! rustls uses for that, seals them here, in memory that is used again. Here are also the 5-byte headers,
//! the counting of records, and what may come besides data: the peer's farewell, and its new keys. Each
//! direction has its own state, so a thread that sends and one that receives share no lock.

use std::io;
use std::ops::Range;

use ring::aead::{Aad, Algorithm, LessSafeKey, Nonce, UnboundKey};
use rustls::crypto::cipher::{self, AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, make_tls13_aad};
use rustls::{ContentType, ProtocolVersion};

/// Bytes of a record's header: its type, a version, its length.
pub(super) const HEADER: usize = 5;
/// Most bytes of data in one record.
const MAX_DATA: usize = 1 << 14;
/// Most bytes of data in a record that is made here: a multiple of a cache line, and with all that stands
/// around it and [`PADDING`] the record is one as well. So the data of each record in a row begins with a
/// line, as it does where it comes from, if the first one's does. Sealing across lines takes a sixth more
/// time.
pub(super) const MAX_SEALED: usize = MAX_DATA - LINE;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Zeros behind the data of a record that is full (RFC 8446, section 5.4).
const PADDING: usize = MAX_DATA - HEADER - MAX_SEALED - TAIL;
/// What stands behind the data in a record (RFC 8446, section 5.2): its type, and 16 bytes that authenticate
/// all of it.
const TAIL: usize = 1 + 16;
/// Most bytes of one record behind its header (RFC 8446, section 5.2).
pub(super) const MAX_BODY: usize = MAX_DATA + 256;
/// Bytes of the buffer for records that have come: so many at first, up to so many once the peer fills it.
const BUFFER: (usize, usize) = (2 * (HEADER + MAX_BODY), 16 * (HEADER + MAX_BODY));

/// Most records in a row that bring no data. The peer makes no empty ones, and new keys only for data that
/// follows.
pub(super) const MOST_EMPTY: u32 = 32;

/// `KeyUpdate` of RFC 8446, section 4.6.3: its type, its length, and whether the peer is asked to do the
/// same.
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];
/// `close_notify`: a warning, 0.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

/// What came out of a record.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// Data ([`Receiving::plain`]).
    Data,
    /// The peer uses new keys from here on, and asks (true) for new ones of ours.
    NewKeys(bool),
    /// The peer sends nothing more.
    Closed,
    /// There is no whole record.
    Nothing,
}

/// The receiving direction.
pub(super) struct Receiving {
    decrypter: Box<dyn MessageDecrypter>,
    /// Number of the next record.
    number: u64,
    buffer: Vec<u8>,
    /// Bytes of the buffer that came and were not looked at.
    held: Range<usize>,
    /// Bytes of the buffer that are data and were not taken.
    plain: Range<usize>,
    /// Records in a row that have brought no data.
    empty: u32,
    closed: bool,
    /// What was wrong with a record. Nothing behind it counts.
    broken: Option<String>,
}

impl Receiving {
    pub(super) fn new(decrypter: Box<dyn MessageDecrypter>, number: u64) -> Receiving {
        Receiving {
            decrypter,
            number,
            buffer: Vec::new(),
            held: 0..0,
            plain: 0..0,
            empty: 0,
            closed: false,
            broken: None,
        }
    }

    /// Uses these keys for the records from here on.
    pub(super) fn renew(&mut self, decrypter: Box<dyn MessageDecrypter>) {
        (self.decrypter, self.number) = (decrypter, 0);
    }

    /// Data that was opened and not taken.
    pub(super) fn plain(&self) -> &[u8] {
        &self.buffer[self.plain.clone()]
    }

    /// The first `n` bytes of the data were taken.
    pub(super) fn take(&mut self, n: usize) {
        self.plain.start += n;
        debug_assert!(self.plain.start <= self.plain.end);
    }

    /// Whether [`open`](Self::open) has something to open.
    pub(super) fn has_record(&self) -> bool {
        !self.closed
            && self.broken.is_none()
            && self.body_len().is_some_and(|len| self.held.len() >= HEADER + len)
    }

    /// Bytes behind the header at hand.
    fn body_len(&self) -> Option<usize> {
        let header = self.buffer[self.held.clone()].first_chunk::<HEADER>()?;
        Some(usize::from(u16::from_be_bytes([header[3], header[4]])))
    }

    /// Where to receive further bytes. To be called when all data was taken.
    pub(super) fn room(&mut self) -> &mut [u8] {
        debug_assert!(self.plain.is_empty());
        if self.held.is_empty() {
            self.held = 0..0;
        }
        let full = self.held.len() + HEADER + MAX_BODY > self.buffer.len() - self.held.start;
        if full && self.held.start > 0 {
            self.buffer.copy_within(self.held.clone(), 0);
            self.held = 0..self.held.len();
        }
        if self.buffer.is_empty() {
            self.buffer.resize(BUFFER.0, 0);
        }
        &mut self.buffer[self.held.end..]
    }

    /// So many bytes came into the [`room`](Self::room). A peer that fills it gets more of it the next time.
    pub(super) fn came(&mut self, n: usize) {
        self.held.end += n;
        if self.held.end == self.buffer.len() && self.buffer.len() < BUFFER.1 {
            self.buffer.resize((2 * self.buffer.len()).min(BUFFER.1), 0);
        }
    }

    /// Whether the peer has filled the first memory, and nothing of that is left. To be called when all data
    /// was taken.
    pub(super) fn has_grown(&self) -> bool {
        self.held.is_empty() && self.buffer.len() > BUFFER.0
    }

    /// Gives the memory back, unless something is left in it.
    pub(super) fn give_back(&mut self) {
        if self.held.is_empty() && self.plain.is_empty() {
            (self.buffer, self.held, self.plain) = (Vec::new(), 0..0, 0..0);
        }
    }

    /// Bytes of memory for what comes.
    #[cfg(test)]
    pub(super) fn memory(&self) -> usize {
        self.buffer.capacity()
    }

    /// Opens the next record. To be called when all data was taken. A record that was not made by the peer
    /// for this place fails, and so does everything behind it.
    pub(super) fn open(&mut self) -> io::Result<Opened> {
        if let Some(text) = &self.broken {
            return Err(invalid(text.clone()));
        }
        self.open_next().inspect_err(|e| self.broken = Some(e.to_string()))
    }

    fn open_next(&mut self) -> io::Result<Opened> {
        debug_assert!(self.plain.is_empty());
        if self.closed {
            return Ok(Opened::Closed);
        }
        let Some(len) = self.body_len() else { return Ok(Opened::Nothing) };
        let kind = self.buffer[self.held.start];
        if kind != u8::from(ContentType::ApplicationData) || len > MAX_BODY {
            return Err(invalid(format!(
                "a record of type {kind} with {len} bytes, which TLS does not allow here"
            )));
        }
        if self.held.len() < HEADER + len {
            return Ok(Opened::Nothing);
        }
        let at = self.held.start + HEADER;
        self.held.start = at + len;
        let body = &mut self.buffer[at..at + len];
        let sealed = InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, body);
        let opened = self
            .decrypter
            .decrypt(sealed, self.number)
            .map_err(|e| invalid(format!("record {} is not the peer's: {e}", self.number)))?;
        // One connection does not send 2^64 records.
        self.number += 1;
        let payload = opened.payload;
        let has_data = opened.typ == ContentType::ApplicationData && !payload.is_empty();
        self.empty = if has_data { 0 } else { self.empty + 1 };
        if self.empty > MOST_EMPTY {
            return Err(invalid(format!("{MOST_EMPTY} records without data, and another one")));
        }
        match opened.typ {
            ContentType::ApplicationData => {
                // Opened in place: the data begins where the record's body did.
                self.plain = at..at + payload.len();
                Ok(Opened::Data)
            }
            ContentType::Alert if payload == CLOSE_NOTIFY => {
                self.closed = true;
                Ok(Opened::Closed)
            }
            ContentType::Alert => Err(invalid(format!("the peer ended TLS with alert {payload:?}"))),
            ContentType::Handshake
                if payload.len() == KEY_UPDATE.len() && payload[..4] == KEY_UPDATE[..4] =>
            {
                match payload[4] {
                    0 => Ok(Opened::NewKeys(false)),
                    1 => Ok(Opened::NewKeys(true)),
                    other => Err(invalid(format!("a key update that asks {other}"))),
                }
            }
            other => Err(invalid(format!("a record of type {other:?} after the handshake"))),
        }
    }
}

/// Keys that seal records.
pub(super) struct Sealer {
    key: LessSafeKey,
    iv: Iv,
}

impl Sealer {
    /// For a key of `algorithm`.
    pub(super) fn new(algorithm: &'static Algorithm, key: &AeadKey, iv: Iv) -> io::Result<Sealer> {
        let key =
            UnboundKey::new(algorithm, key.as_ref()).map_err(|_| invalid("a key of the wrong length"))?;
        Ok(Sealer { key: LessSafeKey::new(key), iv })
    }

    /// Seals record `number` in place: behind the room for its header lie `len` bytes, and behind these is
    /// room for a record's [`TAIL`], and for as many zeros as there is more.
    fn seal(&self, record: &mut [u8], typ: ContentType, number: u64, len: usize) -> io::Result<()> {
        let (header, body) = record.split_at_mut(HEADER);
        let (inner, tag) = body.split_at_mut(body.len() + 1 - TAIL);
        header.copy_from_slice(&make_tls13_aad(inner.len() + tag.len()));
        inner[len] = typ.into();
        inner[len + 1..].fill(0);
        let nonce = Nonce::assume_unique_for_key(cipher::Nonce::new(&self.iv, number).0);
        let sealed = self.key.seal_in_place_separate_tag(nonce, Aad::from(header), inner);
        tag.copy_from_slice(sealed.map_err(|_| invalid("a record that is too long"))?.as_ref());
        Ok(())
    }
}

/// The sending direction.
///
/// Records are made in one buffer, which is kept until the connection is quiet. With memory of its own for
/// each, as rustls would take, the allocator gives pages back to the kernel and faults them in again, which
/// costs more than encryption.
pub(super) struct Sending {
    sealer: Sealer,
    /// Number of the next record.
    number: u64,
    /// Records after which new keys are due.
    limit: u64,
    buffer: Vec<u8>,
    /// Bytes of the buffer that are records and were not sent.
    sealed: Range<usize>,
}

impl Sending {
    pub(super) fn new(sealer: Sealer, number: u64, limit: u64) -> Sending {
        Sending { sealer, number, limit, buffer: Vec::new(), sealed: 0..0 }
    }

    /// Uses these keys for the records from here on.
    pub(super) fn renew(&mut self, sealer: Sealer) {
        (self.sealer, self.number) = (sealer, 0);
    }

    /// Has new keys be due after so many records.
    #[cfg(test)]
    pub(super) fn wear_after(&mut self, records: u64) {
        self.limit = records;
    }

    /// Number of the next record under these keys.
    #[cfg(test)]
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Whether new keys are due.
    pub(super) fn is_worn(&self) -> bool {
        self.number >= self.limit
    }

    /// Seals what `fill` puts at the front of the memory that it is given, `most` bytes at most. Gives how
    /// much that was. 0: no record was made.
    fn seal_as(
        &mut self,
        typ: ContentType,
        most: usize,
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> io::Result<usize> {
        let most_end = self.sealed.end + LINE + HEADER + most + PADDING + TAIL;
        if self.buffer.len() < most_end {
            self.buffer.resize(most_end, 0);
        }
        if self.sealed.is_empty() {
            let lead = self.buffer[HEADER..].as_ptr().align_offset(LINE) % LINE;
            self.sealed = lead..lead;
        }
        let begin = self.sealed.end;
        let len = fill(&mut self.buffer[begin + HEADER..][..most]).min(most);
        if len > 0 {
            let padding = if len == MAX_SEALED { PADDING } else { 0 };
            let end = begin + HEADER + len + padding + TAIL;
            self.sealer.seal(&mut self.buffer[begin..end], typ, self.number, len)?;
            self.number += 1;
            self.sealed.end = end;
        }
        Ok(len)
    }

    /// Seals one record of data: what `fill` puts at the front of the memory that it is given. Gives how many
    /// bytes that are. 0: there is no record.
    pub(super) fn seal(&mut self, fill: impl FnOnce(&mut [u8]) -> usize) -> io::Result<usize> {
        self.seal_as(ContentType::ApplicationData, MAX_SEALED, fill)
    }

    fn seal_message(&mut self, typ: ContentType, message: &[u8]) -> io::Result<()> {
        let fill = |room: &mut [u8]| {
            room.copy_from_slice(message);
            message.len()
        };
        self.seal_as(typ, message.len(), fill).map(drop)
    }

    /// Seals the message that new keys follow.
    pub(super) fn seal_key_update(&mut self) -> io::Result<()> {
        self.seal_message(ContentType::Handshake, &KEY_UPDATE)
    }

    /// Seals the farewell.
    pub(super) fn seal_close(&mut self) -> io::Result<()> {
        self.seal_message(ContentType::Alert, &CLOSE_NOTIFY)
    }

    /// Has memory for so many full records.
    #[cfg(test)]
    pub(super) fn reserve(&mut self, records: usize) {
        self.buffer.resize((records + 1) * MAX_DATA, 0);
    }

    /// Seals a record of data without any.
    #[cfg(test)]
    pub(super) fn seal_nothing(&mut self) -> io::Result<()> {
        let end = self.sealed.end + HEADER + TAIL;
        self.buffer.resize(end.max(self.buffer.len()), 0);
        self.sealer.seal(
            &mut self.buffer[self.sealed.end..end],
            ContentType::ApplicationData,
            self.number,
            0,
        )?;
        (self.number, self.sealed.end) = (self.number + 1, end);
        Ok(())
    }

    /// Gives the memory back, unless records wait in it.
    pub(super) fn give_back(&mut self) {
        if !self.is_pending() {
            (self.buffer, self.sealed) = (Vec::new(), 0..0);
        }
    }

    /// Bytes of memory for records.
    #[cfg(test)]
    pub(super) fn memory(&self) -> usize {
        self.buffer.capacity()
    }

    /// Whether records wait to be sent.
    pub(super) fn is_pending(&self) -> bool {
        !self.sealed.is_empty()
    }

    /// Sends what waits, by calls of `send`, until it gives an error.
    pub(super) fn flush(&mut self, mut send: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        while !self.sealed.is_empty() {
            match send(&self.buffer[self.sealed.clone()]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => self.sealed.start += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.sealed = 0..0;
        Ok(())
    }
}
