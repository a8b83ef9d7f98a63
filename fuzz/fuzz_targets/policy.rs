//! Rules for clients that an operator may write: they are refused with a reason, or each client gets a
//! decision within the limits of its keys.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rgpu_server::policy_any;

fuzz_target!(|text: &str| {
    policy_any(text);
});
