//! `api!`: defines the exported functions of the runtime API.
//!
//! Each entry begins with what it needs (a function of `context`): `init` an initialized driver, `ctx` a
//! current context as well, `raw` neither. It continues in one of two forms:
//!
//! ```text
//! ctx fn cudaName(arguments) |d| expression;                      the expression is a `Result`
//! ctx fn cudaName/cudaName_ptsz(arguments) |d, s| expression;     `s` says which default stream is meant
//! ctx cudaName => cuName(arguments);                              the driver's function takes the same arguments
//! ctx cudaName/cudaName_ptsz => cuName(arguments);
//! ```
//!
//! Pointers that the expression reads or writes have the types of `arguments`, so it is safe code. `unsafe
//! fn` in place of `fn` is for expressions that pass pointers of the program on to the driver.
//!
//! Every entry keeps an error as the thread's last error, and never unwinds into the program.

macro_rules! api {
    () => {};
    ($need:ident fn $name:ident / $per_thread:ident ($($arg:ident : $ty:ty),* $(,)?)
        |$d:ident, $s:ident| $body:expr; $($rest:tt)*) => {
        api! { @export $need $name ($($arg: $ty),*) $d { let $s = $crate::driver::DefaultStream::Legacy; $body } }
        api! { @export $need $per_thread ($($arg: $ty),*) $d { let $s = $crate::driver::DefaultStream::PerThread; $body } }
        api! { $($rest)* }
    };
    ($need:ident fn $name:ident ($($arg:ident : $ty:ty),* $(,)?) |$d:ident| $body:expr; $($rest:tt)*) => {
        api! { @export $need $name ($($arg: $ty),*) $d { $body } }
        api! { $($rest)* }
    };
    ($need:ident unsafe fn $name:ident / $per_thread:ident ($($arg:ident : $ty:ty),* $(,)?)
        |$d:ident, $s:ident| $body:expr; $($rest:tt)*) => {
        api! { @export_unsafe $need $name ($($arg: $ty),*) $d { let $s = $crate::driver::DefaultStream::Legacy; $body } }
        api! { @export_unsafe $need $per_thread ($($arg: $ty),*) $d { let $s = $crate::driver::DefaultStream::PerThread; $body } }
        api! { $($rest)* }
    };
    ($need:ident unsafe fn $name:ident ($($arg:ident : $ty:ty),* $(,)?) |$d:ident| $body:expr; $($rest:tt)*) => {
        api! { @export_unsafe $need $name ($($arg: $ty),*) $d { $body } }
        api! { $($rest)* }
    };
    ($need:ident $name:ident / $per_thread:ident => $cu:ident ($($arg:ident : $ty:ty),* $(,)?); $($rest:tt)*) => {
        api! { @export_unsafe $need $name ($($arg: $ty),*) d { d.$cu($crate::driver::DefaultStream::Legacy $(, $arg)*) } }
        api! { @export_unsafe $need $per_thread ($($arg: $ty),*) d { d.$cu($crate::driver::DefaultStream::PerThread $(, $arg)*) } }
        api! { $($rest)* }
    };
    ($need:ident $name:ident => $cu:ident ($($arg:ident : $ty:ty),* $(,)?); $($rest:tt)*) => {
        api! { @export_unsafe $need $name ($($arg: $ty),*) d { d.$cu($($arg),*) } }
        api! { $($rest)* }
    };
    (@export_unsafe $need:ident $name:ident ($($arg:ident : $ty:ty),*) $d:ident $body:block) => {
        api! { @export $need $name ($($arg: $ty),*) $d {
            // SAFETY: the caller upholds what CUDA's manual requires of this function's arguments: a pointer
            // is NULL where that is allowed, or valid for the documented type and length. The driver's
            // function requires the same of them.
            unsafe { $body }
        } }
    };
    (@export $need:ident $name:ident ($($arg:ident : $ty:ty),*) $d:ident $body:block) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> ::core::ffi::c_int {
            /// `cudaName_params` of NVIDIA's `generated_cuda_runtime_api_meta.h`: what CUPTI tells of the
            /// arguments.
            #[allow(non_camel_case_types, dead_code, reason = "a type for each argument, which a profiler reads")]
            #[repr(C)]
            struct Arguments<$($arg),*> { $($arg: $arg),* }
            static CALL: $crate::call_counts::Call = $crate::call_counts::Call::new(
                match ::core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a name has no NUL"),
                },
                Some($crate::launch::kernel_of),
            );
            let inside = $crate::call_counts::Inside::new(&CALL);
            let status = $crate::error::remember($crate::context::$need(|$d| {
                // Entered here so that initialization on the first call is not counted as this function's
                // work.
                inside.enter(|| Arguments { $($arg),* });
                $body
            }));
            inside.leave(status);
            status
        }
    };
}

/// Exports functions that cannot be served: they return `cudaErrorNotSupported` and log one line each. They
/// declare no arguments, which the C calling conventions of x86-64 and AArch64 Linux permit.
macro_rules! unsupported {
    ($($name:ident: $why:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> ::core::ffi::c_int {
            static ONCE: ::std::sync::Once = ::std::sync::Once::new();
            ONCE.call_once(|| ::log::warn(format_args!("libcudart: {} is not supported: {}", stringify!($name), $why)));
            $crate::error::remember(Err($crate::error::Error::NOT_SUPPORTED))
        }
    )*};
}
