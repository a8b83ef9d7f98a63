//! `api!`: how an exported function of the driver API is written down; `unsupported!`: those that cannot be served yet.
//!
//! ```text
//! fn cuName(arguments) { body }                            the body is a `Result<(), Status>`
//! fn cuName / cuName_ptsz (arguments) |per_thread| { … }   `per_thread`: a NULL stream means the thread's own
//! unsafe fn …                                              the same, for a body that follows bare pointers
//! alias cuOther = cuName(arguments);                       another symbol for the same function
//! ```
//!
//! Arguments that are only read and written have the types of [`arguments`](crate::abi::arguments), so their functions' bodies are safe code. A body that follows
//! other pointers (memory to copy, the parameters of a launch) says `unsafe fn`, and makes its case where it does.
//!
//! A panic cannot leave these functions: Rust aborts at the edge of an `extern "C"` function, with the panic's own message. Aborting, not catching, is what is wanted: state that a
//! panic interrupted is not state to go on with, and no argument of a program leads to one.

/// See the module.
macro_rules! api {
    () => {};
    (fn $name:ident / $per_thread:ident ($($arg:ident : $ty:ty),* $(,)?) |$pt:ident| $body:block $($rest:tt)*) => {
        api! { @export $name ($($arg: $ty),*) { let $pt = false; $body } }
        api! { @export $per_thread ($($arg: $ty),*) { let $pt = true; $body } }
        api! { $($rest)* }
    };
    (fn $name:ident ($($arg:ident : $ty:ty),* $(,)?) $body:block $($rest:tt)*) => {
        api! { @export $name ($($arg: $ty),*) $body }
        api! { $($rest)* }
    };
    (unsafe fn $name:ident / $per_thread:ident ($($arg:ident : $ty:ty),* $(,)?) |$pt:ident| $body:block $($rest:tt)*) => {
        api! { @export_unsafe $name ($($arg: $ty),*) { let $pt = false; $body } }
        api! { @export_unsafe $per_thread ($($arg: $ty),*) { let $pt = true; $body } }
        api! { $($rest)* }
    };
    (unsafe fn $name:ident ($($arg:ident : $ty:ty),* $(,)?) $body:block $($rest:tt)*) => {
        api! { @export_unsafe $name ($($arg: $ty),*) $body }
        api! { $($rest)* }
    };
    (alias $name:ident = $target:ident ($($arg:ident : $ty:ty),* $(,)?); $($rest:tt)*) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            // SAFETY: the same function under another name.
            unsafe { $target($($arg),*) }
        }
        api! { $($rest)* }
    };
    (@export $name:ident ($($arg:ident : $ty:ty),*) $body:block) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            #[inline(always)]
            fn body($($arg: $ty),*) -> $crate::abi::result::Result {
                $body
            }
            static CALL: ::client::counters::Call = ::client::counters::Call::new(stringify!($name));
            let _inside = ::client::counters::enter(&CALL);
            $crate::abi::result::finish(stringify!($name), body($($arg),*))
        }
    };
    (@export_unsafe $name:ident ($($arg:ident : $ty:ty),*) $body:block) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            #[inline(always)]
            unsafe fn body($($arg: $ty),*) -> $crate::abi::result::Result {
                $body
            }
            static CALL: ::client::counters::Call = ::client::counters::Call::new(stringify!($name));
            let _inside = ::client::counters::enter(&CALL);
            // SAFETY: the caller of the exported function keeps what CUDA's manual asks of its arguments, and the body asks for no more.
            let result = unsafe { body($($arg),*) };
            $crate::abi::result::finish(stringify!($name), result)
        }
    };
}

/// Exports names that cannot be served: they answer `CUDA_ERROR_NOT_SUPPORTED` and log one line each. Their arguments are not looked at, which the
/// C calling conventions of x86-64 and AArch64 Linux allow a callee.
macro_rules! unsupported {
    ($($name:ident),* $(,)?) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> u32 {
            static SAID: ::std::sync::atomic::AtomicBool = ::std::sync::atomic::AtomicBool::new(false);
            $crate::abi::result::refuse(stringify!($name), &SAID)
        }
    )*};
}
