//! From the syntax tree to the register machine.
//!
//! This module lays out a module's variables and functions; `function` lowers one function's statements,
//! registers and symbols; `inst` and `access` lower instructions, by family.

mod access;
mod asynchronous;
mod control;
mod function;
mod inst;
mod matrix;
pub(crate) mod program;
mod select;
mod texture;
mod video;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::device::module::{FunctionInfo, GlobalInfo, ParamInfo};
use crate::error::{Error, Result, Unsupported};
use crate::ptx::ast::{File, Function, Init, Linkage, Operand, Space, Stmt, Var};
use function::{Lowering, Symbol};
use program::{Builtin, Code, FUNCTION_WINDOW, Kind, Program};

/// Registers of a block.
pub(crate) const BLOCK_REGISTERS: u32 = 1 << 16;
/// Blocks of a cluster at most.
pub(crate) const MAX_CLUSTER: u32 = 16;

/// A module, ready to run once `images` are written to memory.
pub(crate) struct Loaded {
    pub program: Program,
    /// Each kernel and its index in the program.
    pub kernels: Vec<(FunctionInfo, usize)>,
    pub globals: Vec<GlobalInfo>,
    /// Initial contents, by address.
    pub images: Vec<(u64, Vec<u8>)>,
}

/// Bits of a type, or `None` if it is no type of a value.
pub(crate) fn type_bits(ty: &str) -> Option<u32> {
    Some(match ty {
        "u8" | "s8" | "b8" => 8,
        "u16" | "s16" | "b16" | "f16" | "bf16" => 16,
        "u32" | "s32" | "b32" | "f32" | "f16x2" | "bf16x2" | "u16x2" | "s16x2" => 32,
        "u64" | "s64" | "b64" | "f64" | "texref" | "samplerref" | "surfref" => 64,
        "b128" => 128,
        "pred" => 1,
        _ => return None,
    })
}

/// Bytes and alignment of a variable.
pub(crate) fn layout(var: &Var<'_>) -> Result<(u64, u32)> {
    let bits = type_bits(var.ty).filter(|&b| b >= 8).ok_or_else(|| Error::InvalidPtx {
        line: var.line,
        message: format!("a variable of type .{}", var.ty),
    })?;
    let element = u64::from(bits / 8 * var.vector);
    let size = element.checked_mul(var.elements.unwrap_or(1)).filter(|&s| s < 1 << 40);
    let size = size
        .ok_or_else(|| Error::InvalidPtx { line: var.line, message: format!("{} is too large", var.name) })?;
    let align = var.align.max(element as u32);
    if !align.is_power_of_two() {
        return Err(Error::InvalidPtx {
            line: var.line,
            message: format!("alignment {align} of {}", var.name),
        });
    }
    Ok((size, align))
}

/// What all functions of a file see.
#[derive(Default)]
pub(crate) struct Context<'a> {
    pub symbols: HashMap<&'a str, Symbol<'a>>,
}

fn mentioned<'a>(stmts: &[Stmt<'a>], out: &mut HashSet<&'a str>, indirect: &mut bool) {
    fn operand<'a>(op: &Operand<'a>, out: &mut HashSet<&'a str>) {
        match op {
            Operand::Name(n, _) | Operand::Address(Some(n), _) => {
                out.insert(n);
            }
            Operand::Bracket(list) | Operand::Vector(list) | Operand::List(list) => {
                list.iter().for_each(|o| operand(o, out));
            }
            Operand::Pair(a, b) => {
                operand(a, out);
                operand(b, out);
            }
            _ => {}
        }
    }
    for stmt in stmts {
        match stmt {
            Stmt::Inst(inst) => {
                inst.operands.iter().for_each(|o| operand(o, out));
                let named = inst
                    .operands
                    .iter()
                    .take(2)
                    .any(|o| matches!(o, Operand::Name(n, _) if !n.starts_with('%')));
                *indirect |= inst.name == "call" && !named;
            }
            Stmt::Block(inner) => mentioned(inner, out, indirect),
            _ => {}
        }
    }
}

/// A function of one of the files that are linked.
struct Linked<'a, 'b> {
    function: &'b Function<'a>,
    /// Its file.
    file: usize,
}

/// Ends of the shared memory that a function and what it calls mention: `ends` knows those of module variables by their
/// beginning, `own` those of functions' own variables.
fn reached_end(
    root: usize,
    functions: &[Linked<'_, '_>],
    contexts: &[Context<'_>],
    ends: &HashMap<u32, u64>,
    own: &HashMap<usize, u64>,
) -> u64 {
    let mut seen = HashSet::from([root]);
    let mut work = vec![root];
    let mut end = 0;
    while let Some(index) = work.pop() {
        let linked = &functions[index];
        let Some(body) = &linked.function.body else { continue };
        if index != root {
            end = end.max(own.get(&index).copied().unwrap_or(0));
        }
        let mut names = HashSet::new();
        let mut indirect = false;
        mentioned(body, &mut names, &mut indirect);
        let mut called: Vec<usize> = if indirect { (0..functions.len()).collect() } else { Vec::new() };
        for name in names {
            match contexts[linked.file].symbols.get(name) {
                Some(Symbol::Function(i)) => called.push(*i),
                Some(Symbol::Shared(at)) => end = end.max(ends.get(at).copied().unwrap_or(0)),
                _ => {}
            }
        }
        work.extend(called.into_iter().filter(|&i| !functions[i].function.kernel && seen.insert(i)));
    }
    end
}

/// The definitions that names with linkage stand for, in all files together: the place of each in its file.
fn resolve<'a, T>(
    items: impl Iterator<Item = (usize, &'a str, Linkage, u32, T)>,
) -> Result<HashMap<&'a str, (usize, Linkage, T)>> {
    let mut out: HashMap<&str, (usize, Linkage, T)> = HashMap::new();
    for (file, name, linkage, line, item) in items {
        match (out.get(name).map(|d| d.1), linkage) {
            (Some(Linkage::Visible), Linkage::Visible) => {
                return Err(Error::InvalidPtx { line, message: format!("{name} is defined twice") });
            }
            (None, _) | (Some(Linkage::Weak), Linkage::Visible) => {
                out.insert(name, (file, linkage, item));
            }
            _ => {}
        }
    }
    Ok(out)
}

fn shared_vars<'a, 'b>(stmts: &'b [Stmt<'a>], out: &mut Vec<&'b Var<'a>>) {
    for stmt in stmts {
        match stmt {
            Stmt::Var(var) if var.space == Space::Shared => out.push(var),
            Stmt::Block(inner) => shared_vars(inner, out),
            _ => {}
        }
    }
}

/// Lowers a module that is linked of one or more files. `allocate` gives zeroed global memory. `open`: what is defined nowhere may yet be, in others; so it only shows whether these
/// files are good.
pub(crate) fn load(
    files: &[File<'_>],
    open: bool,
    allocate: &mut dyn FnMut(u64) -> Result<u64>,
) -> Result<Loaded> {
    let mut contexts: Vec<Context<'_>> = files.iter().map(|_| Context::default()).collect();
    let shared_linkage = |linkage| matches!(linkage, Linkage::Visible | Linkage::Weak);
    // Variables.
    let mut globals = Vec::new();
    let mut placed = Vec::new();
    let mut shared_end = 0u64;
    let mut shared_ends: HashMap<u32, u64> = HashMap::new();
    let mut constant_bytes = 0u64;
    let all = files.iter().enumerate().flat_map(|(i, f)| f.globals.iter().map(move |v| (i, v)));
    let dynamic = |v: &Var<'_>| v.space == Space::Shared && v.elements == Some(0);
    let chosen = resolve(
        all.clone()
            .filter(|(_, v)| shared_linkage(v.linkage) && !dynamic(v))
            .map(|(i, v)| (i, v.name, v.linkage, v.line, v)),
    )?;
    let mut linked: HashMap<&str, Symbol<'_>> = HashMap::new();
    for (file, var) in all.clone() {
        let (size, align) = layout(var)?;
        if dynamic(var) {
            contexts[file].symbols.insert(var.name, Symbol::DynamicShared);
            continue;
        }
        let local = var.linkage == Linkage::Local;
        let mine = chosen.get(var.name).is_some_and(|c| std::ptr::eq(c.2, var));
        if !local && !mine {
            continue;
        }
        let symbol = match var.space {
            Space::Shared => {
                let at = shared_end.next_multiple_of(u64::from(align));
                shared_end = at + size;
                shared_ends.insert(at as u32, shared_end);
                Symbol::Shared(at as u32)
            }
            Space::Global | Space::Const => {
                if align > 512 {
                    return Err(Error::UnsupportedPtx { line: var.line, what: format!("alignment {align}") });
                }
                let address = allocate(size)?;
                let constant = var.space == Space::Const;
                constant_bytes += if constant { size } else { 0 };
                globals.push(GlobalInfo {
                    name: var.name.into(),
                    address,
                    size,
                    constant,
                    managed: var.managed,
                });
                placed.push((file, var, address, size));
                Symbol::Global(address, constant)
            }
            _ => {
                return Err(Error::InvalidPtx {
                    line: var.line,
                    message: format!("{} in .{} at module level", var.name, var.space.name()),
                });
            }
        };
        if local {
            contexts[file].symbols.insert(var.name, symbol);
        } else {
            linked.insert(var.name, symbol);
        }
    }
    for (file, var) in all {
        if contexts[file].symbols.contains_key(var.name) {
            continue;
        }
        match linked.get(var.name) {
            Some(symbol) => {
                contexts[file].symbols.insert(var.name, symbol.clone());
            }
            None if open => {
                let symbol = Symbol::Global(0, var.space == Space::Const);
                contexts[file].symbols.insert(var.name, symbol);
            }
            None => {
                return Err(Error::InvalidPtx {
                    line: var.line,
                    message: format!("{} is external and defined nowhere", var.name),
                });
            }
        }
    }
    // Functions. One may be declared before it is defined, or in another file than it is.
    let all = files.iter().enumerate().flat_map(|(i, f)| f.functions.iter().map(move |v| (i, v)));
    let chosen = resolve(
        all.clone()
            .filter(|(_, f)| f.body.is_some() && shared_linkage(f.linkage))
            .map(|(i, f)| (i, f.name, f.linkage, f.line, f)),
    )?;
    let mut functions: Vec<Linked<'_, '_>> = Vec::new();
    let mut linked: HashMap<&str, usize> = HashMap::new();
    for (file, function) in all.clone().filter(|(_, f)| f.body.is_some()) {
        let local = !shared_linkage(function.linkage);
        if !local && !chosen.get(function.name).is_some_and(|c| std::ptr::eq(c.2, function)) {
            continue;
        }
        if local {
            contexts[file].symbols.insert(function.name, Symbol::Function(functions.len()));
        } else {
            linked.insert(function.name, functions.len());
        }
        functions.push(Linked { function, file });
    }
    for (file, function) in all {
        if contexts[file].symbols.contains_key(function.name) {
            continue;
        }
        let index = match linked.get(function.name) {
            Some(&index) => index,
            None if open || builtin(function.name).is_some() => {
                linked.insert(function.name, functions.len());
                functions.push(Linked { function, file });
                functions.len() - 1
            }
            // A mistake only if something mentions it.
            None => continue,
        };
        contexts[file].symbols.insert(function.name, Symbol::Function(index));
    }
    for (context, file) in contexts.iter_mut().zip(files) {
        for &(alias, target) in &file.aliases {
            if let Some(Symbol::Function(i)) = context.symbols.get(target) {
                let symbol = Symbol::Function(*i);
                context.symbols.insert(alias, symbol);
            }
        }
    }
    // Functions' own shared variables follow the module's; a kernel's follow what it reaches of those.
    let mut own: HashMap<(usize, &str), u32> = HashMap::new();
    let mut function_ends: HashMap<usize, u64> = HashMap::new();
    for (i, f) in functions.iter().enumerate().filter(|(_, f)| !f.function.kernel) {
        let mut vars = Vec::new();
        shared_vars(f.function.body.as_deref().unwrap_or(&[]), &mut vars);
        for var in vars {
            let (size, align) = layout(var)?;
            let at = shared_end.next_multiple_of(u64::from(align));
            shared_end = at + size;
            own.insert((i, var.name), at as u32);
            function_ends.insert(i, shared_end);
        }
    }
    let mut kernel_shared = HashMap::new();
    for (i, f) in functions.iter().enumerate().filter(|(_, f)| f.function.kernel) {
        let mut end = reached_end(i, &functions, &contexts, &shared_ends, &function_ends);
        let mut vars = Vec::new();
        shared_vars(f.function.body.as_deref().unwrap_or(&[]), &mut vars);
        for var in vars {
            let (size, align) = layout(var)?;
            let at = end.next_multiple_of(u64::from(align));
            end = at + size;
            own.insert((i, var.name), at as u32);
        }
        kernel_shared.insert(i, end as u32);
    }
    let mut codes = Vec::new();
    let mut kernels = Vec::new();
    for (i, linked) in functions.iter().enumerate() {
        let (f, file) = (linked.function, &files[linked.file]);
        let (code, params) = match &f.body {
            Some(body) => match Lowering::new(&contexts[linked.file], f, i, &own).run(f, body) {
                Err(Error::UnsupportedPtx { line, what }) => unsupported(f, line, what)?,
                lowered => lowered?,
            },
            None => (declared(f)?, Vec::new()),
        };
        if f.kernel && f.body.is_some() {
            let product = |d: [u32; 3]| d.iter().fold(1, |all: u32, &n| all.saturating_mul(n));
            let limit = f.req_ntid.or(f.max_ntid).map_or(1024, |d| product(d).min(1024));
            let target: u32 = file
                .target
                .trim_start_matches("sm_")
                .trim_end_matches(char::is_alphabetic)
                .parse()
                .unwrap_or(0);
            kernels.push((
                FunctionInfo {
                    name: f.name.into(),
                    param_bytes: params.iter().map(|p: &ParamInfo| p.offset + p.size).max().unwrap_or(0),
                    params,
                    shared_bytes: kernel_shared.get(&i).copied().unwrap_or(0),
                    local_bytes: code.local_bytes,
                    constant_bytes: constant_bytes as u32,
                    registers: registers(code.frame_bytes, limit, f.max_registers),
                    max_threads: limit,
                    required_block: f.req_ntid.unwrap_or([0; 3]),
                    required_cluster: f.cluster.required.unwrap_or([0; 3]),
                    cluster_must_be_given: f.cluster.explicit && f.cluster.required.is_none(),
                    max_cluster_blocks: f.cluster.max_blocks.unwrap_or(MAX_CLUSTER).min(MAX_CLUSTER),
                    ptx_version: target,
                    unsupported: None,
                },
                i,
            ));
        }
        codes.push(Arc::new(code));
    }
    if codes.iter().any(|code| code.unsupported.is_some()) {
        for (info, index) in &mut kernels {
            info.unsupported = find_unsupported(*index, &codes).cloned();
        }
    }
    let mut images = Vec::new();
    for (file, var, address, size) in placed {
        if !var.init.is_empty() {
            images.push((address, image(var, size, &contexts[file])?));
        }
    }
    Ok(Loaded { program: Program { functions: codes }, kernels, globals, images })
}

/// Stands for a function with something in it that this GPU does not implement, so that the rest of its module can be used.
fn unsupported(f: &Function<'_>, line: u32, what: String) -> Result<(Code, Vec<ParamInfo>)> {
    let params = if f.kernel { function::parameters(f)? } else { Vec::new() };
    let reason = Unsupported { function: f.name.into(), line, what };
    Ok((Code { unsupported: Some(reason), ..declared(f)? }, params))
}

/// Why the function at `root` cannot run: it, or a function that it calls by name, directly or through others, uses something
/// unsupported. Calls through pointers are not followed: they fail when they are made.
fn find_unsupported(root: usize, codes: &[Arc<Code>]) -> Option<&Unsupported> {
    let mut seen = HashSet::from([root]);
    let mut work = vec![root];
    while let Some(index) = work.pop() {
        let code = codes.get(index)?;
        if code.unsupported.is_some() {
            return code.unsupported.as_ref();
        }
        let called = code.insts.iter().filter(|inst| inst.kind == Kind::Call).map(|inst| inst.r[0] as usize);
        work.extend(called.filter(|&index| seen.insert(index)));
    }
    None
}

/// A function of the device runtime.
fn builtin(name: &str) -> Option<Builtin> {
    Some(match name {
        "vprintf" => Builtin::Vprintf,
        "__assertfail" => Builtin::AssertFail,
        "malloc" => Builtin::Malloc,
        "free" => Builtin::Free,
        "cudaGraphSetConditional" => Builtin::SetCondition,
        "__cudaCDP2GetParameterBufferV2" => Builtin::ParameterBuffer,
        "__cudaCDP2LaunchDeviceV2" | "__cudaCDP2LaunchDeviceV2_ptsz" => Builtin::LaunchDevice,
        "__cudaCDP2GetLastError" => Builtin::GetLastError,
        "__cudaCDP2PeekAtLastError" => Builtin::PeekAtLastError,
        "__cudaCDP2StreamCreateWithFlags" => Builtin::MakeStream,
        "__cudaCDP2EventCreateWithFlags" => Builtin::MakeEvent,
        "__cudaCDP2MemcpyAsync" | "__cudaCDP2MemcpyAsync_ptsz" => Builtin::CopyAsync,
        "__cudaCDP2Memcpy2DAsync" | "__cudaCDP2Memcpy2DAsync_ptsz" => Builtin::CopyRowsAsync,
        "__cudaCDP2MemsetAsync" | "__cudaCDP2MemsetAsync_ptsz" => Builtin::FillAsync,
        "__cudaCDP2Memset2DAsync" | "__cudaCDP2Memset2DAsync_ptsz" => Builtin::FillRowsAsync,
        "__cudaCDP2GetDevice" => Builtin::TellDevice,
        "__cudaCDP2GetDeviceCount" => Builtin::TellDeviceCount,
        "__cudaCDP2RuntimeGetVersion" => Builtin::TellVersion,
        "__cudaCDP2GetErrorString" => Builtin::ErrorText,
        "__cudaCDP2GetErrorName" => Builtin::ErrorName,
        "__cudaCDP2Malloc" => Builtin::DeviceMalloc,
        "__cudaCDP2Free" => Builtin::DeviceFree,
        "__cudaCDP2StreamDestroy"
        | "__cudaCDP2EventDestroy"
        | "__cudaCDP2EventRecord"
        | "__cudaCDP2EventRecord_ptsz"
        | "__cudaCDP2EventRecordWithFlags"
        | "__cudaCDP2EventRecordWithFlags_ptsz"
        | "__cudaCDP2StreamWaitEvent"
        | "__cudaCDP2StreamWaitEvent_ptsz" => Builtin::KeepOrder,
        _ => return None,
    })
}

/// What a compiler would have used of registers: what is used here, but no more than the largest block, or the kernel itself, lets a thread have.
fn registers(frame_bytes: u32, threads: u32, most: Option<u32>) -> u32 {
    let together = (BLOCK_REGISTERS / threads.max(1)) & !7;
    (frame_bytes / 128).clamp(16, 255).min(together).min(most.unwrap_or(255).max(16))
}

/// A function without a body: one of the device runtime's.
fn declared(f: &Function<'_>) -> Result<Code> {
    let mut at = 0u32;
    let mut place = |vars: &[Var<'_>]| -> Result<Vec<(u32, u32)>> {
        vars.iter()
            .map(|v| {
                let (size, align) = layout(v)?;
                at = at.next_multiple_of(align);
                let slot = (at, size as u32);
                at += size as u32;
                Ok(slot)
            })
            .collect()
    };
    let params = place(&f.params)?;
    let returns = place(&f.returns)?;
    Ok(Code {
        name: f.name.into(),
        insts: Vec::new(),
        ext: Vec::new(),
        frame_bytes: 64,
        consts: Vec::new(),
        local_bytes: at.next_multiple_of(16),
        params,
        returns,
        builtin: builtin(f.name),
        unsupported: None,
    })
}

/// The bytes of an initialised variable.
fn image(var: &Var<'_>, size: u64, context: &Context<'_>) -> Result<Vec<u8>> {
    let width = type_bits(var.ty).unwrap_or(8) as usize / 8;
    let mut out = Vec::with_capacity(size as usize);
    for init in &var.init {
        let value = match init {
            Init::Int(n) if var.ty == "f32" => u64::from((*n as i64 as f32).to_bits()),
            Init::Int(n) if var.ty == "f64" => (*n as i64 as f64).to_bits(),
            Init::Int(n) => *n,
            Init::F32(bits) if var.ty == "f64" => f64::from(f32::from_bits(*bits)).to_bits(),
            Init::F32(bits) => u64::from(*bits),
            Init::F64(bits) if var.ty == "f32" => u64::from((f64::from_bits(*bits) as f32).to_bits()),
            Init::F64(bits) => *bits,
            Init::Symbol { name, addend, mask, .. } => {
                let base = match context.symbols.get(name) {
                    Some(Symbol::Global(address, _)) => *address,
                    Some(Symbol::Function(index)) => FUNCTION_WINDOW + *index as u64 * 16,
                    _ => {
                        let message = format!("{name} in the initialiser of {} has no address", var.name);
                        return Err(Error::InvalidPtx { line: var.line, message });
                    }
                };
                let value = base.wrapping_add(*addend as u64);
                match mask {
                    Some(mask) if *mask != 0 => (value & mask) >> mask.trailing_zeros(),
                    _ => value,
                }
            }
        };
        out.extend_from_slice(&value.to_le_bytes()[..width.min(8)]);
        out.resize(out.len() + width.saturating_sub(8), 0);
    }
    if out.len() as u64 > size {
        let message = format!("{} has more initial values than elements", var.name);
        return Err(Error::InvalidPtx { line: var.line, message });
    }
    Ok(out)
}
