//! A module as a program may send it: PTX, or a container of it. Loading ends in a module or in an error that says what is wrong.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use software_gpu::{Gpu, GpuConfig};

static GPU: LazyLock<Gpu> = LazyLock::new(|| {
    Gpu::new(GpuConfig { memory_bytes: 64 << 20, workers: 1, ..GpuConfig::default() }).expect("a GPU")
});

fuzz_target!(|image: &[u8]| {
    if let Ok(module) = GPU.load_module(image) {
        drop(module);
    }
});
