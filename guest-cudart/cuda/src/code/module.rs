//! Modules: images loaded into a context, and their functions.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::abi::result::Result;
use crate::code::function::{FUNCTIONS, Function};
use crate::code::jit_options::Jit;
use crate::code::library;
use crate::memory::managed;
use crate::memory::staging::Staging;
use crate::process::context::Context;
use crate::process::driver::Driver;
use client::data::{HostIn, HostOut};
use client::handle::ModuleId;
use client::handles::Slab;
use client::ops::module::{FunctionTable, ModuleGetGlobal, ModuleInfo, ModuleLoad, ModuleUnload};
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
        unsafe { crate::memory::transfer::move_bytes(image.as_ptr(), staging.ptr(), image.len()) };
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
