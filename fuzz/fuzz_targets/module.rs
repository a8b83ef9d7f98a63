//! A module that a program sends: PTX, or a container with PTX. Loading returns a module, or an error that
//! says what is wrong.
#![cfg_attr(not(standalone), no_main)]

use std::sync::LazyLock;

use software_gpu::{Gpu, GpuConfig};

static GPU: LazyLock<Gpu> = LazyLock::new(|| {
    Gpu::new(GpuConfig { memory_bytes: 64 << 20, workers: 1, ..GpuConfig::default() }).expect("a GPU")
});

rgpu_fuzz::target!(|image: &[u8]| {
    if let Ok(module) = GPU.load_module(image) {
        drop(module);
    }
});
