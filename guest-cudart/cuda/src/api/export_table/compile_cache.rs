//! The driver's private table through which NVRTC (12.9 and later) caches compiled code.
//!
//! NVRTC parses the source at every compilation, but skips what follows, from its intermediate code to PTX
//! and machine code, if the driver's cache has the result. Without the cache, each kernel that cuDNN
//! generates at run time costs another 200 ms or so for each new shape. As observed (NVRTC 12.9, 13.0 and
//! 13.5 behave alike):
//!
//! | slot | arguments | purpose |
//! |---|---|---|
//! | 1 | key\*, requested form (2: PTX, 1: machine code), intermediate code, its length, options, host, build date, architecture | creates a key |
//! | 3 | key, 0, bytes\*\*, length\* (32 bits) | looks up the result; any value but 0 means that there is none |
//! | 4 | key, 0, bytes, length | stores the result |
//! | 6 | bytes | releases what a lookup returned |
//! | 2 | key | releases the key |
//!
//! Results are kept in memory and in files: in `rgpu` below `CUDA_CACHE_PATH`, or else in `rgpu/ComputeCache`
//! below `XDG_CACHE_HOME` or `~/.cache`. As with NVIDIA's driver, `CUDA_CACHE_MAXSIZE` limits the files
//! (default: 1 GiB), and `CUDA_CACHE_DISABLE=1` turns the cache off. A file contains its whole key, which is
//! compared, and a checksum.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_char};
use std::fs::{DirBuilder, OpenOptions};
use std::hash::{DefaultHasher, Hasher};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::{fs, io};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, finish};
use client::{Status, lock, log};

/// Maximum size of a key or result, in bytes. Larger ones are compiled each time.
const LARGEST: usize = 64 << 20;
/// Maximum bytes of keys and results in memory.
const IN_MEMORY: usize = 64 << 20;
/// Maximum bytes of files, unless `CUDA_CACHE_MAXSIZE` is set.
const IN_FILES: u64 = 1 << 30;
/// The files are counted again after this many new ones.
const COUNT_AFTER: u32 = 64;
/// A file's header: these eight bytes, both lengths, and a checksum of both parts, each 64 bits. Key and
/// result follow.
const MAGIC: &[u8; 8] = b"rgpu:cc1";
const HEAD: usize = 32;

type Bytes = Arc<[u8]>;

fn hash(parts: &[&[u8]]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for part in parts {
        hasher.write_u64(part.len() as u64);
        hasher.write(part);
    }
    hasher.finish()
}

/// Results by key, in memory and in files.
struct Cache {
    memory: Mutex<Memory>,
    /// `None` if no folder is usable.
    folder: Option<PathBuf>,
    limit: u64,
    written: AtomicU32,
}

#[derive(Default)]
pub(crate) struct Memory {
    results: HashMap<Bytes, Bytes>,
    oldest: VecDeque<Bytes>,
    bytes: usize,
}

impl Memory {
    fn insert(&mut self, key: &Bytes, result: Bytes) {
        if self.results.contains_key(key) {
            return;
        }
        self.bytes += key.len() + result.len();
        self.results.insert(Arc::clone(key), result);
        self.oldest.push_back(Arc::clone(key));
        while self.bytes > IN_MEMORY
            && let Some(key) = self.oldest.pop_front()
        {
            self.bytes -= key.len() + self.results.remove(&key).map_or(0, |result| result.len());
        }
    }
}

impl Cache {
    fn new(folder: Option<PathBuf>, limit: u64) -> Cache {
        Cache { memory: Mutex::default(), folder, limit, written: AtomicU32::new(0) }
    }

    /// As configured by the environment. `None`: disabled.
    fn from_environment() -> Option<Cache> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if variable("CUDA_CACHE_DISABLE").is_some_and(|value| value == "1") {
            return None;
        }
        let folder = variable("CUDA_CACHE_PATH").map(|path| PathBuf::from(path).join("rgpu")).or_else(|| {
            let caches = variable("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
            Some(caches.join("rgpu/ComputeCache"))
        });
        let limit = variable("CUDA_CACHE_MAXSIZE").and_then(|value| value.to_str()?.parse().ok());
        // A relative path would mean another folder after a change of directory.
        Some(Cache::new(folder.filter(|folder| folder.is_absolute()), limit.unwrap_or(IN_FILES)))
    }

    fn get(&self, key: &Bytes) -> Option<Bytes> {
        if let Some(found) = lock(&self.memory).results.get(key) {
            return Some(Arc::clone(found));
        }
        let found = read(&self.file(key)?, key)?;
        lock(&self.memory).insert(key, Arc::clone(&found));
        Some(found)
    }

    fn insert(&self, key: &Bytes, result: Bytes) {
        lock(&self.memory).insert(key, Arc::clone(&result));
        let Some(file) = self.file(key) else { return };
        if let Err(e) = write(&file, key, &result) {
            log::debug(format_args!("compiled code is not kept in {}: {e}", file.display()));
            return;
        }
        if self.written.fetch_add(1, Ordering::Relaxed).is_multiple_of(COUNT_AFTER) {
            self.make_room();
        }
    }

    fn file(&self, key: &[u8]) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("{:016x}", hash(&[key]))))
    }

    /// If there are too many bytes, removes the oldest files until a quarter of the limit is free.
    fn make_room(&self) {
        let Some(entries) = self.folder.as_ref().and_then(|folder| fs::read_dir(folder).ok()) else { return };
        let mut files: Vec<(i64, u64, PathBuf)> = entries
            .filter_map(|entry| {
                let entry = entry.ok()?;
                let about = entry.metadata().ok().filter(fs::Metadata::is_file)?;
                Some((about.mtime(), about.len(), entry.path()))
            })
            .collect();
        let mut bytes: u64 = files.iter().map(|file| file.1).sum();
        if bytes <= self.limit {
            return;
        }
        files.sort_unstable();
        for (_, len, path) in files {
            if bytes <= self.limit / 4 * 3 {
                break;
            }
            if fs::remove_file(path).is_ok() {
                bytes -= len;
            }
        }
    }
}

/// The result in a file, if the file is intact and has this key.
fn read(file: &Path, key: &[u8]) -> Option<Bytes> {
    // The GPU runs this code, so only files that belong to this user are trusted.
    let mut open = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(file).ok()?;
    let about = open.metadata().ok()?;
    // SAFETY: has no preconditions.
    if about.uid() != unsafe { libc::geteuid() } || about.len() > (HEAD + 2 * LARGEST) as u64 {
        return None;
    }
    let mut bytes = Vec::with_capacity(about.len() as usize);
    open.read_to_end(&mut bytes).ok()?;
    let (head, rest) = bytes.split_at_checked(HEAD)?;
    let word = |at: usize| head[at..at + 8].first_chunk::<8>().map(|word| u64::from_le_bytes(*word));
    let (found, result) = rest.split_at_checked(usize::try_from(word(8)?).ok()?)?;
    let whole = head.starts_with(MAGIC)
        && word(16)? == result.len() as u64
        && word(24)? == hash(&[found, result])
        && found == key;
    whole.then(|| result.into())
}

/// Writes a file atomically.
fn write(file: &Path, key: &[u8], result: &[u8]) -> io::Result<()> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    if let Some(folder) = file.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let partial = file.with_extension(format!("{}.{number}", std::process::id()));
    let mut head = MAGIC.to_vec();
    for word in [key.len() as u64, result.len() as u64, hash(&[key, result])] {
        head.extend(word.to_le_bytes());
    }
    let written = (|| {
        let mut open = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
        open.write_all(&head)?;
        open.write_all(key)?;
        open.write_all(result)?;
        fs::rename(&partial, file)
    })();
    if written.is_err() {
        // There may be nothing to remove.
        let _ = fs::remove_file(&partial);
    }
    written
}

static CACHE: LazyLock<Option<Cache>> = LazyLock::new(Cache::from_environment);

/// Keys handed out, by the word that represents them.
static KEYS: Mutex<Option<HashMap<usize, Bytes>>> = Mutex::new(None);

/// Results handed out, by address.
static GIVEN: Mutex<Option<HashMap<usize, Vec<Bytes>>>> = Mutex::new(None);

fn key(word: usize) -> Result<Bytes> {
    lock(&KEYS).as_ref().and_then(|keys| keys.get(&word).cloned()).ok_or(Status::INVALID_HANDLE)
}

/// # Safety
///
/// NULL, or a valid string of the caller.
unsafe fn string<'a>(text: *const c_char) -> &'a [u8] {
    if text.is_null() {
        return b"";
    }
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(text) }.to_bytes()
}

pub(crate) unsafe extern "C" fn make_key(
    out: *mut usize,
    wanted: u32,
    code: *const u8,
    len: usize,
    options: *const c_char,
    host: *const c_char,
    build: *const c_char,
    architecture: u32,
) -> u32 {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let result: Result = (|| {
        non_null(out)?;
        if CACHE.is_none() {
            return Err(Status::NOT_SUPPORTED);
        }
        if code.is_null() || len == 0 || len > LARGEST {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller passes its intermediate code with its length, and strings.
        let parts =
            unsafe { [std::slice::from_raw_parts(code, len), string(options), string(host), string(build)] };
        let mut key = Vec::with_capacity(len + 256);
        key.extend(wanted.to_le_bytes());
        key.extend(architecture.to_le_bytes());
        for part in parts {
            key.extend((part.len() as u64).to_le_bytes());
            key.extend(part);
        }
        let word = NEXT.fetch_add(1, Ordering::Relaxed);
        lock(&KEYS).get_or_insert_default().insert(word, key.into());
        // SAFETY: not NULL; the caller guarantees that it is writable.
        unsafe { put(out, word) }
    })();
    // The caller then compiles without a cache, which is not an error of the program.
    result.err().map_or(0, |status| status.0)
}

pub(crate) unsafe extern "C" fn look_up(
    word: usize,
    _zero: usize,
    bytes: *mut *const u8,
    len: *mut u32,
) -> u32 {
    let result: Result = (|| {
        non_null(bytes)?;
        non_null(len)?;
        let key = key(word)?;
        let found = CACHE.as_ref().and_then(|cache| cache.get(&key)).ok_or(Status::NOT_FOUND)?;
        let size = u32::try_from(found.len()).map_err(|_| Status::NOT_FOUND)?;
        let at = found.as_ptr();
        lock(&GIVEN).get_or_insert_default().entry(at as usize).or_default().push(found);
        // SAFETY: neither is NULL; the caller guarantees that both are writable.
        unsafe {
            put(bytes, at)?;
            put(len, size)
        }
    })();
    // A miss is normal.
    result.err().map_or(0, |status| status.0)
}

pub(crate) unsafe extern "C" fn keep(word: usize, _zero: usize, bytes: *const u8, len: u32) -> u32 {
    let result: Result = (|| {
        non_null(bytes)?;
        let key = key(word)?;
        let len = len as usize;
        if len == 0 || len > LARGEST {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller passes its result with its length.
        let result: Bytes = unsafe { std::slice::from_raw_parts(bytes, len) }.into();
        CACHE.as_ref().ok_or(Status::NOT_SUPPORTED)?.insert(&key, result);
        Ok(())
    })();
    finish("compile cache insert", result)
}

pub(crate) unsafe extern "C" fn give_back(bytes: *const u8) -> u32 {
    let mut given = lock(&GIVEN);
    if let Some(given) = given.as_mut()
        && let Some(results) = given.get_mut(&(bytes as usize))
    {
        results.pop();
        if results.is_empty() {
            given.remove(&(bytes as usize));
        }
    }
    0
}

pub(crate) unsafe extern "C" fn drop_key(word: usize) -> u32 {
    if let Some(keys) = lock(&KEYS).as_mut() {
        keys.remove(&word);
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(folder: &Path) -> Cache {
        Cache::new(Some(folder.join("deep/rgpu")), IN_FILES)
    }

    fn bytes(text: &[u8]) -> Bytes {
        text.into()
    }

    #[test]
    fn another_process_finds_results_only_under_the_same_key() {
        let folder = tempfile::tempdir().unwrap();
        cache(folder.path()).insert(&bytes(b"key"), bytes(b"result"));
        let later = cache(folder.path());
        assert_eq!(later.get(&bytes(b"key")).as_deref(), Some(&b"result"[..]));
        assert_eq!(later.get(&bytes(b"kez")), None);
    }

    #[test]
    fn damaged_files_and_files_of_other_keys_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let first = cache(folder.path());
        first.insert(&bytes(b"key"), bytes(b"result"));
        let file = first.file(b"key").unwrap();
        let whole = fs::read(&file).unwrap();
        for end in 0..whole.len() {
            fs::write(&file, &whole[..end]).unwrap();
            assert_eq!(cache(folder.path()).get(&bytes(b"key")), None, "{end} bytes");
        }
        for at in 0..whole.len() {
            let mut other = whole.clone();
            other[at] ^= 1;
            fs::write(&file, other).unwrap();
            assert_eq!(cache(folder.path()).get(&bytes(b"key")), None, "byte {at}");
        }
        fs::write(&file, &whole).unwrap();
        fs::copy(&file, first.file(b"other").unwrap()).unwrap();
        assert_eq!(cache(folder.path()).get(&bytes(b"other")), None);
        assert!(cache(folder.path()).get(&bytes(b"key")).is_some());
    }

    #[test]
    fn the_oldest_files_are_removed_above_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let small = Cache { limit: 4000, ..cache(folder.path()) };
        for n in 0..8u8 {
            small.insert(&bytes(&[n]), vec![n; 900].into());
            let file = OpenOptions::new().write(true).open(small.file(&[n]).unwrap()).unwrap();
            file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(n.into())).unwrap();
        }
        small.make_room();
        let kept = |n: u8| small.file(&[n]).unwrap().exists();
        assert_eq!((0..8).map(kept).collect::<Vec<_>>(), [[false; 5].as_slice(), &[true; 3]].concat());
    }

    #[test]
    fn without_a_folder_results_stay_in_bounded_memory() {
        let cache = Cache::new(None, IN_FILES);
        for n in 0..5u8 {
            cache.insert(&bytes(&[n]), vec![n; IN_MEMORY / 4].into());
        }
        assert_eq!(cache.get(&bytes(&[0])), None);
        assert_eq!(cache.get(&bytes(&[4])).map(|result| result[0]), Some(4));
        assert!(lock(&cache.memory).bytes <= IN_MEMORY);
    }
}
