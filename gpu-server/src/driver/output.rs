//! What kernels print. `printf` goes to the client's standard output, the text of a failed `assert` to its
//! standard error.
//!
//! ```text
//!  kernel ─▶ software-gpu's sinks ──────────────┐
//!  kernel ─▶ NVIDIA's driver ─▶ stdout, stderr ─┴▶ Output ── OUTPUT word: bytes printed so far ──▶ client's progress area
//!                                                    ▲──────── device_output, called by the client when the word has changed
//! ```
//!
//! The word is published before the client learns that the kernel has finished, so a client that synchronizes
//! gets the text before it continues. A session whose kernels print nothing pays nothing. Up to [`MAX_KEPT`]
//! bytes are kept until the client fetches them. Further text is dropped, and the client is told how much.

use std::collections::VecDeque;
use std::ffi::{c_char, c_void};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use host_bridge::endpoint::Client;
use protocol::link::{ProgressUpdate, progress};
use protocol::ops::context::DeviceOutputReply;
use protocol::wire::Bytes;

/// Maximum amount of text kept for a client, in bytes.
const MAX_KEPT: usize = 16 << 20;
/// Maximum amount of text in one answer, in bytes. The whole answer fits into a reply slot.
const PIECE: usize = 3840;

/// Where a kernel printed something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// What a session's kernels have printed and its client has not fetched.
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
    /// Bytes printed since the session began, including dropped ones.
    total: u64,
    /// The last `total` that was published.
    told: u64,
    dropped: u64,
}

impl Output {
    /// Makes an output that has no client yet.
    pub fn new() -> Arc<Output> {
        Arc::default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the client that is notified.
    pub fn serve(&self, client: Arc<dyn Client>) {
        self.lock().client = Some(client);
    }

    /// Adds text that a kernel printed.
    pub fn print(&self, stream: Stream, text: &[u8]) {
        self.lock().take(stream, text);
    }

    /// Publishes the number of printed bytes, if it has changed.
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

    /// Removes and returns the next text for the client. It is empty if there is none.
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
        if self.held + text.len() > MAX_KEPT {
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

/// Redirects the C library's standard streams to `output`, because NVIDIA's driver prints there what kernels
/// print. The process's own log writes to file descriptors and is not affected.
pub fn capture(output: &Arc<Output>) -> io::Result<()> {
    let [out, err] = [to_output as extern "C" fn(_, _, _) -> _, to_errors].map(|write| {
        let functions = CookieFunctions { read: None, write: Some(write), seek: None, close: None };
        // The streams are never closed, so the reference is never released.
        let cookie = Arc::into_raw(Arc::clone(output)).cast_mut().cast::<c_void>();
        // SAFETY: the cookie is what the functions expect; the mode is a C string.
        let stream = unsafe { fopencookie(cookie, c"w".as_ptr(), functions) };
        if !stream.is_null() {
            // SAFETY: a new stream that nothing has used.
            unsafe { libc::setvbuf(stream, std::ptr::null_mut(), libc::_IONBF, 0) };
        }
        stream
    });
    if out.is_null() || err.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the C library lets a program assign them. No other thread of this process prints through them
    // at this point.
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
/// `cookie` points to an [`Output`] that is never freed, `text` to `size` bytes.
unsafe fn take(cookie: *mut c_void, stream: Stream, text: *const c_char, size: usize) -> isize {
    // SAFETY: guaranteed by the caller.
    let (output, text) =
        unsafe { (&*cookie.cast::<Output>(), std::slice::from_raw_parts(text.cast::<u8>(), size)) };
    output.print(stream, text);
    size as isize
}

/// Maximum size of an image that is searched for `printf`, in bytes after decompression.
const SEARCHED: usize = 4 << 20;

/// Whether an image contains code for a device of this compute capability that may call `printf`. `None` if
/// it is too long or in a format that cannot be searched.
pub fn may_print(image: &[u8], (major, minor): (u32, u32)) -> Option<bool> {
    software_gpu::mentions(image, 10 * major + minor, b"vprintf", SEARCHED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_split_and_keeps_its_order() {
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
    fn text_beyond_the_limit_is_dropped_and_counted() {
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
