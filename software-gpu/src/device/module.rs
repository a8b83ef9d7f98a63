//! Modules: loaded PTX, with its functions and its globals placed in memory.

use std::collections::HashMap;
use std::sync::Arc;

use crate::device::gpu::Gpu;
use crate::error::{Error, Result, Unsupported};
use crate::fatbin;
use crate::lower::program::{Code, Program};
use crate::ptx::ast::File;

/// One parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamInfo {
    /// Where it lies in the parameter block, in bytes.
    pub offset: u32,
    /// Bytes.
    pub size: u32,
}

/// What is known of a kernel without running it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Its name, as in the PTX (mangled).
    pub name: String,
    /// Its parameters, in order.
    pub params: Vec<ParamInfo>,
    /// Bytes of the whole parameter block.
    pub param_bytes: u32,
    /// Static shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Local memory of a thread, in bytes, calls not counted.
    pub local_bytes: u32,
    /// Bytes of the module's constants.
    pub constant_bytes: u32,
    /// 32-bit registers of a thread, estimated.
    pub registers: u32,
    /// Threads of a block at most (`__launch_bounds__`, or the GPU's limit).
    pub max_threads: u32,
    /// Exact block dimensions that the kernel requires (`.reqntid`), or zeros.
    pub required_block: [u32; 3],
    /// Exact dimensions of clusters that the kernel requires (`.reqnctapercluster`, `__cluster_dims__`), or zeros.
    pub required_cluster: [u32; 3],
    /// It is for clusters whose size each launch must give (`.explicitcluster` alone).
    pub cluster_must_be_given: bool,
    /// Blocks of a cluster at most.
    pub max_cluster_blocks: u32,
    /// PTX version times ten, as `CU_FUNC_ATTRIBUTE_PTX_VERSION` counts: that of the `.target`.
    pub ptx_version: u32,
    /// Why it cannot be launched, if it cannot: it, or a function that it calls, uses something that this GPU does not implement.
    pub unsupported: Option<Unsupported>,
}

/// One global or constant variable of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GlobalInfo {
    /// Its name.
    pub name: String,
    /// Device address; may be used for reads and writes like any other.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// It is `__constant__`.
    pub constant: bool,
    /// It is `__managed__`.
    pub managed: bool,
}

struct Inner {
    gpu: Gpu,
    program: Arc<Program>,
    functions: Vec<FunctionInfo>,
    codes: Vec<Arc<Code>>,
    by_name: HashMap<String, usize>,
    globals: Vec<GlobalInfo>,
    memory: Vec<u64>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        for &address in &self.memory {
            // The address came from the allocator and is given back once.
            let _ = self.gpu.memory().free_module(address);
        }
    }
}

/// Loaded PTX. Cloning gives another handle; its globals go with the last handle of the module and of its functions.
#[derive(Clone)]
pub struct Module {
    inner: Arc<Inner>,
}

/// Functions of the device runtime that are PTX themselves.
const COOPERATIVE: &str = include_str!("../lower/cooperative.ptx");

/// Whether an image holds PTX that a GPU can run, but for what others define.
pub(crate) fn check(gpu: &Gpu, image: &[u8]) -> Result<()> {
    let (major, minor) = gpu.properties().compute_capability;
    let texts = fatbin::select_ptx(image, major * 10 + minor)?;
    let parsed = texts.iter().map(|text| crate::ptx::parse(text)).collect::<Result<Vec<_>>>()?;
    // Nothing of it runs, so its variables may be anywhere.
    crate::lower::load(&parsed, true, &mut |_| Ok(0)).map(|_| ())
}

impl Module {
    pub(crate) fn load(gpu: &Gpu, images: &[&[u8]]) -> Result<Module> {
        let (major, minor) = gpu.properties().compute_capability;
        let mut texts = Vec::new();
        for image in images {
            texts.extend(fatbin::select_ptx(image, major * 10 + minor)?);
        }
        let mut parsed = texts.iter().map(|text| crate::ptx::parse(text)).collect::<Result<Vec<_>>>()?;
        let asks =
            |f: &File<'_>| f.functions.iter().any(|f| f.body.is_none() && f.name.starts_with("cudaCG"));
        if parsed.iter().any(asks) {
            parsed.push(crate::ptx::parse(COOPERATIVE)?);
        }
        let mut memory = Vec::new();
        let loaded = crate::lower::load(&parsed, false, &mut |size| {
            let address = gpu.memory().allocate_module(size)?;
            memory.push(address);
            Ok(address)
        });
        let release = |memory: &[u64]| {
            for &address in memory {
                // Given back once, as in Drop.
                let _ = gpu.memory().free_module(address);
            }
        };
        let loaded = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                release(&memory);
                return Err(error);
            }
        };
        for (address, bytes) in &loaded.images {
            if let Err(error) = gpu.write(*address, bytes) {
                release(&memory);
                return Err(error);
            }
        }
        let program = Arc::new(loaded.program);
        let codes: Vec<Arc<Code>> =
            loaded.kernels.iter().map(|k| Arc::clone(&program.functions[k.1])).collect();
        let functions: Vec<FunctionInfo> = loaded.kernels.into_iter().map(|k| k.0).collect();
        let by_name = functions.iter().enumerate().map(|(i, f)| (f.name.clone(), i)).collect();
        Ok(Module {
            inner: Arc::new(Inner {
                gpu: gpu.clone(),
                program,
                functions,
                codes,
                by_name,
                globals: loaded.globals,
                memory,
            }),
        })
    }

    /// Its kernels, in the order of the PTX.
    pub fn functions(&self) -> &[FunctionInfo] {
        &self.inner.functions
    }

    /// Its globals and constants that are visible by name.
    pub fn globals(&self) -> &[GlobalInfo] {
        &self.inner.globals
    }

    /// A kernel by its (mangled) name.
    pub fn function(&self, name: &str) -> Result<Function> {
        match self.inner.by_name.get(name) {
            Some(&index) => Ok(Function { inner: Arc::clone(&self.inner), index }),
            None => Err(Error::NotFound { kind: "function", name: name.into() }),
        }
    }

    /// The kernel that is the `index`th function of the program.
    pub(crate) fn kernel_at(&self, index: usize) -> Option<Function> {
        let code = self.inner.program.functions.get(index)?;
        let index = self.inner.codes.iter().position(|kernel| Arc::ptr_eq(kernel, code))?;
        Some(Function { inner: Arc::clone(&self.inner), index })
    }

    /// A global or constant by its name.
    pub fn global(&self, name: &str) -> Result<&GlobalInfo> {
        let found = self.inner.globals.iter().find(|g| g.name == name);
        found.ok_or_else(|| Error::NotFound { kind: "global", name: name.into() })
    }
}

/// A kernel of a module. Keeps the module loaded.
#[derive(Clone)]
pub struct Function {
    inner: Arc<Inner>,
    index: usize,
}

impl Function {
    /// What is known of it.
    pub fn info(&self) -> &FunctionInfo {
        &self.inner.functions[self.index]
    }

    /// The module that it belongs to.
    pub fn module(&self) -> Module {
        Module { inner: Arc::clone(&self.inner) }
    }

    /// Blocks of `threads` threads with `dynamic_shared` bytes that are resident on one multiprocessor at a time.
    pub fn max_active_blocks(&self, threads: u32, dynamic_shared: u32) -> u32 {
        let p = self.inner.gpu.properties();
        let warps = threads.max(1).div_ceil(p.warp_size);
        let by_threads = p.max_threads_per_multiprocessor / p.warp_size / warps;
        let shared = self
            .info()
            .shared_bytes
            .saturating_add(dynamic_shared)
            .saturating_add(p.shared_reserved_per_block);
        by_threads.min(p.max_blocks_per_multiprocessor).min(p.shared_per_multiprocessor / shared)
    }

    /// Bytes of dynamic shared memory that each block may have with `blocks` blocks of `threads` threads on one multiprocessor; `None` if so many do not fit.
    pub fn available_shared(&self, blocks: u32, threads: u32) -> Option<u32> {
        let p = self.inner.gpu.properties();
        if blocks == 0 || self.max_active_blocks(threads, 0) < blocks {
            return None;
        }
        Some(p.shared_per_multiprocessor / blocks - self.info().shared_bytes - p.shared_reserved_per_block)
    }

    /// As [`Function::max_active_blocks`], on all multiprocessors.
    pub fn max_resident_blocks(&self, threads: u32, dynamic_shared: u32) -> u32 {
        self.max_active_blocks(threads, dynamic_shared) * self.inner.gpu.properties().multiprocessors
    }

    pub(crate) fn program(&self) -> &Arc<Program> {
        &self.inner.program
    }

    pub(crate) fn code(&self) -> &Arc<Code> {
        &self.inner.codes[self.index]
    }
}
