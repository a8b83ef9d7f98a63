//! Test support: a GPU with memory, uploads and parameters.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::sync::{Arc, Mutex};

use software_gpu::{Error, GRANULE, Gpu, GpuConfig, LaunchConfig, Module};

pub const BASE: u64 = 0x2000_0000_0000;

pub struct Bench {
    pub gpu: Gpu,
    next: Mutex<u64>,
    pub printed: Arc<Mutex<Vec<u8>>>,
}

impl Bench {
    pub fn new() -> Bench {
        let printed = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&printed);
        let gpu = Gpu::new(GpuConfig {
            memory_bytes: 1 << 30,
            workers: 4,
            printf: Arc::new(move |text| sink.lock().unwrap().extend_from_slice(text)),
            ..GpuConfig::default()
        })
        .unwrap();
        gpu.map(BASE, 32 * GRANULE).unwrap();
        Bench { gpu, next: Mutex::new(BASE), printed }
    }

    pub fn alloc(&self, bytes: usize) -> u64 {
        let mut next = self.next.lock().unwrap();
        let at = *next;
        self.gpu.place(at, bytes as u64).unwrap();
        *next += (bytes as u64).next_multiple_of(512);
        at
    }

    pub fn upload<T: Copy>(&self, data: &[T]) -> u64 {
        // SAFETY: plain numbers have no padding.
        let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), size_of_val(data)) };
        let at = self.alloc(bytes.len());
        self.gpu.write(at, bytes).unwrap();
        at
    }

    pub fn download<T: Copy + Default>(&self, at: u64, n: usize) -> Vec<T> {
        let mut out = vec![T::default(); n];
        // SAFETY: plain numbers have no padding, and any bits are a valid number.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u8>(), n * size_of::<T>()) };
        self.gpu.read(at, bytes).unwrap();
        out
    }

    pub fn run(&self, module: &Module, name: &str, config: LaunchConfig, params: &[u8]) -> Result<(), Error> {
        let stream = self.gpu.stream();
        stream.launch(&module.function(name)?, config, params)?;
        stream.synchronize()
    }
}

#[derive(Default)]
pub struct Params(pub Vec<u8>);
impl Params {
    pub fn u64(mut self, v: u64) -> Self {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        self.0.extend(v.to_le_bytes());
        self
    }
    pub fn i32(mut self, v: i32) -> Self {
        self.0.extend(v.to_le_bytes());
        self
    }
}

pub fn shape(grid: [u32; 3], block: [u32; 3]) -> LaunchConfig {
    LaunchConfig { grid, block, dynamic_shared: 0, cooperative: false, cluster: None }
}

/// The value of `%d` after `work` for these `%a`, `%b` and `%c`.
pub fn answer(work: &str, [a, b, c]: [u32; 3]) -> u32 {
    let text = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 o)\n{{\n .reg .b64 %o;\n .reg .b32 %a, %b, %c, %d;\n \
         mov.b32 %a, {a};\n mov.b32 %b, {b};\n mov.b32 %c, {c};\n {work}\n ld.param.u64 %o, [o];\n st.global.b32 [%o], %d;\n ret;\n}}\n"
    );
    let bench = Bench::new();
    let module = bench.gpu.load_module(text.as_bytes()).unwrap();
    let out = bench.upload(&[0u32]);
    bench.run(&module, "k", LaunchConfig::linear(1, 1), &out.to_le_bytes()).unwrap();
    bench.download::<u32>(out, 1)[0]
}
