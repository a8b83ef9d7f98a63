//! Libraries and kernels: code that is loaded into a context when it is first used there.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use crate::abi::result::Result;
use crate::code::function::{FUNCTIONS, Function, func};
use crate::code::jit_options::Jit;
use crate::code::module::{self, Module, Variable};
use crate::process::context::{self, Context};
use crate::process::driver::{self, Driver, driver};
use client::handles::Slab;
use client::{Status, lock};

/// The function that a handle names in the current context: a function's handle, or a kernel's, which is
/// loaded now if necessary.
///
/// # Errors
/// `INVALID_HANDLE` for any other handle.
#[inline]
pub(crate) fn of(handle: usize) -> Result<Arc<Function>> {
    if let Some(function) = FUNCTIONS.get(handle) {
        return Ok(function);
    }
    driver()?;
    let kernel = KERNELS.get(handle).ok_or(Status::INVALID_HANDLE)?;
    kernel.in_context(context::current()?)
}

/// The function for a launch in a context: a function's handle, of whichever context it is, or a kernel's.
///
/// # Errors
/// As for [`of`].
#[inline]
pub(crate) fn for_launch(handle: usize, context: &'static Context) -> Result<Arc<Function>> {
    if let Some(function) = FUNCTIONS.get(handle) {
        return Ok(function);
    }
    KERNELS.get(handle).ok_or(Status::INVALID_HANDLE)?.in_context(context)
}

/// The name of a function or kernel, which stays as long as that does. Loads nothing.
pub(crate) fn name_of(handle: usize) -> Option<*const c_char> {
    match FUNCTIONS.get(handle) {
        Some(function) => Some(function.name.as_ptr()),
        None => KERNELS.get(handle).map(|kernel| kernel.name.as_ptr()),
    }
}

/// A library.
pub(crate) struct Library {
    pub handle: usize,
    /// The program's image, or a copy of it if the program may free its own. The program's may be gone once
    /// [`unload`](Self::unload) has returned.
    image: Cow<'static, [u8]>,
    jit: Jit,
    pub instances: Mutex<Instances>,
    /// Notified when a context is no longer [`Instances::loading`].
    loaded: Condvar,
    pub kernels: Mutex<HashMap<CString, Arc<Kernel>>>,
}

/// Where a library is. Not locked while a server loads it: others load it and use it meanwhile.
#[derive(Default)]
pub(crate) struct Instances {
    pub all: Vec<(&'static Context, Arc<Module>)>,
    /// The contexts into which threads are loading it.
    loading: Vec<&'static Context>,
    /// The context whose managed variables the program knows. In another context they would be separate
    /// variables that the host never sees, so the library isn't loaded there.
    home: Option<&'static Context>,
    /// Whether the program has unloaded it. Threads may still be loading it.
    unloaded: bool,
}

impl Instances {
    fn module(&self, context: &Context) -> Option<Arc<Module>> {
        self.all.iter().find(|(other, _)| std::ptr::eq(*other, context)).map(|(_, module)| module.clone())
    }

    fn is_loading(&self, context: &Context) -> bool {
        self.loading.iter().any(|other| std::ptr::eq(*other, context))
    }

    /// Whether it is in another context, or soon will be, or belongs to another.
    fn is_beside(&self, context: &Context) -> bool {
        let all = self.all.iter().map(|(context, _)| *context);
        all.chain(self.loading.iter().copied()).chain(self.home).any(|other| !std::ptr::eq(other, context))
    }
}

/// A kernel of a library, usable wherever a function is.
pub(crate) struct Kernel {
    pub library: Weak<Library>,
    pub name: CString,
    pub handle: usize,
    /// Its function in each context where it was used.
    instances: RwLock<Vec<(&'static Context, Arc<Function>)>>,
    /// Settings, applied again when it is loaded in another context.
    settings: Mutex<Vec<Setting>>,
}

/// A kernel's setting: the device, the attribute, and its value.
type Setting = (u32, u32, i32);

pub(crate) static LIBRARIES: Slab<Library> = Slab::new(6);

pub(crate) static KERNELS: Slab<Kernel> = Slab::new(7);

impl Library {
    /// The library's module in a context, loaded now if necessary.
    pub fn in_context(&self, context: &'static Context) -> Result<Arc<Module>> {
        self.load(context, &self.jit)
    }

    /// The instances, once no thread is loading one into a context.
    fn when_loaded(&self, context: &Context) -> MutexGuard<'_, Instances> {
        let is_loading = |instances: &mut Instances| instances.is_loading(context);
        let waited = self.loaded.wait_while(lock(&self.instances), is_loading);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    fn load(&self, context: &'static Context, jit: &Jit) -> Result<Arc<Module>> {
        {
            let mut instances = self.when_loaded(context);
            if instances.unloaded {
                return Err(Status::INVALID_HANDLE);
            }
            if let Some(module) = instances.module(context) {
                return Ok(module);
            }
            if instances.home.is_some_and(|home| !std::ptr::eq(home, context)) {
                return in_two_contexts();
            }
            instances.loading.push(context);
        }
        self.note(context, module::load(context, &self.image, jit))
    }

    /// Notes the result of a load, and returns it.
    fn note(&self, context: &'static Context, loaded: Result<Arc<Module>>) -> Result<Arc<Module>> {
        let mut instances = lock(&self.instances);
        instances.loading.retain(|other| !std::ptr::eq(*other, context));
        let unloaded = instances.unloaded;
        if !unloaded {
            instances.all.extend(loaded.iter().map(|module| (context, module.clone())));
        }
        drop(instances);
        self.loaded.notify_all();
        if !unloaded {
            return loaded;
        }
        if let Ok(module) = loaded {
            // After the session is lost there is no module.
            let _ = module.unload();
        }
        Err(Status::INVALID_HANDLE)
    }

    /// Unloads it from all contexts, for whoever has taken it out of [`LIBRARIES`].
    pub fn unload(&self) -> Result {
        for kernel in lock(&self.kernels).drain().map(|(_, kernel)| kernel) {
            KERNELS.remove(kernel.handle);
        }
        let modules = {
            let mut instances = lock(&self.instances);
            // A thread that is loading it unloads it again.
            instances.unloaded = true;
            if let Cow::Borrowed(_) = self.image {
                let waited = self.loaded.wait_while(instances, |instances| !instances.loading.is_empty());
                instances = waited.unwrap_or_else(PoisonError::into_inner);
            }
            std::mem::take(&mut instances.all)
        };
        let mut unloaded = Ok(());
        for (context, module) in modules {
            // One of its kernels may be running.
            context.quiesce();
            let done = module.unload();
            // What a lost server had must not keep the others' modules.
            if !context.is_given_up() {
                unloaded = unloaded.and(done);
            }
        }
        unloaded
    }

    /// Notes that the program learns the address of a managed variable in one of the library's modules.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` if the library is used in another context, whose kernels have their own variable.
    fn tells_of(&self, module: &Module) -> Result {
        let mut instances = lock(&self.instances);
        if instances.is_beside(module.context) {
            return in_two_contexts();
        }
        instances.home = Some(module.context);
        Ok(())
    }

    /// The library's module in any context, for facts that are the same in all.
    pub fn anywhere(&self, driver: &'static Driver) -> Result<Arc<Module>> {
        let first = lock(&self.instances).all.first().map(|(_, module)| module.clone());
        first.map_or_else(|| self.in_context(usual(driver)?), Ok)
    }

    pub fn kernel(self: &Arc<Self>, name: &CStr) -> Result<Arc<Kernel>> {
        let mut kernels = lock(&self.kernels);
        if let Some(kernel) = kernels.get(name) {
            return Ok(kernel.clone());
        }
        let mut made = None;
        let handle = KERNELS.insert_with(|handle| {
            let kernel = Arc::new(Kernel {
                library: Arc::downgrade(self),
                name: name.to_owned(),
                handle,
                instances: RwLock::default(),
                settings: Mutex::default(),
            });
            made = Some(kernel.clone());
            kernel
        });
        let kernel = made.filter(|_| handle.is_some()).ok_or(Status::OUT_OF_MEMORY)?;
        kernels.insert(name.to_owned(), kernel.clone());
        Ok(kernel)
    }
}

/// The current context, or else the first device's primary context.
fn usual(driver: &'static Driver) -> Result<&'static Context> {
    match context::current() {
        Ok(context) => Ok(context),
        Err(_) => Ok(driver.devices.first().ok_or(Status::NO_DEVICE)?.primary),
    }
}

impl Kernel {
    /// The kernel's function in a context.
    #[inline]
    pub fn in_context(&self, context: &'static Context) -> Result<Arc<Function>> {
        let instances = self.instances.read().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, function)) = instances.iter().find(|(c, _)| std::ptr::eq(*c, context)) {
            return Ok(function.clone());
        }
        drop(instances);
        self.load(context)
    }

    #[cold]
    fn load(&self, context: &'static Context) -> Result<Arc<Function>> {
        let library = self.library.upgrade().ok_or(Status::INVALID_HANDLE)?;
        let module = library.in_context(context)?;
        let function = module.function(&self.name).ok_or(Status::NOT_FOUND)?.clone();
        loop {
            // Not locked meanwhile: the server may be silent, and other contexts are loaded and set.
            let settings = lock(&self.settings).clone();
            let of_device = settings.iter().filter(|(device, ..)| *device == context.device);
            of_device.clone().try_for_each(|(_, attribute, value)| apply(&function, *attribute, *value))?;
            if self.note(context, &function, &settings) {
                return Ok(function);
            }
        }
    }

    /// Notes the function in a context, to which these settings were applied. Returns false if others have
    /// been made meanwhile.
    fn note(&self, context: &'static Context, function: &Arc<Function>, applied: &[Setting]) -> bool {
        let mut instances = self.instances.write().unwrap_or_else(PoisonError::into_inner);
        if *lock(&self.settings) != applied {
            return false;
        }
        if !instances.iter().any(|(c, _)| std::ptr::eq(*c, context)) {
            instances.push((context, function.clone()));
        }
        true
    }

    /// The kernel's function in some context of a device: the current one, or the primary.
    fn on_device(&self, device: i32) -> Result<Arc<Function>> {
        let device = driver::device(device)?;
        let context = context::current()
            .ok()
            .filter(|context| context.device == device.ordinal)
            .unwrap_or(device.primary);
        self.in_context(context)
    }

    /// A kernel's attribute on a device, regardless of what was set for its functions.
    pub fn get(&self, device: i32, attribute: u32) -> Result<i32> {
        let function = self.on_device(device)?;
        let loaded = function.loaded(attribute)?;
        let settings = lock(&self.settings);
        let set = settings.iter().find(|(d, a, _)| (*d, *a) == (device as u32, attribute));
        Ok(set.map_or(loaded, |(.., value)| *value))
    }

    /// Sets something for all present and future contexts of a device, except where it was set for the
    /// function itself.
    pub fn set(&self, device: i32, attribute: u32, value: i32) -> Result {
        let first = self.on_device(device)?;
        self.set_first(&first, attribute, value)
    }

    /// The same for the device of one of its functions, which comes first and so tells whether it is
    /// possible.
    fn set_first(&self, first: &Arc<Function>, attribute: u32, value: i32) -> Result {
        let device = first.context.device;
        apply(first, attribute, value)?;
        // Before the others are looked at: a context that the function is just loaded into is then among
        // them, or finds this.
        let mut settings = lock(&self.settings);
        settings.retain(|(d, a, _)| (*d, *a) != (device, attribute));
        settings.push((device, attribute, value));
        drop(settings);
        let instances = self.instances.read().unwrap_or_else(PoisonError::into_inner);
        let mut others = instances.iter().map(|(_, function)| function);
        others.try_for_each(|other| {
            if other.context.device == device { apply(other, attribute, value) } else { Ok(()) }
        })
    }
}

/// Applies a kernel's setting to one of its functions.
fn apply(function: &Function, attribute: u32, value: i32) -> Result {
    match attribute {
        func::CACHE_CONFIG => function.set_cache_config(value as u32),
        _ => function.set(attribute, value, true),
    }
}

/// The error for using a library with managed variables in a second context.
fn in_two_contexts<T>() -> Result<T> {
    refuse_form!("code with __managed__ variables in several contexts, as on several GPUs")
}

/// Drops what libraries loaded into a context. `with_server`: the server unloads it with the context.
pub(crate) fn forget(context: &'static Context, with_server: bool) {
    for kernel in KERNELS.all() {
        kernel
            .instances
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|(c, _)| !std::ptr::eq(*c, context));
    }
    for library in LIBRARIES.all() {
        // A thread that loads it there would note a module that is gone.
        let mut instances = library.when_loaded(context);
        instances.home = instances.home.filter(|home| !std::ptr::eq(*home, context));
        for (_, module) in instances.all.extract_if(.., |(c, _)| std::ptr::eq(*c, context)) {
            module.forget();
            if !with_server {
                // After the session is lost there are no modules.
                let _ = module.unload();
            }
        }
    }
}

/// Whether a module belongs to a library, and so cannot be unloaded by itself.
pub(crate) fn owns(module: &Arc<Module>) -> bool {
    let has =
        |library: &Arc<Library>| lock(&library.instances).all.iter().any(|(_, m)| Arc::ptr_eq(m, module));
    LIBRARIES.all().iter().any(has)
}

/// The library that a function belongs to, and its module.
fn owner_of(function: &Arc<Function>) -> Option<(Arc<Library>, Arc<Module>)> {
    let holds = |module: &Module| module.functions.iter().any(|f| Arc::ptr_eq(f, function));
    LIBRARIES.all().into_iter().find_map(|library| {
        let module =
            lock(&library.instances).all.iter().find(|(_, module)| holds(module)).map(|(_, m)| m.clone());
        Some((library, module?))
    })
}

/// The module of a kernel's function.
pub(crate) fn module_of(function: &Arc<Function>) -> Option<Arc<Module>> {
    Some(owner_of(function)?.1)
}

/// The kernel that a function belongs to, unless it is a plain module's function.
pub(crate) fn kernel_of(function: &Arc<Function>) -> Option<usize> {
    Some(owner_of(function)?.0.kernel(&function.name).ok()?.handle)
}

pub(crate) fn library(handle: usize) -> Result<(&'static Driver, Arc<Library>)> {
    let driver = driver()?;
    Ok((driver, LIBRARIES.get(handle).ok_or(Status::INVALID_HANDLE)?))
}

/// A library's variable in the current context.
pub(crate) fn variable(handle: usize, name: &CStr) -> Result<Variable> {
    let (driver, library) = library(handle)?;
    let module = library.in_context(context::current()?)?;
    let variable = module.global(driver, name)?;
    if variable.managed {
        library.tells_of(&module)?;
    }
    Ok(variable)
}

/// A library's managed variable. It has the same address in all contexts, so none needs to be current.
pub(crate) fn managed_variable(handle: usize, name: &CStr) -> Result<Variable> {
    let (driver, library) = library(handle)?;
    let module = library.anywhere(driver)?;
    let variable = module.global(driver, name)?;
    if !variable.managed {
        return Err(Status::NOT_FOUND);
    }
    library.tells_of(&module)?;
    Ok(variable)
}

/// The handle of a kernel's function in the current context.
pub(crate) fn function_of(handle: usize) -> Result<usize> {
    let (_, kernel) = kernel(handle)?;
    let context = context::current()?;
    let function = kernel.in_context(context)?;
    let library = kernel.library.upgrade().ok_or(Status::INVALID_HANDLE)?;
    function.handle(&library.in_context(context)?)
}

pub(crate) fn kernel(handle: usize) -> Result<(&'static Driver, Arc<Kernel>)> {
    let driver = driver()?;
    Ok((driver, KERNELS.get(handle).ok_or(Status::INVALID_HANDLE)?))
}

/// Creates a library from an image. Returns its handle.
pub(crate) fn new_library(image: Cow<'static, [u8]>, jit: Jit) -> Result<usize> {
    let driver = driver()?;
    let mut made = None;
    let handle = LIBRARIES.insert_with(|handle| {
        let library = Arc::new(Library {
            handle,
            image,
            jit: jit.without_buffers(),
            instances: Mutex::default(),
            loaded: Condvar::new(),
            kernels: Mutex::default(),
        });
        made = Some(library.clone());
        library
    });
    let library = made.filter(|_| handle.is_some()).ok_or(Status::OUT_OF_MEMORY)?;
    // Loaded immediately, so that a bad image is reported here, as CUDA does.
    if let Err(status) = usual(driver).and_then(|context| library.load(context, &jit)) {
        LIBRARIES.remove(library.handle);
        return Err(status);
    }
    Ok(library.handle)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::process::driver::Server;
    use client::handle::{ContextId, ModuleId};
    use client::ops::module::FunctionInfo;

    fn unlisted_of(image: Cow<'static, [u8]>) -> Arc<Library> {
        Arc::new(Library {
            handle: 0,
            image,
            jit: Jit::default(),
            instances: Mutex::default(),
            loaded: Condvar::new(),
            kernels: Mutex::default(),
        })
    }

    fn unlisted() -> Arc<Library> {
        unlisted_of(Cow::Owned(b"no image".to_vec()))
    }

    #[test]
    fn a_library_that_is_unloaded_while_it_is_loaded_leaves_no_module() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, false);
        let library = unlisted();
        lock(&library.instances).loading.push(context);
        assert_eq!(library.unload(), Ok(()));
        let before = context.session().last_seq();
        let loaded = library.note(context, Ok(Module::new(ModuleId(1), context, Vec::new(), None)));
        assert_eq!(loaded.map(drop), Err(Status::INVALID_HANDLE));
        assert_ne!(context.session().last_seq(), before, "the server is told");
        let instances = lock(&library.instances);
        assert!(instances.all.is_empty() && !instances.is_loading(context));
        drop(instances);
        // It is not loaded again: the server never answers.
        assert_eq!(library.in_context(context).map(drop), Err(Status::INVALID_HANDLE));
    }

    #[test]
    fn a_programs_own_image_is_not_read_once_its_library_was_unloaded() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, false);
        let library = unlisted_of(Cow::Borrowed(b"no image"));
        let before = context.session().last_seq();
        let loading = library.clone();
        let loads = std::thread::spawn(move || loading.in_context(context).map(drop));
        while context.session().last_seq() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (says, said) = mpsc::channel();
        let unloading = library.clone();
        std::thread::spawn(move || says.send(unloading.unload()).unwrap());
        while !lock(&library.instances).unloaded {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(lock(&library.instances).is_loading(context));
        assert_eq!(said.try_recv(), Err(mpsc::TryRecvError::Empty));
        context.server.lose();
        assert!(loads.join().unwrap().is_err());
        said.recv_timeout(Duration::from_secs(60)).expect("the library is not loaded any more").unwrap();
    }

    #[test]
    fn a_server_that_does_not_answer_while_it_loads_a_library_stops_no_other() {
        let [silent, other] = [(); 2].map(|()| Server::unused());
        let [first, second] = [silent, other].map(|server| Context::new(ContextId(0), server, 0, 0, false));
        let library = unlisted();
        let before = silent.session.last_seq();
        let loading = library.clone();
        let loads = std::thread::spawn(move || loading.in_context(first).map(drop));
        while silent.session.last_seq() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        other.lose();
        let (says, said) = mpsc::channel();
        let loading = library.clone();
        std::thread::spawn(move || says.send(loading.in_context(second).map(drop)).unwrap());
        // If this waited for the answer, so would the test: it never comes.
        let refused = said.recv_timeout(Duration::from_secs(60)).expect("the library is locked");
        assert_eq!(refused, Err(Status::DEVICE_UNAVAILABLE));
        assert!(lock(&library.instances).is_loading(first));
        silent.lose();
        assert!(loads.join().unwrap().is_err());
        assert!(!lock(&library.instances).is_loading(first));
    }

    #[test]
    fn a_context_that_a_kernel_is_loaded_into_while_it_is_set_gets_the_setting() {
        let contexts = [(); 2].map(|()| Context::new(ContextId(0), Server::unused(), 0, 0, false));
        let info = || FunctionInfo { name: "f".into(), attributes: Vec::new(), params: Vec::new() };
        let [first, second] = contexts
            .map(|context| Arc::new(Function::new(ModuleId(1), 0, context, info(), false, "").unwrap()));
        let kernel = unlisted().kernel(c"f").unwrap();
        assert!(kernel.note(contexts[0], &first, &[]));
        // Another thread loads it here, and has seen no setting.
        let before = contexts[1].session().last_seq();
        kernel.set_first(&first, func::CACHE_CONFIG, 1).unwrap();
        assert!(!kernel.note(contexts[1], &second, &[]), "it would miss the setting");
        let settings = lock(&kernel.settings).clone();
        assert_eq!(settings, [(0, func::CACHE_CONFIG, 1)]);
        assert!(kernel.note(contexts[1], &second, &settings));
        assert_eq!(contexts[1].session().last_seq(), before);
        kernel.set_first(&first, func::CACHE_CONFIG, 2).unwrap();
        assert_ne!(contexts[1].session().last_seq(), before, "it is set here, too");
        KERNELS.remove(kernel.handle);
    }
}
