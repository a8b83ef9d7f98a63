//! From the syntax tree to the register machine.
//!
//! This module lays out a module's variables and functions; `function` lowers one function's statements,
//! registers and symbols; `inst` and `access` lower instructions, by family.

mod access;
mod function;
mod inst;
pub(crate) mod program;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::device::module::{FunctionInfo, GlobalInfo, ParamInfo};
use crate::error::{Error, Result};
use crate::ptx::ast::{File, Function, Init, Operand, Space, Stmt, Var};
use function::{Lowering, Symbol};
use program::{Builtin, Code, FUNCTION_WINDOW, Program};

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

/// What all functions of a module see.
pub(crate) struct Context<'a> {
    pub symbols: HashMap<&'a str, Symbol<'a>>,
}

struct Names<'a, 'b> {
    shared: HashSet<&'a str>,
    bodies: HashMap<&'a str, &'b Function<'a>>,
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

/// Names that a function and what it calls mention.
fn reachable<'a>(root: &'a str, names: &Names<'a, '_>) -> HashSet<&'a str> {
    let mut seen = HashSet::new();
    let mut work = vec![root];
    while let Some(name) = work.pop() {
        let Some(body) = names.bodies.get(name).and_then(|f| f.body.as_ref()) else { continue };
        let mut found = HashSet::new();
        let mut indirect = false;
        mentioned(body, &mut found, &mut indirect);
        if indirect {
            found.extend(names.bodies.keys());
        }
        for name in found {
            if (names.shared.contains(name) || names.bodies.contains_key(name)) && seen.insert(name) {
                work.push(name);
            }
        }
    }
    seen
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

/// Lowers a module. `allocate` gives zeroed global memory.
pub(crate) fn load(file: &File<'_>, allocate: &mut dyn FnMut(u64) -> Result<u64>) -> Result<Loaded> {
    let mut context = Context { symbols: HashMap::new() };
    let mut globals = Vec::new();
    let mut placed = Vec::new();
    let mut shared_end = 0u64;
    let mut shared_ends: HashMap<&str, u64> = HashMap::new();
    let mut constant_bytes = 0u64;
    for var in &file.globals {
        let (size, align) = layout(var)?;
        match var.space {
            Space::Shared if var.elements == Some(0) => {
                context.symbols.insert(var.name, Symbol::DynamicShared);
            }
            Space::Shared => {
                let at = shared_end.next_multiple_of(u64::from(align));
                shared_end = at + size;
                shared_ends.insert(var.name, shared_end);
                context.symbols.insert(var.name, Symbol::Shared(at as u32));
            }
            Space::Global | Space::Const => {
                if context.symbols.contains_key(var.name) {
                    continue;
                }
                if var.external && !file.globals.iter().any(|v| v.name == var.name && !v.external) {
                    return Err(Error::InvalidPtx {
                        line: var.line,
                        message: format!(
                            "{} is external and defined nowhere; link the modules first",
                            var.name
                        ),
                    });
                }
                if var.external {
                    continue;
                }
                if align > 512 {
                    return Err(Error::UnsupportedPtx { line: var.line, what: format!("alignment {align}") });
                }
                let address = allocate(size)?;
                let constant = var.space == Space::Const;
                constant_bytes += if constant { size } else { 0 };
                context.symbols.insert(var.name, Symbol::Global(address, constant));
                globals.push(GlobalInfo {
                    name: var.name.into(),
                    address,
                    size,
                    constant,
                    managed: var.managed,
                });
                placed.push((var, address, size));
            }
            _ => {
                return Err(Error::InvalidPtx {
                    line: var.line,
                    message: format!("{} in .{} at module level", var.name, var.space.name()),
                });
            }
        }
    }
    // A function may be declared before it is defined.
    let mut functions: Vec<&Function<'_>> = Vec::new();
    let mut index: HashMap<&str, usize> = HashMap::new();
    for f in &file.functions {
        match index.get(f.name) {
            Some(&i) if f.body.is_some() => functions[i] = f,
            Some(_) => {}
            None => {
                index.insert(f.name, functions.len());
                functions.push(f);
            }
        }
    }
    for (i, f) in functions.iter().enumerate() {
        context.symbols.insert(f.name, Symbol::Function(i));
    }
    for &(alias, target) in &file.aliases {
        if let Some(&i) = index.get(target) {
            context.symbols.insert(alias, Symbol::Function(i));
        }
    }
    let mut names = Names { shared: shared_ends.keys().copied().collect(), bodies: HashMap::new() };
    names.bodies = functions.iter().map(|f| (f.name, *f)).collect();
    // Functions' own shared variables follow the module's; a kernel's follow what it reaches of those.
    let mut own: HashMap<(usize, &str), u32> = HashMap::new();
    let mut function_ends: HashMap<&str, u64> = HashMap::new();
    for (i, f) in functions.iter().enumerate().filter(|(_, f)| !f.kernel) {
        let mut vars = Vec::new();
        shared_vars(f.body.as_deref().unwrap_or(&[]), &mut vars);
        for var in vars {
            let (size, align) = layout(var)?;
            let at = shared_end.next_multiple_of(u64::from(align));
            shared_end = at + size;
            own.insert((i, var.name), at as u32);
            function_ends.insert(f.name, shared_end);
        }
    }
    let mut kernel_shared = HashMap::new();
    for (i, f) in functions.iter().enumerate().filter(|(_, f)| f.kernel) {
        let reached = reachable(f.name, &names);
        let ends = reached.iter().filter_map(|n| shared_ends.get(n).or_else(|| function_ends.get(n)));
        let mut end = ends.copied().max().unwrap_or(0);
        let mut vars = Vec::new();
        shared_vars(f.body.as_deref().unwrap_or(&[]), &mut vars);
        for var in vars {
            let (size, align) = layout(var)?;
            let at = end.next_multiple_of(u64::from(align));
            end = at + size;
            own.insert((i, var.name), at as u32);
        }
        kernel_shared.insert(i, end.next_multiple_of(16) as u32);
    }
    let mut codes = Vec::new();
    let mut kernels = Vec::new();
    for (i, f) in functions.iter().enumerate() {
        let (code, params) = match &f.body {
            Some(body) => Lowering::new(&context, f, i, &own).run(f, body)?,
            None => (declared(f)?, Vec::new()),
        };
        if f.kernel && f.body.is_some() {
            let limit = f.req_ntid.or(f.max_ntid).map_or(1024, |d| d.iter().product::<u32>().min(1024));
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
                    registers: (code.frame_bytes / 128).clamp(16, 255),
                    max_threads: limit,
                    required_block: f.req_ntid.unwrap_or([0; 3]),
                    ptx_version: target,
                },
                i,
            ));
        }
        codes.push(Arc::new(code));
    }
    let mut images = Vec::new();
    for (var, address, size) in placed {
        if !var.init.is_empty() {
            images.push((address, image(var, size, &context)?));
        }
    }
    Ok(Loaded { program: Program { functions: codes }, kernels, globals, images })
}

/// A function without a body: one of the device runtime's.
fn declared(f: &Function<'_>) -> Result<Code> {
    let builtin = match f.name {
        "vprintf" => Some(Builtin::Vprintf),
        "__assertfail" => Some(Builtin::AssertFail),
        "malloc" => Some(Builtin::Malloc),
        "free" => Some(Builtin::Free),
        _ => None,
    };
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
        builtin,
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
