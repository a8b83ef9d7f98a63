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
    numbers: HashMap<&'static str, u32>,
    names: HashMap<u32, CString>,
}

fn entries(text: &'static str) -> impl Iterator<Item = (&'static str, u32)> {
    text.lines().filter_map(|line| line.split_once(' ').and_then(|(name, n)| Some((name, n.parse().ok()?))))
}

/// A name without the version at its end.
fn plain(name: &str) -> &str {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.rsplit_once("_v").filter(|(_, version)| digits(version)).map_or(name, |(name, _)| name)
}

impl Names {
    fn of(text: &'static str, versions: bool) -> Names {
        let mut numbers = HashMap::new();
        for (name, number) in entries(text) {
            let key = if versions { plain(name) } else { name };
            // If there are several versions, programs call the last one.
            let known = numbers.entry(key).or_insert(number);
            *known = number.max(*known);
        }
        let names =
            entries(text).filter_map(|(name, number)| Some((number, CString::new(name).ok()?))).collect();
        Names { numbers, names }
    }

    /// The number of a function; 0 if it has none.
    pub fn number(&self, function: &str) -> u32 {
        // nvcc's launch stubs call `__cudaLaunchKernel`, which CUPTI reports as `cudaLaunchKernel`.
        self.numbers.get(function.trim_start_matches('_')).copied().unwrap_or(0)
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
        assert_eq!((driver.number("cuLaunchKernel"), driver.number("cuMemcpyHtoDAsync_v2")), (307, 277));
        assert_eq!((runtime.number("cudaLaunchKernel"), runtime.number("cudaLaunchKernel_ptsz")), (211, 214));
        assert_eq!(runtime.number("__cudaLaunchKernel"), 211);
        assert_eq!((driver.number("cuNothing"), of(3).is_none()), (0, true));
        assert_eq!(runtime.name(211).unwrap().to_str(), Ok("cudaLaunchKernel_v7000"));
        assert_eq!(
            (plain("cudaMalloc_v3020"), plain("cudaMemcpy_v"), plain("cu_x")),
            ("cudaMalloc", "cudaMemcpy_v", "cu_x")
        );
    }
}
