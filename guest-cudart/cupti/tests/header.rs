//! Compares the numbers of functions, the structures of their parameters, and the names of results with
//! CUPTI's headers.

#[path = "../../c_signatures.rs"]
mod c_signatures;
#[path = "../../../cupti-records/tests/includes/mod.rs"]
mod includes;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::fs;

use c_signatures::{classes, prototypes, type_of};

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

/// The structures `NAME_params` of a header, with the types of their fields.
fn parameters(header: &str) -> BTreeMap<String, Vec<String>> {
    let text = fs::read_to_string(includes::folder().join(header)).expect("NVIDIA's header");
    let structure = |part: &str| {
        let (name, rest) = part.split_once("_params_st {")?;
        let fields = rest.split_once('}')?.0.split(';').map(str::trim).filter(|field| !field.is_empty());
        Some((name.trim().to_owned(), fields.map(type_of).collect()))
    };
    text.split("typedef struct ").skip(1).filter_map(structure).collect()
}

/// A callback's `functionParams` are the function's arguments in their order, which other tests compare with
/// the prototypes.
#[test]
fn structures_of_parameters_have_the_arguments_of_the_functions() {
    let includes = [includes::folder().to_path_buf()];
    let apis = [
        ("generated_cuda_meta.h", "cuda.h", "CUresult"),
        ("generated_cuda_runtime_api_meta.h", "cuda_runtime_api.h", "cudaError_t"),
    ];
    let forms = ["RGPU_NOTHING", "CUDA_API_PER_THREAD_DEFAULT_STREAM", "__CUDA_API_VERSION_INTERNAL"];
    for (structures, header, result) in apis {
        let structures = parameters(structures);
        let functions: BTreeMap<_, _> =
            forms.iter().flat_map(|form| prototypes(&includes, header, &[*form], result)).collect();
        let types: BTreeSet<String> =
            structures.values().chain(functions.values()).flatten().cloned().collect();
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let classes = classes(&includes, header, &["__CUDA_API_VERSION_INTERNAL"], types, scratch.path());
        let classes = |types: &[String]| types.iter().map(|kind| classes[kind]).collect::<Vec<_>>();
        let mut compared = 0;
        for (name, fields) in structures {
            // Those of the runtime end with a version. Those for a thread's own stream share a prototype.
            let version = name.rfind("_v").filter(|_| result == "cudaError_t").unwrap_or(name.len());
            let plain = name[..version].trim_end_matches("_ptsz").trim_end_matches("_ptds");
            let Some(arguments) = functions.get(&name).or_else(|| functions.get(plain)) else { continue };
            assert_eq!(classes(&fields), classes(arguments), "{name}: {fields:?}, {arguments:?}");
            compared += 1;
        }
        assert!(compared > 350, "{header}: {compared} structures were compared");
    }
}
