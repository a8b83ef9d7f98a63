//! Modules, functions, launches.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_void};

use protocol::Status;
use protocol::handle::{ContextId, StreamId};
use protocol::ops::launch::*;
use protocol::ops::module::*;
use protocol::wire::{Wire, Writer};

use cudarc::driver::sys::{CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue};

use super::Cuda;
use super::api::{Api, CUfunction, CUlaunchConfig, CUmodule, CUstream};
use super::link::Link;
use super::streams::CudaStream;
use crate::driver::call::{Call, Result};
use crate::driver::gpu::{GpuModules, LinkInput, Loaded};
use crate::driver::output::may_print;
use crate::driver::streams::Streams;

/// `CU_POINTER_ATTRIBUTE_IS_MANAGED`.
pub(super) const POINTER_IS_MANAGED: u32 = 8;

/// Function attributes are read for modules of up to this many functions, because reading them loads the
/// function.
const TELL_ATTRIBUTES: usize = 16;
/// Number of function attributes.
const ATTRIBUTES: u32 = 16;
/// Instead of an attribute: `cuFuncSetCacheConfig`.
const CACHE_CONFIG: u32 = 0x1_0000;
/// Number of kernel parameters whose addresses fit on the stack.
const FEW: usize = 32;
/// Size of each JIT log with its NUL, in bytes. Both fit in a reply.
pub(super) const LOG: usize = 1792;

// `CUjit_option`.
const INFO_LOG: u32 = 3;
const INFO_LOG_SIZE: u32 = 4;
const ERROR_LOG: u32 = 5;
const ERROR_LOG_SIZE: u32 = 6;

/// A loaded module.
pub struct CudaModule {
    handle: CUmodule,
    /// The function table's wire form; empty if its functions are bound by name.
    table: Vec<u8>,
    /// Whether its functions may call `printf`.
    prints: bool,
}

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for CudaModule {}

/// A function of a module.
pub struct CudaFunction {
    pub(super) handle: CUfunction,
    params: Vec<Param>,
    /// Whether it may call `printf`.
    prints: bool,
}

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for CudaFunction {}

#[cfg(test)]
impl CudaFunction {
    /// One without parameters.
    pub(super) fn fake() -> CudaFunction {
        CudaFunction { handle: std::ptr::null_mut(), params: Vec::new(), prints: false }
    }
}

fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: a NUL-terminated string of the driver that lives as long as the function.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// A function's parameters.
fn params(api: &Api, handle: CUfunction) -> Result<Vec<Param>> {
    let mut params = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: writes two integers; an index beyond the last parameter returns CUDA_ERROR_INVALID_VALUE.
        match unsafe { api.function_param_raw(handle, params.len(), &mut offset, &mut size) } {
            Ok(()) => params.push(Param { offset: offset as u32, size: size as u32 }),
            Err(Status::INVALID_VALUE) => return Ok(params),
            Err(status) => return Err(status),
        }
    }
}

fn describe(api: &Api, handle: CUfunction, attributes: bool) -> Result<FunctionInfo> {
    let mut name = std::ptr::null();
    // SAFETY: a function of a loaded module; writes a pointer.
    unsafe { api.function_name(&mut name, handle) }?;
    let params = params(api, handle)?;
    let attributes = if attributes { function_attributes(api, handle)? } else { Vec::new() };
    Ok(FunctionInfo { name: text(name), params, attributes })
}

/// Loads the function, which the driver would otherwise do at its first launch, and reads its attributes.
fn function_attributes(api: &Api, handle: CUfunction) -> Result<Vec<i32>> {
    // SAFETY: a function of a loaded module.
    unsafe { api.function_load(handle) }?;
    let read = |number| {
        let mut value = 0;
        // SAFETY: writes one integer.
        unsafe { api.function_attribute(&mut value, number, handle) }.map(|()| value)
    };
    // Every driver has the first one. The list ends before the first that this driver doesn't know.
    let first = read(0)?;
    Ok(std::iter::once(first).chain((1..ATTRIBUTES).map_while(|number| read(number).ok())).collect())
}

fn functions(api: &Api, module: CUmodule) -> Result<(Vec<CudaFunction>, Vec<u8>)> {
    let mut count = 0;
    // SAFETY: writes one integer.
    unsafe { api.module_count(&mut count, module) }?;
    let mut handles: Vec<CUfunction> = vec![std::ptr::null_mut(); count as usize];
    if count > 0 {
        // SAFETY: room for `count` handles.
        unsafe { api.module_functions(handles.as_mut_ptr(), count, module) }?;
    }
    let tell = handles.len() <= TELL_ATTRIBUTES;
    let mut functions = Vec::with_capacity(handles.len());
    let mut table = FunctionTable { functions: Vec::with_capacity(handles.len()) };
    for handle in handles {
        let info = describe(api, handle, tell)?;
        functions.push(CudaFunction { handle, params: info.params.clone(), prints: true });
        table.functions.push(info);
    }
    let mut bytes = Vec::new();
    table.put(&mut Writer(&mut bytes));
    Ok((functions, bytes))
}

/// The driver's options for the compiler and linker: integers only. Options that point to the client's memory
/// are left out: wall time, logs. Names of symbols, and the numbers of names (the driver would read as many
/// from a null pointer), are refused.
pub(super) fn jit_options(options: &[JitOption]) -> Result<(Vec<u32>, Vec<*mut c_void>)> {
    let (mut numbers, mut values) = (Vec::new(), Vec::new());
    for option in options {
        if matches!(option.option, 0 | 1 | 7 | 8 | 9 | 10 | 11 | 12 | 13 | 14 | 15 | 16 | 20..=24 | 30..=33) {
            numbers.push(option.option);
            values.push(option.value as *mut c_void);
        } else if !matches!(option.option, 2..=6) {
            tracing::warn!(option = option.option, "JIT option refused");
            return Err(Status::NOT_SUPPORTED);
        }
    }
    Ok((numbers, values))
}

/// Logs of the compiler or the linker: messages and errors.
pub(super) struct Logs([Box<[u8]>; 2]);

impl Logs {
    /// Allocates `room` bytes for each.
    pub(super) fn new(room: usize) -> Logs {
        Logs([vec![0; room].into(), vec![0; room].into()])
    }

    /// Adds the options that make the driver write here. This must outlive their use.
    pub(super) fn ask(&mut self, numbers: &mut Vec<u32>, values: &mut Vec<*mut c_void>) {
        numbers.extend([INFO_LOG, INFO_LOG_SIZE, ERROR_LOG, ERROR_LOG_SIZE]);
        for log in &mut self.0 {
            values.extend([log.as_mut_ptr().cast(), log.len() as *mut c_void]);
        }
    }

    /// Both logs.
    pub(super) fn texts(&self) -> [String; 2] {
        self.0.each_ref().map(|log| {
            let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
            String::from_utf8_lossy(&log[..end]).into_owned()
        })
    }
}

/// Checks where an image ends. The driver trusts the length stated in the image, so an image that claims to
/// be longer than it is must be refused.
fn whole(mut image: Vec<u8>) -> Result<Vec<u8>> {
    let word =
        |at: usize| image.get(at..at + 8).and_then(|b| b.first_chunk::<8>()).map(|b| u64::from_le_bytes(*b));
    let half =
        |at: usize| image.get(at..at + 2).and_then(|b| b.first_chunk::<2>()).map(|b| u16::from_le_bytes(*b));
    let end = match image.first_chunk::<4>() {
        // A fat binary: a header of 16 bytes, with the size of the rest at offset 8.
        Some([0x50, 0xed, 0x55, 0xba]) => word(8).and_then(|size| size.checked_add(16)),
        // ELF: the section headers are usually last and must be inside.
        Some([0x7f, b'E', b'L', b'F']) => word(0x28)
            .zip(half(0x3a))
            .zip(half(0x3c))
            .and_then(|((at, each), n)| at.checked_add(u64::from(each) * u64::from(n))),
        // PTX: text that ends with NUL.
        _ => {
            image.push(0);
            Some(0)
        }
    };
    match end {
        Some(end) if end <= image.len() as u64 => Ok(image),
        _ => Err(Status::INVALID_IMAGE),
    }
}

impl Cuda {
    fn load(
        &self,
        context: ContextId,
        options: &[JitOption],
        image: &[u8],
    ) -> Result<(Result<CUmodule>, [String; 2])> {
        let mut logs = Logs::new(LOG);
        let (mut numbers, mut values) = jit_options(options)?;
        logs.ask(&mut numbers, &mut values);
        let mut module: CUmodule = std::ptr::null_mut();
        let count = numbers.len() as u32;
        // SAFETY: the image is complete (see `whole`) and NUL-terminated if it is text; the logs have the
        // sizes given in the options.
        let loaded = unsafe {
            self.api.module_load(
                &mut module,
                image.as_ptr().cast(),
                count,
                numbers.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        let texts = logs.texts();
        if loaded.is_err() && !texts[1].is_empty() {
            tracing::warn!("module refused: {}", texts[1].trim_end());
        }
        Ok((self.note(context, loaded).map(|()| module), texts))
    }

    /// Enqueues a launch on a stream of the current context, which is also the function's.
    pub(super) fn launch_at(
        &self,
        context: ContextId,
        stream: CUstream,
        function: &CudaFunction,
        op: &Launch<'_>,
    ) -> Result {
        let mut attributes = launch_attributes(&op.attributes)?;
        let config = config(op.grid, op.block, op.dynamic_shared, stream, &mut attributes);
        let launched = self.with_params(function, op.params, |params| {
            // SAFETY: live handles of the current context; one pointer per parameter, each to as many bytes
            // as that parameter has, which the driver copies before it returns.
            unsafe { self.api.launch(&config, function.handle, params, std::ptr::null_mut()) }
        });
        self.note(context, launched)
    }

    /// Calls `launch` with a pointer to each parameter in the packed ones of a launch, which is to happen.
    pub(super) fn with_params(
        &self,
        function: &CudaFunction,
        packed: &[u8],
        launch: impl FnOnce(*mut *mut c_void) -> Result,
    ) -> Result {
        if function.prints {
            self.completer.may_print();
        }
        let (mut few, mut many) = ([std::ptr::null_mut::<c_void>(); FEW], Vec::new());
        let pointers = match few.get_mut(..function.params.len()) {
            Some(few) => few,
            None => {
                many.resize(function.params.len(), std::ptr::null_mut());
                &mut many[..]
            }
        };
        for (pointer, param) in pointers.iter_mut().zip(&function.params) {
            let (offset, size) = (param.offset as usize, param.size as usize);
            let bytes = offset
                .checked_add(size)
                .and_then(|end| packed.get(offset..end))
                .ok_or(Status::INVALID_VALUE)?;
            *pointer = bytes.as_ptr().cast_mut().cast();
        }
        launch(pointers.as_mut_ptr())
    }
}

impl GpuModules for Cuda {
    type Module = CudaModule;
    type Function = CudaFunction;
    type Link = Link;
    type LaunchPlace = (CUstream, ContextId);
    const MAX_IMAGE: u64 = 1 << 30;

    fn load_module(
        &mut self,
        context: ContextId,
        device: u32,
        image: Vec<u8>,
        options: &[JitOption],
        wanted: bool,
    ) -> Result<Loaded<CudaModule, CudaFunction>> {
        let image = whole(image)?;
        let (loaded, logs) = self.load(context, options, &image)?;
        let handle = match loaded {
            Ok(handle) => handle,
            Err(status) => return Ok(Loaded { module: Err(status), prints: false, bytes: 0, logs }),
        };
        let described = if wanted { functions(self.api, handle) } else { Ok((Vec::new(), Vec::new())) };
        let (mut functions, table) = match self.note(context, described) {
            Ok(described) => described,
            Err(status) => {
                // SAFETY: loaded above and not used by anything.
                let _ = unsafe { self.api.module_unload(handle) };
                return Err(status);
            }
        };
        let device = self.device(device)?.handle;
        // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, …MINOR
        let [major, minor] =
            [75, 76].map(|number| super::attribute(self.api, device, number).unwrap_or(0) as u32);
        let prints = may_print(&image, (major, minor));
        let told = prints.unwrap_or(false);
        // If it was not searched, it may print.
        let prints = prints.unwrap_or(true);
        functions.iter_mut().for_each(|function| function.prints = prints);
        let module = CudaModule { handle, table, prints };
        // The driver doesn't report its size. The daemon sees the driver's additional use through NVML.
        let bytes = image.len() as u64;
        Ok(Loaded { module: Ok((module, functions)), prints: told, bytes, logs })
    }

    fn bind_function(
        &mut self,
        context: ContextId,
        module: &CudaModule,
        name: &str,
        expected: &[Param],
    ) -> Result<CudaFunction> {
        let text = CString::new(name).map_err(|_| Status::INVALID_VALUE)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a live module, a C string; writes a handle.
        let found = unsafe { self.api.module_function(&mut handle, module.handle, text.as_ptr()) };
        self.note(context, found)?;
        let params = params(self.api, handle);
        let params = self.note(context, params)?;
        if params != expected {
            tracing::error!(
                "kernel {name} is refused: the client has read {expected:?} in its image as the kernel's parameters, but the driver says {params:?}; RGPU_READ_IMAGES=never helps the client's program"
            );
            return Err(Status::INVALID_IMAGE);
        }
        Ok(CudaFunction { handle, params, prints: module.prints })
    }

    fn function_table<'a>(
        module: &'a CudaModule,
        _functions: impl Iterator<Item = &'a CudaFunction>,
    ) -> Cow<'a, [u8]> {
        Cow::Borrowed(&module.table)
    }

    fn unload_module(
        &mut self,
        _streams: &mut Streams<CudaStream>,
        context: ContextId,
        _device: u32,
        module: CudaModule,
        _functions: Vec<CudaFunction>,
    ) -> Result {
        // The driver waits for the context's work. That work finishes without this thread, because no stream
        // waits for the client on the device.
        // SAFETY: a module of that context, removed from the session's table.
        let unloaded = unsafe { self.api.module_unload(module.handle) };
        self.note(context, unloaded)
    }

    fn module_global(
        &mut self,
        context: ContextId,
        module: &CudaModule,
        name: &str,
    ) -> Result<ModuleGetGlobalReply> {
        let name = CString::new(name).map_err(|_| Status::INVALID_VALUE)?;
        let (mut address, mut size) = (0, 0);
        // SAFETY: a live module; writes two integers.
        let found = unsafe { self.api.module_global(&mut address, &mut size, module.handle, name.as_ptr()) };
        self.note(context, found)?;
        let mut managed = 0u32;
        // SAFETY: this attribute is an int.
        let asked = unsafe {
            self.api.pointer_attribute(std::ptr::from_mut(&mut managed).cast(), POINTER_IS_MANAGED, address)
        };
        self.note(context, asked)?;
        Ok(ModuleGetGlobalReply { address, size: size as u64, managed: managed != 0 })
    }

    fn set_function_attribute(
        &mut self,
        context: ContextId,
        function: &mut CudaFunction,
        attribute: u32,
        value: i32,
    ) -> Result {
        let handle = function.handle;
        // SAFETY: a live function.
        let set = unsafe {
            match attribute {
                CACHE_CONFIG => self.api.function_cache_config(handle, value as u32),
                attribute => self.api.function_set_attribute(handle, attribute, value),
            }
        };
        self.note(context, set)
    }

    fn function_attributes(&mut self, context: ContextId, function: &CudaFunction) -> Result<Vec<i32>> {
        let read = function_attributes(self.api, function.handle);
        self.note(context, read)
    }

    fn max_active_blocks(
        &mut self,
        context: ContextId,
        function: &CudaFunction,
        op: &OccupancyMaxActiveBlocks,
    ) -> Result<i32> {
        let size = i32::try_from(op.block_size).map_err(|_| Status::INVALID_VALUE)?;
        let (mut blocks, handle) = (0, function.handle);
        // SAFETY: a live function; writes one integer.
        let read =
            unsafe { self.api.occupancy(&mut blocks, handle, size, op.dynamic_shared as usize, op.flags) };
        self.note(context, read).map(|()| blocks)
    }

    fn available_shared(
        &mut self,
        context: ContextId,
        function: &CudaFunction,
        op: &OccupancyAvailableShared,
    ) -> Result<u64> {
        let number = |n: u32| i32::try_from(n).map_err(|_| Status::INVALID_VALUE);
        let (blocks, size) = (number(op.blocks)?, number(op.block_size)?);
        let mut bytes = 0;
        // SAFETY: a live function; writes one number.
        let read = unsafe { self.api.occupancy_available_shared(&mut bytes, function.handle, blocks, size) };
        self.note(context, read).map(|()| bytes as u64)
    }

    fn max_active_clusters(
        &mut self,
        context: ContextId,
        function: &CudaFunction,
        op: &OccupancyMaxActiveClusters,
    ) -> Result<i32> {
        let mut attributes = launch_attributes(&op.attributes)?;
        let config = config(op.grid, op.block, op.dynamic_shared, std::ptr::null_mut(), &mut attributes);
        let mut clusters = 0;
        // SAFETY: a live function, a description whose attributes outlive the call; writes one integer.
        let read = unsafe { self.api.occupancy_clusters(&mut clusters, function.handle, &config) };
        self.note(context, read).map(|()| clusters)
    }

    fn max_cluster_size(
        &mut self,
        context: ContextId,
        function: &CudaFunction,
        op: &OccupancyMaxPotentialClusterSize,
    ) -> Result<i32> {
        let mut attributes = launch_attributes(&op.attributes)?;
        let config = config(op.grid, op.block, op.dynamic_shared, std::ptr::null_mut(), &mut attributes);
        let mut size = 0;
        // SAFETY: a live function, a description whose attributes outlive the call; writes one integer.
        let read = unsafe { self.api.occupancy_cluster_size(&mut size, function.handle, &config) };
        self.note(context, read).map(|()| size)
    }

    #[inline]
    fn enter_to_launch(
        &mut self,
        cx: &mut Call,
        streams: &mut Streams<CudaStream>,
        id: StreamId,
    ) -> Result<(CUstream, ContextId)> {
        self.enter_briefly(cx, streams, id)
    }

    #[inline]
    fn launch(
        &mut self,
        (stream, context): &(CUstream, ContextId),
        function: &mut CudaFunction,
        op: &Launch<'_>,
    ) -> Result {
        self.launch_at(*context, *stream, function, op)
    }

    fn make_link(&mut self, context: ContextId, options: &[JitOption]) -> Result<Link> {
        self.start_link(context, options)
    }

    fn link_add(
        &mut self,
        context: ContextId,
        _device: u32,
        link: &mut Link,
        input: LinkInput<'_>,
    ) -> Result<(Status, [String; 2])> {
        let (added, logs) = link.add(input)?;
        Ok((self.note(context, added).err().unwrap_or(Status::SUCCESS), logs))
    }

    fn link_complete(
        &mut self,
        context: ContextId,
        _device: u32,
        link: &mut Link,
    ) -> Result<(Status, [String; 2])> {
        let (completed, logs) = link.complete();
        Ok((self.note(context, completed).err().unwrap_or(Status::SUCCESS), logs))
    }

    fn link_image(link: &Link) -> Option<&[u8]> {
        link.image()
    }
}

/// The attributes that [`PASSED_ON`](protocol::ops::launch::PASSED_ON) lists, in the driver's form. (An
/// access policy's window is an address on this session's device, and only a hint.)
fn known(id: u32) -> Option<CUlaunchAttributeID> {
    Some(match id {
        0 => CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
        1 => CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
        2 => CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        4 => CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        5 => CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
        6 => CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        8 => CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PRIORITY,
        9 => CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
        10 => CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
        11 => CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION,
        14 => CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
        _ => return None,
    })
}

/// A launch's attributes in the driver's form.
fn launch_attributes(attributes: &[LaunchAttribute]) -> Result<Vec<CUlaunchAttribute>> {
    let translate = |attribute: &LaunchAttribute| {
        let id = known(attribute.id).ok_or_else(|| {
            tracing::warn!(
                attribute = attribute.id,
                "launch attribute refused: it names an object, or is not known"
            );
            Status::NOT_SUPPORTED
        })?;
        let value = CUlaunchAttributeValue { pad: attribute.value.map(|b| b as c_char) };
        Ok(CUlaunchAttribute { id, pad: [0; 4], value })
    };
    attributes.iter().map(translate).collect()
}

/// The driver's description of a launch. It points to `attributes`.
fn config(
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_shared: u32,
    stream: CUstream,
    attributes: &mut [CUlaunchAttribute],
) -> CUlaunchConfig {
    CUlaunchConfig {
        gridDimX: grid[0],
        gridDimY: grid[1],
        gridDimZ: grid[2],
        blockDimX: block[0],
        blockDimY: block[1],
        blockDimZ: block[2],
        sharedMemBytes: dynamic_shared,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launch_attributes_of_the_protocol_are_those_passed_on() {
        for id in 0..64 {
            assert_eq!(known(id).map(|id| id as u32), PASSED_ON.contains(&id).then_some(id), "{id}");
        }
    }

    #[test]
    fn options_that_point_to_memory_or_count_what_others_point_to_are_refused() {
        for option in [17, 18, 19, 25, 26, 27, 28, 29, 34, u32::MAX] {
            let refused = jit_options(&[JitOption { option, value: 1 }]).err();
            assert_eq!(refused, Some(Status::NOT_SUPPORTED), "{option}");
        }
        let logs: Vec<JitOption> = (2..=6).map(|option| JitOption { option, value: 1 }).collect();
        assert_eq!(jit_options(&logs).unwrap(), (vec![], vec![]));
        assert_eq!(jit_options(&[JitOption { option: 7, value: 3 }]).unwrap().0, [7]);
    }

    #[test]
    fn an_image_shorter_than_it_claims_is_refused() {
        let mut fat = vec![0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0];
        fat.extend_from_slice(&8u64.to_le_bytes());
        assert_eq!(whole(fat.clone()), Err(Status::INVALID_IMAGE));
        fat.extend_from_slice(&[0; 8]);
        assert!(whole(fat.clone()).is_ok());
        fat[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(whole(fat), Err(Status::INVALID_IMAGE));
        let mut elf = vec![0; 64];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[0x28..0x30].copy_from_slice(&64u64.to_le_bytes());
        elf[0x3a] = 64;
        assert!(whole(elf.clone()).is_ok());
        elf[0x3c] = 1;
        assert_eq!(whole(elf), Err(Status::INVALID_IMAGE));
        assert_eq!(whole(b".version 8.0".to_vec()).unwrap().last(), Some(&0));
    }
}
