//! Functions, and what is known of them: it came with the module, but for the attributes of a large module's functions, which come when the
//! first of them is needed.

use std::ffi::{CString, c_char};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::context::{self, Context};
use crate::device::attr;
use crate::library::{self, KERNELS};
use crate::module::Module;
use crate::state::{self, driver};
use crate::{Result, non_null, put};
use client::handle::{FunctionId, ModuleId};
use client::handles::Slab;
use client::ops::module::{FunctionAttributes, FunctionInfo, FunctionSetAttribute, Param};
use client::{Status, log};

/// `CUfunction_attribute` numbers that are used here.
pub(crate) mod func {
    pub const MAX_THREADS_PER_BLOCK: u32 = 0;
    pub const SHARED_SIZE_BYTES: u32 = 1;
    pub const NUM_REGS: u32 = 4;
    pub const BINARY_VERSION: u32 = 6;
    pub const MAX_DYNAMIC_SHARED_SIZE_BYTES: u32 = 8;
    pub const PREFERRED_SHARED_MEMORY_CARVEOUT: u32 = 9;
    pub const REQUIRED_CLUSTER_WIDTH: u32 = 11;
    pub const REQUIRED_CLUSTER_HEIGHT: u32 = 12;
    pub const REQUIRED_CLUSTER_DEPTH: u32 = 13;
    pub const NON_PORTABLE_CLUSTER_SIZE_ALLOWED: u32 = 14;
    pub const CLUSTER_SCHEDULING_POLICY_PREFERENCE: u32 = 15;
    /// Known so far.
    pub const MAX: u32 = 16;
    /// How the cache configuration travels.
    pub const CACHE_CONFIG: u32 = 0x1_0000;
}

/// A function in a context.
pub(crate) struct Function {
    pub id: FunctionId,
    pub context: &'static Context,
    pub name: CString,
    pub params: Vec<Param>,
    /// Bytes of the parameter block.
    pub params_size: usize,
    /// It is of a module that may call `printf`.
    pub prints: bool,
    /// Why it cannot be launched, if it cannot: the server has no code of it that its device runs.
    unsupported: Option<String>,
    attributes: [AtomicI32; func::MAX as usize],
    /// Attributes that the server's driver knows are those below this number. Not set while they have not come.
    known: OnceLock<u32>,
    /// Made when it is asked for.
    pub handle: OnceLock<usize>,
    module: OnceLock<Weak<Module>>,
}

pub(crate) static FUNCTIONS: Slab<Function> = Slab::new(5);

impl Function {
    pub fn new(
        module: ModuleId,
        index: u32,
        context: &'static Context,
        info: FunctionInfo,
        prints: bool,
        error_log: &str,
    ) -> Result<Function> {
        let name = CString::new(info.name).map_err(|_| Status::UNKNOWN)?;
        let end = info.params.iter().map(|p| u64::from(p.offset) + u64::from(p.size)).max().unwrap_or(0);
        // What a launch can carry; the toolkit's own limit is 32764.
        let params_size = usize::try_from(end).ok().filter(|end| *end <= 40 << 10).ok_or(Status::UNKNOWN)?;
        let unsupported = (info.attributes.get(func::BINARY_VERSION as usize) == Some(&0)).then(|| {
            let name = name.to_str().unwrap_or_default();
            let line = error_log.lines().find(|line| line.contains(name));
            line.unwrap_or("the server's device has no code for it").to_owned()
        });
        let function = Function {
            unsupported,
            id: FunctionId::new(module, index),
            context,
            name,
            params_size,
            params: info.params,
            prints,
            attributes: Default::default(),
            known: OnceLock::new(),
            handle: OnceLock::new(),
            module: OnceLock::new(),
        };
        if !info.attributes.is_empty() {
            function.keep(&info.attributes);
        }
        Ok(function)
    }

    /// Keeps the attributes as they came, once: what the program sets later is not overwritten by a second thread's answer.
    fn keep(&self, values: &[i32]) -> u32 {
        *self.known.get_or_init(|| {
            for (place, value) in self.attributes.iter().zip(values) {
                place.store(*value, Ordering::Relaxed);
            }
            values.len().min(self.attributes.len()) as u32
        })
    }

    /// Sees to it that the attributes are here, and says how many there are.
    #[inline]
    pub fn ready(&self) -> Result<u32> {
        self.known.get().map_or_else(|| self.fetch(), |known| Ok(*known))
    }

    #[cold]
    fn fetch(&self) -> Result<u32> {
        let reply = driver()?.session.call(&FunctionAttributes { function: self.id })?;
        Ok(self.keep(&reply.attributes))
    }

    /// That the server's device has code of it.
    ///
    /// # Errors
    /// `NO_BINARY_FOR_GPU`, with a line on stderr that says what the device does not support.
    #[inline]
    pub fn has_code(&self) -> Result {
        self.unsupported.as_ref().map_or(Ok(()), |why| self.refuse(why))
    }

    #[cold]
    fn refuse(&self, why: &str) -> Result {
        log::warn(format_args!("kernel {} cannot be launched: {why}", self.name.to_string_lossy()));
        Err(Status::NO_BINARY_FOR_GPU)
    }

    /// The function's handle.
    pub fn handle(self: &Arc<Self>, module: &Arc<Module>) -> Result<usize> {
        if let Some(handle) = self.handle.get() {
            return Ok(*handle);
        }
        let _ = self.module.set(Arc::downgrade(module));
        let made = FUNCTIONS.insert(self.clone()).ok_or(Status::OUT_OF_MEMORY)?;
        let kept = *self.handle.get_or_init(|| made);
        if kept != made {
            FUNCTIONS.remove(made);
        }
        Ok(kept)
    }

    /// An attribute; 0 if the server's driver does not know it. [`ready`](Self::ready) has been called.
    #[inline]
    pub fn attribute(&self, number: u32) -> i32 {
        self.attributes.get(number as usize).map_or(0, |value| value.load(Ordering::Relaxed))
    }

    /// `cuFuncGetAttribute`.
    pub fn get(&self, number: u32) -> Result<i32> {
        if number >= func::MAX {
            return Err(Status::INVALID_VALUE);
        }
        if number >= self.ready()? { Err(Status::NOT_SUPPORTED) } else { Ok(self.attribute(number)) }
    }

    /// `cuFuncSetAttribute`: checked here, told to the server, and kept.
    pub fn set(&self, number: u32, value: i32) -> Result {
        self.ready()?;
        match number {
            func::MAX_DYNAMIC_SHARED_SIZE_BYTES => {
                let device = state::device(self.context.device as i32)?;
                let most = device
                    .attribute(attr::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
                    .max(device.attribute(attr::MAX_SHARED_MEMORY_PER_BLOCK));
                if value < 0
                    || i64::from(value) + i64::from(self.attribute(func::SHARED_SIZE_BYTES)) > i64::from(most)
                {
                    return Err(Status::INVALID_VALUE);
                }
            }
            func::PREFERRED_SHARED_MEMORY_CARVEOUT if (-1..=100).contains(&value) => {}
            func::REQUIRED_CLUSTER_WIDTH..=func::CLUSTER_SCHEDULING_POLICY_PREFERENCE if value >= 0 => {}
            _ => return Err(Status::INVALID_VALUE),
        }
        driver()?.session.call(&FunctionSetAttribute { function: self.id, attribute: number, value })?;
        if let Some(place) = self.attributes.get(number as usize) {
            place.store(value, Ordering::Relaxed);
        }
        Ok(())
    }

    pub fn set_cache_config(&self, config: u32) -> Result {
        if config > 3 {
            return Err(Status::INVALID_VALUE);
        }
        let request =
            FunctionSetAttribute { function: self.id, attribute: func::CACHE_CONFIG, value: config as i32 };
        driver()?.session.call(&request).map(|_| ())
    }

    /// `cuFuncGetParamInfo`.
    pub fn param(&self, index: usize) -> Result<&Param> {
        self.params.get(index).ok_or(Status::INVALID_VALUE)
    }
}

/// The function that a handle names in the current context: a function's own, or a kernel's, which is loaded there if it was not yet.
///
/// # Errors
/// `INVALID_HANDLE` for what is neither.
#[inline]
pub(crate) fn of(handle: usize) -> Result<Arc<Function>> {
    if let Some(function) = FUNCTIONS.get(handle) {
        return Ok(function);
    }
    let driver = driver()?;
    let kernel = KERNELS.get(handle).ok_or(Status::INVALID_HANDLE)?;
    kernel.in_context(driver, context::current()?)
}

pub(crate) unsafe fn put_param(param: &Param, offset: *mut usize, size: *mut usize) -> Result {
    non_null(offset)?;
    // SAFETY: checked not to be NULL; the program says that they may be written.
    unsafe {
        put(offset, param.offset as usize)?;
        if !size.is_null() {
            put(size, param.size as usize)?;
        }
    }
    Ok(())
}

api! {
    fn cuFuncGetAttribute(value: *mut i32, number: u32, function: usize) {
        non_null(value)?;
        put(value, of(function)?.get(number)?)
    }

    fn cuFuncSetAttribute(function: usize, number: u32, value: i32) {
        of(function)?.set(number, value)
    }

    fn cuFuncSetCacheConfig(function: usize, config: u32) {
        of(function)?.set_cache_config(config)
    }

    fn cuFuncSetSharedMemConfig(function: usize, config: u32) {
        // As with cuCtxSetSharedMemConfig: banks have one width.
        of(function)?;
        if config > 2 { Err(Status::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuFuncGetModule(module: *mut usize, function: usize) {
        non_null(module)?;
        let function = of(function)?;
        let found = function.module.get().and_then(Weak::upgrade).or_else(|| library::module_of(&function));
        put(module, found.ok_or(Status::INVALID_HANDLE)?.handle()?)
    }

    fn cuFuncGetName(name: *mut *const c_char, function: usize) {
        // The text lives as long as the module is loaded, as CUDA says.
        put(name, of(function)?.name.as_ptr())
    }

    fn cuFuncGetParamInfo(function: usize, index: usize, offset: *mut usize, size: *mut usize) {
        let function = of(function)?;
        put_param(function.param(index)?, offset, size)
    }

    fn cuFuncIsLoaded(loaded: *mut u32, function: usize) {
        non_null(loaded)?;
        of(function)?;
        put(loaded, 1)
    }

    fn cuFuncLoad(function: usize) {
        of(function).map(|_| ())
    }
}
