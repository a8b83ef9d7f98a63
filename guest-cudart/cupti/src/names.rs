//! The numbers of CUDA's functions: `cupti_driver_cbid.h` and `cupti_runtime_cbid.h`.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::OnceLock;

/// `CUpti_CallbackDomain`: the driver API and the runtime API.
pub const DRIVER: u32 = 1;
pub const RUNTIME: u32 = 2;

/// CUPTI's names with their numbers. Names of the runtime API end with the version that introduced them.
pub const DRIVER_NAMES: &str = include_str!("../cbids/driver.txt");
pub const RUNTIME_NAMES: &str = include_str!("../cbids/runtime.txt");

/// The functions of one API.
pub struct Names {
    /// The versions of each function, with their numbers.
    numbers: HashMap<&'static str, Vec<(u32, u32)>>,
    names: HashMap<u32, CString>,
}

fn entries(text: &'static str) -> impl Iterator<Item = (&'static str, u32)> {
    text.lines().filter_map(|line| line.split_once(' ').and_then(|(name, n)| Some((name, n.parse().ok()?))))
}

/// A name of the runtime API: without the version at its end, and that version.
fn plain(name: &str) -> (&str, u32) {
    let split = name.rsplit_once("_v").and_then(|(name, version)| Some((name, version.parse().ok()?)));
    split.unwrap_or((name, 0))
}

/// `cudaName_ptsz` for `cudaName_v2_ptsz`.
fn first_form(name: &str) -> String {
    let (name, stream) = name.strip_suffix("_ptsz").map_or((name, ""), |name| (name, "_ptsz"));
    format!("{}{stream}", plain(name).0)
}

impl Names {
    fn of(text: &'static str, versions: bool) -> Names {
        let mut numbers: HashMap<&'static str, Vec<(u32, u32)>> = HashMap::new();
        for (name, number) in entries(text) {
            let (key, version) = if versions { plain(name) } else { (name, 0) };
            numbers.entry(key).or_default().push((version, number));
        }
        let names =
            entries(text).filter_map(|(name, number)| Some((number, CString::new(name).ok()?))).collect();
        Names { numbers, names }
    }

    /// The number of a function; 0 if it has none. In the runtime of a major version (0: the driver) a name
    /// keeps the arguments that it had at first. What changed since has a name with `_v2` or `_v3` there, and
    /// the plain name only in the next one.
    pub fn number(&self, function: &str, major: u32) -> u32 {
        // nvcc's launch stubs call `__cudaLaunchKernel`, which CUPTI reports as `cudaLaunchKernel`.
        let function = function.trim_start_matches('_');
        let (versions, end) = match self.numbers.get(function) {
            Some(versions) => (Some(versions), major * 1000 + 10),
            None => (self.numbers.get(first_form(function).as_str()), (major + 1) * 1000),
        };
        let versions = versions.map_or(&[][..], Vec::as_slice);
        let known = versions.iter().filter(|(version, _)| *version < end).max();
        known.or_else(|| versions.iter().min()).map_or(0, |(_, number)| *number)
    }

    /// The name of the function with this number.
    pub fn name(&self, number: u32) -> Option<&CString> {
        self.names.get(&number)
    }
}

/// The functions of a domain.
pub fn of(domain: u32) -> Option<&'static Names> {
    static NAMES: OnceLock<[Names; 2]> = OnceLock::new();
    let all = NAMES.get_or_init(|| [Names::of(DRIVER_NAMES, false), Names::of(RUNTIME_NAMES, true)]);
    match domain {
        DRIVER => Some(&all[0]),
        RUNTIME => Some(&all[1]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_cupti_s_numbers() {
        let (driver, runtime) = (of(DRIVER).unwrap(), of(RUNTIME).unwrap());
        assert_eq!(
            (driver.number("cuLaunchKernel", 0), driver.number("cuMemcpyHtoDAsync_v2", 0)),
            (307, 277)
        );
        assert_eq!(
            (runtime.number("cudaLaunchKernel", 13), runtime.number("cudaLaunchKernel_ptsz", 13)),
            (211, 214)
        );
        assert_eq!(runtime.number("__cudaLaunchKernel", 13), 211);
        assert_eq!((driver.number("cuNothing", 0), of(3).is_none()), (0, true));
        assert_eq!(runtime.name(211).unwrap().to_str(), Ok("cudaLaunchKernel_v7000"));
        assert_eq!(plain("cudaMalloc_v3020"), ("cudaMalloc", 3020));
        assert_eq!((plain("cudaMemcpy_v"), plain("cu_x")), (("cudaMemcpy_v", 0), ("cu_x", 0)));
    }

    /// Their arguments differ.
    #[test]
    fn a_runtime_s_functions_are_those_of_its_version() {
        let runtime = of(RUNTIME).unwrap();
        let number = |name: &str, major| runtime.number(name, major);
        assert_eq!((number("cudaMemPrefetchAsync", 12), number("cudaMemPrefetchAsync", 13)), (252, 449));
        assert_eq!(number("cudaMemPrefetchAsync_v2_ptsz", 12), 450);
        assert_eq!((number("cudaGraphInstantiate", 12), number("cudaGraphInstantiate", 13)), (443, 443));
        assert_eq!((number("cudaMemcpyBatchAsync", 12), number("cudaMemcpyBatchAsync", 13)), (482, 509));
        assert_eq!((number("cudaGraphAddNode", 12), number("cudaGraphAddNode_v2", 12)), (445, 460));
        assert_eq!((number("cudaGraphAddNode", 13), number("cudaNothing_v2", 12)), (460, 0));
    }
}
