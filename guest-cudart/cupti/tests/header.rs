//! Compares the numbers of functions and the names of results with CUPTI's headers.

#[path = "../../../cupti-records/tests/includes/mod.rs"]
mod includes;

use std::ffi::CStr;
use std::fs;

/// The entries of an enumeration: `PREFIXname = number`.
fn entries(header: &str, prefix: &str) -> Vec<(String, u32)> {
    let text = fs::read_to_string(includes::folder().join(header)).expect("NVIDIA's header");
    let entry = |line: &str| {
        let (name, number) = line.trim().strip_prefix(prefix)?.split_once('=')?;
        Some((name.trim().to_owned(), number.trim().trim_end_matches(',').trim().parse().ok()?))
    };
    text.lines().filter_map(entry).collect()
}

fn ours(text: &str) -> Vec<(String, u32)> {
    let entry = |line: &str| {
        let (name, number) = line.split_once(' ').expect("a name and a number");
        (name.to_owned(), number.parse().expect("a number"))
    };
    text.lines().map(entry).collect()
}

#[test]
fn functions_have_the_numbers_of_the_headers() {
    let without = |mut all: Vec<(String, u32)>| {
        // `INVALID`, `SIZE` and `FORCE_INT` are not functions.
        all.retain(|(name, _)| name.starts_with("cu"));
        all
    };
    let driver = without(entries("cupti_driver_cbid.h", "CUPTI_DRIVER_TRACE_CBID_"));
    assert!(driver.len() > 800 && ours(include_str!("../cbids/driver.txt")) == driver);
    let runtime = without(entries("cupti_runtime_cbid.h", "CUPTI_RUNTIME_TRACE_CBID_"));
    assert!(runtime.len() > 500 && ours(include_str!("../cbids/runtime.txt")) == runtime);
}

#[test]
fn results_have_the_names_of_the_header() {
    let mut all = entries("cupti_result.h", "CUPTI_");
    all.retain(|(name, _)| name == "SUCCESS" || name.starts_with("ERROR_") && name != "ERROR_FORCE_INT");
    assert!(all.len() > 40);
    for (name, number) in all {
        let mut text = std::ptr::null();
        // SAFETY: writes the address of a constant text.
        let text = unsafe {
            assert_eq!(cupti::cuptiGetResultString(number, &mut text), 0, "{name}");
            CStr::from_ptr(text)
        };
        assert_eq!(text.to_str(), Ok(format!("CUPTI_{name}").as_str()));
    }
}
