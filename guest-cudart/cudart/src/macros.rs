//! `api!`: how an exported function of the runtime API is written down.
//!
//! Each entry begins with what it needs of the driver (a function of `context`): `init` for an initialized driver,
//! `ctx` for a current context as well, `raw` for neither. Then, in one of two forms:
//!
//! ```text
//! ctx fn cudaName(arguments) |d| expression;                      the expression is a `Result`
//! ctx fn cudaName/cudaName_ptsz(arguments) |d, s| expression;     `s` says which default stream is meant
//! ctx cudaName => cuName(arguments);                              the driver's function takes the same arguments
//! ctx cudaName/cudaName_ptsz => cuName(arguments);
//! ```
//!
//! What every entry shares: an error is kept as the thread's last error, and nothing unwinds into the program.

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
    ($need:ident $name:ident / $per_thread:ident => $cu:ident ($($arg:ident : $ty:ty),* $(,)?); $($rest:tt)*) => {
        api! { @export $need $name ($($arg: $ty),*) d { d.$cu($crate::driver::DefaultStream::Legacy $(, $arg)*) } }
        api! { @export $need $per_thread ($($arg: $ty),*) d { d.$cu($crate::driver::DefaultStream::PerThread $(, $arg)*) } }
        api! { $($rest)* }
    };
    ($need:ident $name:ident => $cu:ident ($($arg:ident : $ty:ty),* $(,)?); $($rest:tt)*) => {
        api! { @export $need $name ($($arg: $ty),*) d { d.$cu($($arg),*) } }
        api! { $($rest)* }
    };
    (@export $need:ident $name:ident ($($arg:ident : $ty:ty),*) $d:ident $body:block) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> ::core::ffi::c_int {
            static CALL: $crate::counts::Call = $crate::counts::Call::new(
                match ::core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a name has no NUL"),
                },
            );
            $crate::error::remember($crate::context::$need(|$d| {
                // What a first call needs to start with is not the function's own.
                let _inside = $crate::counts::enter(&CALL);
                // SAFETY: the caller keeps what CUDA's manual asks of the arguments of this function: pointers are
                // NULL where that is allowed, or valid for the type and length described there. They are handed to
                // the driver under the same terms, and those read or written here have been checked for NULL.
                #[allow(unused_unsafe, reason = "some functions are served without unsafe operations")]
                unsafe { $body }
            }))
        }
    };
}

/// Exports names that cannot be served: they answer `cudaErrorNotSupported` and log one line each. Their arguments
/// are not looked at, which the C calling conventions of x86-64 and AArch64 Linux allow a callee.
macro_rules! unsupported {
    ($($name:ident: $why:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> ::core::ffi::c_int {
            static ONCE: ::std::sync::Once = ::std::sync::Once::new();
            ONCE.call_once(|| $crate::log::warn(format_args!("{} is not supported: {}", stringify!($name), $why)));
            $crate::error::remember(Err($crate::error::Error::NOT_SUPPORTED))
        }
    )*};
}
