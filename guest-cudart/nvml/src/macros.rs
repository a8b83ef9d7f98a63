//! `nvml!` defines an exported function, `query!` one that is a query to the server, `unsupported!` one that
//! is refused.
//!
//! ```text
//! nvml! { fn nvmlName(arguments) { body } }     the body is a `Result`
//! query! {
//!     block nvmlName(argument) = QUERY;         (device, unsigned int argument, void *out)
//!     words nvmlName() [first, second] = …;     (device, unsigned int *first, unsigned int *second)
//!     text nvmlName() = …;                      (device, char *text, unsigned int length)
//!     list nvmlName() = …;                      (device, unsigned int *count, void *list)
//!     versioned nvmlName = [QUERY, …];          (device, void *structure), a query for each version
//! }
//! ```
//!
//! A panic cannot leave these functions: Rust aborts at the boundary of an `extern "C"` function.

macro_rules! nvml {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            #[allow(unused_unsafe, reason = "not every function reads or writes through its arguments")]
            #[inline(always)]
            unsafe fn body($($arg: $ty),*) -> $crate::error::Result {
                // SAFETY: the caller upholds what NVML's manual requires of the arguments: a pointer is NULL,
                // which is checked here, or valid for the documented type and length.
                unsafe { $body }
            }
            static CALL: ::client::counters::Call = ::client::counters::Call::new(concat!(stringify!($name), "\0"));
            let mut nobody_asks = ::std::mem::MaybeUninit::uninit();
            let _inside = ::client::counters::enter(&CALL, &mut nobody_asks, || ());
            // SAFETY: the caller upholds what NVML's manual requires of the arguments.
            let result = unsafe { body($($arg),*) };
            $crate::error::finish(stringify!($name), result)
        }
    )*};
}

macro_rules! query {
    () => {};
    (block $name:ident($($arg:ident),*) = $query:ident; $($rest:tt)*) => {
        nvml! { fn $name(device: $crate::state::Handle $(, $arg: u32)*, out: *mut u8) {
            $crate::query::block(device, ::client::ops::nvml::$query, &[$($arg),*], out)
        } }
        query! { $($rest)* }
    };
    (words $name:ident() [$($out:ident),*] = $query:ident; $($rest:tt)*) => {
        nvml! { fn $name(device: $crate::state::Handle $(, $out: *mut u32)*) {
            $crate::query::words(device, ::client::ops::nvml::$query, [$($out),*])
        } }
        query! { $($rest)* }
    };
    (text $name:ident($($arg:ident),*) = $query:ident; $($rest:tt)*) => {
        nvml! { fn $name(device: $crate::state::Handle $(, $arg: u32)*, text: *mut ::std::ffi::c_char, length: u32) {
            $crate::query::text(device, ::client::ops::nvml::$query, &[$($arg),*], text, length)
        } }
        query! { $($rest)* }
    };
    (list $name:ident($($arg:ident),*) = $query:ident; $($rest:tt)*) => {
        nvml! { fn $name(device: $crate::state::Handle $(, $arg: u32)*, count: *mut u32, list: *mut u8) {
            $crate::query::list(device, ::client::ops::nvml::$query, &[$($arg),*], count, list)
        } }
        query! { $($rest)* }
    };
    (versioned $name:ident = [$($query:ident),*]; $($rest:tt)*) => {
        nvml! { fn $name(device: $crate::state::Handle, structure: *mut u8) {
            $crate::query::versioned(device, &[$(::client::ops::nvml::$query),*], structure)
        } }
        query! { $($rest)* }
    };
}

/// Exports functions that cannot be served: they return `NVML_ERROR_NOT_SUPPORTED` and log one line each.
/// They declare no arguments, which the C calling conventions of x86-64 and AArch64 Linux permit.
macro_rules! unsupported {
    ($($name:ident),* $(,)?) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> u32 {
            static SAID: ::std::sync::atomic::AtomicBool = ::std::sync::atomic::AtomicBool::new(false);
            $crate::error::refuse(stringify!($name), &SAID)
        }
    )*};
}
