//! Modules: images loaded into a context, and their functions.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::code::function::{FUNCTIONS, Function};
use crate::code::{image, library};
use crate::memory::managed;
use crate::process::context;
use crate::process::context::Context;
use crate::process::driver::{Driver, driver};
use client::data::{HostIn, HostOut, HostRange, Place};
use client::handle::ModuleId;
use client::handles::Slab;
use client::ops::module::{FunctionTable, JitOption, ModuleGetGlobal, ModuleInfo, ModuleLoad, ModuleUnload};
use client::{Status, lock, log};

/// Images up to this many bytes go inside the record.
const INLINE: usize = 24 << 10;

/// Room for a function table that is asked for at first.
const TABLE: usize = 64 << 10;

/// A loaded module.
pub(crate) struct Module {
    pub id: ModuleId,
    pub context: &'static Context,
    pub functions: Vec<Arc<Function>>,
    by_name: HashMap<CString, usize>,
    globals: Mutex<HashMap<CString, Variable>>,
    /// Handle of the module itself: made when it is asked for, for a library's.
    handle: OnceLock<usize>,
}

/// A variable of a module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Variable {
    pub address: u64,
    pub size: u64,
    /// It is `__managed__`.
    pub managed: bool,
}

pub(crate) static MODULES: Slab<Module> = Slab::new(4);

static IDS: AtomicU32 = AtomicU32::new(1);

/// JIT options of a load, and the program's buffers for the compiler's messages.
#[derive(Default, Clone)]
pub(crate) struct Jit {
    pub options: Vec<JitOption>,
    info: Option<(usize, usize)>,
    error: Option<(usize, usize)>,
    /// Where the sizes stand that are to be overwritten with what was filled.
    sizes: [Option<usize>; 2],
    wall_time: Option<usize>,
}

/// `CUjit_option` numbers.
mod jit {
    pub const WALL_TIME: u32 = 2;
    pub const INFO_LOG_BUFFER: u32 = 3;
    pub const INFO_LOG_SIZE: u32 = 4;
    pub const ERROR_LOG_BUFFER: u32 = 5;
    pub const ERROR_LOG_SIZE: u32 = 6;
    /// Options whose values are pointers to names or counts of them: 17 to 19, 25 to 28.
    pub fn is_pointer(option: u32) -> bool {
        matches!(option, 17..=19 | 25..=28)
    }
}

impl Jit {
    /// Reads a program's options.
    ///
    /// # Safety
    /// Both arrays hold `count` entries.
    pub unsafe fn parse(count: u32, options: *const u32, values: *const *mut c_void) -> Result<Jit> {
        let mut parsed = Jit::default();
        if count == 0 {
            return Ok(parsed);
        }
        non_null(options)?;
        non_null(values)?;
        let (mut info, mut error) = ((0, 0), (0, 0));
        for i in 0..count as usize {
            // SAFETY: as the caller says.
            let (option, place) = unsafe { (*options.add(i), values.add(i)) };
            // SAFETY: as above; the value stands in the array's word itself.
            let value = unsafe { *place } as usize;
            match option {
                jit::WALL_TIME => parsed.wall_time = Some(place as usize),
                jit::INFO_LOG_BUFFER => info.0 = value,
                jit::INFO_LOG_SIZE => {
                    info.1 = value as u32 as usize;
                    parsed.sizes[0] = Some(place as usize);
                }
                jit::ERROR_LOG_BUFFER => error.0 = value,
                jit::ERROR_LOG_SIZE => {
                    error.1 = value as u32 as usize;
                    parsed.sizes[1] = Some(place as usize);
                }
                option if jit::is_pointer(option) => return Err(Status::NOT_SUPPORTED),
                option if option > 34 => return Err(Status::INVALID_VALUE),
                option => parsed.options.push(JitOption { option, value: u64::from(value as u32) }),
            }
        }
        parsed.info = (info.0 != 0 && info.1 != 0).then_some(info);
        parsed.error = (error.0 != 0 && error.1 != 0).then_some(error);
        Ok(parsed)
    }

    /// The options alone: for a later load, when the program's buffers are gone.
    pub fn without_buffers(&self) -> Jit {
        Jit { options: self.options.clone(), ..Jit::default() }
    }

    /// Fills the program's buffers.
    ///
    /// # Safety
    /// The options were read from arrays that are still there, and the buffers in them may be written.
    pub unsafe fn report(&self, info: &str, error: &str) {
        for (buffer, size, text) in [(self.info, self.sizes[0], info), (self.error, self.sizes[1], error)] {
            let mut filled = 0;
            if let Some((at, room)) = buffer {
                filled = text.len().min(room - 1);
                // SAFETY: the program gave `room` bytes at `at`.
                unsafe {
                    std::ptr::copy_nonoverlapping(text.as_ptr(), at as *mut u8, filled);
                    (at as *mut u8).add(filled).write(0);
                }
            }
            if let Some(place) = size {
                // SAFETY: the word of the program's array that the size was read from.
                unsafe { (place as *mut usize).write(filled) };
            }
        }
        if let Some(place) = self.wall_time {
            // SAFETY: the word of the program's array that asked for the time, a float; the server does not tell it.
            unsafe { (place as *mut f32).write(0.0) };
        }
    }
}

/// Bytes somewhere that the host can read or write: the arena, or pinned memory where they are too many.
pub(crate) enum Staging<'s> {
    Arena(client::arena::Block<'s>),
    Pinned { region: u32, mapping: client::port::mapping::Mapping },
}

impl Staging<'_> {
    pub fn new(driver: &'static Driver, len: usize) -> Result<Staging<'static>> {
        let session = driver.session;
        if len <= session.arena().largest() {
            return session.arena().alloc(session, len).map(Staging::Arena);
        }
        let pinned = session.port().pin_new(len.next_multiple_of(64 << 10)).map_err(|error| {
            log::warn(format_args!("{len} bytes of staging: {}", error.line()));
            Status::OUT_OF_MEMORY
        })?;
        Ok(Staging::Pinned { region: pinned.region, mapping: pinned.mapping })
    }

    pub fn ptr(&self) -> *mut u8 {
        match self {
            Staging::Arena(block) => block.ptr(),
            Staging::Pinned { mapping, .. } => mapping.base(),
        }
    }

    pub fn range(&self, len: usize) -> HostRange {
        match self {
            Staging::Arena(block) => block.range(len),
            Staging::Pinned { region, .. } => {
                HostRange { place: Place::Region(*region), offset: 0, len: len as u64 }
            }
        }
    }

    /// The host has answered, and touches the bytes no more.
    pub fn done(self, driver: &Driver) {
        if let Staging::Pinned { region, mapping } = self {
            driver.session.port().unpin(region);
            drop(mapping);
        }
    }
}

/// Loads an image into a context.
pub(crate) fn load(
    driver: &'static Driver,
    context: &'static Context,
    image: &[u8],
    jit: &Jit,
) -> Result<Arc<Module>> {
    let session = driver.session;
    let id = ModuleId(IDS.fetch_add(1, Ordering::Relaxed));
    let staged = if image.len() <= INLINE {
        None
    } else {
        let staging = Staging::new(driver, image.len())?;
        // SAFETY: the staging has room for as many bytes, and is nobody else's.
        unsafe { crate::work::copy::move_bytes(image.as_ptr(), staging.ptr(), image.len()) };
        Some(staging)
    };
    let table = Staging::new(driver, TABLE)?;
    let source =
        staged.as_ref().map_or(HostIn::Inline(image), |staging| HostIn::Range(staging.range(image.len())));
    let result = session.call(&ModuleLoad {
        context: context.id,
        module: id,
        options: jit.options.clone(),
        image: source,
        info: HostOut(table.range(TABLE)),
    });
    if let Some(staging) = staged {
        staging.done(driver);
    }
    let reply = match result {
        Ok(reply) => reply,
        Err(status) => {
            // SAFETY: `jit` was read by this call's caller from arrays of the program that are still there.
            unsafe { jit.report("", &format!("{status}")) };
            return Err(status);
        }
    };
    // SAFETY: as above.
    unsafe { jit.report(&reply.info_log, &reply.error_log) };
    Status(reply.result).ok()?;
    let needed = usize::try_from(reply.info_size).map_err(|_| Status::UNKNOWN)?;
    let read = |staging: &Staging<'_>, len: usize| {
        // SAFETY: the host has written `len` bytes there before it answered.
        let bytes = unsafe { std::slice::from_raw_parts(staging.ptr(), len) };
        client::ops::decode_reply::<FunctionTable>(bytes).map_err(|error| {
            log::error(format_args!(
                "a module's function table does not decode ({error}): the server is of another build"
            ));
            Status::UNKNOWN
        })
    };
    let functions = if needed <= TABLE {
        read(&table, needed)?
    } else {
        let large = Staging::new(driver, needed)?;
        let again = session.call(&ModuleInfo { module: id, info: HostOut(large.range(needed)) })?;
        if again.info_size as usize > needed {
            return Err(Status::UNKNOWN);
        }
        let functions = read(&large, again.info_size as usize);
        large.done(driver);
        functions?
    };
    let functions: Vec<Arc<Function>> = functions
        .functions
        .into_iter()
        .enumerate()
        .map(|(index, info)| {
            Function::new(id, index as u32, context, info, reply.prints, &reply.error_log).map(Arc::new)
        })
        .collect::<Result<_>>()?;
    let by_name = functions.iter().enumerate().map(|(i, function)| (function.name.clone(), i)).collect();
    Ok(Arc::new(Module {
        id,
        context,
        functions,
        by_name,
        globals: Mutex::default(),
        handle: OnceLock::new(),
    }))
}

impl Variable {
    /// Writes where it is through a program's pointers, of which either may be NULL.
    ///
    /// # Safety
    /// What is not NULL may be written.
    pub unsafe fn put(&self, address: *mut u64, size: *mut usize) -> Result {
        // SAFETY: as the caller says.
        unsafe {
            if !address.is_null() {
                put(address, self.address)?;
            }
            if !size.is_null() {
                put(size, self.size as usize)?;
            }
        }
        Ok(())
    }
}

impl Module {
    /// The function of a name.
    pub fn function(&self, name: &CStr) -> Option<&Arc<Function>> {
        self.by_name.get(name).and_then(|i| self.functions.get(*i))
    }

    /// The module's handle.
    pub fn handle(self: &Arc<Self>) -> Result<usize> {
        if let Some(handle) = self.handle.get() {
            return Ok(*handle);
        }
        let made = MODULES.insert(self.clone()).ok_or(Status::OUT_OF_MEMORY)?;
        let kept = *self.handle.get_or_init(|| made);
        if kept != made {
            MODULES.remove(made);
        }
        Ok(kept)
    }

    /// A variable.
    pub fn global(&self, driver: &'static Driver, name: &CStr) -> Result<Variable> {
        if let Some(found) = lock(&self.globals).get(name) {
            return Ok(*found);
        }
        let text = name.to_str().map_err(|_| Status::NOT_FOUND)?;
        let reply = driver.session.call(&ModuleGetGlobal { module: self.id, name: text })?;
        let variable = Variable { address: reply.address, size: reply.size, managed: reply.managed };
        if variable.managed {
            managed::variable(driver, self.context, variable.address, variable.size)?;
        }
        lock(&self.globals).insert(name.to_owned(), variable);
        let mut globals = driver.globals.write().unwrap_or_else(PoisonError::into_inner);
        globals.insert(reply.address, (reply.size, self.context));
        Ok(variable)
    }

    /// Unloads it on the server. Its functions' handles name nothing from here on.
    pub fn unload(&self, driver: &Driver) -> Result {
        self.forget(driver);
        driver.session.append(&ModuleUnload { module: self.id }).map(|_| ())
    }

    /// Its handles, and those of its functions, name nothing from here on.
    pub fn forget(&self, driver: &Driver) {
        for function in &self.functions {
            if let Some(handle) = function.handle.get() {
                FUNCTIONS.remove(*handle);
            }
        }
        if let Some(handle) = self.handle.get() {
            MODULES.remove(*handle);
        }
        let mut globals = driver.globals.write().unwrap_or_else(PoisonError::into_inner);
        for variable in lock(&self.globals).values() {
            globals.remove(&variable.address);
            if variable.managed {
                managed::forget_variable(variable.address, variable.size);
            }
        }
    }
}

/// A context's modules are gone with it. `with_server`: the server unloads them by itself.
pub(crate) fn forget(driver: &Driver, context: &'static Context, with_server: bool) {
    for module in MODULES.remove_where(|module| std::ptr::eq(module.context, context)) {
        module.forget(driver);
        // A library's modules are its own to unload.
        if !with_server && !library::owns(&module) {
            // A lost session has no modules.
            let _ = driver.session.append(&ModuleUnload { module: module.id });
        }
    }
}

fn of(handle: usize) -> Result<(&'static Driver, Arc<Module>)> {
    let driver = driver()?;
    Ok((driver, MODULES.get(handle).ok_or(Status::INVALID_HANDLE)?))
}

unsafe fn load_data(module: *mut usize, image: *const c_void, jit: &Jit) -> Result {
    non_null(module)?;
    let (driver, context) = context::ready()?;
    // SAFETY: the program gives a whole image.
    let loaded = load(driver, context, &unsafe { image::bytes(image)? }, jit)?;
    // SAFETY: checked above not to be NULL; the program says that it may be written.
    unsafe { put(module, loaded.handle()?) }
}

/// A file's bytes, with a NUL after them in case they are PTX.
pub(crate) fn read_file(name: &CStr) -> Result<Vec<u8>> {
    let path = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
    let mut bytes = std::fs::read(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Status::FILE_NOT_FOUND,
        _ => Status::INVALID_SOURCE,
    })?;
    bytes.push(0);
    Ok(bytes)
}

api! {
    fn cuModuleLoad(module: *mut usize, name: *const c_char) {
        non_null(module)?;
        non_null(name)?;
        context::ready()?;
        let bytes = read_file(CStr::from_ptr(name))?;
        load_data(module, bytes.as_ptr().cast(), &Jit::default())
    }

    fn cuModuleLoadData(module: *mut usize, image: *const c_void) {
        load_data(module, image, &Jit::default())
    }

    fn cuModuleLoadDataEx(module: *mut usize, image: *const c_void, count: u32, options: *const u32, values: *const *mut c_void) {
        load_data(module, image, &Jit::parse(count, options, values)?)
    }

    fn cuModuleLoadFatBinary(module: *mut usize, image: *const c_void) {
        load_data(module, image, &Jit::default())
    }

    fn cuModuleUnload(module: usize) {
        let (driver, module) = of(module)?;
        driver.session.check()?;
        // A kernel of it may be running.
        module.context.quiesce(driver);
        if library::owns(&module) {
            return Err(Status::NOT_PERMITTED);
        }
        module.unload(driver)
    }

    fn cuModuleGetLoadingMode(mode: *mut u32) {
        driver()?;
        // CU_MODULE_LAZY_LOADING: a runtime inside the program then loads a module when a kernel of it is first used, as NVIDIA's driver
        // has it do by default; and where the server's driver is NVIDIA's, it loads each function so.
        put(mode, 2)
    }

    fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) {
        non_null(function)?;
        non_null(name)?;
        let (_, module) = of(module)?;
        let found = module.function(CStr::from_ptr(name)).ok_or(Status::NOT_FOUND)?;
        put(function, found.handle(&module)?)
    }

    fn cuModuleGetFunctionCount(count: *mut u32, module: usize) {
        let (_, module) = of(module)?;
        put(count, module.functions.len() as u32)
    }

    fn cuModuleEnumerateFunctions(functions: *mut usize, count: u32, module: usize) {
        let (_, module) = of(module)?;
        non_null(functions)?;
        for (i, function) in module.functions.iter().take(count as usize).enumerate() {
            put(functions.add(i), function.handle(&module)?)?;
        }
        Ok(())
    }

    fn cuModuleGetGlobal_v2(address: *mut u64, size: *mut usize, module: usize, name: *const c_char) {
        non_null(name)?;
        let (driver, module) = of(module)?;
        driver.session.check()?;
        module.global(driver, CStr::from_ptr(name))?.put(address, size)
    }
}
