//! Modules: loaded PTX, with its functions, and with its globals placed in memory.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::fatbin;
use crate::lower::info::{FunctionInfo, GlobalInfo};
use crate::lower::link::link;
use crate::machine::hardware::{Allocation, Hardware};
use crate::machine::program::{Code, Program};
use crate::ptx::{self, ast::File};

struct Inner {
    hardware: Arc<Hardware>,
    program: Arc<Program>,
    functions: Vec<FunctionInfo>,
    codes: Vec<Arc<Code>>,
    by_name: HashMap<String, usize>,
    globals: Vec<GlobalInfo>,
    /// Of the globals.
    _memory: Vec<Allocation>,
}

/// Loaded PTX. Clones refer to the same module. Its globals are freed with the last handle of the module and
/// its functions.
#[derive(Clone)]
pub struct Module {
    inner: Arc<Inner>,
}

/// The functions of the device runtime that are written in PTX.
const COOPERATIVE: &str = include_str!("../lower/cooperative.ptx");

/// Checks whether an image contains PTX that a GPU can run, apart from symbols that other images may define.
pub(crate) fn check(hardware: &Hardware, image: &[u8]) -> Result<()> {
    let (major, minor) = hardware.properties.compute_capability;
    let texts = fatbin::select_ptx(image, major * 10 + minor)?;
    let parsed = texts.iter().map(|text| ptx::parse(text)).collect::<Result<Vec<_>>>()?;
    // Nothing of it runs, so its variables can have any address.
    link(&parsed, true, &mut |_| Ok(0)).map(|_| ())
}

impl Module {
    pub(crate) fn load(hardware: &Arc<Hardware>, images: &[&[u8]]) -> Result<Module> {
        let (major, minor) = hardware.properties.compute_capability;
        let mut texts = Vec::new();
        for image in images {
            texts.extend(fatbin::select_ptx(image, major * 10 + minor)?);
        }
        let mut parsed = texts.iter().map(|text| ptx::parse(text)).collect::<Result<Vec<_>>>()?;
        let asks =
            |f: &File<'_>| f.functions.iter().any(|f| f.body.is_none() && f.name.starts_with("cudaCG"));
        if parsed.iter().any(asks) {
            parsed.push(ptx::parse(COOPERATIVE)?);
        }
        let mut memory = Vec::new();
        let loaded = link(&parsed, false, &mut |size| {
            let allocation = hardware.allocate(size)?;
            let address = allocation.address;
            memory.push(allocation);
            Ok(address)
        })?;
        for (address, bytes) in &loaded.images {
            hardware.memory.write(*address, bytes)?;
        }
        let program = Arc::new(loaded.program);
        let codes: Vec<Arc<Code>> =
            loaded.kernels.iter().map(|k| Arc::clone(&program.functions[k.1])).collect();
        let functions: Vec<FunctionInfo> = loaded.kernels.into_iter().map(|k| k.0).collect();
        let by_name = functions.iter().enumerate().map(|(i, f)| (f.name.clone(), i)).collect();
        Ok(Module {
            inner: Arc::new(Inner {
                hardware: Arc::clone(hardware),
                program,
                functions,
                codes,
                by_name,
                globals: loaded.globals,
                _memory: memory,
            }),
        })
    }

    /// The module's kernels in PTX order.
    pub fn functions(&self) -> &[FunctionInfo] {
        &self.inner.functions
    }

    /// The module's globals and constants that are visible by name.
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

    /// The kernel whose "address" this is in the program.
    pub(crate) fn kernel_at(&self, address: u64) -> Option<Function> {
        let program = &self.inner.program;
        let code = program.functions.get(program.addresses.index(address)?)?;
        let index = self.inner.codes.iter().position(|kernel| Arc::ptr_eq(kernel, code))?;
        Some(Function { inner: Arc::clone(&self.inner), index })
    }

    /// A global or constant by its name.
    pub fn global(&self, name: &str) -> Result<&GlobalInfo> {
        let found = self.inner.globals.iter().find(|g| g.name == name);
        found.ok_or_else(|| Error::NotFound { kind: "global", name: name.into() })
    }
}

/// A kernel of a module. It keeps the module loaded.
#[derive(Clone)]
pub struct Function {
    inner: Arc<Inner>,
    index: usize,
}

impl Function {
    /// The kernel's properties.
    pub fn info(&self) -> &FunctionInfo {
        &self.inner.functions[self.index]
    }

    /// The kernel's module.
    pub fn module(&self) -> Module {
        Module { inner: Arc::clone(&self.inner) }
    }

    /// How many blocks of `threads` threads with `dynamic_shared` bytes can be resident on one
    /// multiprocessor.
    pub fn max_active_blocks(&self, threads: u32, dynamic_shared: u32) -> u32 {
        let p = &self.inner.hardware.properties;
        let warps = threads.max(1).div_ceil(p.warp_size);
        let by_threads = p.max_threads_per_multiprocessor / p.warp_size / warps;
        let shared = self
            .info()
            .shared_bytes
            .saturating_add(dynamic_shared)
            .saturating_add(p.shared_reserved_per_block);
        by_threads.min(p.max_blocks_per_multiprocessor).min(p.shared_per_multiprocessor / shared)
    }

    /// The dynamic shared memory in bytes that each of `blocks` blocks of `threads` threads can have on one
    /// multiprocessor; `None` if that many blocks do not fit.
    pub fn available_shared(&self, blocks: u32, threads: u32) -> Option<u32> {
        let p = &self.inner.hardware.properties;
        if blocks == 0 || self.max_active_blocks(threads, 0) < blocks {
            return None;
        }
        Some(p.shared_per_multiprocessor / blocks - self.info().shared_bytes - p.shared_reserved_per_block)
    }

    /// Like [`Function::max_active_blocks`], for all multiprocessors together.
    pub fn max_resident_blocks(&self, threads: u32, dynamic_shared: u32) -> u32 {
        self.max_active_blocks(threads, dynamic_shared) * self.inner.hardware.properties.multiprocessors
    }

    pub(crate) fn program(&self) -> &Arc<Program> {
        &self.inner.program
    }

    pub(crate) fn code(&self) -> &Arc<Code> {
        &self.inner.codes[self.index]
    }
}
