//! Modules: images loaded into a context, and their functions.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::abi::result::Result;
use crate::code::function::{FUNCTIONS, Function};
use crate::code::jit_options::Jit;
use crate::code::library;
use crate::code::loading::Loading;
use crate::code::reading;
use crate::memory::staging::Staging;
use crate::memory::{address, managed};
use crate::process::context::Context;
use crate::process::driver::{Driver, Server};
use client::data::{HostIn, HostOut};
use client::handle::ModuleId;
use client::handles::Slab;
use client::ops::module::{
    FunctionTable, ModuleGetGlobal, ModuleInfo, ModuleLoad, ModuleLoadByName, ModuleUnload,
};
use client::session::Session;
use client::{Status, lock, log};
use device_code::cubin::Cubin;

/// Images up to this size in bytes are sent inside the record.
const INLINE: usize = 24 << 10;
/// Space first offered for a function table, in bytes.
const TABLE: usize = 64 << 10;

/// A loaded module.
pub(crate) struct Module {
    pub id: ModuleId,
    pub context: &'static Context,
    pub functions: Vec<Arc<Function>>,
    by_name: HashMap<CString, usize>,
    globals: Mutex<HashMap<CString, Variable>>,
    /// Its load, if nobody has waited for it.
    loading: Option<Arc<Loading>>,
    /// The module's handle. For a library's module it is created on request.
    handle: OnceLock<usize>,
}

/// A variable of a module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Variable {
    pub address: u64,
    pub size: u64,
    /// Whether it is `__managed__`.
    pub managed: bool,
}

pub(crate) static MODULES: Slab<Module> = Slab::new(4);

static IDS: AtomicU32 = AtomicU32::new(1);

/// Puts an image where the host can read it, unless it is small.
fn stage(session: &'static Session, image: &[u8]) -> Result<Option<Staging<'static>>> {
    if image.len() <= INLINE {
        return Ok(None);
    }
    let staging = Staging::new(session, image.len())?;
    // SAFETY: the staging memory has this many bytes and belongs only to this call.
    unsafe { crate::memory::transfer::move_bytes(image.as_ptr(), staging.ptr(), image.len()) };
    Ok(Some(staging))
}

/// How a command refers to an image.
fn named<'a>(image: &'a [u8], staged: Option<&Staging<'_>>) -> HostIn<'a> {
    staged.map_or(HostIn::Inline(image), |staging| HostIn::Range(staging.range(image.len())))
}

/// Loads an image that was read in this process, without waiting for the result. `None` if too many replies
/// are outstanding.
fn load_read(context: &'static Context, image: &[u8], mut cubin: Cubin) -> Result<Option<Arc<Module>>> {
    let id = ModuleId(IDS.fetch_add(1, Ordering::Relaxed));
    let staged = stage(context.session(), image)?;
    let load = ModuleLoadByName { context: context.id, module: id, image: named(image, staged.as_ref()) };
    let Some(loading) = Loading::send(context.session(), &load, staged)? else { return Ok(None) };
    let kernels = std::mem::take(&mut cubin.kernels).into_iter();
    let function = |kernel| Function::read(context, loading.clone(), &cubin, kernel).map(Arc::new);
    let functions = kernels.map(function).collect::<Result<_>>()?;
    Ok(Some(Module::new(id, context, functions, Some(loading.clone()))))
}

/// Loads an image into a context.
pub(crate) fn load(context: &'static Context, image: &[u8], jit: &Jit) -> Result<Arc<Module>> {
    let session = context.session();
    // A failed context refuses the load, so such a load is waited for.
    if !context.has_error()
        && let Some(cubin) = reading::read(context, image, jit)
        && let Some(module) = load_read(context, image, cubin)?
    {
        return Ok(module);
    }
    let id = ModuleId(IDS.fetch_add(1, Ordering::Relaxed));
    let staged = stage(context.session(), image)?;
    let table = Staging::new(session, TABLE)?;
    let source = named(image, staged.as_ref());
    let result = session.call(&ModuleLoad {
        context: context.id,
        module: id,
        options: jit.options.clone(),
        image: source,
        info: HostOut(table.range(TABLE)),
    });
    drop(staged);
    let reply = match result {
        Ok(reply) => reply,
        Err(status) => {
            // SAFETY: the caller read `jit` from arrays of the program that still exist.
            unsafe { jit.report("", &format!("{status}")) };
            return Err(status);
        }
    };
    // SAFETY: the caller read `jit` from arrays of the program that still exist.
    unsafe { jit.report(&reply.info_log, &reply.error_log) };
    // Many programs ask for no log, and would only say which number they got.
    Status(reply.result).ok().inspect_err(|status| {
        log::info(format_args!("a module was refused: {status} {}", reply.error_log.trim_end()));
    })?;
    let needed = usize::try_from(reply.info_size).map_err(|_| Status::UNKNOWN)?;
    let read = |staging: &Staging<'_>, len: usize| {
        // SAFETY: the host wrote `len` bytes there before it answered.
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
        let large = Staging::new(session, needed)?;
        let again = session.call(&ModuleInfo { module: id, info: HostOut(large.range(needed)) })?;
        if again.info_size as usize > needed {
            return Err(Status::UNKNOWN);
        }
        read(&large, again.info_size as usize)?
    };
    let functions: Vec<Arc<Function>> = functions
        .functions
        .into_iter()
        .enumerate()
        .map(|(index, info)| {
            Function::new(id, index as u32, context, info, reply.prints, &reply.error_log).map(Arc::new)
        })
        .collect::<Result<_>>()?;
    Ok(Module::new(id, context, functions, None))
}

impl Module {
    pub(super) fn new(
        id: ModuleId,
        context: &'static Context,
        functions: Vec<Arc<Function>>,
        loading: Option<Arc<Loading>>,
    ) -> Arc<Module> {
        let by_name = functions.iter().enumerate().map(|(i, function)| (function.name.clone(), i)).collect();
        let (globals, handle) = (Mutex::default(), OnceLock::new());
        Arc::new(Module { id, context, functions, by_name, globals, loading, handle })
    }

    /// The function with this name.
    pub fn function(&self, name: &CStr) -> Option<&Arc<Function>> {
        self.by_name.get(name).and_then(|i| self.functions.get(*i))
    }

    /// The module's handle.
    pub fn handle(self: &Arc<Self>) -> Result<usize> {
        MODULES.insert_once(&self.handle, self).ok_or(Status::OUT_OF_MEMORY)
    }

    /// A variable.
    pub fn global(&self, driver: &'static Driver, name: &CStr) -> Result<Variable> {
        if let Some(found) = lock(&self.globals).get(name) {
            return Ok(*found);
        }
        let text = name.to_str().map_err(|_| Status::NOT_FOUND)?;
        // The server answers after the load; if the load failed, the answer has its status.
        self.loading.as_ref().map_or(Ok(()), |loading| loading.check())?;
        let reply = self.context.session().call(&ModuleGetGlobal { module: self.id, name: text })?;
        let variable = Variable { address: reply.address, size: reply.size, managed: reply.managed };
        if variable.managed {
            managed::variable(driver, self.context, variable.address, variable.size)?;
        }
        self.warn_of_twins(driver, text, variable.address);
        lock(&self.globals).insert(name.to_owned(), variable);
        let mut globals = self.context.server.globals.write().unwrap_or_else(PoisonError::into_inner);
        globals.insert(reply.address, (reply.size, self.context));
        Ok(variable)
    }

    /// Logs once that the address of a variable does not identify its server.
    fn warn_of_twins(&self, driver: &Driver, name: &str, at: u64) {
        static SAID: AtomicBool = AtomicBool::new(false);
        let own = self.context.server;
        let has_one = |other: &Server| !std::ptr::eq(other, own) && address::variable(other, at).is_some();
        if driver.servers.iter().any(|other| has_one(other)) && !SAID.swap(true, Ordering::Relaxed) {
            log::warn(format_args!(
                "two servers have variables at {at:#x} ({name}): a call that names such an address, but no device and no stream, means the current device's"
            ));
        }
    }

    /// Unloads it on the server. Invalidates its functions' handles.
    pub fn unload(&self) -> Result {
        self.forget();
        self.context.session().append(&ModuleUnload { module: self.id }).map(|_| ())
    }

    /// Invalidates its handles and those of its functions.
    pub fn forget(&self) {
        for function in &self.functions {
            if let Some(handle) = function.handle.get() {
                FUNCTIONS.remove(*handle);
            }
        }
        if let Some(handle) = self.handle.get() {
            MODULES.remove(*handle);
        }
        let mut globals = self.context.server.globals.write().unwrap_or_else(PoisonError::into_inner);
        for variable in lock(&self.globals).values() {
            globals.remove(&variable.address);
            if variable.managed {
                managed::forget_variable(variable.address, variable.size);
            }
        }
    }
}

/// Drops a context's modules. `with_server`: the server unloads them with the context.
pub(crate) fn forget(context: &'static Context, with_server: bool) {
    for module in MODULES.remove_where(|module| std::ptr::eq(module.context, context)) {
        module.forget();
        // Libraries unload their own modules.
        if !with_server && !library::owns(&module) {
            // After the session is lost there are no modules.
            let _ = context.session().append(&ModuleUnload { module: module.id });
        }
    }
}
