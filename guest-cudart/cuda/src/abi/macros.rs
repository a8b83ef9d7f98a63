//! `api!` defines exported functions of the driver API; `unsupported!` those that rgpu doesn't support yet.
//!
//! ```text
//! fn cuName(arguments) { body }                            the body is a `Result<(), Status>`
//! fn cuName / cuName_ptsz (arguments) |per_thread| { … }   `per_thread`: a NULL stream means the thread's own
//! unsafe fn …                                              the same; the body dereferences raw pointers
//! alias cuOther = cuName(arguments);                       another symbol for the same function
//! ```
//!
//! Arguments that are only read and written have the types of [`arguments`](crate::abi::arguments), so such
//! bodies are safe code. A body that dereferences other pointers (memory to copy, the parameters of a launch)
//! is an `unsafe fn` and justifies each dereference.
//!
//! A panic cannot leave these functions: Rust aborts at the edge of an `extern "C"` function and prints the
//! panic's message. Aborting is better than catching: after a panic the library's state can't be trusted. No
//! argument that a program passes leads to a panic.

/// See the module's documentation.
macro_rules! api {
    () => {};
    (fn $name:ident / $per_thread:ident ($($arg:ident : $ty:ty),* $(,)?) |$pt:ident| $body:block $($rest:tt)*) => {
        api! { @export [] $name ($($arg: $ty),*) { let $pt = false; $body } }
        api! { @export [] $per_thread ($($arg: $ty),*) { let $pt = true; $body } }
        api! { $($rest)* }
    };
    (fn $name:ident ($($arg:ident : $ty:ty),* $(,)?) $body:block $($rest:tt)*) => {
        api! { @export [] $name ($($arg: $ty),*) $body }
        api! { $($rest)* }
    };
    (unsafe fn $name:ident / $per_thread:ident ($($arg:ident : $ty:ty),* $(,)?) |$pt:ident| $body:block $($rest:tt)*) => {
        api! { @export [unsafe] $name ($($arg: $ty),*) { let $pt = false; $body } }
        api! { @export [unsafe] $per_thread ($($arg: $ty),*) { let $pt = true; $body } }
        api! { $($rest)* }
    };
    (unsafe fn $name:ident ($($arg:ident : $ty:ty),* $(,)?) $body:block $($rest:tt)*) => {
        api! { @export [unsafe] $name ($($arg: $ty),*) $body }
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
    (@export [$($unsafe:tt)?] $name:ident ($($arg:ident : $ty:ty),*) $body:block) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            #[inline(always)]
            $($unsafe)? fn body($($arg: $ty),*) -> $crate::abi::result::Result {
                $body
            }
            /// `cuName_params` of NVIDIA's `generated_cuda_meta.h`: what CUPTI tells of the arguments.
            #[allow(non_camel_case_types, dead_code, reason = "a type for each argument, which a profiler reads")]
            #[repr(C)]
            struct Arguments<$($arg),*> { $($arg: $arg),* }
            static CALL: ::client::counters::Call =
                ::client::counters::Call::new(concat!(stringify!($name), "\0"));
            // Dropped last: the program's log callbacks are called when the function is over.
            let _told = $crate::abi::log_callbacks::enter();
            let mut arguments = ::std::mem::MaybeUninit::uninit();
            let _inside = ::client::counters::enter(&CALL, &mut arguments, || Arguments { $($arg),* });
            // SAFETY: the caller of the exported function meets the manual's requirements for its arguments,
            // and the body needs nothing else.
            let result = $($unsafe)? { body($($arg),*) };
            $crate::abi::result::finish(stringify!($name), result)
        }
    };
}

/// Exports functions that return `CUDA_ERROR_NOT_SUPPORTED` and log one line each. They ignore their
/// arguments, which the C calling conventions of x86-64 and AArch64 Linux allow.
macro_rules! unsupported {
    ($($name:ident),* $(,)?) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> u32 {
            static SAID: ::std::sync::atomic::AtomicBool = ::std::sync::atomic::AtomicBool::new(false);
            let _told = $crate::abi::log_callbacks::enter();
            $crate::abi::result::refuse(stringify!($name), &SAID)
        }
    )*};
}

/// `Err(NOT_SUPPORTED)` for an unsupported form of a supported function. Each place logs its form once.
macro_rules! refuse_form {
    ($what:expr $(,)?) => {{
        static SAID: ::std::sync::atomic::AtomicBool = ::std::sync::atomic::AtomicBool::new(false);
        $crate::abi::result::refuse_form($what, &SAID)
    }};
}
