//! Links the files of a module: finds the definition of each name, places the variables, and lowers the
//! functions.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::builtin::{builtin, code_without_body};
use super::function::{self, Context, Lowering, OwnShared, Symbol, is_dynamic_shared};
use super::info::{FunctionInfo, GlobalInfo, ParamInfo};
use super::types::{Placement, layout, type_bits};
use crate::error::{Error, Result, Unsupported};
use crate::machine::address::{FunctionAddresses, RANK};
use crate::machine::program::{Code, Kind, Program};
use crate::machine::properties::{BLOCK_REGISTERS, MAX_CLUSTER};
use crate::ptx::ast::{File, Function, Init, Linkage, Operand, Space, Stmt, Var};

/// A linked module. It can run once `images` have been written to memory.
pub(crate) struct LinkedModule {
    pub program: Program,
    /// Each kernel and its index in the program.
    pub kernels: Vec<(FunctionInfo, usize)>,
    pub globals: Vec<GlobalInfo>,
    /// The initial contents of variables, by address.
    pub images: Vec<(u64, Vec<u8>)>,
}

/// Links one or more files to a module and lowers its functions. `allocate` returns the address of zeroed
/// global memory. With `allow_undefined`, a name may be undefined because another file may define it; the
/// result then only shows whether these files are valid.
pub(crate) fn link(
    files: &[File<'_>],
    allow_undefined: bool,
    allocate: &mut dyn FnMut(u64) -> Result<u64>,
) -> Result<LinkedModule> {
    let mut linker = Linker {
        files,
        allow_undefined,
        contexts: files.iter().map(|_| Context::default()).collect(),
        functions: Vec::new(),
        globals: Vec::new(),
        placed: Vec::new(),
        constant_bytes: 0,
        shared: SharedLayout {
            module: Placement::new("shared memory", "the module", RANK as u32),
            variable_ends: HashMap::new(),
            own: HashMap::new(),
            of_kernels: HashMap::new(),
        },
        addresses: FunctionAddresses::default(),
    };
    let defined = linker.place_variables(allocate)?;
    linker.bind_variables(&defined)?;
    linker.bind_functions()?;
    linker.bind_aliases();
    linker.number_functions();
    linker.place_function_variables()?;
    linker.finish()
}

/// A function of one of the files.
struct Linked<'a, 'b> {
    function: &'b Function<'a>,
    /// The index of its file.
    file: usize,
}

/// A variable in global memory.
struct Placed<'a, 'b> {
    /// The index of its file.
    file: usize,
    variable: &'b Var<'a>,
    address: u64,
    size: u64,
}

/// Where shared variables lie in a block's shared memory.
struct SharedLayout<'a> {
    /// Where variables are placed that are not kernels' own.
    module: Placement<'static>,
    /// The end of each module variable, by its offset.
    variable_ends: HashMap<u32, u32>,
    /// The offsets of functions' own variables.
    own: OwnShared<'a>,
    /// For each kernel by its index, the size of its static shared memory in bytes and the alignment of its
    /// dynamic shared memory.
    of_kernels: HashMap<usize, (u32, u32)>,
}

struct Linker<'a, 'b> {
    files: &'b [File<'a>],
    allow_undefined: bool,
    /// The symbols of each file.
    contexts: Vec<Context<'a>>,
    /// All functions with a body, and those that are declared only; a function's index is its index in the
    /// program.
    functions: Vec<Linked<'a, 'b>>,
    globals: Vec<GlobalInfo>,
    placed: Vec<Placed<'a, 'b>>,
    constant_bytes: u64,
    shared: SharedLayout<'a>,
    addresses: FunctionAddresses,
}

fn has_linkage(linkage: Linkage) -> bool {
    matches!(linkage, Linkage::Visible | Linkage::Weak)
}

impl<'a, 'b> Linker<'a, 'b> {
    fn variables(&self) -> impl Iterator<Item = (usize, &'b Var<'a>)> + use<'a, 'b> {
        self.files.iter().enumerate().flat_map(|(i, f)| f.globals.iter().map(move |v| (i, v)))
    }

    fn declarations(&self) -> impl Iterator<Item = (usize, &'b Function<'a>)> + use<'a, 'b> {
        self.files.iter().enumerate().flat_map(|(i, f)| f.functions.iter().map(move |v| (i, v)))
    }

    /// Places every variable that is defined, and returns those with linkage by name.
    fn place_variables(
        &mut self,
        allocate: &mut dyn FnMut(u64) -> Result<u64>,
    ) -> Result<HashMap<&'a str, Symbol>> {
        let chosen = resolve(
            self.variables()
                .filter(|(_, v)| has_linkage(v.linkage) && !is_dynamic_shared(v))
                .map(|(_, v)| (v.name, v.linkage, v.line, v)),
        )?;
        let mut defined = HashMap::new();
        for (file, var) in self.variables() {
            let (size, align) = layout(var)?;
            if is_dynamic_shared(var) {
                self.contexts[file].symbols.insert(var.name, Symbol::DynamicShared(align));
                continue;
            }
            let local = var.linkage == Linkage::Local;
            if !local && !chosen.get(var.name).is_some_and(|&c| std::ptr::eq(c, var)) {
                continue;
            }
            let symbol = self.place_variable(file, var, size, align, allocate)?;
            if local {
                self.contexts[file].symbols.insert(var.name, symbol);
            } else {
                defined.insert(var.name, symbol);
            }
        }
        Ok(defined)
    }

    fn place_variable(
        &mut self,
        file: usize,
        var: &'b Var<'a>,
        size: u64,
        align: u32,
        allocate: &mut dyn FnMut(u64) -> Result<u64>,
    ) -> Result<Symbol> {
        match var.space {
            Space::Shared => {
                let at = self.shared.module.place(size, align, var.line)?;
                self.shared.variable_ends.insert(at, self.shared.module.end);
                Ok(Symbol::Shared(at))
            }
            Space::Global | Space::Const => {
                if align > 512 {
                    return Err(Error::UnsupportedPtx { line: var.line, what: format!("alignment {align}") });
                }
                let address = allocate(size)?;
                let constant = var.space == Space::Const;
                self.constant_bytes += if constant { size } else { 0 };
                self.globals.push(GlobalInfo {
                    name: var.name.into(),
                    address,
                    size,
                    constant,
                    managed: var.managed,
                });
                self.placed.push(Placed { file, variable: var, address, size });
                Ok(Symbol::Global(address, constant))
            }
            _ => Err(Error::InvalidPtx {
                line: var.line,
                message: format!("variable {} of space .{} at module level", var.name, var.space.name()),
            }),
        }
    }

    /// Binds each file's external variables to the definitions in other files.
    fn bind_variables(&mut self, defined: &HashMap<&'a str, Symbol>) -> Result<()> {
        for (file, var) in self.variables() {
            if self.contexts[file].symbols.contains_key(var.name) {
                continue;
            }
            let symbol = match defined.get(var.name) {
                Some(symbol) => symbol.clone(),
                None if self.allow_undefined => Symbol::Global(0, var.space == Space::Const),
                None => {
                    return Err(Error::InvalidPtx {
                        line: var.line,
                        message: format!("external variable {} is not defined", var.name),
                    });
                }
            };
            self.contexts[file].symbols.insert(var.name, symbol);
        }
        Ok(())
    }

    /// Collects the functions and binds their names. A function may be declared before its definition, or in
    /// another file.
    fn bind_functions(&mut self) -> Result<()> {
        let chosen = resolve(
            self.declarations()
                .filter(|(_, f)| f.body.is_some() && has_linkage(f.linkage))
                .map(|(_, f)| (f.name, f.linkage, f.line, f)),
        )?;
        let mut defined: HashMap<&str, usize> = HashMap::new();
        for (file, function) in self.declarations().filter(|(_, f)| f.body.is_some()) {
            if !has_linkage(function.linkage) {
                self.contexts[file].symbols.insert(function.name, Symbol::Function(self.functions.len()));
            } else if chosen.get(function.name).is_some_and(|&c| std::ptr::eq(c, function)) {
                defined.insert(function.name, self.functions.len());
            } else {
                continue;
            }
            self.functions.push(Linked { function, file });
        }
        for (file, function) in self.declarations() {
            if self.contexts[file].symbols.contains_key(function.name) {
                continue;
            }
            let index = match defined.get(function.name) {
                Some(&index) => index,
                None if self.allow_undefined || builtin(function.name).is_some() => {
                    defined.insert(function.name, self.functions.len());
                    self.functions.push(Linked { function, file });
                    self.functions.len() - 1
                }
                // An error only if something refers to it.
                None => continue,
            };
            self.contexts[file].symbols.insert(function.name, Symbol::Function(index));
        }
        Ok(())
    }

    fn bind_aliases(&mut self) {
        for (context, file) in self.contexts.iter_mut().zip(self.files) {
            for &(alias, target) in &file.aliases {
                if let Some(Symbol::Function(i)) = context.symbols.get(target) {
                    let symbol = Symbol::Function(*i);
                    context.symbols.insert(alias, symbol);
                }
            }
        }
    }

    /// Gives the functions their addresses, once they are known.
    fn number_functions(&mut self) {
        self.addresses = FunctionAddresses::new(self.functions.len());
        for context in &mut self.contexts {
            context.functions = self.addresses;
        }
    }

    /// Places functions' own shared variables. Those of functions follow the module's variables. Those of a
    /// kernel follow whatever the kernel can reach.
    fn place_function_variables(&mut self) -> Result<()> {
        // A function with an indirect call can call every function: one more "function" calls them all.
        let all = self.functions.len();
        let callable: Vec<usize> = (0..all).filter(|&i| !self.functions[i].function.kernel).collect();
        let mut calls = vec![Vec::new(); all];
        // For each function, what it needs itself: shared memory up to an end, and an alignment.
        let (mut ends, mut aligns) = (vec![0; all + 1], vec![1; all + 1]);
        for (i, linked) in self.functions.iter().enumerate() {
            for var in variables_in(linked.function).filter(|var| var.space == Space::Shared) {
                if is_dynamic_shared(var) {
                    aligns[i] = aligns[i].max(layout(var)?.1);
                } else if !linked.function.kernel {
                    let (at, _) = self.shared.module.place_variable(var)?;
                    self.shared.own.insert(var, at);
                    ends[i] = self.shared.module.end;
                }
            }
            let references = References::of(linked.function);
            if references.indirect_call {
                calls[i].push(all);
            }
            for name in references.names {
                match self.contexts[linked.file].symbols.get(name) {
                    Some(&Symbol::Function(called)) if !self.functions[called].function.kernel => {
                        calls[i].push(called);
                    }
                    Some(Symbol::Shared(at)) => {
                        ends[i] = ends[i].max(self.shared.variable_ends.get(at).copied().unwrap_or(0));
                    }
                    Some(&Symbol::DynamicShared(align)) => aligns[i] = aligns[i].max(align),
                    _ => {}
                }
            }
        }
        calls.push(callable);
        let (ends, aligns) = (reached(&ends, &calls), reached(&aligns, &calls));
        for (i, linked) in self.functions.iter().enumerate().filter(|(_, linked)| linked.function.kernel) {
            let mut own = Placement::new("shared memory", linked.function.name, RANK as u32);
            own.end = ends[i];
            for var in variables_in(linked.function) {
                if var.space == Space::Shared && !is_dynamic_shared(var) {
                    let (at, _) = own.place_variable(var)?;
                    self.shared.own.insert(var, at);
                }
            }
            self.shared.of_kernels.insert(i, (own.end, aligns[i]));
        }
        Ok(())
    }

    /// Lowers all functions and puts the module together.
    fn finish(self) -> Result<LinkedModule> {
        let mut codes = Vec::new();
        let mut kernels = Vec::new();
        for (i, linked) in self.functions.iter().enumerate() {
            let function = linked.function;
            let (code, params) = self.lower_function(i)?;
            if function.kernel && function.body.is_some() {
                kernels.push((self.kernel_info(i, &code, params), i));
            }
            codes.push(Arc::new(code));
        }
        if codes.iter().any(|code| code.unsupported.is_some()) {
            let reasons = find_unsupported(&codes);
            for (info, index) in &mut kernels {
                info.unsupported = reasons[*index].cloned();
            }
        }
        let mut images = Vec::new();
        for placed in self.placed.iter().filter(|placed| !placed.variable.init.is_empty()) {
            let runs = initial_bytes(placed.variable, placed.size, &self.contexts[placed.file])?;
            images.extend(runs.into_iter().map(|(at, bytes)| (placed.address + at, bytes)));
        }
        let program = Program { functions: codes, addresses: self.addresses };
        Ok(LinkedModule { program, kernels, globals: self.globals, images })
    }

    fn lower_function(&self, i: usize) -> Result<(Code, Vec<ParamInfo>)> {
        let Linked { function, file } = self.functions[i];
        let Some(body) = &function.body else { return Ok((code_without_body(function)?, Vec::new())) };
        match Lowering::new(&self.contexts[file], function, &self.shared.own).run(function, body) {
            Err(Error::UnsupportedPtx { line, what }) => unsupported(function, line, what),
            lowered => lowered,
        }
    }

    fn kernel_info(&self, i: usize, code: &Code, params: Vec<ParamInfo>) -> FunctionInfo {
        let Linked { function: f, file } = self.functions[i];
        let product = |d: [u32; 3]| d.iter().fold(1, |all: u32, &n| all.saturating_mul(n));
        let limit = f.req_ntid.or(f.max_ntid).map_or(1024, |d| product(d).min(1024));
        let (shared_bytes, dynamic_alignment) = self.shared.of_kernels.get(&i).copied().unwrap_or((0, 1));
        let target = self.files[file].target.trim_start_matches("sm_").trim_end_matches(char::is_alphabetic);
        FunctionInfo {
            name: f.name.into(),
            param_bytes: params.iter().map(|p: &ParamInfo| p.offset + p.size).max().unwrap_or(0),
            params,
            shared_bytes,
            dynamic_shared_alignment: dynamic_alignment.max(16),
            local_bytes: code.local_bytes,
            constant_bytes: self.constant_bytes as u32,
            registers: registers(code.frame_bytes, limit, f.max_registers),
            max_threads: limit,
            required_block: f.req_ntid.unwrap_or([0; 3]),
            required_cluster: f.cluster.required.unwrap_or([0; 3]),
            cluster_must_be_given: f.cluster.explicit && f.cluster.required.is_none(),
            max_cluster_blocks: f.cluster.max_blocks.unwrap_or(MAX_CLUSTER).min(MAX_CLUSTER),
            ptx_version: target.parse().unwrap_or(0),
            unsupported: None,
        }
    }
}

/// The definition that each name with linkage stands for, over all files: a visible one, or else the first
/// weak one.
fn resolve<'a, T>(items: impl Iterator<Item = (&'a str, Linkage, u32, T)>) -> Result<HashMap<&'a str, T>> {
    let mut out: HashMap<&str, (Linkage, T)> = HashMap::new();
    for (name, linkage, line, item) in items {
        match (out.get(name).map(|d| d.0), linkage) {
            (Some(Linkage::Visible), Linkage::Visible) => {
                return Err(Error::InvalidPtx { line, message: format!("{name} is defined twice") });
            }
            (None, _) | (Some(Linkage::Weak), Linkage::Visible) => {
                out.insert(name, (linkage, item));
            }
            _ => {}
        }
    }
    Ok(out.into_iter().map(|(name, (_, item))| (name, item)).collect())
}

/// What a function's body refers to.
#[derive(Default)]
struct References<'a> {
    names: HashSet<&'a str>,
    indirect_call: bool,
}

impl<'a> References<'a> {
    fn of(function: &Function<'a>) -> Self {
        let mut references = Self::default();
        references.collect(function.body.as_deref().unwrap_or(&[]));
        references
    }

    fn collect(&mut self, stmts: &[Stmt<'a>]) {
        for stmt in stmts {
            match stmt {
                Stmt::Inst(inst) => {
                    inst.operands.iter().for_each(|o| self.operand(o));
                    let named = inst
                        .operands
                        .iter()
                        .take(2)
                        .any(|o| matches!(o, Operand::Name(n, _) if !n.starts_with('%')));
                    self.indirect_call |= inst.name == "call" && !named;
                }
                Stmt::Block(inner) => self.collect(inner),
                _ => {}
            }
        }
    }

    fn operand(&mut self, op: &Operand<'a>) {
        match op {
            Operand::Name(n, _) | Operand::Address(Some(n), _) | Operand::Element { array: n, .. } => {
                self.names.insert(n);
            }
            Operand::Bracket(list) | Operand::Vector(list) | Operand::List(list) => {
                list.iter().for_each(|o| self.operand(o));
            }
            Operand::Pair(a, b) => {
                self.operand(a);
                self.operand(b);
            }
            _ => {}
        }
    }
}

/// The variables that a function declares in its body.
fn variables_in<'a, 'b>(function: &'b Function<'a>) -> impl Iterator<Item = &'b Var<'a>> {
    fn collect<'a, 'b>(stmts: &'b [Stmt<'a>], out: &mut Vec<&'b Var<'a>>) {
        for stmt in stmts {
            match stmt {
                Stmt::Var(var) => out.push(var),
                Stmt::Block(inner) => collect(inner, out),
                _ => {}
            }
        }
    }
    let mut out = Vec::new();
    collect(function.body.as_deref().unwrap_or(&[]), &mut out);
    out.into_iter()
}

/// For each function, the largest of the values of all functions that it can reach, including its own. Each
/// function is visited once.
fn reached<T: Copy + Ord>(own: &[T], calls: &[Vec<usize>]) -> Vec<T> {
    let mut callers = vec![Vec::new(); own.len()];
    for (caller, called) in calls.iter().enumerate() {
        for &called in called {
            callers[called].push(caller);
        }
    }
    let mut order: Vec<usize> = (0..own.len()).collect();
    order.sort_by_key(|&i| Reverse(own[i]));
    let mut out: Vec<Option<T>> = vec![None; own.len()];
    let mut work = Vec::new();
    for first in order {
        work.push(first);
        while let Some(i) = work.pop() {
            if out[i].is_none() {
                out[i] = Some(own[first]);
                work.extend_from_slice(&callers[i]);
            }
        }
    }
    out.into_iter().zip(own).map(|(found, own)| found.unwrap_or(*own)).collect()
}

/// The code of a function that uses something unimplemented. It cannot run, but the rest of its module can.
fn unsupported(f: &Function<'_>, line: u32, what: String) -> Result<(Code, Vec<ParamInfo>)> {
    let params = if f.kernel { function::parameters(f)? } else { Vec::new() };
    let reason = Unsupported { function: f.name.into(), line, what };
    Ok((Code { unsupported: Some(reason), ..code_without_body(f)? }, params))
}

/// Why each function cannot run: it, or a function that it calls by name, directly or indirectly, uses
/// something unimplemented. Calls through pointers are not followed; they fail when they are made.
fn find_unsupported(codes: &[Arc<Code>]) -> Vec<Option<&Unsupported>> {
    let called = |code: &Arc<Code>| {
        let calls = code.insts.iter().filter(|inst| inst.kind == Kind::Call);
        calls.map(|inst| inst.r[0] as usize).collect()
    };
    let calls: Vec<Vec<usize>> = codes.iter().map(called).collect();
    let own: Vec<Option<usize>> =
        codes.iter().enumerate().map(|(i, code)| code.unsupported.as_ref().map(|_| i)).collect();
    reached(&own, &calls).into_iter().map(|found| codes[found?].unsupported.as_ref()).collect()
}

/// An estimate of the registers per thread that a compiler would use: the registers of the frame, limited so
/// that the largest block fits and by the kernel's `.maxnreg`.
fn registers(frame_bytes: u32, threads: u32, most: Option<u32>) -> u32 {
    let together = (BLOCK_REGISTERS / threads.max(1)) & !7;
    (frame_bytes / 128).clamp(16, 255).min(together).min(most.unwrap_or(255).max(16))
}

/// The most zeros between initial values that are written as if they were values.
const GAP: usize = 64;

/// The bytes of a variable's initial values, in runs that begin at an offset each.
fn initial_bytes(var: &Var<'_>, size: u64, context: &Context<'_>) -> Result<Vec<(u64, Vec<u8>)>> {
    let width = type_bits(var.ty).unwrap_or(8) as usize / 8;
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    for (number, init) in &var.init {
        let at = number.saturating_mul(width as u64);
        if at.saturating_add(width as u64) > size {
            let message = format!("{} has more initial values than elements", var.name);
            return Err(Error::InvalidPtx { line: var.line, message });
        }
        let bytes = initial_value(var, init, context)?.to_le_bytes();
        let out = match runs.last_mut() {
            // The values come in order.
            Some((start, out)) if at - *start <= (out.len() + GAP) as u64 => {
                out.resize((at - *start) as usize, 0);
                out
            }
            _ => {
                runs.push((at, Vec::new()));
                let last = runs.len() - 1;
                &mut runs[last].1
            }
        };
        out.extend_from_slice(&bytes[..width.min(8)]);
        out.resize(out.len() + width.saturating_sub(8), 0);
    }
    Ok(runs)
}

/// A scalar's initial value in its lowest bits.
fn initial_value(var: &Var<'_>, init: &Init<'_>, context: &Context<'_>) -> Result<u64> {
    Ok(match init {
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
                Some(Symbol::Function(index)) => context.functions.of(*index),
                _ => {
                    let message = format!("{name}, in the initializer of {}, has no address", var.name);
                    return Err(Error::InvalidPtx { line: var.line, message });
                }
            };
            let value = base.wrapping_add(*addend as u64);
            match mask {
                Some(mask) if *mask != 0 => (value & mask) >> mask.trailing_zeros(),
                _ => value,
            }
        }
    })
}
