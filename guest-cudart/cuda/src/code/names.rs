//! Names of functions that programs hold by address.
//!
//! A text stays for as long as the process, because a profiler's records refer to it after the module is
//! unloaded. Functions of the same name have the same text, even in different modules: programs compare the
//! addresses, as NVIDIA's driver allows.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::Mutex;

use client::lock;

/// Maximum number of texts, for programs that compile functions under new names without end.
const MOST: usize = 1 << 17;

/// The texts by their bytes, without the NUL.
static NAMES: Mutex<Option<HashMap<&'static [u8], &'static CStr>>> = Mutex::new(None);

/// The text of a name. `None` if there are too many, or if the name has a NUL in it.
pub(crate) fn kept(name: &[u8]) -> Option<&'static CStr> {
    let mut names = lock(&NAMES);
    let names = names.get_or_insert_default();
    if let Some(known) = names.get(name) {
        return Some(known);
    }
    if names.len() >= MOST {
        return None;
    }
    let text: &'static CStr = Box::leak(CString::new(name).ok()?.into_boxed_c_str());
    names.insert(text.to_bytes(), text);
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::kept;

    #[test]
    fn a_name_has_one_text() {
        let text = kept(b"kept once").expect("a text");
        assert_eq!(text, c"kept once");
        assert_eq!(kept(b"kept once").map(|again| again.as_ptr()), Some(text.as_ptr()));
        assert_ne!(kept(b"another").map(|other| other.as_ptr()), Some(text.as_ptr()));
        assert_eq!(kept(b"with a \0 in it"), None);
    }
}
