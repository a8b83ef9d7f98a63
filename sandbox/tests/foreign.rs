//! A file of a file system whose server does not answer harms only the copy that has looked at it.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rgpu_sandbox::foreign::{Found, look};

/// Requests of `linux/fuse.h`.
mod op {
    pub const LOOKUP: u32 = 1;
    pub const OPEN: u32 = 14;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
}

/// A file system with one file in its folder.
#[derive(Default)]
struct Fuse {
    /// Whether it leaves `FLUSH` without an answer, and how often it has.
    silent: AtomicBool,
    flushes: AtomicUsize,
    over: AtomicBool,
}

impl Fuse {
    fn serve(&self, mut device: File) {
        let mut request = vec![0; 1 << 17];
        while !self.over.load(Ordering::SeqCst) {
            let mut watched = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
            if poll(&mut watched, 20_u8).unwrap() == 0 || device.read(&mut request).is_err() {
                continue;
            }
            let number = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
            // What the kernel knows of files without an answer is enough.
            let (error, answer) = match number(4) {
                // Version 7.31; 64 bytes.
                op::INIT => (0, words(&[(0, 7), (1, 31), (5, 4096)], 16)),
                // Node 2, which is a regular file with one link.
                op::LOOKUP => (0, words(&[(0, 2), (10, 2), (25, libc::S_IFREG | 0o666), (26, 1)], 32)),
                op::OPEN => (0, words(&[], 4)),
                op::FLUSH if self.silent.load(Ordering::SeqCst) => {
                    self.flushes.fetch_add(1, Ordering::SeqCst);
                    continue;
                }
                op::FLUSH => (0, Vec::new()),
                _ => (libc::ENOSYS, Vec::new()),
            };
            let length = 16 + answer.len() as u32;
            let header = [&length.to_ne_bytes()[..], &(-error).to_ne_bytes(), &request[8..16]].concat();
            // Requests that nobody waits for take no answer.
            let _ = device.write(&[header, answer].concat());
        }
    }
}

/// Ends the file system, and with it whatever waits for it.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Zeros, but for some words.
fn words(set: &[(usize, u32)], count: usize) -> Vec<u8> {
    let mut all = vec![0; count];
    set.iter().for_each(|(at, value)| all[*at] = *value);
    all.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

#[test]
fn a_file_system_that_does_not_answer_keeps_only_the_copy_waiting() {
    let Ok(device) = File::options().read(true).write(true).open("/dev/fuse") else {
        return eprintln!("left out: /dev/fuse cannot be opened");
    };
    let folder = tempfile::tempdir().unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    let (none, options) = (MsFlags::empty(), Some(options.as_str()));
    if let Err(e) = mount(Some("rgpu-test"), folder.path(), Some("fuse"), none, options) {
        return eprintln!("left out: a FUSE file system cannot be mounted: {e}");
    }
    let fuse = Fuse::default();
    let patience = Duration::from_secs(240);
    std::thread::scope(|scope| {
        let ends = Ends(&fuse.over);
        scope.spawn(|| fuse.serve(device));
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = File::options().write(true).open(folder.path().join("file")).unwrap();
        let rights = [file.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&rights)];
        sendmsg::<()>(theirs.as_raw_fd(), &[IoSlice::new(b"text")], &rights, MsgFlags::empty(), None)
            .unwrap();
        drop(file);
        fuse.silent.store(true, Ordering::SeqCst);
        let found = look(ours.as_fd(), 4, patience).unwrap();
        let Found::Foreign(copy) = found else { panic!("harmless") };
        while fuse.flushes.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The message goes without being received, and other processes can be started.
        drop((ours, theirs));
        assert!(std::process::Command::new("true").status().unwrap().success());
        drop(ends);
        copy.wait();
    });
    umount2(folder.path(), MntFlags::MNT_DETACH).unwrap();
}
