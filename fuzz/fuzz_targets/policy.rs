//! Rules for clients that an operator may write: they are refused with a reason, or each client gets a
//! decision within the limits of its keys.
#![cfg_attr(not(standalone), no_main)]

use rgpu_server::policy_any;

rgpu_fuzz::target!(|text: &str| {
    policy_any(text);
});
