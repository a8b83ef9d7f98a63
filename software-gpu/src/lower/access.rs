//! Lowers memory accesses, and calls, which pass their arguments through memory.

use super::function::{Address, Lowering, Symbol};
use super::inst::Modifiers;
use super::types::type_bits;
use crate::error::Result;
use crate::exec::memory::{self, ADDRESS_32, SPIN};
use crate::exec::moves::{IS_SPACE, OFFSET, insert, mapa, rank};
use crate::exec::{atomic, int, special_register};
use crate::machine::address::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::machine::program::{Kind, NONE};
use crate::ptx::ast::{Inst, Operand, Space};

/// The access of a load or store.
struct Access<'i, 'a> {
    ty: &'a str,
    bits: u32,
    /// The registers that are loaded or stored.
    registers: &'i [Operand<'a>],
    address: Address,
    space: Space,
    /// Whether its memory order needs a fence.
    fence: bool,
    /// Whether a program may wait for the value in a loop.
    spin: bool,
}

fn space(mods: &mut Modifiers<'_>) -> Option<Space> {
    let name = mods.one_of(&[
        "global",
        "shared",
        "shared::cta",
        "shared::cluster",
        "local",
        "const",
        "param",
        "param::entry",
        "param::func",
    ])?;
    Some(match name {
        "global" => Space::Global,
        "local" => Space::Local,
        "const" => Space::Const,
        "param" | "param::entry" | "param::func" => Space::Param,
        _ => Space::Shared,
    })
}

fn window(space: Space) -> Option<u64> {
    Some(match space {
        Space::Shared => SHARED_WINDOW,
        Space::Local => LOCAL_WINDOW,
        Space::Param => PARAM_WINDOW,
        Space::Global | Space::Const => 0,
        Space::Reg | Space::Generic => return None,
    })
}

impl<'a> Lowering<'a, '_> {
    pub fn lower_access(&mut self, inst: &Inst<'a>) -> Result<()> {
        match inst.name {
            "st" | "red" if inst.modifiers.first() == Some(&"async") => self.lower_store_async(inst),
            "ld" | "ldu" => self.lower_load(inst),
            "st" => self.lower_store(inst),
            "atom" | "red" => self.lower_atomic(inst),
            "cvta" => self.lower_cvta(inst),
            "isspacep" => {
                let mut mods = Modifiers::new(inst);
                let own = !mods.left.contains(&"shared::cluster");
                // Constants lie among the global variables.
                let named = space(&mut mods).filter(|space| *space != Space::Const);
                let Some(window) = named.and_then(window).filter(|_| mods.done()) else {
                    return self.unknown(inst);
                };
                let a = self.source(self.operand(inst, 1)?, "u64")?;
                let p = self.destination(self.operand(inst, 0)?, 1)?;
                self.emit(IS_SPACE, [p, a, u32::from(own), 0, 0, 0], window as i64);
                Ok(())
            }
            "createpolicy" => {
                // A cache policy is a hint, so its operand is ignored.
                let mut mods = Modifiers::new(inst);
                let converts = mods.has("cvt") && mods.has("L2");
                mods.one_of(&["fractional", "range"]);
                mods.has("global");
                const POLICIES: [&str; 4] =
                    ["L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged"];
                let primary = mods.one_of(&POLICIES).is_some() != converts;
                mods.one_of(&POLICIES);
                if !primary || !mods.has("b64") || !mods.done() {
                    return self.unknown(inst);
                }
                let (to, policy) = (self.destination(self.operand(inst, 0)?, 64)?, self.constant(64, 0));
                self.emit(OFFSET, [to, policy, 0, 0, 0, 0], 0);
                Ok(())
            }
            "mapa" | "getctarank" => self.lower_cluster_address(inst),
            "alloca" | "stacksave" | "stackrestore" => self.lower_stack(inst),
            "prefetch" | "prefetchu" | "applypriority" | "discard" => {
                let mut mods = Modifiers::new(inst);
                mods.one_of(&["global", "local", "const", "param"]);
                mods.one_of(&["L1", "L2", "L2::evict_last", "L2::evict_normal", "tensormap"]);
                if inst.name == "discard" {
                    mods.has("L2");
                }
                mods.one_of(&["L2::evict_last", "L2::evict_normal"]);
                if !mods.done() || inst.operands.is_empty() {
                    return self.unknown(inst);
                }
                self.emit(special_register::NOTHING, [0; 6], 0);
                Ok(())
            }
            _ => self.unknown(inst),
        }
    }

    /// `mapa`, `getctarank`: shared memory of other blocks in the cluster.
    fn lower_cluster_address(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let ty = mods.last();
        mods.has("shared::cluster");
        let Some(bits) = type_bits(ty).filter(|_| ty.starts_with('u')) else { return self.unknown(inst) };
        if inst.name == "mapa" {
            let handler = self.found(inst, mapa(bits), &mods)?;
            self.simple(inst, handler, bits, &[ty, "u32"], 0)
        } else {
            let handler = self.found(inst, rank(bits), &mods)?;
            self.simple(inst, handler, 32, &[ty], 0)
        }
    }

    fn lower_stack(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let ty = mods.last();
        let Some(bits @ (32 | 64)) = type_bits(ty).filter(|_| mods.done()) else { return self.unknown(inst) };
        let narrow = u32::from(bits == 32);
        match inst.name {
            "alloca" => {
                let align = match inst.operands.get(2) {
                    None => 16,
                    Some(Operand::Int(n)) if n.is_power_of_two() && *n <= 128 => (*n).max(16) as i64,
                    Some(_) => return self.unknown(inst),
                };
                let size = self.source(self.operand(inst, 1)?, ty)?;
                let to = self.destination(self.operand(inst, 0)?, bits)?;
                self.emit_kind(Kind::Alloca, special_register::NOTHING, [to, size, narrow, 0, 0, 0], align);
            }
            "stacksave" => {
                let to = self.destination(self.operand(inst, 0)?, bits)?;
                self.control(Kind::StackSave, [to, 0, narrow, 0, 0, 0]);
            }
            _ => {
                let from = self.source(self.operand(inst, 0)?, ty)?;
                self.control(Kind::StackRestore, [from, 0, narrow, 0, 0, 0]);
            }
        }
        Ok(())
    }

    /// Takes the cache hints, which have no effect here. The operand that some of them add is ignored.
    pub fn take_hints(mods: &mut Modifiers<'a>) {
        while mods
            .one_of(&[
                "ca",
                "cg",
                "cs",
                "lu",
                "cv",
                "wb",
                "wt",
                "nc",
                "L1::evict_normal",
                "L1::evict_unchanged",
                "L1::evict_first",
                "L1::evict_last",
                "L1::no_allocate",
                "L2::evict_last",
                "L2::evict_normal",
                "L2::evict_first",
                "L2::cache_hint",
                "L2::64B",
                "L2::128B",
                "L2::256B",
            ])
            .is_some()
        {}
    }

    /// Takes the memory order. Returns whether it needs a fence, and whether a program may wait for the value
    /// in a loop.
    fn take_order(mods: &mut Modifiers<'a>) -> (bool, bool) {
        let order = mods.one_of(&["weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"]);
        mods.one_of(&["relaxed"]);
        mods.one_of(&["cta", "cluster", "gpu", "sys"]);
        (
            matches!(order, Some("acquire" | "release" | "acq_rel")),
            matches!(order, Some("volatile" | "relaxed" | "acquire" | "mmio")),
        )
    }

    /// What loads and stores have in common. `data` and `at` are the numbers of the operands with the
    /// registers and with the address.
    fn access<'i>(&mut self, inst: &'i Inst<'a>, data: usize, at: usize) -> Result<Access<'i, 'a>> {
        let mut mods = Modifiers::new(inst);
        let ty = mods.last();
        let (fence, spin) = Self::take_order(&mut mods);
        Self::take_hints(&mut mods);
        let named = space(&mut mods);
        let vector = mods.one_of(&["v2", "v4", "v8"]);
        let Some(bits) = type_bits(ty).filter(|&b| b >= 8 && mods.done()) else { return self.unknown(inst) };
        let registers = self.operand(inst, data)?.elements();
        let n = registers.len();
        if n > 4 || vector.map_or(1, |v| if v == "v2" { 2 } else { 4 }) != n {
            return self.unknown(inst);
        }
        let (address, implied) = self.address(self.operand(inst, at)?)?;
        let space = match (named, implied) {
            // A function's parameters, and those of the calls it makes, are in its local memory.
            (Some(Space::Param), Some(Space::Local)) => Space::Local,
            (Some(Space::Param), None) if !self.is_kernel() => Space::Local,
            (Some(space), _) => space,
            (None, Some(implied)) => implied,
            (None, None) => Space::Generic,
        };
        Ok(Access { ty, bits, registers, address, space, fence, spin })
    }

    /// Loads each element that has needed bytes by itself, if a load says that others have none, and an
    /// element of which only some are needed byte by byte. NVIDIA's compiler widens loads to whole vectors
    /// like that, even past the end of an array: on hardware, there is memory up to the vector's end.
    fn lower_needed_elements(&mut self, inst: &Inst<'a>) -> Result<bool> {
        let (Some(used), Some(to), Some(Operand::Address(Some(base), offset))) =
            (inst.used_bytes, inst.operands.first(), inst.operands.get(1))
        else {
            return Ok(false);
        };
        let registers = to.elements();
        let bytes = inst.modifiers.last().and_then(|ty| type_bits(ty)).unwrap_or(0) / 8;
        if bytes == 0 || registers.len() as u32 > u32::BITS / bytes {
            return Ok(false);
        }
        let element = u32::MAX >> (u32::BITS - bytes);
        let needed = |k: usize| used >> (k as u32 * bytes) & element;
        if (0..registers.len()).all(|k| needed(k) == element) {
            return Ok(false);
        }
        if let [_] = registers {
            return self.lower_needed_bytes(inst, needed(0), bytes);
        }
        let is_base = |register: &Operand<'a>| matches!(register, Operand::Name(name, 0) if name == base);
        let mut order: Vec<usize> = (0..registers.len()).filter(|&k| needed(k) != 0).collect();
        // The address must be there until the last load.
        order.sort_by_key(|&k| is_base(&registers[k]));
        for k in order {
            let at = offset.wrapping_add((k as u32 * bytes).into());
            self.lower_load(&Inst {
                guard: inst.guard,
                name: inst.name,
                modifiers: inst
                    .modifiers
                    .iter()
                    .copied()
                    .filter(|m| !matches!(*m, "v2" | "v4" | "v8"))
                    .collect(),
                operands: vec![registers[k].clone(), Operand::Address(Some(base), at)],
                used_bytes: Some(needed(k)),
                line: inst.line,
            })?;
        }
        Ok(true)
    }

    /// Loads those bytes of a number that are needed; the others become zero.
    fn lower_needed_bytes(&mut self, inst: &Inst<'a>, needed: u32, bytes: u32) -> Result<bool> {
        let Access { ty, bits, registers, space, fence, spin, .. } = self.access(inst, 0, 1)?;
        let (row, narrow, offset, _) = self.address_row(self.operand(inst, 1)?)?;
        let parts = (memory::load_handler(space, 8, 1), insert(8, bits), int::bits("mov", bits));
        let ((Some(load), Some(insert), Some(copy)), false) = (parts, fence || spin) else {
            return Ok(false);
        };
        let (sum, zero) = (self.allocate_row(bits), self.constant(bits, 0));
        self.emit(copy, [sum, zero, 0, 0, 0, 0], 0);
        for n in (0..bytes).filter(|n| needed >> n & 1 != 0) {
            let byte = self.allocate_row(8);
            let flags = if narrow { ADDRESS_32 } else { 0 };
            let at = offset.wrapping_add(n.into());
            self.emit_flags(load, [byte, NONE, NONE, NONE, row, 0], at, flags);
            self.emit(insert, [sum, byte, sum, 0, 0, 0], i64::from(8 * n));
        }
        self.write_wider_from(&registers[0], sum, bits, ty.starts_with('s'))?;
        Ok(true)
    }

    fn lower_load(&mut self, inst: &Inst<'a>) -> Result<()> {
        if self.lower_needed_elements(inst)? {
            return Ok(());
        }
        let Access { ty, bits, registers, address, space, fence, spin } = self.access(inst, 0, 1)?;
        let n = registers.len();
        let mut r = [NONE; 6];
        let mut extend = Vec::new();
        for (k, out) in registers.iter().enumerate() {
            if *out == Operand::Sink {
                continue;
            }
            r[k] = match self.register_bits(out) {
                Some(wide) if wide > bits => {
                    let row = self.allocate_row(bits);
                    extend.push((out.clone(), row));
                    row
                }
                _ => self.destination(out, bits)?,
            };
        }
        match address {
            Address::Param(at) if space == Space::Param => match memory::param_handler(bits, n) {
                Some(handler) => self.emit(handler, r, at),
                None => return self.unknown(inst),
            },
            Address::Frame(at) if space == Space::Local => match memory::frame_load_handler(bits, n) {
                Some(handler) => self.emit(handler, r, at),
                None => return self.unknown(inst),
            },
            _ => {
                let (row, narrow, offset, _) = self.address_row(self.operand(inst, 1)?)?;
                let Some(handler) = memory::load_handler(space, bits, n) else { return self.unknown(inst) };
                r[4] = row;
                let flags = if narrow { ADDRESS_32 } else { 0 } | if spin { SPIN } else { 0 };
                self.emit_flags(handler, r, offset, flags);
            }
        }
        if fence {
            self.emit(memory::FENCE, [0; 6], 0);
        }
        for (out, row) in extend {
            self.write_wider_from(&out, row, bits, ty.starts_with('s'))?;
        }
        Ok(())
    }

    fn write_wider_from(&mut self, out: &Operand<'a>, row: u32, bits: u32, signed: bool) -> Result<()> {
        let Some(copy) = int::bits("mov", bits) else { return self.unsupported(format!("{bits} bits")) };
        self.write_wider_operand(out, bits, signed, |s, to| s.emit(copy, [to, row, 0, 0, 0, 0], 0))
    }

    fn lower_store(&mut self, inst: &Inst<'a>) -> Result<()> {
        let Access { ty, bits, registers, address, space, fence, .. } = self.access(inst, 1, 0)?;
        let n = registers.len();
        let mut r = [NONE; 6];
        for (k, input) in registers.iter().enumerate() {
            r[k] = self.source(input, ty)?;
        }
        if fence {
            self.emit(memory::FENCE, [0; 6], 0);
        }
        match address {
            Address::Frame(at) if space == Space::Local => match memory::frame_store_handler(bits, n) {
                Some(handler) => self.emit(handler, r, at),
                None => return self.unknown(inst),
            },
            _ => {
                let (row, narrow, offset, _) = self.address_row(self.operand(inst, 0)?)?;
                let Some(handler) = memory::store_handler(space, bits, n) else { return self.unknown(inst) };
                r[4] = row;
                self.emit_flags(handler, r, offset, if narrow { ADDRESS_32 } else { 0 });
            }
        }
        Ok(())
    }

    fn lower_atomic(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        // Vectors have their type before the operation, though NVIDIA's compiler writes it at the end.
        let ty = mods.ty();
        Self::take_order(&mut mods);
        Self::take_hints(&mut mods);
        let named = space(&mut mods);
        let op = mods
            .one_of(&["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"])
            .unwrap_or("");
        let name = if mods.has("noftz") { format!("{op}.noftz") } else { op.to_string() };
        let vector = mods.one_of(&["v2", "v4", "v8"]);
        let has_result = inst.name == "atom";
        let at = usize::from(has_result);
        let (row, narrow, offset, implied) = self.address_row(self.operand(inst, at)?)?;
        let space = named.or(implied).unwrap_or(Space::Generic);
        let handler = self.found(inst, atomic::handler(&name, ty, space), &mods)?;
        let Some(bits) = type_bits(ty) else { return self.unknown(inst) };
        let flags = if narrow { ADDRESS_32 } else { 0 };
        if let Some(vector) = vector {
            // Each element is a separate atomic operation.
            let Operand::Vector(sources) = self.operand(inst, at + 1)? else { return self.unknown(inst) };
            let count: usize = vector[1..].parse().unwrap_or(0);
            if sources.len() != count || op == "cas" {
                return self.unknown(inst);
            }
            let rows = sources.iter().map(|s| self.source(s, ty)).collect::<Result<Vec<_>>>()?;
            let mut to = vec![NONE; count];
            if let (true, Operand::Vector(list)) = (has_result, self.operand(inst, 0)?) {
                for (slot, dst) in to.iter_mut().zip(list) {
                    *slot = if *dst == Operand::Sink { NONE } else { self.destination(dst, bits)? };
                }
            }
            // The results wait in rows of their own if one would change what a later element reads.
            let own = (1..count).any(|n| to[..n].contains(&rows[n]) || to[..n].contains(&row));
            let results: Vec<u32> = match own {
                true => to.iter().map(|_| self.allocate_row(bits)).collect(),
                false => to.clone(),
            };
            for n in 0..count {
                let offset = offset.wrapping_add(i64::from(n as u32 * bits / 8));
                self.emit_flags(handler, [results[n], rows[n], rows[n], 0, row, 0], offset, flags);
            }
            for (to, result) in to.into_iter().zip(results).filter(|(to, _)| own && *to != NONE) {
                let Some(copy) = int::bits("mov", bits) else { return self.unknown(inst) };
                self.emit(copy, [to, result, 0, 0, 0, 0], 0);
            }
            return Ok(());
        }
        let b = self.source(self.operand(inst, at + 1)?, ty)?;
        let c = if op == "cas" { self.source(self.operand(inst, at + 2)?, ty)? } else { b };
        let to = match self.operand(inst, 0)? {
            Operand::Sink => NONE,
            dst if has_result => self.destination(dst, bits)?,
            _ => NONE,
        };
        self.emit_flags(handler, [to, b, c, 0, row, 0], offset, flags);
        Ok(())
    }

    fn lower_cvta(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let ty = mods.last();
        let to_space = mods.has("to");
        let named = space(&mut mods);
        let named = match named {
            Some(Space::Param) if !self.is_kernel() => Some(Space::Local),
            other => other,
        };
        let Some(window) = named.and_then(window).filter(|_| mods.done() && ty == "u64") else {
            return self.unknown(inst);
        };
        let a = self.source(self.operand(inst, 1)?, "u64")?;
        let to = self.destination(self.operand(inst, 0)?, 64)?;
        let offset = if to_space { (window as i64).wrapping_neg() } else { window as i64 };
        self.emit(OFFSET, [to, a, 0, 0, 0, 0], offset);
        Ok(())
    }

    /// The local memory of a call's argument or result. A plain register is copied through memory allocated
    /// for it.
    fn call_slot(&mut self, op: &Operand<'a>, size: u32, store: bool) -> Result<(u32, Option<u32>)> {
        if let Operand::Name(name, 0) = op
            && let Some(Symbol::Local(at)) = self.lookup(name)
        {
            return Ok((*at, None));
        }
        let bits = size * 8;
        let at = self.allocate_local(size, size.next_power_of_two().min(16))?;
        if !store {
            return Ok((at, Some(bits)));
        }
        let row = self.source(op, super::function::unsigned(bits))?;
        let Some(handler) = memory::frame_store_handler(bits, 1) else {
            return self.unsupported("this kind of argument");
        };
        self.emit(handler, [row, NONE, NONE, NONE, NONE, NONE], i64::from(at));
        Ok((at, Some(bits)))
    }

    pub fn lower_call(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut ops = inst.operands.as_slice();
        let empty = Vec::new();
        let results = match ops.first() {
            Some(Operand::List(list)) => {
                ops = &ops[1..];
                list
            }
            _ => &empty,
        };
        let Some(Operand::Name(name, 0)) = ops.first() else { return self.unknown(inst) };
        let arguments = match ops.get(1) {
            Some(Operand::List(list)) => list,
            _ => &empty,
        };
        let target = match self.lookup(name) {
            Some(Symbol::Function(index)) => Some(*index),
            _ => None,
        };
        // Sizes matter only for registers passed directly; a prototype gives them.
        let prototype = match ops.last() {
            Some(Operand::Name(proto, 0)) => self.lookup(proto).cloned(),
            _ => None,
        };
        let (argument_sizes, result_sizes) = match prototype {
            Some(Symbol::Prototype { params, returns }) => (params, returns),
            _ => Default::default(),
        };
        let mut list = vec![arguments.len() as u32, results.len() as u32];
        for (n, op) in arguments.iter().enumerate() {
            let own = self.register_bits(op).map(|b| b / 8);
            let size = own.or_else(|| argument_sizes.get(n).copied()).unwrap_or(4);
            list.push(self.call_slot(op, size, true)?.0);
        }
        let mut loads = Vec::new();
        for (n, op) in results.iter().enumerate() {
            let own = self.register_bits(op).map(|b| b / 8);
            let size = own.or_else(|| result_sizes.get(n).copied()).unwrap_or(4);
            let (at, bits) = self.call_slot(op, size, false)?;
            list.push(at);
            if let Some(bits) = bits {
                loads.push((op, at, bits));
            }
        }
        let ext = self.ext.len() as u32;
        self.ext.extend(list);
        match target {
            Some(index) => self.control(Kind::Call, [index as u32, ext, 0, 0, 0, 0]),
            None => {
                let row = self.source(&ops[0], "u64")?;
                self.control(Kind::CallIndirect, [row, ext, 0, 0, 0, 0]);
            }
        }
        for (op, at, bits) in loads {
            let Some(handler) = memory::frame_load_handler(bits, 1) else {
                return self.unsupported("this kind of result");
            };
            let to = self.destination(op, bits)?;
            self.emit(handler, [to, NONE, NONE, NONE, NONE, NONE], i64::from(at));
        }
        Ok(())
    }
}
