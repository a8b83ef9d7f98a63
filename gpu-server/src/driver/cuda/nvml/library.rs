//! Opens and calls NVIDIA's library.
//!
//! It is opened at the first query and never closed. A query takes up to a few milliseconds and is answered
//! in the dispatcher's thread: a client's NVML has a session of its own, so no kernel waits for it.

use std::ffi::{CStr, CString, c_void};
use std::sync::OnceLock;

use protocol::ops::nvml::{
    FIELD_SIZE, MAX_FIELDS, MAX_OUTPUT, NvmlQuery, Output, QUERIES, Query, status, struct_size,
};

/// A symbol that rgpu's own library exports and NVIDIA's doesn't.
const OWN_LIBRARY: &CStr = c"rgpu_libnvml";
/// Where to look for the library: first by the loader's rules, then where distributions install it, in case
/// the loader finds rgpu's own.
const PLACES: &[&CStr] = &[
    c"libnvidia-ml.so.1",
    c"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    c"/usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1",
    c"/usr/lib64/libnvidia-ml.so.1",
    c"/usr/lib/libnvidia-ml.so.1",
];
/// Functions that take two devices, by the query's number.
const PAIR_FUNCTIONS: &[&CStr] =
    &[c"nvmlDeviceGetTopologyCommonAncestor", c"nvmlDeviceOnSameBoard", c"nvmlDeviceGetP2PStatus"];

/// Every function is called with six words and reads as many as it has parameters: a pointer, a device and an
/// `unsigned int` each take one integer register, and the calling conventions of x86-64 and AArch64 Linux let
/// a callee ignore further registers.
pub(super) type Function = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> u32;

/// NVIDIA's library, initialized.
pub(super) struct Library {
    handle: usize,
    /// By index in [`QUERIES`].
    queries: Vec<Option<Function>>,
    /// By the query's number.
    pairs: Vec<Option<Function>>,
}

impl Library {
    /// A function by its name.
    pub fn find(&self, name: &CStr) -> Option<Function> {
        symbol(self.handle as *mut c_void, name)
    }

    /// The function for a query.
    pub fn of_query(&self, query: &Query) -> Option<Function> {
        let place = QUERIES.iter().position(|other| other == query)?;
        self.queries.get(place).copied().flatten()
    }

    /// The function for a query about two devices.
    pub fn of_pair(&self, question: u32) -> Result<Function, u32> {
        let found = self.pairs.get(question as usize).ok_or(status::INVALID_ARGUMENT)?;
        found.ok_or(status::FUNCTION_NOT_FOUND)
    }

    /// The handle that a function returns for a text: a UUID or a PCI address.
    pub fn device(&self, function: &CStr, text: &str) -> Option<usize> {
        let function = self.find(function)?;
        let text = CString::new(text).ok()?;
        let mut found = 0usize;
        // SAFETY: a NUL-terminated text, and a place for one pointer.
        let answer =
            unsafe { function(text.as_ptr() as usize, std::ptr::from_mut(&mut found) as usize, 0, 0, 0, 0) };
        (answer == status::SUCCESS).then_some(found)
    }

    /// Calls a function that only writes one number.
    pub fn number(&self, function: &CStr) -> Result<u32, u32> {
        let function = self.find(function).ok_or(status::FUNCTION_NOT_FOUND)?;
        let mut value = 0u32;
        // SAFETY: a place for one integer.
        match unsafe { function(std::ptr::from_mut(&mut value) as usize, 0, 0, 0, 0, 0) } {
            status::SUCCESS => Ok(value),
            failure => Err(failure),
        }
    }

    /// Calls a function that only writes a text.
    pub fn text(&self, function: &CStr) -> Result<String, u32> {
        const LENGTH: usize = 128;
        let function = self.find(function).ok_or(status::FUNCTION_NOT_FOUND)?;
        let mut buffer = Buffer::new(LENGTH);
        // SAFETY: a buffer and its length.
        match unsafe { function(buffer.address(), LENGTH, 0, 0, 0, 0) } {
            status::SUCCESS => {
                let mut text = buffer.bytes(LENGTH);
                text.truncate(text.iter().position(|byte| *byte == 0).unwrap_or(0));
                Ok(String::from_utf8_lossy(&text).into_owned())
            }
            failure => Err(failure),
        }
    }

    /// Makes a query without arguments about a device, for this server's own use.
    pub fn ask(&self, device: usize, query: &Query) -> Result<Vec<u8>, u32> {
        let function = self.of_query(query).ok_or(status::FUNCTION_NOT_FOUND)?;
        ask(
            function,
            device,
            query,
            &NvmlQuery { device: 0, query: query.number, arguments: [0; 3], input: &[] },
        )
    }
}

fn symbol(handle: *mut c_void, name: &CStr) -> Option<Function> {
    // SAFETY: the handle is of a library that is never closed.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    // SAFETY: not null; every requested symbol is a function that can be called like `Function`.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Function>(found) })
}

fn open() -> Result<Library, u32> {
    let mut own = false;
    for place in PLACES {
        // SAFETY: NVIDIA's library; its initializers are trusted.
        let handle = unsafe { libc::dlopen(place.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            continue;
        }
        // SAFETY: a loaded library and a C string.
        if !unsafe { libc::dlsym(handle, OWN_LIBRARY.as_ptr()) }.is_null() {
            own = true;
            continue;
        }
        let init = symbol(handle, c"nvmlInit_v2").ok_or(status::FUNCTION_NOT_FOUND)?;
        // SAFETY: takes no arguments.
        let answer = unsafe { init(0, 0, 0, 0, 0, 0) };
        if answer != status::SUCCESS {
            tracing::warn!("nvmlInit: {answer}");
            return Err(answer);
        }
        let find = |name: &str| CString::new(name).ok().and_then(|name| symbol(handle, &name));
        return Ok(Library {
            handle: handle as usize,
            queries: QUERIES.iter().map(|query| find(query.function)).collect(),
            pairs: PAIR_FUNCTIONS.iter().map(|name| symbol(handle, name)).collect(),
        });
    }
    let why =
        if own { "only rgpu's own is on this machine's path" } else { "it is part of the driver's packages" };
    tracing::warn!("NVIDIA's libnvidia-ml.so.1 cannot be used: {why}");
    Err(status::LIBRARY_NOT_FOUND)
}

/// The library, opened at the first call.
pub(super) fn library() -> Result<&'static Library, u32> {
    static LIBRARY: OnceLock<Result<Library, u32>> = OnceLock::new();
    LIBRARY.get_or_init(open).as_ref().map_err(|status| *status)
}

/// Memory that a function writes to, aligned for every NVML structure.
struct Buffer(Vec<u64>);

impl Buffer {
    fn new(size: usize) -> Buffer {
        Buffer(vec![0; size.div_ceil(8)])
    }

    fn holding(bytes: &[u8]) -> Buffer {
        let words = bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        });
        Buffer(words.collect())
    }

    fn address(&mut self) -> usize {
        self.0.as_mut_ptr() as usize
    }

    fn bytes(&self, size: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.truncate(size);
        bytes
    }
}

/// Makes one query. `device` is NVML's handle. The program's input is checked before the library sees it.
pub(super) fn ask(
    function: Function,
    device: usize,
    query: &Query,
    op: &NvmlQuery<'_>,
) -> Result<Vec<u8>, u32> {
    let mut words = [0; 6];
    words[0] = device;
    let mut next = 1;
    for argument in op.arguments.iter().take(query.arguments) {
        words[next] = *argument as usize;
        next += 1;
    }
    let [a, b, c, d, ..] = [next, next + 1, next + 2, next + 3];
    // SAFETY: the function belongs to the query, and its pointers are to memory of the size given by its
    // shape in the table: a text's buffer with its length, a list's with its capacity, a structure's checked
    // against its version word, which NVML goes by.
    let call = |words: [usize; 6]| match unsafe {
        function(words[0], words[1], words[2], words[3], words[4], words[5])
    } {
        status::SUCCESS => Ok(()),
        status => Err(status),
    };
    match query.output {
        Output::Text => {
            const LENGTH: usize = 256;
            let mut buffer = Buffer::new(LENGTH);
            words[a] = buffer.address();
            words[b] = LENGTH;
            call(words)?;
            let mut text = buffer.bytes(LENGTH);
            text.truncate(text.iter().position(|byte| *byte == 0).unwrap_or(0));
            Ok(text)
        }
        Output::Block(size) => {
            let mut buffer = Buffer::new(size);
            words[a] = buffer.address();
            call(words)?;
            Ok(buffer.bytes(size))
        }
        Output::Words(count) => {
            let mut values = [0u32; 4];
            for (place, value) in [a, b, c, d].into_iter().zip(&mut values).take(count) {
                words[place] = std::ptr::from_mut(value) as usize;
            }
            call(words)?;
            Ok(values[..count].iter().flat_map(|value| value.to_ne_bytes()).collect())
        }
        Output::List(size) => {
            let capacity = MAX_OUTPUT / size;
            let mut count = capacity as u32;
            let mut buffer = Buffer::new(capacity * size);
            words[a] = std::ptr::from_mut(&mut count) as usize;
            words[b] = buffer.address();
            call(words)?;
            Ok(buffer.bytes(capacity.min(count as usize) * size))
        }
        Output::Struct(version) => {
            let size = struct_size(version);
            if op.input.len() != size || op.input.get(..4) != Some(&version.to_le_bytes()[..]) {
                return Err(status::ARGUMENT_VERSION_MISMATCH);
            }
            let mut buffer = Buffer::holding(op.input);
            words[a] = buffer.address();
            call(words)?;
            Ok(buffer.bytes(size))
        }
        Output::Fields => {
            let count = op.input.len() / FIELD_SIZE;
            if !op.input.len().is_multiple_of(FIELD_SIZE) || !(1..=MAX_FIELDS).contains(&count) {
                return Err(status::INVALID_ARGUMENT);
            }
            let mut buffer = Buffer::holding(op.input);
            words[a] = count;
            words[b] = buffer.address();
            call(words)?;
            Ok(buffer.bytes(op.input.len()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::ops::nvml;

    fn question<'a>(query: &Query, input: &'a [u8]) -> NvmlQuery<'a> {
        NvmlQuery { device: 0, query: query.number, arguments: [7, 8, 9], input }
    }

    unsafe extern "C" fn write_text(
        _device: usize,
        text: usize,
        length: usize,
        _: usize,
        _: usize,
        _: usize,
    ) -> u32 {
        let text = std::ptr::with_exposed_provenance_mut::<u8>(text);
        // SAFETY: `ask` passes a buffer of that length.
        unsafe { std::slice::from_raw_parts_mut(text, length)[..3].copy_from_slice(b"abc") };
        0
    }

    unsafe extern "C" fn write_argument(
        _device: usize,
        argument: usize,
        to: usize,
        _: usize,
        _: usize,
        _: usize,
    ) -> u32 {
        // SAFETY: `ask` passes a place for one word.
        unsafe { std::ptr::with_exposed_provenance_mut::<u32>(to).write(argument as u32) };
        0
    }

    unsafe extern "C" fn write_two(
        device: usize,
        first: usize,
        second: usize,
        _: usize,
        _: usize,
        _: usize,
    ) -> u32 {
        for (to, value) in [(first, device as u32), (second, 2)] {
            // SAFETY: `ask` passes two places for one word each.
            unsafe { std::ptr::with_exposed_provenance_mut::<u32>(to).write(value) };
        }
        0
    }

    unsafe extern "C" fn write_list(
        _device: usize,
        count: usize,
        list: usize,
        _: usize,
        _: usize,
        _: usize,
    ) -> u32 {
        // SAFETY: `ask` passes a count and a list with room for that many.
        unsafe {
            std::ptr::with_exposed_provenance_mut::<u32>(count).write(2);
            std::ptr::with_exposed_provenance_mut::<[u32; 2]>(list).write([10, 20]);
        }
        0
    }

    unsafe extern "C" fn refuse(_: usize, _: usize, _: usize, _: usize, _: usize, _: usize) -> u32 {
        status::NOT_SUPPORTED
    }

    #[test]
    fn each_shape_is_called_and_read() {
        assert_eq!(ask(write_text, 1, nvml::NAME, &question(nvml::NAME, &[])), Ok(b"abc".to_vec()));
        assert_eq!(
            ask(write_argument, 1, nvml::TEMPERATURE, &question(nvml::TEMPERATURE, &[])),
            Ok(vec![7, 0, 0, 0])
        );
        assert_eq!(
            ask(write_two, 5, nvml::ECC_MODE, &question(nvml::ECC_MODE, &[])),
            Ok(vec![5, 0, 0, 0, 2, 0, 0, 0])
        );
        let clocks = question(nvml::SUPPORTED_MEMORY_CLOCKS, &[]);
        assert_eq!(
            ask(write_list, 1, nvml::SUPPORTED_MEMORY_CLOCKS, &clocks),
            Ok(vec![10, 0, 0, 0, 20, 0, 0, 0])
        );
    }

    #[test]
    fn the_librarys_status_is_the_answer() {
        assert_eq!(
            ask(refuse, 1, nvml::FAN_SPEED, &question(nvml::FAN_SPEED, &[])),
            Err(status::NOT_SUPPORTED)
        );
    }

    #[test]
    fn a_structure_of_another_version_or_size_never_reaches_the_library() {
        let good = [&(40u32 | 2 << 24).to_le_bytes()[..], &[0; 36]].concat();
        let other = [&(400u32 | 3 << 24).to_le_bytes()[..], &[0; 36]].concat();
        assert!(
            ask(refuse, 1, nvml::MEMORY_V2, &question(nvml::MEMORY_V2, &good))
                .is_err_and(|s| s == status::NOT_SUPPORTED)
        );
        for bad in [&other[..], &good[..39], &[]] {
            assert_eq!(
                ask(refuse, 1, nvml::MEMORY_V2, &question(nvml::MEMORY_V2, bad)),
                Err(status::ARGUMENT_VERSION_MISMATCH)
            );
        }
    }
}
