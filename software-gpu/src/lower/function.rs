//! Lowers one function: its registers, symbols, constants and labels.

use std::collections::HashMap;
use std::rc::Rc;

use crate::error::{Error, Result};
use crate::exec;
use crate::exec::memory::ADDRESS_32;
use crate::lower::info::ParamInfo;
use crate::lower::types::{Placement, layout, type_bits};
use crate::machine::address::FunctionAddresses;
use crate::machine::program::{CONST, Code, ExecFn, Handler, Inst, Kind, NONE};
use crate::machine::properties::{MAX_FRAMES, MAX_LOCAL, MAX_PARAMETERS};
use crate::machine::row::Line;
use crate::ptx::ast::{self, Function, Linkage, Operand, Space, Stmt, Var};

/// What a name refers to.
#[derive(Debug, Clone)]
pub(crate) enum Symbol {
    /// Row, and width in bits (1 for a predicate).
    Register(u32, u32),
    /// Numbered registers, allocated on first use.
    Family(u32, u32),
    Global(u64, bool),
    Shared(u32),
    /// With its alignment.
    DynamicShared(u32),
    /// Offset in the call's local memory.
    Local(u32),
    /// Offset in the kernel's parameters.
    Param(u32),
    Function(usize),
    /// Branch targets: an index into the extension.
    Targets(u32),
    Prototype {
        returns: Rc<[u32]>,
        params: Rc<[u32]>,
    },
}

/// The symbols that all functions of a file see.
#[derive(Default)]
pub(crate) struct Context<'a> {
    pub symbols: HashMap<&'a str, Symbol>,
    /// The addresses of the module's functions.
    pub functions: FunctionAddresses,
}

/// The names of a block in braces.
#[derive(Default)]
struct Scope<'a> {
    symbols: HashMap<&'a str, Symbol>,
    /// Whether it declares numbered registers.
    families: bool,
    /// Each label's index in [`Lowering::positions`].
    labels: HashMap<&'a str, usize>,
}

impl Scope<'_> {
    /// The width in bits of a numbered register that it declares.
    fn member(&self, name: &str) -> Option<u32> {
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        // A number has at most ten digits.
        let first = prefix.len().max(name.len().saturating_sub(10));
        let splits = if self.families { first..name.len() } else { 0..0 };
        splits.into_iter().find_map(|split| {
            let (prefix, number) = name.split_at(split);
            match self.symbols.get(prefix) {
                Some(&Symbol::Family(count, bits)) if number == "0" || !number.starts_with('0') => {
                    number.parse::<u32>().is_ok_and(|number| number < count).then_some(bits)
                }
                _ => None,
            }
        })
    }
}

/// Where functions' own shared variables lie.
pub(crate) type OwnShared<'a> = HashMap<*const Var<'a>, u32>;

/// The target of an address operand.
pub(crate) enum Address {
    /// A row of addresses, whether they are 32 bits wide, and an offset.
    Row(u32, bool, i64),
    /// A fixed offset in the call's local memory.
    Frame(i64),
    /// A fixed offset in the kernel's parameters.
    Param(i64),
}

pub(crate) struct Lowering<'a, 'b> {
    context: &'b Context<'a>,
    name: &'a str,
    kernel: bool,
    own_shared: &'b OwnShared<'a>,
    /// The enclosing blocks, the innermost last.
    scopes: Vec<Scope<'a>>,
    /// The instruction that each label precedes.
    positions: Vec<u32>,
    /// Slots of `insts` (its `r[0]`) and of `ext` that wait for a label's position.
    label_fixups: Vec<(usize, usize)>,
    ext_fixups: Vec<(usize, usize)>,
    pub insts: Vec<Inst>,
    pub ext: Vec<u32>,
    /// Bytes of the registers' rows, at most [`MAX_FRAMES`].
    frame: u32,
    /// At most [`MAX_FRAMES`] bytes.
    consts: Vec<Line>,
    const_rows: HashMap<(u32, u128), u32>,
    /// What has exceeded its limit, which ends the lowering after the current instruction.
    exceeded: Option<&'static str>,
    local: Placement<'a>,
    carry: Option<u32>,
    /// The guard of the current instruction.
    guard: (u32, bool),
    pub line: u32,
    returns: Vec<(u32, u32)>,
}

/// The layout of a kernel's parameter block.
pub(crate) fn parameters(f: &Function<'_>) -> Result<Vec<ParamInfo>> {
    let mut block = Placement::new("block of parameters", f.name, MAX_PARAMETERS);
    let place = |var: &Var<'_>| block.place_variable(var).map(|(offset, size)| ParamInfo { offset, size });
    f.params.iter().map(place).collect()
}

impl<'a, 'b> Lowering<'a, 'b> {
    pub fn new(context: &'b Context<'a>, f: &Function<'a>, own_shared: &'b OwnShared<'a>) -> Self {
        Lowering {
            context,
            name: f.name,
            kernel: f.kernel,
            own_shared,
            scopes: vec![Scope::default()],
            positions: Vec::new(),
            label_fixups: Vec::new(),
            ext_fixups: Vec::new(),
            insts: Vec::new(),
            ext: Vec::new(),
            frame: 0,
            consts: Vec::new(),
            const_rows: HashMap::new(),
            exceeded: None,
            local: Placement::new("local memory", f.name, MAX_LOCAL),
            carry: None,
            guard: (NONE, false),
            line: f.line,
            returns: Vec::new(),
        }
    }

    /// Lowers the body. Returns the code and, for a kernel, its parameters.
    pub fn run(mut self, f: &Function<'a>, body: &[Stmt<'a>]) -> Result<(Code, Vec<ParamInfo>)> {
        if let Some(directive) = f.unsupported {
            return self.unsupported(directive);
        }
        let infos = if f.kernel { parameters(f)? } else { Vec::new() };
        let mut params = Vec::new();
        for (i, var) in f.params.iter().enumerate() {
            match infos.get(i) {
                Some(info) => {
                    self.scope().insert(var.name, Symbol::Param(info.offset));
                }
                None => params.push(self.place_value(var)?),
            }
        }
        for var in &f.returns {
            let slot = self.place_value(var)?;
            self.returns.push(slot);
        }
        self.block(body)?;
        self.guard = (NONE, false);
        self.control(Kind::Return, [0; 6]);
        for (at, label) in self.label_fixups {
            self.insts[at].r[0] = self.positions[label];
        }
        for (at, label) in self.ext_fixups {
            self.ext[at] = self.positions[label];
        }
        let code = Code {
            name: f.name.into(),
            insts: self.insts,
            ext: self.ext,
            frame_bytes: self.frame.next_multiple_of(64).max(64),
            consts: self.consts,
            local_bytes: self.local.size.next_multiple_of(16),
            local_align: self.local.align.max(16),
            params,
            returns: self.returns,
            builtin: None,
            unsupported: None,
        };
        Ok((code, infos))
    }

    /// Places a parameter or result of a function in local memory, or in a register, which old PTX allows.
    fn place_value(&mut self, var: &Var<'a>) -> Result<(u32, u32)> {
        if var.space == Space::Reg {
            return self.unsupported("functions with parameters in registers");
        }
        let (at, size) = self.local.place_variable(var)?;
        if !var.name.is_empty() {
            self.scope().insert(var.name, Symbol::Local(at));
        }
        Ok((at, size))
    }

    /// The label of the innermost enclosing block that has one of this name.
    fn label(&self, name: &str) -> Result<usize> {
        match self.scopes.iter().rev().find_map(|scope| scope.labels.get(name)) {
            Some(&label) => Ok(label),
            None => self.error(format!("no label {name}")),
        }
    }

    pub fn error<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(Error::InvalidPtx { line: self.line, message: message.into() })
    }

    pub fn unsupported<T>(&self, what: impl Into<String>) -> Result<T> {
        Err(Error::UnsupportedPtx { line: self.line, what: what.into() })
    }

    fn scope(&mut self) -> &mut HashMap<&'a str, Symbol> {
        let last = self.scopes.len() - 1;
        &mut self.scopes[last].symbols
    }

    pub fn allocate_local(&mut self, size: u32, align: u32) -> Result<u32> {
        self.local.place(size.into(), align.max(1), self.line)
    }

    /// Makes the labels of a block known, before the branches to them.
    fn declare_labels(&mut self, stmts: &[Stmt<'a>]) -> Result<()> {
        let mut labels = HashMap::new();
        for stmt in stmts {
            let Stmt::Label(name, line) = stmt else { continue };
            if labels.insert(*name, self.positions.len()).is_some() {
                self.line = *line;
                return self.error(format!("label {name} is defined twice"));
            }
            self.positions.push(0);
        }
        self.scopes.push(Scope { labels, ..Scope::default() });
        Ok(())
    }

    /// Lowers the statements between two braces. Names mean something only there, and local memory is free
    /// afterwards.
    fn block(&mut self, stmts: &[Stmt<'a>]) -> Result<()> {
        let local = self.local.end;
        self.declare_labels(stmts)?;
        for stmt in stmts {
            match stmt {
                Stmt::Label(name, _) => {
                    let label = self.label(name)?;
                    self.positions[label] = self.insts.len() as u32;
                }
                Stmt::Var(var) => self.declare(var)?,
                Stmt::Block(inner) => self.block(inner)?,
                Stmt::Targets(name, list) => {
                    let targets = self.target_list(list)?;
                    self.scope().insert(name, Symbol::Targets(targets));
                }
                Stmt::Prototype { name, returns, params } => {
                    let sizes = |vars: &[Var<'a>]| -> Result<Rc<[u32]>> {
                        let mut all = Placement::new("arguments and results", name, MAX_LOCAL);
                        vars.iter().map(|v| Ok(all.place_variable(v)?.1)).collect()
                    };
                    let symbol = Symbol::Prototype { returns: sizes(returns)?, params: sizes(params)? };
                    self.scope().insert(name, symbol);
                }
                Stmt::Inst(inst) => {
                    self.line = inst.line;
                    self.guard = match inst.guard {
                        None => (NONE, false),
                        Some((name, negated)) => (self.register(name, 1)?, negated),
                    };
                    self.instruction(inst)?;
                }
            }
            if let Some(what) = self.exceeded {
                return self.error(format!("the {what} of {} take more than {MAX_FRAMES} bytes", self.name));
            }
        }
        self.scopes.pop();
        self.local.end = local;
        Ok(())
    }

    fn declare(&mut self, var: &Var<'a>) -> Result<()> {
        self.line = var.line;
        match var.space {
            Space::Reg => {
                let Some(bits) = type_bits(var.ty) else {
                    return self.unsupported(format!("a register of type .{}", var.ty));
                };
                if var.vector != 1 {
                    return self.unsupported("vector registers");
                }
                let symbol = match var.family {
                    Some(count) => {
                        let last = self.scopes.len() - 1;
                        self.scopes[last].families = true;
                        Symbol::Family(count, bits)
                    }
                    None => Symbol::Register(self.allocate_row(bits), bits),
                };
                self.scope().insert(var.name, symbol);
            }
            Space::Local | Space::Param => {
                let (at, _) = self.local.place_variable(var)?;
                self.scope().insert(var.name, Symbol::Local(at));
            }
            Space::Shared => {
                let symbol = match self.own_shared.get(&std::ptr::from_ref(var)) {
                    _ if is_dynamic_shared(var) => Symbol::DynamicShared(layout(var)?.1),
                    _ if var.linkage == Linkage::Extern => {
                        return self.error(format!("external variable {} is not defined", var.name));
                    }
                    Some(&at) => Symbol::Shared(at),
                    None => return self.error(format!("shared variable {} was not placed", var.name)),
                };
                self.scope().insert(var.name, symbol);
            }
            Space::Global | Space::Const | Space::Generic => {
                return self.unsupported(format!(".{} variables inside functions", var.space.name()));
            }
        }
        Ok(())
    }

    /// Allocates a row for values of `bits` bits.
    pub fn allocate_row(&mut self, bits: u32) -> u32 {
        let bytes = if bits == 1 { 4 } else { bits * 4 };
        let at = self.frame.next_multiple_of(bytes.min(64));
        if bytes > MAX_FRAMES - at {
            self.exceeded = Some("registers");
            return 0;
        }
        self.frame = at + bytes;
        at
    }

    pub fn lookup(&self, name: &str) -> Option<&Symbol> {
        self.scopes.iter().rev().find_map(|s| s.symbols.get(name)).or_else(|| self.context.symbols.get(name))
    }

    /// Row and width in bits of a register, if the name is one.
    fn find_register(&mut self, name: &'a str) -> Option<(u32, u32)> {
        for i in (0..self.scopes.len()).rev() {
            match self.scopes[i].symbols.get(name) {
                Some(&Symbol::Register(row, bits)) => return Some((row, bits)),
                Some(_) => return None,
                None => {}
            }
            if let Some(bits) = self.scopes[i].member(name) {
                let row = self.allocate_row(bits);
                self.scopes[i].symbols.insert(name, Symbol::Register(row, bits));
                return Some((row, bits));
            }
        }
        None
    }

    /// The row of a register that must be `bits` bits wide.
    pub fn register(&mut self, name: &'a str, bits: u32) -> Result<u32> {
        match self.find_register(name) {
            Some((row, b)) if b == bits => Ok(row),
            Some((_, b)) => self.error(format!("{name} has {b} bits instead of {bits}")),
            None => self.error(format!("no register {name}")),
        }
    }

    /// The width in bits of an operand that is a register.
    pub fn register_bits(&mut self, op: &Operand<'a>) -> Option<u32> {
        match op {
            Operand::Name(name, _) => self.find_register(name).map(|r| r.1),
            _ => None,
        }
    }

    /// The row of a constant.
    pub fn constant(&mut self, bits: u32, value: u128) -> u32 {
        let value = if bits >= 128 { value } else { value & ((1u128 << bits) - 1) };
        if let Some(&row) = self.const_rows.get(&(bits, value)) {
            return row;
        }
        let bytes = size_of_val(self.consts.as_slice());
        if bytes >= MAX_FRAMES as usize {
            self.exceeded = Some("constants");
            return CONST;
        }
        let row = bytes as u32 | CONST;
        if bits == 1 {
            let mut line = Line([0; 64]);
            line.0[..4].copy_from_slice(&(if value != 0 { u32::MAX } else { 0 }).to_le_bytes());
            self.consts.push(line);
        } else {
            let bytes = bits as usize / 8;
            let all: Vec<u8> =
                value.to_le_bytes()[..bytes].iter().copied().cycle().take(bytes * 32).collect();
            for chunk in all.chunks(64) {
                let mut line = Line([0; 64]);
                line.0[..chunk.len()].copy_from_slice(chunk);
                self.consts.push(line);
            }
        }
        self.const_rows.insert((bits, value), row);
        row
    }

    /// The carry predicate of extended-precision arithmetic.
    pub fn carry(&mut self) -> u32 {
        match self.carry {
            Some(row) => row,
            None => {
                let row = self.allocate_row(1);
                *self.carry.insert(row)
            }
        }
    }

    fn push(&mut self, exec: ExecFn, kind: Kind, r: [u32; 6], imm: i64, flags: u8) {
        let (guard, guard_negated) = self.guard;
        self.insts.push(Inst { exec, r, imm, guard, guard_negated, flags, kind, line: self.line });
    }

    /// Emits an operation.
    pub fn emit(&mut self, handler: Handler, r: [u32; 6], imm: i64) {
        self.push(exec::select(handler), Kind::Plain, r, imm, 0);
    }

    /// Emits an operation with flags.
    pub fn emit_flags(&mut self, handler: Handler, r: [u32; 6], imm: i64, flags: u8) {
        self.push(exec::select(handler), Kind::Plain, r, imm, flags);
    }

    /// Emits a warp-wide operation. `shape` is one of the shapes in [`crate::machine::program::joint`].
    pub fn converge(&mut self, shape: u8, handler: Handler, r: [u32; 6], imm: i64) {
        self.push(exec::select(handler), Kind::Converge, r, imm, shape << 4);
    }

    /// Emits a warp-wide operation that all its lanes execute at the same instruction, with the flags of a
    /// memory access.
    pub fn converge_aligned(&mut self, handler: Handler, r: [u32; 6], imm: i64, flags: u8) {
        let flags = crate::machine::program::joint::ALIGNED << 4 | flags;
        self.push(exec::select(handler), Kind::Converge, r, imm, flags);
    }

    /// Whether an operand is a predicate.
    pub fn is_predicate(&mut self, op: &Operand<'a>) -> bool {
        matches!(op, Operand::Not(_)) || self.register_bits(op) == Some(1)
    }

    /// Emits an operation of another kind.
    pub fn emit_kind(&mut self, kind: Kind, handler: Handler, r: [u32; 6], imm: i64) {
        self.push(exec::select(handler), kind, r, imm, 0);
    }

    /// Emits control flow.
    pub fn control(&mut self, kind: Kind, r: [u32; 6]) {
        self.emit_kind(kind, exec::special_register::NOTHING, r, 0);
    }

    /// Emits a branch.
    pub fn branch(&mut self, label: &str) -> Result<()> {
        self.label_fixups.push((self.insts.len(), self.label(label)?));
        self.control(Kind::Branch, [0; 6]);
        Ok(())
    }

    /// Adds a list of branch targets to the extension and returns its index.
    fn target_list(&mut self, targets: &[&str]) -> Result<u32> {
        let at = self.ext.len();
        self.ext.push(targets.len() as u32);
        for target in targets {
            self.ext_fixups.push((self.ext.len(), self.label(target)?));
            self.ext.push(0);
        }
        Ok(at as u32)
    }

    /// Emits operations that run regardless of the guard.
    fn unguarded(&mut self, f: impl FnOnce(&mut Self)) {
        let guard = std::mem::replace(&mut self.guard, (NONE, false));
        f(self);
        self.guard = guard;
    }

    /// The row of a source operand of type `ty`.
    pub fn source(&mut self, op: &Operand<'a>, ty: &str) -> Result<u32> {
        let Some(bits) = type_bits(ty) else { return self.unsupported(format!("type .{ty}")) };
        match op {
            Operand::Int(n) => {
                let value = match ty {
                    "f32" => u128::from((*n as i64 as f32).to_bits()),
                    "f64" => u128::from((*n as i64 as f64).to_bits()),
                    _ if bits == 128 => *n as i64 as i128 as u128,
                    _ => u128::from(*n),
                };
                Ok(self.constant(bits, value))
            }
            Operand::F32(b) if bits == 64 => {
                Ok(self.constant(64, u128::from(f64::from(f32::from_bits(*b)).to_bits())))
            }
            Operand::F32(b) => Ok(self.constant(bits, u128::from(*b))),
            Operand::F64(b) if ty == "f64" || bits == 64 => Ok(self.constant(64, u128::from(*b))),
            Operand::F64(b) if bits == 32 => {
                Ok(self.constant(32, u128::from((f64::from_bits(*b) as f32).to_bits())))
            }
            Operand::F64(b) if bits == 16 => {
                let value = f64::from_bits(*b);
                let h =
                    if ty == "bf16" { exec::half::to_bf16(value, 0) } else { exec::half::to_f16(value, 0) };
                Ok(self.constant(16, u128::from(h)))
            }
            Operand::Name(name, addend) => self.named(name, *addend, bits),
            Operand::Element { array, index, ty, vector } => {
                let (row, addend) = self.element(index, ty, *vector)?;
                let start = self.named(array, addend, bits)?;
                match row {
                    Some(row) if bits == 64 => self.sum(start, row),
                    Some(_) => self.unsupported(format!("the address of an element in {bits} bits")),
                    None => Ok(start),
                }
            }
            other => self.error(format!("{other:?} is not a value")),
        }
    }

    fn named(&mut self, name: &'a str, addend: i64, bits: u32) -> Result<u32> {
        if let Some((row, b)) = self.find_register(name) {
            if addend != 0 {
                return self.error(format!("{name}{addend:+} is not a value"));
            }
            if b == bits {
                return Ok(row);
            }
            if b < bits || bits == 1 {
                return self.error(format!("{name} has {b} bits instead of {bits}"));
            }
            let to = self.allocate_row(bits);
            let narrow = exec::convert::cvt(unsigned(bits), unsigned(b), false);
            let Some(narrow) = narrow else { return self.unsupported(format!("{name} as {bits} bits")) };
            self.unguarded(|s| s.emit(narrow, [to, row, 0, 0, 0, 0], 0));
            return Ok(to);
        }
        if name.starts_with('%') {
            return self.special_register(name, bits);
        }
        self.address_of(name, addend, bits)
    }

    fn special_register(&mut self, name: &'a str, bits: u32) -> Result<u32> {
        let meeting = matches!(name, "%envreg1" | "%envreg2");
        if !meeting && name.starts_with("%envreg") || name.starts_with("%pm") {
            return Ok(self.constant(bits, 0));
        }
        let Some((handler, width)) = exec::special_register::register(name) else {
            return self.unsupported(format!("the register {name}"));
        };
        let row = self.allocate_row(width);
        // Reading a special register does not depend on the guard, but a clock must be read where the
        // instruction is.
        self.unguarded(|s| s.emit(handler, [row, 0, 0, 0, 0, 0], 0));
        if width == bits {
            return Ok(row);
        }
        let to = self.allocate_row(bits);
        match exec::convert::cvt(unsigned(bits), unsigned(width), false) {
            Some(resize) => self.unguarded(|s| s.emit(resize, [to, row, 0, 0, 0, 0], 0)),
            None => return self.unsupported(format!("{name} as {bits} bits")),
        }
        Ok(to)
    }

    /// The address of a variable or function within its own space, as a value.
    fn address_of(&mut self, name: &str, addend: i64, bits: u32) -> Result<u32> {
        let Some(symbol) = self.lookup(name).cloned() else { return self.error(format!("no symbol {name}")) };
        if bits != 32 && bits != 64 {
            return self.error(format!("the address of {name} in {bits} bits"));
        }
        let value = match symbol {
            Symbol::Global(address, _) => address.wrapping_add(addend as u64),
            Symbol::Shared(at) => u64::from(at).wrapping_add(addend as u64),
            Symbol::Param(at) => u64::from(at).wrapping_add(addend as u64),
            Symbol::Function(index) => self.context.functions.of(index),
            Symbol::DynamicShared(_) => {
                let row = self.allocate_row(bits);
                let handler = if bits == 32 {
                    exec::special_register::DYNAMIC_SHARED_32
                } else {
                    exec::special_register::DYNAMIC_SHARED_64
                };
                self.unguarded(|s| s.emit(handler, [row, 0, 0, 0, 0, 0], addend));
                return Ok(row);
            }
            Symbol::Local(at) => {
                let row = self.allocate_row(bits);
                let flags = if bits == 32 { ADDRESS_32 } else { 0 };
                let imm = i64::from(at) + addend;
                self.unguarded(|s| {
                    s.emit_flags(exec::memory::LOCAL_ADDRESS, [row, 0, 0, 0, 0, 0], imm, flags)
                });
                return Ok(row);
            }
            _ => return self.error(format!("{name} has no address")),
        };
        Ok(self.constant(bits, u128::from(value)))
    }

    /// The target of an address operand, and the space that a named variable implies.
    pub fn address(&mut self, op: &Operand<'a>) -> Result<(Address, Option<Space>)> {
        let (base, offset) = match op {
            Operand::Address(base, offset) => (*base, *offset),
            Operand::Element { array, index, ty, vector } => {
                let (row, addend) = self.element(index, ty, *vector)?;
                let start = Operand::Address(Some(array), addend);
                let Some(row) = row else { return self.address(&start) };
                let (start, narrow, offset, space) = self.address_row(&start)?;
                if narrow {
                    return self.error(format!("{array} is not an array"));
                }
                return Ok((Address::Row(self.sum(start, row)?, false, offset), space));
            }
            other => return self.error(format!("{other:?} is not an address")),
        };
        let Some(name) = base else {
            return Ok((Address::Row(self.constant(64, offset as u64 as u128), false, 0), None));
        };
        if let Some((row, bits)) = self.find_register(name) {
            return match bits {
                32 | 64 => Ok((Address::Row(row, bits == 32, offset), None)),
                _ => self.error(format!("{name} has {bits} bits and cannot be an address")),
            };
        }
        match self.lookup(name) {
            Some(Symbol::Local(at)) => Ok((Address::Frame(i64::from(*at) + offset), Some(Space::Local))),
            Some(Symbol::Param(at)) => Ok((Address::Param(i64::from(*at) + offset), Some(Space::Param))),
            Some(Symbol::Global(_, constant)) => {
                let space = if *constant { Space::Const } else { Space::Global };
                Ok((Address::Row(self.address_of(name, offset, 64)?, false, 0), Some(space)))
            }
            Some(Symbol::Shared(_) | Symbol::DynamicShared(_)) => {
                Ok((Address::Row(self.address_of(name, offset, 64)?, false, 0), Some(Space::Shared)))
            }
            _ => self.error(format!("{name} is not an address")),
        }
    }

    /// Where an element is in its array: a row with the distance in bytes, if the index is a register, and a
    /// fixed distance.
    fn element(&mut self, index: &Operand<'a>, ty: &str, vector: u32) -> Result<(Option<u32>, i64)> {
        let Some(bits) = type_bits(ty).filter(|&bits| bits >= 8) else {
            return self.unsupported(format!("elements of type .{ty}"));
        };
        let bytes = u64::from(bits / 8 * vector);
        let (register, fixed) = match index {
            Operand::Int(n) => (None, *n as i64),
            Operand::Name(name, addend) => match self.find_register(name) {
                Some(register) => (Some(register), *addend),
                None => return self.error(format!("{name} is not a register")),
            },
            other => return self.error(format!("{other:?} is not an index")),
        };
        let row = match register {
            None => None,
            Some((row, width)) => {
                let handler = match width {
                    32 => exec::int::wide(false, "u32"),
                    64 => exec::int::arithmetic("mul.lo", "u64"),
                    _ => None,
                };
                let Some(handler) = handler else {
                    return self.unsupported(format!("an index of {width} bits"));
                };
                let (size, to) = (self.constant(width, bytes.into()), self.allocate_row(64));
                self.emit(handler, [to, row, size, 0, 0, 0], 0);
                Some(to)
            }
        };
        Ok((row, fixed.wrapping_mul(bytes as i64)))
    }

    /// The sum of two rows of 64 bits.
    fn sum(&mut self, a: u32, b: u32) -> Result<u32> {
        let Some(add) = exec::int::arithmetic("add", "u64") else { return self.unsupported("add.u64") };
        let to = self.allocate_row(64);
        self.emit(add, [to, a, b, 0, 0, 0], 0);
        Ok(to)
    }

    /// A row of addresses for any address operand, for operations without fixed offsets.
    pub fn address_row(&mut self, op: &Operand<'a>) -> Result<(u32, bool, i64, Option<Space>)> {
        let (address, space) = self.address(op)?;
        Ok(match address {
            Address::Row(row, narrow, offset) => (row, narrow, offset, space),
            Address::Param(at) => (self.constant(64, at as u128), false, 0, space),
            Address::Frame(at) => {
                let row = self.allocate_row(64);
                self.unguarded(|s| s.emit(exec::memory::LOCAL_ADDRESS, [row, 0, 0, 0, 0, 0], at));
                (row, false, 0, space)
            }
        })
    }

    /// The row of a destination of exactly `bits` bits. `_` becomes a row that is never read.
    pub fn destination(&mut self, op: &Operand<'a>, bits: u32) -> Result<u32> {
        match op {
            Operand::Name(name, 0) => self.register(name, bits),
            Operand::Sink => Ok(self.allocate_row(bits)),
            other => self.error(format!("{other:?} is not a destination")),
        }
    }

    /// A predicate operand and whether it is negated.
    pub fn predicate(&mut self, op: &Operand<'a>) -> Result<(u32, bool)> {
        match op {
            Operand::Name("%is_explicit_cluster", 0) => {
                let row = self.allocate_row(1);
                self.unguarded(|s| {
                    s.emit(exec::special_register::IS_EXPLICIT_CLUSTER, [row, 0, 0, 0, 0, 0], 0)
                });
                Ok((row, false))
            }
            Operand::Name(name, 0) => Ok((self.register(name, 1)?, false)),
            Operand::Not(name) => Ok((self.register(name, 1)?, true)),
            Operand::Int(n) => Ok((self.constant(1, u128::from(*n != 0)), false)),
            other => self.error(format!("{other:?} is not a predicate")),
        }
    }

    /// Whether this is a kernel, whose parameters are constant memory.
    pub fn is_kernel(&self) -> bool {
        self.kernel
    }

    /// Lowers an instruction according to its name.
    fn instruction(&mut self, inst: &ast::Inst<'a>) -> Result<()> {
        self.lower(inst)
    }
}

/// Whether a variable is dynamic shared memory: `.extern .shared .b8 name[]`.
pub(crate) fn is_dynamic_shared(var: &Var<'_>) -> bool {
    var.space == Space::Shared && var.linkage == Linkage::Extern && var.elements == Some(0)
}

/// The unsigned type of a width in bits.
pub(crate) fn unsigned(bits: u32) -> &'static str {
    match bits {
        8 => "u8",
        16 => "u16",
        32 => "u32",
        64 => "u64",
        _ => "b128",
    }
}
