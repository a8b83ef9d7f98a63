//! What kernels print: `printf` goes to the client's standard output, the text of a failed `assert` to its standard error.
//!
//! ```text
//!  kernel ─▶ software-gpu's sinks ──────────────┐
//!  kernel ─▶ NVIDIA's driver ─▶ stdout, stderr ─┴▶ Output ── OUTPUT word: "so many bytes so far" ──▶ client's progress area
//!                                                    ▲──────── device_output, asked by the client when the word has moved
//! ```
//!
//! The word is published before whatever lets the client know that the kernel is done, so a client that synchronizes has the text before it goes on; a session whose
//! kernels print nothing pays nothing for it. What a client does not fetch is kept up to [`MOST`] bytes; after that text is dropped, and the client is told how much.

use std::collections::VecDeque;
use std::ffi::{c_char, c_void};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use host_bridge::endpoint::Client;
use protocol::link::{ProgressUpdate, progress};
use protocol::ops::context::DeviceOutputReply;
use protocol::wire::Bytes;

/// Text that is kept for a client.
const MOST: usize = 16 << 20;
/// Text of one answer, in bytes: with what is around it, it fits into a reply slot.
const PIECE: usize = 3840;

/// Where a piece of text belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// The text of a session's kernels that its client has not fetched.
#[derive(Default)]
pub struct Output {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    client: Option<Arc<dyn Client>>,
    kept: VecDeque<(Stream, Vec<u8>)>,
    /// Bytes in `kept`.
    held: usize,
    /// Bytes that were ever printed, those that were dropped among them.
    total: u64,
    /// `total` when the client was told last.
    told: u64,
    dropped: u64,
}

impl Output {
    /// Of no client yet.
    pub fn new() -> Arc<Output> {
        Arc::default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The client that is told from now on.
    pub fn serve(&self, client: Arc<dyn Client>) {
        self.lock().client = Some(client);
    }

    /// Takes text that a kernel printed.
    pub fn print(&self, stream: Stream, text: &[u8]) {
        self.lock().take(stream, text);
    }

    /// Tells the client of what has been printed since it was told last.
    pub fn tell(&self) {
        let mut state = self.lock();
        if state.told != state.total
            && let Some(client) = &state.client
        {
            client.publish(&[ProgressUpdate {
                kind: progress::OUTPUT,
                index: 0,
                seq: 0,
                value: state.total,
            }]);
            state.told = state.total;
        }
    }

    /// The next piece for the client; empty if there is none.
    pub fn fetch(&self) -> DeviceOutputReply {
        let mut state = self.lock();
        let dropped = std::mem::take(&mut state.dropped);
        let mut reply = DeviceOutputReply { error: false, text: Bytes(Vec::new()), dropped };
        if let Some((stream, mut text)) = state.kept.pop_front() {
            if text.len() > PIECE {
                let rest = text.split_off(PIECE);
                state.kept.push_front((stream, rest));
            }
            state.held -= text.len();
            reply.error = stream == Stream::Err;
            reply.text = Bytes(text);
        }
        reply
    }
}

impl State {
    fn take(&mut self, stream: Stream, text: &[u8]) {
        self.total += text.len() as u64;
        if self.held + text.len() > MOST {
            self.dropped += text.len() as u64;
            return;
        }
        self.held += text.len();
        match self.kept.back_mut() {
            Some((last, kept)) if *last == stream => kept.extend_from_slice(text),
            _ => self.kept.push_back((stream, text.to_vec())),
        }
    }
}

unsafe extern "C" {
    /// The C library's streams, which NVIDIA's driver prints to.
    static mut stdout: *mut libc::FILE;
    static mut stderr: *mut libc::FILE;
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: CookieFunctions) -> *mut libc::FILE;
}

/// `cookie_io_functions_t` of the C library.
#[repr(C)]
struct CookieFunctions {
    read: Option<extern "C" fn()>,
    write: Option<extern "C" fn(*mut c_void, *const c_char, usize) -> isize>,
    seek: Option<extern "C" fn()>,
    close: Option<extern "C" fn()>,
}

/// From now on, what this process prints through the C library's standard streams goes to `output`: NVIDIA's driver prints there what kernels print. The process's own log
/// writes to descriptors and is not concerned.
pub fn capture(output: &Arc<Output>) -> io::Result<()> {
    let [out, err] = [to_output as extern "C" fn(_, _, _) -> _, to_errors].map(|write| {
        let functions = CookieFunctions { read: None, write: Some(write), seek: None, close: None };
        // The streams are never closed, so that the reference is never given back.
        let cookie = Arc::into_raw(Arc::clone(output)).cast_mut().cast::<c_void>();
        // SAFETY: the functions take what the cookie is; the mode is a C string.
        let stream = unsafe { fopencookie(cookie, c"w".as_ptr(), functions) };
        if !stream.is_null() {
            // SAFETY: a fresh stream, on which nothing was done yet.
            unsafe { libc::setvbuf(stream, std::ptr::null_mut(), libc::_IONBF, 0) };
        }
        stream
    });
    if out.is_null() || err.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the C library lets a program assign them; no other thread of this process prints through them at this point.
    unsafe {
        stdout = out;
        stderr = err;
    }
    Ok(())
}

extern "C" fn to_output(cookie: *mut c_void, text: *const c_char, size: usize) -> isize {
    // SAFETY: called by the C library, with the cookie of `capture` and a buffer of that size.
    unsafe { take(cookie, Stream::Out, text, size) }
}

extern "C" fn to_errors(cookie: *mut c_void, text: *const c_char, size: usize) -> isize {
    // SAFETY: called by the C library, with the cookie of `capture` and a buffer of that size.
    unsafe { take(cookie, Stream::Err, text, size) }
}

/// # Safety
/// `cookie` points to an [`Output`] that lives for ever, `text` to `size` bytes.
unsafe fn take(cookie: *mut c_void, stream: Stream, text: *const c_char, size: usize) -> isize {
    // SAFETY: by this function's own contract.
    let (output, text) =
        unsafe { (&*cookie.cast::<Output>(), std::slice::from_raw_parts(text.cast::<u8>(), size)) };
    output.print(stream, text);
    size as isize
}

/// Images are searched for `printf` as far as they are no longer than this unpacked.
const SEARCHED: usize = 4 << 20;

/// Whether an image has code for a device of this compute capability that may call `printf`. `None`: it is too long to be searched, or of a form that cannot be.
pub fn may_print(image: &[u8], (major, minor): (u32, u32)) -> Option<bool> {
    software_gpu::mentions(image, 10 * major + minor, b"vprintf", SEARCHED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_comes_in_pieces_and_in_order() {
        let output = Output::new();
        output.print(Stream::Out, &[b'a'; PIECE + 10]);
        output.print(Stream::Err, b"assertion");
        output.print(Stream::Out, b"b");
        let all: Vec<_> =
            std::iter::from_fn(|| Some(output.fetch()).filter(|reply| !reply.text.0.is_empty())).collect();
        let sizes: Vec<_> = all.iter().map(|reply| (reply.error, reply.text.0.len())).collect();
        assert_eq!(sizes, [(false, PIECE), (false, 10), (true, 9), (false, 1)]);
        assert_eq!(output.lock().held, 0);
    }

    #[test]
    fn what_nobody_fetches_is_dropped_and_counted() {
        let output = Output::new();
        for _ in 0..20 {
            output.print(Stream::Out, &vec![b'x'; 1 << 20]);
        }
        let first = output.fetch();
        assert_eq!((first.dropped, first.text.0.len()), (4 << 20, PIECE));
        assert_eq!(output.fetch().dropped, 0);
        assert_eq!(output.lock().total, 20 << 20);
    }

    #[test]
    fn an_answer_fits_into_a_reply_slot() {
        let output = Output::new();
        output.print(Stream::Out, &vec![b'x'; 2 * PIECE]);
        let mut payload = Vec::new();
        protocol::wire::Wire::put(&output.fetch(), &mut protocol::wire::Writer(&mut payload));
        assert!(payload.len() <= protocol::channel::MAX_PAYLOAD, "{}", payload.len());
    }
}
