//! NVML's questions, put to NVIDIA's library on this machine.
//!
//! The library is opened at the first question and never closed. Questions take up to some milliseconds and are answered in the dispatcher's thread: a
//! client's NVML has a session of its own, so it is nobody's kernel that waits.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::OnceLock;

use protocol::Status;
use protocol::ops::Answer;
use protocol::ops::nvml::{
    self, FIELD_SIZE, MAX_FIELDS, MAX_OUTPUT, NvmlOps, NvmlPair, NvmlPairReply, NvmlQuery, NvmlQueryReply,
    NvmlSystem, NvmlSystemReply, NvmlText, Output, QUERIES, Query, status, struct_size,
};
use protocol::wire::Bytes;

use super::{Cuda, attribute, version};
use crate::driver::call::Call;

/// A symbol that rgpu's own library exports, and NVIDIA's does not.
const OWN_LIBRARY: &CStr = c"rgpu_libnvml";
/// Where the library is looked for: by the loader's rules, and where distributions put it, should rgpu's own be on the loader's path.
const PLACES: &[&CStr] = &[
    c"libnvidia-ml.so.1",
    c"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    c"/usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1",
    c"/usr/lib64/libnvidia-ml.so.1",
    c"/usr/lib/libnvidia-ml.so.1",
];
/// Functions that take two devices, by the number of the question.
const PAIR_FUNCTIONS: &[&CStr] =
    &[c"nvmlDeviceGetTopologyCommonAncestor", c"nvmlDeviceOnSameBoard", c"nvmlDeviceGetP2PStatus"];

/// Every function is called with six words, of which it reads as many as it has parameters: a pointer, a device and an `unsigned int` each travel in
/// one integer register, and the calling conventions of x86-64 and AArch64 Linux let a callee ignore registers that it has no parameter for.
type Function = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> u32;

/// NVIDIA's library, initialized.
struct Library {
    handle: usize,
    /// By place in [`QUERIES`].
    queries: Vec<Option<Function>>,
    pairs: Vec<Option<Function>>,
}

fn symbol(handle: *mut c_void, name: &CStr) -> Option<Function> {
    // SAFETY: the handle is of a library that is never closed.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    // SAFETY: not null; every symbol asked for is a function whose parameters are as `Function` says.
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
        // SAFETY: as above.
        if !unsafe { libc::dlsym(handle, OWN_LIBRARY.as_ptr()) }.is_null() {
            own = true;
            continue;
        }
        let init = symbol(handle, c"nvmlInit_v2").ok_or(status::FUNCTION_NOT_FOUND)?;
        // SAFETY: takes nothing.
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
    tracing::warn!("NVIDIA's libnvidia-ml.so.1 is not found: {why}");
    Err(status::LIBRARY_NOT_FOUND)
}

fn library() -> Result<&'static Library, u32> {
    static LIBRARY: OnceLock<Result<Library, u32>> = OnceLock::new();
    LIBRARY.get_or_init(open).as_ref().map_err(|status| *status)
}

/// Memory that a function writes into, aligned for every structure of NVML's.
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

/// Asks one question. `device` is NVML's handle.
fn ask(function: Function, device: usize, query: &Query, op: &NvmlQuery<'_>) -> Result<Vec<u8>, u32> {
    let mut words = [0; 6];
    words[0] = device;
    let mut next = 1;
    for argument in op.arguments.iter().take(query.arguments) {
        words[next] = *argument as usize;
        next += 1;
    }
    let [a, b, c, d, ..] = [next, next + 1, next + 2, next + 3];
    // SAFETY: the function is the question's, and its pointers are to memory of the size that its shape in the table gives: a text's buffer with its
    // length, a list's with its capacity, a structure's checked against its version word, which is what NVML goes by.
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

impl Cuda {
    /// NVML's handle of a device of this session, by what CUDA calls it: their numbers need not agree.
    fn nvml_device(&self, library: &Library, ordinal: u32) -> Result<usize, u32> {
        let device = self.device(ordinal).map_err(|_| status::INVALID_ARGUMENT)?.handle;
        let mut uuid = [0; 16];
        // SAFETY: writes 16 bytes.
        unsafe { self.api.device_uuid(&mut uuid, device) }.map_err(|_| status::GPU_IS_LOST)?;
        let uuid = nvml::uuid_text(&uuid);
        // CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, …BUS_ID, …DEVICE_ID
        let [domain, bus, number] =
            [50, 33, 34].map(|number| attribute(self.api, device, number).unwrap_or(0));
        let names = [
            (c"nvmlDeviceGetHandleByUUID", format!("GPU-{uuid}")),
            (c"nvmlDeviceGetHandleByUUID", format!("MIG-{uuid}")),
            (c"nvmlDeviceGetHandleByPciBusId_v2", format!("{domain:08X}:{bus:02X}:{number:02X}.0")),
        ];
        for (function, name) in names {
            let (Some(function), Ok(name)) =
                (symbol(library.handle as *mut c_void, function), CString::new(name))
            else {
                continue;
            };
            let mut found = 0usize;
            // SAFETY: a NUL-terminated name, and a place for one pointer.
            if unsafe {
                function(name.as_ptr() as usize, std::ptr::from_mut(&mut found) as usize, 0, 0, 0, 0)
            } == status::SUCCESS
            {
                return Ok(found);
            }
        }
        Err(status::NOT_FOUND)
    }

    fn nvml_answer(&self, op: &NvmlQuery<'_>) -> Result<Vec<u8>, u32> {
        let query = Query::by_number(op.query).ok_or(status::FUNCTION_NOT_FOUND)?;
        let library = library()?;
        let place = QUERIES.iter().position(|other| other == query);
        let function = place
            .and_then(|place| library.queries.get(place).copied().flatten())
            .ok_or(status::FUNCTION_NOT_FOUND)?;
        let device = self.nvml_device(library, op.device)?;
        let mut output = ask(function, device, query, op)?;
        if self.memory_limit > 0 {
            limit_memory(query, &mut output, self.memory_limit);
        }
        Ok(output)
    }
}

/// What a session may have of a device's memory is all that it is told of.
fn limit_memory(query: &Query, output: &mut [u8], limit: u64) {
    // Places of total, free and used, in 64-bit words.
    let places = match query {
        q if q == nvml::MEMORY => [0, 1, 2],
        q if q == nvml::MEMORY_V2 => [1, 3, 4],
        _ => return,
    };
    let (words, _) = output.as_chunks_mut::<8>();
    let [total, free, _] = places.map(|place| words.get(place).map_or(0, |word| u64::from_le_bytes(*word)));
    let total = total.min(limit);
    let free = free.min(total);
    for (place, value) in places.into_iter().zip([total, free, total - free]) {
        if let Some(word) = words.get_mut(place) {
            *word = value.to_le_bytes();
        }
    }
}

/// A text of the library's that belongs to no device.
fn system_text(library: &Library, function: &CStr) -> NvmlText {
    const LENGTH: usize = 128;
    let mut buffer = Buffer::new(LENGTH);
    let answer = match symbol(library.handle as *mut c_void, function) {
        // SAFETY: a buffer and its length.
        Some(function) => unsafe { function(buffer.address(), LENGTH, 0, 0, 0, 0) },
        None => status::FUNCTION_NOT_FOUND,
    };
    let mut text = buffer.bytes(LENGTH);
    text.truncate(text.iter().position(|byte| *byte == 0).unwrap_or(0));
    NvmlText { status: answer, text: String::from_utf8_lossy(&text).into_owned() }
}

impl NvmlOps<Call> for Cuda {
    fn nvml_system(&mut self, _cx: &mut Call, _op: NvmlSystem) -> Result<Answer<NvmlSystemReply>, Status> {
        let cuda_version = version(self.api)? as c_int as u32;
        let device_count = self.devices.len() as u32;
        let missing = |status| NvmlText { status, text: String::new() };
        Ok(Answer::Now(match library() {
            Ok(library) => NvmlSystemReply {
                status: status::SUCCESS,
                device_count,
                driver_version: system_text(library, c"nvmlSystemGetDriverVersion"),
                nvml_version: system_text(library, c"nvmlSystemGetNVMLVersion"),
                cuda_version,
            },
            Err(status) => NvmlSystemReply {
                status,
                device_count,
                driver_version: missing(status),
                nvml_version: missing(status),
                cuda_version,
            },
        }))
    }

    fn nvml_query(&mut self, _cx: &mut Call, op: NvmlQuery<'_>) -> Result<Answer<NvmlQueryReply>, Status> {
        Ok(Answer::Now(match self.nvml_answer(&op) {
            Ok(output) => NvmlQueryReply { status: status::SUCCESS, output: Bytes(output) },
            Err(status) => NvmlQueryReply { status, output: Bytes::default() },
        }))
    }

    fn nvml_pair(&mut self, _cx: &mut Call, op: NvmlPair) -> Result<Answer<NvmlPairReply>, Status> {
        let ask = || {
            let library = library()?;
            let function = library
                .pairs
                .get(op.question as usize)
                .ok_or(status::INVALID_ARGUMENT)?
                .ok_or(status::FUNCTION_NOT_FOUND)?;
            let (device, peer) = (self.nvml_device(library, op.device)?, self.nvml_device(library, op.peer)?);
            let mut value = 0u32;
            let to = std::ptr::from_mut(&mut value) as usize;
            // SAFETY: two handles of the library's, for the last question a number, and a place for one integer.
            let answer = unsafe {
                if op.question == 2 {
                    function(device, peer, op.argument as usize, to, 0, 0)
                } else {
                    function(device, peer, to, 0, 0, 0)
                }
            };
            if answer == status::SUCCESS { Ok(value) } else { Err(answer) }
        };
        Ok(Answer::Now(match ask() {
            Ok(value) => NvmlPairReply { status: status::SUCCESS, value },
            Err(status) => NvmlPairReply { status, value: 0 },
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        // SAFETY: `ask` passes a count and a list that has room for so many.
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
    fn each_shape_is_called_and_read_as_it_is() {
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
    fn a_status_of_the_library_s_is_the_answer() {
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

    #[test]
    fn a_session_with_a_limit_is_told_of_no_more_memory_than_that() {
        let mut output: Vec<u8> = [100u64, 90, 10].iter().flat_map(|value| value.to_le_bytes()).collect();
        limit_memory(nvml::MEMORY, &mut output, 40);
        assert_eq!(output, [40u64, 40, 0].iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>());
    }
}
