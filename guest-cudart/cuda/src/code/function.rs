//! Functions and their attributes. Attributes are read from the image or sent with the module; for a large
//! module they are fetched when the first one is needed.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::abi::result::Result;
use crate::code::loading::Loading;
use crate::code::module::Module;
use crate::code::occupancy::Resources;
use crate::code::reading;
use crate::process::context::Context;
use crate::process::device_attributes::attr;
use crate::process::driver;
use client::handle::{FunctionId, ModuleId};
use client::handles::Slab;
use client::ops::module::{FunctionAttributes, FunctionInfo, FunctionPreset, FunctionSetAttribute, Param};
use client::ops::{Op, SyncOp, encode};
use client::trace::Name;
use client::{Status, lock, log};
use device_code::cubin::{self, Cubin};

/// The `CUfunction_attribute` numbers used here.
pub(crate) mod func {
    pub const MAX_THREADS_PER_BLOCK: u32 = 0;
    pub const SHARED_SIZE_BYTES: u32 = 1;
    pub const LOCAL_SIZE_BYTES: u32 = 3;
    pub const NUM_REGS: u32 = 4;
    pub const BINARY_VERSION: u32 = 6;
    pub const MAX_DYNAMIC_SHARED_SIZE_BYTES: u32 = 8;
    pub const PREFERRED_SHARED_MEMORY_CARVEOUT: u32 = 9;
    pub const REQUIRED_CLUSTER_WIDTH: u32 = 11;
    pub const REQUIRED_CLUSTER_HEIGHT: u32 = 12;
    pub const REQUIRED_CLUSTER_DEPTH: u32 = 13;
    pub const NON_PORTABLE_CLUSTER_SIZE_ALLOWED: u32 = 14;
    pub const CLUSTER_SCHEDULING_POLICY_PREFERENCE: u32 = 15;
    /// Number of known attributes.
    pub const MAX: u32 = 16;
    /// The first attribute that can be set.
    pub const FIRST_SETTABLE: u32 = MAX_DYNAMIC_SHARED_SIZE_BYTES;
    /// The number under which the cache configuration is sent.
    pub const CACHE_CONFIG: u32 = 0x1_0000;
}

/// Maximum number of answers cached per function. Programs ask about few block sizes.
const MOST_ANSWERS: usize = 256;

/// A function's settings besides its attributes, and cached answers that depend on both.
#[derive(Default)]
struct Settings {
    /// `CUfunc_cache`.
    cache_config: u32,
    /// Number of changes so far.
    changes: u64,
    /// A bit for each attribute set through the function's own handle. Setting it for the kernel leaves these
    /// alone.
    own: u32,
    /// Cached answers of the server: see [`Function::ask`].
    answers: HashMap<Vec<u8>, u64>,
}

/// A function in a context.
pub(crate) struct Function {
    /// Its ID, if it has one. A function that was read from an image gets an ID when it is first used.
    id: OnceLock<FunctionId>,
    /// The load of its module, if the image was read in this process.
    loading: Option<Arc<Loading>>,
    /// Its resources according to the image, besides its attributes.
    code: Option<Resources>,
    /// The only block shape that it can be launched with, according to its image.
    required_block: Option<[u32; 3]>,
    pub context: &'static Context,
    pub name: CString,
    pub params: Vec<Param>,
    /// Size of the parameter block, in bytes.
    pub params_size: usize,
    /// Whether its module may call `printf`.
    pub prints: bool,
    /// Why it cannot be launched, if it can't: the server has no code for it that the device runs.
    unsupported: Option<String>,
    attributes: [AtomicI32; func::MAX as usize],
    /// Locked during each change, so that the server receives changes in the order in which they are stored
    /// here.
    settings: Mutex<Settings>,
    /// The attributes that the server's driver knows, as of loading. Unset until they arrive.
    loaded: OnceLock<Vec<i32>>,
    /// Created when the program requests it.
    pub handle: OnceLock<usize>,
    /// Its name in a timeline.
    pub traced: Name,
    pub module: OnceLock<Weak<Module>>,
}

pub(crate) static FUNCTIONS: Slab<Function> = Slab::new(5);

/// Maximum bytes of a kernel's parameters (CUDA C++ Programming Guide, "Function Parameters").
const MOST_PARAMS: u64 = 32_764;

/// Bytes of a kernel's parameters as the server describes them. A launch reads as many from the program, so a
/// server that names more than any kernel has is not believed.
fn params_size(params: &[Param]) -> Result<usize> {
    let end = params.iter().map(|p| u64::from(p.offset) + u64::from(p.size)).max().unwrap_or(0);
    if end > MOST_PARAMS { Err(Status::UNKNOWN) } else { Ok(end as usize) }
}

impl Function {
    /// A function that has neither an ID nor code yet.
    fn of(
        context: &'static Context,
        name: CString,
        params: Vec<Param>,
        params_size: usize,
        prints: bool,
    ) -> Function {
        Function {
            unsupported: None,
            id: OnceLock::new(),
            loading: None,
            code: None,
            required_block: None,
            context,
            name,
            params_size,
            params,
            prints,
            attributes: Default::default(),
            settings: Mutex::default(),
            loaded: OnceLock::new(),
            handle: OnceLock::new(),
            traced: Name::new(),
            module: OnceLock::new(),
        }
    }

    pub fn new(
        module: ModuleId,
        index: u32,
        context: &'static Context,
        info: FunctionInfo,
        prints: bool,
        error_log: &str,
    ) -> Result<Function> {
        let name = CString::new(info.name).map_err(|_| Status::UNKNOWN)?;
        let params_size = params_size(&info.params)?;
        let unsupported = (info.attributes.get(func::BINARY_VERSION as usize) == Some(&0)).then(|| {
            let name = name.to_str().unwrap_or_default();
            let line = error_log.lines().find(|line| line.contains(name));
            line.unwrap_or("the server's device has no code for it").to_owned()
        });
        let function = Function {
            unsupported,
            id: OnceLock::from(FunctionId::new(module, index)),
            ..Function::of(context, name, info.params, params_size, prints)
        };
        if !info.attributes.is_empty() {
            function.keep(&info.attributes);
        }
        Ok(function)
    }

    /// A function read from an image.
    pub fn read(
        context: &'static Context,
        loading: Arc<Loading>,
        cubin: &Cubin,
        kernel: cubin::Kernel,
    ) -> Result<Function> {
        let resources = Resources::of(&kernel);
        let attributes = resources.attributes(cubin, &kernel);
        let name = CString::new(kernel.name).map_err(|_| Status::INVALID_IMAGE)?;
        let params: Vec<Param> =
            kernel.params.iter().map(|p| Param { offset: p.offset, size: p.size }).collect();
        // The image reader bounds the size.
        let params_size = params.last().map_or(0, |last| (last.offset + last.size) as usize);
        let function = Function {
            loading: Some(loading),
            code: Some(resources),
            required_block: kernel.required_threads,
            ..Function::of(context, name, params, params_size, cubin.prints)
        };
        function.keep(&attributes);
        Ok(function)
    }

    /// The function's ID.
    ///
    /// # Errors
    /// The error of its module's load.
    #[inline]
    pub fn id(&self) -> Result<FunctionId> {
        match self.id.get() {
            Some(id) => Ok(*id),
            None => self.bind(),
        }
    }

    /// Whether the server is known to have loaded it.
    pub fn is_loaded(&self) -> bool {
        self.loading.as_ref().is_none_or(|loading| loading.is_known() && loading.check().is_ok())
    }

    /// Waits until the server has loaded it.
    ///
    /// # Errors
    /// The error of its module's load.
    pub fn load(&self) -> Result {
        let Some(loading) = self.loading.as_ref().filter(|loading| !loading.is_known()) else {
            return self.loading.as_ref().map_or(Ok(()), |loading| loading.check());
        };
        // The server does this after the load, so the load's result is here with the reply.
        let asked = self.context.session().call(&FunctionAttributes { function: self.id()? });
        loading.is_known();
        loading.check().and(asked.map(drop))
    }

    #[cold]
    fn bind(&self) -> Result<FunctionId> {
        let loading = self.loading.as_ref().ok_or(Status::INVALID_HANDLE)?;
        let id = loading.bind(&self.id, &self.name, &self.params)?;
        if reading::is_checked() {
            self.compare(id)?;
        }
        Ok(id)
    }

    /// Compares the attributes that were read with the server's, and stores the server's.
    fn compare(&self, function: FunctionId) -> Result {
        let reply = self.context.session().call(&FunctionAttributes { function })?;
        for (number, (place, value)) in self.attributes.iter().zip(&reply.attributes).enumerate() {
            let read = place.load(Ordering::Relaxed);
            // Settings made before now have not reached the server yet.
            if read != *value && (number as u32) < func::FIRST_SETTABLE {
                let name = self.name.to_string_lossy();
                log::warn(format_args!("attribute {number} of {name}: read {read}, the server says {value}"));
                place.store(*value, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// If the function's image requires another block shape, asks the server whether the launch just appended
    /// was accepted: the driver refuses such a launch immediately.
    ///
    /// # Errors
    /// The context's deferred error, which is the launch's status if it was refused.
    #[inline]
    pub fn launched(&self, block: &[u32; 3]) -> Result {
        match &self.required_block {
            Some(required) if required != block => {
                self.context.session().call(&FunctionAttributes { function: self.id()? })?;
                self.context.deferred()
            }
            _ => Ok(()),
        }
    }

    /// The function's ID, once [`id`](Self::id) has succeeded.
    #[inline]
    pub fn known_id(&self) -> FunctionId {
        // No function on any server has this ID.
        self.id.get().copied().unwrap_or(FunctionId(u64::MAX))
    }

    /// Its resources, if its image was read in this process.
    pub fn resources(&self) -> Option<&Resources> {
        self.code.as_ref()
    }

    /// Whether only attributes were set for it.
    pub fn has_usual_caches(&self) -> bool {
        lock(&self.settings).cache_config == 0
    }

    /// Stores the attributes from the server, once: a second thread's reply must not overwrite what the
    /// program sets later.
    fn keep(&self, values: &[i32]) -> u32 {
        let loaded = self.loaded.get_or_init(|| {
            for (place, value) in self.attributes.iter().zip(values) {
                place.store(*value, Ordering::Relaxed);
            }
            values.iter().copied().take(self.attributes.len()).collect()
        });
        loaded.len() as u32
    }

    /// Makes sure that the attributes are here. Returns their number.
    #[inline]
    pub fn ready(&self) -> Result<u32> {
        self.loaded.get().map_or_else(|| self.fetch(), |loaded| Ok(loaded.len() as u32))
    }

    #[cold]
    fn fetch(&self) -> Result<u32> {
        let reply = self.context.session().call(&FunctionAttributes { function: self.id()? })?;
        Ok(self.keep(&reply.attributes))
    }

    /// Checks that the server has code for its device.
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
        self.module.get_or_init(|| Arc::downgrade(module));
        FUNCTIONS.insert_once(&self.handle, self).ok_or(Status::OUT_OF_MEMORY)
    }

    /// An attribute, or 0 if the server's driver doesn't know it. Call [`ready`](Self::ready) first.
    #[inline]
    pub fn attribute(&self, number: u32) -> i32 {
        self.attributes.get(number as usize).map_or(0, |value| value.load(Ordering::Relaxed))
    }

    /// Bytes of stack that each thread needs, as far as known. Call [`ready`](Self::ready) first.
    #[inline]
    pub fn stack(&self) -> u64 {
        self.attribute(func::LOCAL_SIZE_BYTES).max(0) as u64
    }

    /// An attribute's value when the function was loaded.
    pub fn loaded(&self, number: u32) -> Result<i32> {
        if number >= func::MAX {
            return Err(Status::INVALID_VALUE);
        }
        self.ready()?;
        let loaded = self.loaded.get().and_then(|loaded| loaded.get(number as usize));
        loaded.copied().ok_or(Status::NOT_SUPPORTED)
    }

    /// `cuFuncGetAttribute`.
    pub fn get(&self, number: u32) -> Result<i32> {
        if number >= func::MAX {
            return Err(Status::INVALID_VALUE);
        }
        if number >= self.ready()? { Err(Status::NOT_SUPPORTED) } else { Ok(self.attribute(number)) }
    }

    /// `cuFuncSetAttribute`, or `cuKernelSetAttribute` (`of_kernel`). If only the device and the function
    /// decide whether the driver accepts a value, it is checked here without waiting. Values that are already
    /// set are not sent.
    pub fn set(&self, number: u32, value: i32, of_kernel: bool) -> Result {
        let known = self.ready()?;
        let (value, certain) = match number {
            func::MAX_DYNAMIC_SHARED_SIZE_BYTES => {
                let device = driver::device(self.context.device as i32)?;
                let most = device
                    .attribute(attr::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
                    .max(device.attribute(attr::MAX_SHARED_MEMORY_PER_BLOCK));
                if value < 0
                    || i64::from(value) + i64::from(self.attribute(func::SHARED_SIZE_BYTES)) > i64::from(most)
                {
                    return Err(Status::INVALID_VALUE);
                }
                (value, true)
            }
            func::PREFERRED_SHARED_MEMORY_CARVEOUT if (-1..=100).contains(&value) => (value, true),
            // Only the driver knows which cluster sizes its device supports.
            func::REQUIRED_CLUSTER_WIDTH..=func::REQUIRED_CLUSTER_DEPTH if value >= 0 => (value, false),
            func::NON_PORTABLE_CLUSTER_SIZE_ALLOWED => (i32::from(value != 0), self.may_have_clusters()?),
            func::CLUSTER_SCHEDULING_POLICY_PREFERENCE if (0..=2).contains(&value) => {
                (value, self.may_have_clusters()?)
            }
            _ => return Err(Status::INVALID_VALUE),
        };
        let Some(place) = self.attributes.get(number as usize) else { return Err(Status::INVALID_VALUE) };
        let session = self.context.session();
        session.check()?;
        let function = self.id()?;
        let mut settings = lock(&self.settings);
        if of_kernel && settings.own & 1 << number != 0 {
            return Ok(());
        }
        if number >= known || place.load(Ordering::Relaxed) != value {
            if certain {
                session.append(&FunctionPreset { function, attribute: number, value })?;
            } else {
                session.call(&FunctionSetAttribute { function, attribute: number, value })?;
            }
            place.store(value, Ordering::Relaxed);
            settings.changes += 1;
        }
        if !of_kernel {
            settings.own |= 1 << number;
        }
        Ok(())
    }

    /// Whether its device accepts cluster settings for every function. (Recorded on an H200, value by value.)
    fn may_have_clusters(&self) -> Result<bool> {
        Ok(driver::device(self.context.device as i32)?.attribute(attr::COMPUTE_CAPABILITY_MAJOR) == 9)
    }

    /// `cuFuncSetCacheConfig`.
    pub fn set_cache_config(&self, config: u32) -> Result {
        if config > 3 {
            return Err(Status::INVALID_VALUE);
        }
        let session = self.context.session();
        session.check()?;
        let function = self.id()?;
        let mut settings = lock(&self.settings);
        if settings.cache_config == config {
            return Ok(());
        }
        let (attribute, value) = (func::CACHE_CONFIG, config as i32);
        session.append(&FunctionPreset { function, attribute, value })?;
        settings.cache_config = config;
        settings.changes += 1;
        Ok(())
    }

    /// Number of changes so far.
    pub fn changes(&self) -> u64 {
        lock(&self.settings).changes
    }

    /// The server's answer to a question that depends only on the function and its settings. The server is
    /// asked once per question.
    pub fn ask<T: SyncOp<'static>>(&self, question: &T, number: impl FnOnce(T::Reply) -> u64) -> Result<u64> {
        let session = self.context.session();
        session.check()?;
        let changes = self.changes();
        if let Some(answer) = self.answered(question) {
            return Ok(answer);
        }
        let answer = number(session.call(question)?);
        self.keep_answer(question, answer, changes);
        Ok(answer)
    }

    /// The cached answer for [`Function::ask`], if there is one.
    pub fn answered<T: SyncOp<'static>>(&self, question: &T) -> Option<u64> {
        let settings = lock(&self.settings);
        settings.answers.get(&self.key(question, &settings)).copied()
    }

    /// Caches an answer for [`Function::ask`] unless something was set since there were this many `changes`:
    /// it may then be the answer for other settings.
    pub fn keep_answer<T: SyncOp<'static>>(&self, question: &T, answer: u64, changes: u64) {
        let mut settings = lock(&self.settings);
        if settings.changes != changes {
            return;
        }
        if settings.answers.len() >= MOST_ANSWERS {
            settings.answers.clear();
        }
        let key = self.key(question, &settings);
        settings.answers.insert(key, answer);
    }

    /// The question together with the function's settings.
    fn key<'a, T: Op<'a>>(&self, question: &T, settings: &Settings) -> Vec<u8> {
        let mut key = T::INFO.opcode.to_le_bytes().to_vec();
        encode(question, &mut key);
        key.extend(settings.cache_config.to_le_bytes());
        for set in &self.attributes[func::FIRST_SETTABLE as usize..] {
            key.extend(set.load(Ordering::Relaxed).to_le_bytes());
        }
        key
    }

    /// `cuFuncGetParamInfo`.
    pub fn param(&self, index: usize) -> Result<&Param> {
        self.params.get(index).ok_or(Status::INVALID_VALUE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_names_more_parameters_than_a_kernel_may_have_is_not_believed() {
        let size = |offset, size| params_size(&[Param { offset: 0, size: 8 }, Param { offset, size }]);
        assert_eq!((size(8, 4), size(4, 32_760)), (Ok(12), Ok(32_764)));
        for (offset, bytes) in [(8, 32_757), (40 << 10, 0), (u32::MAX, u32::MAX)] {
            assert_eq!(size(offset, bytes), Err(Status::UNKNOWN));
        }
        assert_eq!(params_size(&[]), Ok(0));
    }
}
