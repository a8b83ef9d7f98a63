//! What compiled programs register before `main`: fat binaries with their kernels and variables.
//!
//! nvcc's start-up code calls `__cudaRegisterFatBinary` for each object file, registers each kernel under the
//! address of its host stub and each variable under the address of its host shadow, and then calls
//! `__cudaRegisterFatBinaryEnd`. At exit, or when a plugin is closed, it calls `__cudaUnregisterFatBinary`.
//! None of this may touch the driver: the program may never use a GPU, or may fork first. The driver loads a
//! fat binary, as a library, when one of its names is first used. Libraries and their kernels are valid in
//! all contexts, so each kernel is looked up once per process.
//!
//! Two objects may register the same host stub or variable: code of a header whose symbol the dynamic linker
//! shares among them. The first one counts, which has the symbol as a rule, and whose data so stays until the
//! others are closed.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::address_map::AddressMap;
use crate::arguments::Out;
use crate::context;
use crate::driver::Driver;
use crate::error::{Error, Result, remember};
use crate::types::{CUkernel, CUlibrary};

/// The driver's option for code that stays in place until the library is unloaded.
const BINARY_IS_PRESERVED: c_uint = 1;

/// A registered fat binary; the handle given to the program points to one. They are never freed, because a
/// process's objects unregister in an order that this library does not control.
pub(crate) struct FatBinary {
    /// The wrapper in the program's data, which the driver reads: magic, version, code, and for version 2 the
    /// prelinked objects.
    wrapper: *const c_void,
    library: AtomicPtr<c_void>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    kernels: Vec<&'static Kernel>,
    variables: Vec<&'static Variable>,
    unregistered: bool,
    /// The process that loaded the library.
    loaded_by: u32,
    /// When the program's pointers to managed variables were last set, and for which device.
    placed: (u32, c_int),
}

// SAFETY: the wrapper is constant data of the program, read by the driver only while the program has it
// registered.
unsafe impl Sync for FatBinary {}
// SAFETY: every other field is a lock, an atomic or owned data; the wrapper is constant data that any thread
// may read.
unsafe impl Send for FatBinary {}

/// A kernel that a program registered, or a handle that it received and may pass in place of a host function.
pub(crate) struct Kernel {
    /// How the program names it: the address of its host stub.
    host: usize,
    /// Its NUL-terminated name in the fat binary, in the program's constant data.
    name: *const c_char,
    binary: Option<&'static FatBinary>,
    /// The driver's handle; NULL until first used.
    handle: AtomicPtr<c_void>,
}

// SAFETY: the name is constant data of the program.
unsafe impl Sync for Kernel {}

/// A device variable that a program registered.
pub(crate) struct Variable {
    host: usize,
    name: *const c_char,
    binary: &'static FatBinary,
    size: usize,
    /// For a managed variable: where the program keeps its address.
    managed: Option<*mut *mut c_void>,
}

// SAFETY: the name is constant data of the program. The managed address is written only while its library is
// loaded, under the fat binary's lock.
unsafe impl Sync for Variable {}

static KERNELS: AddressMap<Kernel> = AddressMap::new();
/// Kernels by the driver's handle, to find the host function of a handle and to accept a handle in place of a
/// function.
static HANDLES: AddressMap<Kernel> = AddressMap::new();
static VARIABLES: AddressMap<Variable> = AddressMap::new();

/// Loaded fat binaries with managed variables.
static WITH_MANAGED: Mutex<Vec<&'static FatBinary>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn has_managed(&self) -> bool {
        self.variables.iter().any(|variable| variable.managed.is_some())
    }
}

impl FatBinary {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The driver's library, loaded on first use.
    fn library(&'static self, driver: &Driver) -> Result<CUlibrary> {
        let loaded = self.library.load(Ordering::Acquire);
        if !loaded.is_null() {
            return Ok(loaded);
        }
        let mut state = self.state();
        let loaded = self.library.load(Ordering::Acquire);
        if !loaded.is_null() {
            return Ok(loaded);
        }
        if state.unregistered {
            return Err(Error::INVALID_DEVICE_FUNCTION);
        }
        let mut library = ptr::null_mut();
        let (mut option, mut value) = (BINARY_IS_PRESERVED, ptr::without_provenance_mut(1));
        // SAFETY: the wrapper stays in place until it is unregistered, which this state excludes. The other
        // pointers are to live local variables, and the option count is one.
        unsafe {
            driver.cuLibraryLoadData(
                &mut library,
                self.wrapper,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
                &mut option,
                &mut value,
                1,
            )?;
        }
        if let Err(error) = place_managed(driver, library, &state.variables) {
            // SAFETY: the library was just loaded, and nothing uses it yet.
            let _ = unsafe { driver.cuLibraryUnload(library) };
            return Err(error);
        }
        if state.has_managed() {
            state.placed = (context::generation(), context::device(driver)?);
            lock(&WITH_MANAGED).push(self);
            context::after_reset(place_managed_again);
        }
        state.loaded_by = std::process::id();
        self.library.store(library, Ordering::Release);
        log::debug(format_args!("libcudart: loaded the fat binary at {:p}", self.wrapper));
        Ok(library)
    }
}

/// Sets the program's pointers to its managed variables.
fn place_managed(driver: &Driver, library: CUlibrary, variables: &[&'static Variable]) -> Result {
    for variable in variables {
        let Some(place) = variable.managed else { continue };
        let (mut address, mut size) = (ptr::null_mut(), 0);
        // SAFETY: outputs are live local variables and the name ends with NUL. `place` is the program's own
        // pointer variable, which nvcc's code reads only after the module is initialized.
        let before = unsafe {
            driver.cuLibraryGetManaged(&mut address, &mut size, library, variable.name)?;
            place.replace(address)
        };
        VARIABLES.remove(before.addr(), variable);
        // nvcc replaces a managed variable by the address it points to, so that address also acts as its
        // symbol.
        VARIABLES.insert(address.addr(), variable);
    }
    Ok(())
}

/// Called when a device is used again after a reset, which has freed the managed variables there. As CUDA
/// does, gives the program new ones. Returns whether this is done for all devices.
fn place_managed_again(driver: &Driver) -> Result<bool> {
    let (generation, device) = (context::generation(), context::device(driver)?);
    let mut is_done = true;
    let binaries = lock(&WITH_MANAGED).clone();
    for binary in binaries {
        let mut state = binary.state();
        let library = binary.library.load(Ordering::Acquire);
        if library.is_null() || state.placed.0 == generation {
            continue;
        }
        if state.placed.1 == device {
            place_managed(driver, library, &state.variables)?;
            state.placed.0 = generation;
        } else {
            is_done = false;
        }
    }
    Ok(is_done)
}

impl Kernel {
    /// The driver's handle, looked up on first use.
    #[inline]
    pub(crate) fn handle(&self) -> Result<CUkernel> {
        let handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() { self.find() } else { Ok(handle) }
    }

    #[cold]
    fn find(&self) -> Result<CUkernel> {
        let binary = self.binary.ok_or(Error::INVALID_DEVICE_FUNCTION)?;
        let driver = context::bound()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the output is a live local variable and the name ends with NUL.
        unsafe { driver.cuLibraryGetKernel(&mut handle, binary.library(driver)?, self.name)? };
        self.handle.store(handle, Ordering::Release);
        if let Some(own) = KERNELS.get(self.host) {
            HANDLES.insert(handle.addr(), own);
        }
        Ok(handle)
    }
}

/// The driver's kernel for what a program passes as a function: a host stub or a kernel handle. An unknown
/// handle may come from the driver API, so the driver decides.
///
/// # Errors
///
/// `cudaErrorInvalidDeviceFunction` for NULL; the driver's error for an invalid handle
/// (`cudaErrorInvalidResourceHandle`); the error of loading the fat binary.
#[inline]
pub(crate) fn kernel(function: *const c_void) -> Result<CUkernel> {
    match KERNELS.get(function.addr()) {
        Some(kernel) => kernel.handle(),
        None => foreign_handle(function),
    }
}

#[cold]
fn foreign_handle(function: *const c_void) -> Result<CUkernel> {
    let handle = function.cast_mut();
    if HANDLES.get(handle.addr()).is_some() {
        return Ok(handle);
    }
    // Without a device, the missing device is the more helpful error.
    let driver = context::bound()?;
    if handle.is_null() {
        return Err(Error::INVALID_DEVICE_FUNCTION);
    }
    let mut of_kernel = ptr::null_mut();
    // SAFETY: the output is a live local variable. The driver looks a handle up and does not dereference one
    // that it did not create; NVIDIA's runtime relies on the same.
    unsafe { driver.cuKernelGetFunction(&mut of_kernel, handle)? };
    Ok(handle)
}

/// The driver's kernel for what a stub launches: the handle from `__cudaGetKernel`, or, if that failed, the
/// stub's address, which is looked up again.
#[inline]
pub(crate) fn launched(kernel: CUkernel) -> Result<CUkernel> {
    if HANDLES.get(kernel.addr()).is_some() { Ok(kernel) } else { self::kernel(kernel) }
}

/// The name of the kernel that a program passes as a function: a host stub or a handle. Empty if it is
/// unknown. Loads nothing that is not loaded.
pub(crate) fn name_of(function: usize) -> *const c_char {
    let known = KERNELS.get(function).or_else(|| HANDLES.get(function)).map_or(ptr::null(), |it| it.name);
    let mut name = known;
    if known.is_null()
        && let Ok(driver) = context::bound()
    {
        // SAFETY: the output is a live local variable. The driver looks a handle up, and does not
        // dereference one that it did not create.
        let _ = unsafe { driver.cuKernelGetName(&mut name, ptr::without_provenance_mut(function)) };
    }
    if name.is_null() { c"".as_ptr() } else { name }
}

/// The driver's kernel for a function that must be the program's own: one that it registered, or a handle
/// that it got from this library.
///
/// # Errors
///
/// `cudaErrorInvalidDeviceFunction` for anything else; the error of loading the fat binary.
pub(crate) fn registered(function: *const c_void) -> Result<CUkernel> {
    match KERNELS.get(function.addr()) {
        Some(kernel) => kernel.handle(),
        None if HANDLES.get(function.addr()).is_some() => Ok(function.cast_mut()),
        None => context::bound().and(Err(Error::INVALID_DEVICE_FUNCTION)),
    }
}

/// Records a kernel handle that the program got without registering, so that it can pass the handle as a
/// function.
pub(crate) fn adopt(handle: CUkernel) {
    if !handle.is_null() && HANDLES.get(handle.addr()).is_none() {
        let kernel =
            Kernel { host: handle.addr(), name: ptr::null(), binary: None, handle: AtomicPtr::new(handle) };
        HANDLES.insert(handle.addr(), Box::leak(Box::new(kernel)));
    }
}

/// What the program calls the kernel behind a `CUkernel` or `CUfunction` of the driver: its host stub if it
/// registered one, else the handle itself.
pub(crate) fn host_function_of(driver: &Driver, kernel: CUkernel, function: *mut c_void) -> *mut c_void {
    if !kernel.is_null() {
        return HANDLES.get(kernel.addr()).map_or(kernel, |known| ptr::without_provenance_mut(known.host));
    }
    if let Some(known) = HANDLES.get(function.addr()) {
        return ptr::without_provenance_mut(known.host);
    }
    HANDLES
        .values()
        .find(|known| {
            let mut of_kernel = ptr::null_mut();
            // SAFETY: the output is a live local variable and the kernel is the driver's own handle.
            let answer =
                unsafe { driver.cuKernelGetFunction(&mut of_kernel, known.handle.load(Ordering::Acquire)) };
            answer.is_ok() && of_kernel == function
        })
        .map_or(function, |known| ptr::without_provenance_mut(known.host))
}

/// The address and size of a variable in the current context.
///
/// # Errors
///
/// `cudaErrorInvalidSymbol` if no such variable is registered.
pub(crate) fn variable(driver: &Driver, symbol: *const c_void) -> Result<(*mut c_void, usize)> {
    let variable = VARIABLES.get(symbol.addr()).ok_or(Error::INVALID_SYMBOL)?;
    let library = variable.binary.library(driver)?;
    let (mut address, mut size) = (ptr::null_mut(), 0);
    // SAFETY: the outputs are live local variables and the name ends with NUL.
    let found = unsafe {
        if variable.managed.is_some() {
            driver.cuLibraryGetManaged(&mut address, &mut size, library, variable.name)
        } else {
            driver.cuLibraryGetGlobal(&mut address, &mut size, library, variable.name)
        }
    };
    match found {
        Ok(()) => Ok((address, if size == 0 { variable.size } else { size })),
        Err(Error::SYMBOL_NOT_FOUND) => Err(Error::INVALID_SYMBOL),
        Err(error) => Err(error),
    }
}

/// The fat binary behind a handle of `__cudaRegisterFatBinary`.
fn binary(handle: *mut *mut c_void) -> Option<&'static FatBinary> {
    // SAFETY: the program passes a handle that it was given, and fat binaries are never freed.
    unsafe { handle.cast::<FatBinary>().as_ref() }
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(wrapper: *mut c_void) -> *mut *mut c_void {
    let binary =
        FatBinary { wrapper, library: AtomicPtr::new(ptr::null_mut()), state: Mutex::new(State::default()) };
    Box::into_raw(Box::new(binary)).cast()
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_handle: *mut *mut c_void) {}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFunction(
    handle: *mut *mut c_void,
    host_function: *const c_char,
    _device_function: *mut c_char,
    name: *const c_char,
    _thread_limit: c_int,
    _thread: *mut c_void,
    _block: *mut c_void,
    _block_size: *mut c_void,
    _grid_size: *mut c_void,
    _warp_size: *mut c_int,
) {
    let Some(binary) = binary(handle) else { return };
    let kernel: &'static Kernel = Box::leak(Box::new(Kernel {
        host: host_function.addr(),
        name,
        binary: Some(binary),
        handle: AtomicPtr::new(ptr::null_mut()),
    }));
    KERNELS.claim(kernel.host, kernel);
    binary.state().kernels.push(kernel);
}

fn register_variable(
    handle: *mut *mut c_void,
    host: usize,
    name: *const c_char,
    size: usize,
    managed: Option<*mut *mut c_void>,
) {
    let Some(binary) = binary(handle) else { return };
    let variable: &'static Variable = Box::leak(Box::new(Variable { host, name, binary, size, managed }));
    VARIABLES.claim(host, variable);
    binary.state().variables.push(variable);
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterVar(
    handle: *mut *mut c_void,
    host_variable: *mut c_char,
    _device_address: *mut c_char,
    name: *const c_char,
    _external: c_int,
    size: usize,
    _constant: c_int,
    _global: c_int,
) {
    register_variable(handle, host_variable.addr(), name, size, None);
}

/// Registers a host variable that device code accesses in place. That needs an operating system that shares
/// its page tables with the GPU.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterHostVar(
    _handle: *mut *mut c_void,
    _name: *const c_char,
    _host_variable: *mut c_char,
    _size: usize,
) {
    log::warn(format_args!(
        "libcudart: host variables used by device code are not supported (__cudaRegisterHostVar)"
    ));
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterManagedVar(
    handle: *mut *mut c_void,
    host_variable: *mut *mut c_void,
    _device_address: *mut c_char,
    name: *const c_char,
    _external: c_int,
    size: usize,
    _constant: c_int,
    _global: c_int,
) {
    register_variable(handle, host_variable.addr(), name, size, Some(host_variable));
}

/// Sets the program's pointers to its managed variables. Returns true, so that nvcc's code does not call
/// again.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaInitModule(handle: *mut *mut c_void) -> c_char {
    if let Some(binary) = binary(handle) {
        let _ = remember(context::ctx(|driver| binary.library(driver).map(|_| ())));
    }
    1
}

/// Removes a fat binary when a plugin is closed, so its data goes away, or when the process ends. At exit the
/// driver may already have shut down; it reports that, and nothing is left to unload. In a forked child, the
/// library belongs to the parent.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaUnregisterFatBinary(handle: *mut *mut c_void) {
    let Some(binary) = binary(handle) else { return };
    lock(&WITH_MANAGED).retain(|other| !ptr::eq(*other, binary));
    let mut state = binary.state();
    state.unregistered = true;
    for kernel in state.kernels.drain(..) {
        KERNELS.remove(kernel.host, kernel);
        HANDLES.remove(kernel.handle.load(Ordering::Acquire).addr(), kernel);
    }
    for variable in state.variables.drain(..) {
        VARIABLES.remove(variable.host, variable);
        if let Some(place) = variable.managed {
            // SAFETY: `place` is the program's pointer variable, in the data of the object that is being
            // unregistered.
            VARIABLES.remove(unsafe { place.read() }.addr(), variable);
        }
    }
    let library = binary.library.swap(ptr::null_mut(), Ordering::AcqRel);
    if !library.is_null() && state.loaded_by == std::process::id() {
        let unload = context::init(|driver| {
            // SAFETY: the library was loaded for this fat binary, whose names have all been removed.
            unsafe { driver.cuLibraryUnload(library) }
        });
        if let Err(error) = unload {
            log::debug(format_args!(
                "libcudart: unloading the fat binary at {:p}: error {}",
                binary.wrapper, error.0
            ));
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaGetKernel(out: Out<CUkernel>, host_function: *const c_void) -> c_int {
    remember(get_kernel_for_stub(out, host_function))
}

/// `__cudaGetKernel`: a stub calls this once, ignores the result, keeps the handle in a static variable and
/// launches it from then on. If the kernel is not available now, the stub gets its own address as the handle.
/// Each launch then looks it up and reports the error. CUDA 12 reports nothing before that.
fn get_kernel_for_stub(out: Out<CUkernel>, host_function: *const c_void) -> Result {
    out.required()?;
    let found = registered(host_function);
    if found.is_err() && host_function.is_null() {
        return found.map(|_| ());
    }
    out.put(found.unwrap_or(host_function.cast_mut()))?;
    if cfg!(feature = "v12") { Ok(()) } else { found.map(|_| ()) }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::device::{cudaDeviceReset, cudaSetDevice};
    use crate::fake_driver::{self, Fake};
    use crate::function::{cudaGetFuncBySymbol, cudaGetKernel};
    use crate::graph_nodes::{cudaGraphAddKernelNode, cudaGraphKernelNodeGetParams};
    use crate::launch::{__cudaLaunchKernel, cudaLaunchKernel};
    use crate::types::{Dim3, KernelNodeParams};
    use crate::variable::{cudaGetSymbolAddress, cudaMemcpyToSymbol};

    /// A new stub for each test, since registrations last.
    fn stub() -> *const c_void {
        let address: &'static u64 = Box::leak(Box::new(0));
        ptr::from_ref(address).cast()
    }

    fn binary() -> *mut *mut c_void {
        __cudaRegisterFatBinary(stub().cast_mut())
    }

    fn kernel_of(handle: *mut *mut c_void, name: &'static CStr) -> *const c_void {
        let stub = stub();
        register(handle, stub, name);
        stub
    }

    fn register(handle: *mut *mut c_void, stub: *const c_void, name: &'static CStr) {
        let null = ptr::null_mut();
        __cudaRegisterFunction(
            handle,
            stub.cast(),
            null,
            name.as_ptr(),
            -1,
            null.cast(),
            null.cast(),
            null.cast(),
            null.cast(),
            null.cast(),
        );
    }

    fn launch(function: *const c_void) -> c_int {
        let one = Dim3 { x: 1, y: 1, z: 1 };
        // SAFETY: the fake driver does not look at arguments.
        unsafe { cudaLaunchKernel(function, one, one, ptr::null_mut(), 0, ptr::null_mut()) }
    }

    #[test]
    fn a_fat_binary_is_loaded_by_the_first_launch_only() {
        let fake = Fake::new();
        let function = kernel_of(binary(), c"known");
        assert_eq!(fake.count("cuLibraryLoadData"), 0);
        assert_eq!((launch(function), launch(function)), (0, 0));
        assert_eq!((fake.count("cuLibraryLoadData"), fake.count("cuLibraryGetKernel")), (1, 1));
        assert_eq!(fake.count("cuLaunchKernel"), 2);
    }

    #[test]
    fn concurrent_first_launches_load_a_fat_binary_once() {
        let fake = Fake::new();
        let function = kernel_of(binary(), c"known").addr();
        let start = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    start.wait();
                    assert_eq!(launch(ptr::without_provenance(function)), 0);
                });
            }
        });
        assert_eq!((fake.count("cuLibraryLoadData"), fake.count("cuDevicePrimaryCtxRetain")), (1, 1));
    }

    #[test]
    fn an_unregistered_address_is_an_invalid_handle_and_null_an_invalid_function() {
        let _fake = Fake::new();
        assert_eq!(launch(stub()), 400);
        assert_eq!(launch(ptr::null()), 98);
    }

    #[test]
    fn a_kernel_handle_of_the_driver_api_is_launched() {
        let _fake = Fake::new();
        assert_eq!(launch(ptr::without_provenance(fake_driver::KERNEL)), 0);
    }

    #[test]
    fn a_kernel_missing_from_its_binary_is_a_symbol_not_found() {
        let _fake = Fake::new();
        assert_eq!(launch(kernel_of(binary(), c"unknown")), 500);
    }

    #[test]
    fn cuda_get_kernel_leaves_its_output_alone_for_an_unregistered_function() {
        let _fake = Fake::new();
        let before: CUkernel = ptr::without_provenance_mut(5);
        let (mut kernel, mut function) = (before, before);
        // SAFETY: the outputs are live local variables.
        unsafe {
            assert_eq!(cudaGetKernel((&mut kernel).into(), stub()), 98);
            assert_eq!(cudaGetFuncBySymbol((&mut function).into(), stub()), 98);
        }
        assert_eq!((kernel, function), (before, before));
    }

    /// What nvcc 13's stub does: it looks the kernel up once and then launches the result.
    fn launch_by_stub(kernel: CUkernel) -> c_int {
        let one = Dim3 { x: 1, y: 1, z: 1 };
        // SAFETY: the fake driver does not look at arguments.
        unsafe { __cudaLaunchKernel(kernel, one, one, ptr::null_mut(), 0, ptr::null_mut()) }
    }

    #[test]
    fn a_stub_whose_binary_did_not_load_fails_at_each_launch_until_it_loads() {
        let fake = Fake::new();
        fake.with(|state| state.load = 209);
        let function = kernel_of(binary(), c"known");
        let mut kernel: CUkernel = ptr::null_mut();
        // SAFETY: the output is a live local variable.
        let answer = unsafe { __cudaGetKernel((&mut kernel).into(), function) };
        assert_eq!(answer, if cfg!(feature = "v12") { 0 } else { 209 });
        assert_eq!(kernel.cast_const(), function);
        assert_eq!((launch_by_stub(kernel), launch_by_stub(kernel)), (209, 209));
        fake.with(|state| state.load = 0);
        assert_eq!(launch_by_stub(kernel), 0);
    }

    #[test]
    fn a_stub_without_a_kernel_is_an_invalid_device_function() {
        let _fake = Fake::new();
        let mut kernel: CUkernel = ptr::null_mut();
        // SAFETY: the output is a live local variable.
        assert_eq!(unsafe { __cudaGetKernel((&mut kernel).into(), ptr::null()) }, 98);
        assert_eq!(launch_by_stub(kernel), 98);
    }

    #[test]
    fn unregistering_unloads_the_library_and_removes_its_kernels() {
        let fake = Fake::new();
        let handle = binary();
        let function = kernel_of(handle, c"known");
        assert_eq!(launch(function), 0);
        __cudaUnregisterFatBinary(handle);
        assert_eq!(fake.count("cuLibraryUnload"), 1);
        assert_eq!(launch(function), 400);
    }

    #[test]
    fn a_binary_that_was_never_used_is_unregistered_without_the_driver() {
        let fake = Fake::new();
        let handle = binary();
        kernel_of(handle, c"known");
        __cudaUnregisterFatBinary(handle);
        assert!(fake.with(|state| state.calls.is_empty()));
    }

    #[test]
    fn copies_beyond_a_variable_are_refused() {
        let fake = Fake::new();
        let (symbol, bytes) = (stub(), [0_u8; 16]);
        __cudaRegisterVar(
            binary(),
            symbol.cast_mut().cast(),
            ptr::null_mut(),
            c"variable".as_ptr(),
            0,
            16,
            0,
            0,
        );
        let copy = |symbol, count, offset, direction| {
            // SAFETY: the source is as long as the longest copy, which the fake driver does not make.
            unsafe { cudaMemcpyToSymbol(symbol, bytes.as_ptr().cast(), count, offset, direction) }
        };
        assert_eq!(copy(symbol, 12, 4, 1), 0);
        assert_eq!(copy(symbol, 12, 8, 1), 1);
        assert_eq!(copy(symbol, 12, usize::MAX, 1), 1);
        assert_eq!(copy(symbol, 12, 0, 2), 21);
        assert_eq!(copy(stub(), 12, 0, 1), 13);
        assert_eq!(fake.count("cuMemcpyHtoD_v2"), 1);
    }

    /// A binary with a managed variable, which is initialized, and the program's pointer to it.
    fn with_managed_variable() -> (*mut *mut c_void, *mut *mut c_void) {
        let place: &'static mut *mut c_void = Box::leak(Box::new(ptr::null_mut()));
        let place = ptr::from_mut(place);
        let handle = binary();
        __cudaRegisterManagedVar(handle, place, ptr::null_mut(), c"managed".as_ptr(), 0, 4, 0, 0);
        assert_eq!(__cudaInitModule(handle), 1);
        (handle, place)
    }

    #[test]
    fn initializing_a_module_points_managed_variables_at_their_memory() {
        let _fake = Fake::new();
        let (_, place) = with_managed_variable();
        let (mut by_place, mut by_memory): (*mut c_void, *mut c_void) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the place is leaked memory; the outputs are live local variables.
        unsafe {
            assert_eq!(place.read().addr(), fake_driver::MANAGED);
            assert_eq!(cudaGetSymbolAddress((&mut by_place).into(), place.cast()), 0);
            assert_eq!(cudaGetSymbolAddress((&mut by_memory).into(), place.read()), 0);
        }
        assert_eq!((by_place.addr(), by_memory.addr()), (fake_driver::MANAGED, fake_driver::MANAGED));
    }

    #[test]
    fn managed_variables_are_placed_again_when_their_device_is_used_after_a_reset() {
        let fake = Fake::new();
        let (handle, place) = with_managed_variable();
        // SAFETY: the place is leaked memory.
        let placed = || unsafe { place.read() }.addr();
        let before = placed();
        fake.with(|state| state.managed_moves = 0x100);
        // SAFETY: the functions take nothing, or any number; the output is a live local variable.
        unsafe {
            assert_eq!(cudaDeviceReset(), 0);
            assert_eq!((cudaSetDevice(1), placed()), (0, before));
            assert_eq!((cudaSetDevice(0), placed()), (0, before + 0x100));
            let mut found: *mut c_void = ptr::null_mut();
            let gone = ptr::without_provenance(before);
            assert_eq!(cudaGetSymbolAddress((&mut found).into(), gone), 13);
            assert_eq!(cudaGetSymbolAddress((&mut found).into(), place.read()), 0);
            // Without another reset they stay.
            fake.with(|state| state.managed_moves = 0x200);
            assert_eq!((cudaSetDevice(0), placed()), (0, before + 0x100));
        }
        __cudaUnregisterFatBinary(handle);
    }

    #[test]
    fn a_stub_of_two_binaries_stays_when_either_is_unregistered() {
        let _fake = Fake::new();
        for first_goes in [false, true] {
            let (first, second) = (binary(), binary());
            let function = kernel_of(first, c"known");
            register(second, function, c"known");
            let variable = stub();
            for handle in [first, second] {
                let host = variable.cast_mut().cast();
                __cudaRegisterVar(handle, host, ptr::null_mut(), c"variable".as_ptr(), 0, 16, 0, 0);
            }
            assert_eq!(launch(function), 0);
            let mut found: *mut c_void = ptr::null_mut();
            let (gone, left) = if first_goes { (first, second) } else { (second, first) };
            __cudaUnregisterFatBinary(gone);
            assert_eq!(launch(function), 0);
            // SAFETY: the output is a live local variable.
            assert_eq!(unsafe { cudaGetSymbolAddress((&mut found).into(), variable) }, 0);
            __cudaUnregisterFatBinary(left);
            assert_eq!(launch(function), 400);
            // SAFETY: the output is a live local variable.
            assert_eq!(unsafe { cudaGetSymbolAddress((&mut found).into(), variable) }, 13);
        }
    }

    #[test]
    fn a_graph_node_takes_the_kernel_and_reports_its_stub() {
        let fake = Fake::new();
        let function = kernel_of(binary(), c"known");
        let mut node = ptr::null_mut();
        let given = KernelNodeParams { func: function.cast_mut(), ..KernelNodeParams::default() };
        let mut back = KernelNodeParams::default();
        // SAFETY: outputs and descriptions are live local variables.
        unsafe {
            assert_eq!(
                cudaGraphAddKernelNode(&mut node, ptr::null_mut(), ptr::null(), 0, (&given).into()),
                0
            );
            assert_eq!(cudaGraphKernelNodeGetParams(node, (&mut back).into()), 0);
        }
        assert_eq!(fake.with(|state| state.nodes[0].kern.addr()), fake_driver::KERNEL);
        assert_eq!(back.func.cast_const(), function);
    }
}
