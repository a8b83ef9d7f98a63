//! Lowers asynchronous copies and the barriers that wait for them.

use super::function::Lowering;
use super::inst::Modifiers;
use super::types::type_bits;
use crate::error::Result;
use crate::exec::asynchronous::{ACT, Action, COPY, PENDING, TEST, bulk};
use crate::exec::memory::{self, ADDRESS_32};
use crate::exec::{atomic, int, moves, reduction, special_register, tensor_copy};
use crate::machine::program::NONE;
use crate::ptx::ast::{Inst, Operand, Space};

impl<'a> Lowering<'a, '_> {
    /// The row of an address with its offset added, as 64 bits.
    fn wide_address(&mut self, op: &Operand<'a>) -> Result<u32> {
        let (mut row, narrow, offset, _) = self.address_row(op)?;
        if narrow {
            let wide = self.allocate_row(64);
            let Some(extend) = crate::exec::convert::cvt("u64", "u32", false) else {
                return self.unsupported("a 32-bit address");
            };
            self.emit(extend, [wide, row, 0, 0, 0, 0], 0);
            row = wide;
        }
        if offset != 0 {
            let sum = self.allocate_row(64);
            self.emit(moves::OFFSET, [sum, row, 0, 0, 0, 0], offset);
            row = sum;
        }
        Ok(row)
    }

    pub fn lower_copy_async(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let bulk_copy = mods.has("bulk");
        let reduces = mods.has("reduce");
        let known = if mods.has("async") && (bulk_copy || !reduces) {
            mods.one_of(&["commit_group", "wait_group", "wait_all", "mbarrier"])
        } else {
            return self.unknown(inst);
        };
        match known {
            // Copies complete when they are issued, so there is nothing to wait for.
            Some("commit_group" | "wait_group" | "wait_all") => {
                mods.has("read");
                if !mods.done() {
                    return self.unknown(inst);
                }
                self.emit(special_register::NOTHING, [0; 6], 0);
                return Ok(());
            }
            Some(_) => {
                // Without `.noinc`, the pending count is first incremented for this arrival, so nothing
                // changes.
                let counted = mods.has("noinc");
                mods.has("arrive");
                mods.one_of(&["shared", "shared::cta"]);
                if !mods.has("b64") || !mods.done() {
                    return self.unknown(inst);
                }
                if counted {
                    self.act(Action::Arrive, self.operand(inst, 0)?, None, None, NONE)?;
                }
                return Ok(());
            }
            None => {}
        }
        if bulk_copy && mods.has("tensor") {
            return self.lower_tensor(inst, mods, reduces);
        }
        if bulk_copy {
            return self.lower_bulk(inst, mods, reduces);
        }
        mods.one_of(&["ca", "cg"]);
        Self::take_hints(&mut mods);
        let spaces = mods.one_of(&["shared", "shared::cta"]).is_some() && mods.has("global");
        let Operand::Int(size @ (4 | 8 | 16)) = self.operand(inst, 2)? else { return self.unknown(inst) };
        let hinted = inst.modifiers.contains(&"L2::cache_hint");
        let there = inst.operands.len() - usize::from(hinted) > 3;
        if !spaces || !mods.done() {
            return self.unknown(inst);
        }
        let size = *size as i64;
        let to = self.wide_address(self.operand(inst, 0)?)?;
        let from = self.wide_address(self.operand(inst, 1)?)?;
        let count = match inst.operands.get(3).filter(|_| there).cloned() {
            // Whether to ignore the source.
            Some(op) if self.is_predicate(&op) => {
                let handler = self.found(inst, int::bits("selp", 32), &mods)?;
                let (p, negated) = self.predicate(&op)?;
                let (none, all) = (self.constant(32, 0), self.constant(32, size as u128));
                let (if_true, if_false) = if negated { (all, none) } else { (none, all) };
                let count = self.allocate_row(32);
                self.emit(handler, [count, if_true, if_false, p, 0, 0], 0);
                count
            }
            Some(op) => self.source(&op, "u32")?,
            None => NONE,
        };
        self.emit(COPY, [0, from, count, 0, to, 0], size);
        Ok(())
    }

    fn lower_bulk(&mut self, inst: &Inst<'a>, mut mods: Modifiers<'a>, reduces: bool) -> Result<()> {
        let mut number = 0;
        if reduces {
            let ty = mods.last();
            let noftz = if mods.has("noftz") { ".noftz" } else { "" };
            let op = mods.one_of(&["add", "min", "max", "inc", "dec", "and", "or", "xor"]).unwrap_or("");
            let Some(found) = reduction::find(&format!("{op}{noftz}"), ty) else { return self.unknown(inst) };
            number = found;
        }
        let hinted = mods.has("L2::cache_hint");
        if mods.has("prefetch") {
            let known = mods.has("L2") && mods.has("global") && mods.done() && !reduces;
            if !known || inst.operands.len() != 2 + usize::from(hinted) {
                return self.unknown(inst);
            }
            self.emit(special_register::NOTHING, [0; 6], 0);
            return Ok(());
        }
        let barrier = mods.has("mbarrier::complete_tx::bytes");
        let group = mods.has("bulk_group");
        let multicast = mods.has("multicast::cluster");
        let to = mods.one_of(&["shared::cluster", "shared::cta", "global"]);
        let from = mods.one_of(&["shared::cta", "global"]);
        let (Some(to), Some(_)) = (to, from) else { return self.unknown(inst) };
        if reduces && from != Some("shared::cta") {
            return self.unknown(inst);
        }
        let to_space = if to == "global" { Space::Global } else { Space::Shared };
        if multicast && !(barrier && to == "shared::cluster" && from == Some("global")) {
            return self.unknown(inst);
        }
        let expected = 3 + usize::from(barrier) + usize::from(multicast) + usize::from(hinted);
        let Some(handler) = bulk(to_space).filter(|_| mods.done() && barrier != group) else {
            return self.unknown(inst);
        };
        if inst.operands.len() != expected {
            return self.unknown(inst);
        }
        let dst = self.wide_address(self.operand(inst, 0)?)?;
        // A shared source is named by its generic address, which any address of its block may be.
        let src = self.wide_address(self.operand(inst, 1)?)?;
        let src = if from == Some("shared::cta") && to_space == Space::Shared {
            let sum = self.allocate_row(64);
            let window = crate::machine::address::SHARED_WINDOW as i64;
            self.emit(moves::OFFSET, [sum, src, 0, 0, 0, 0], window);
            sum
        } else {
            src
        };
        let size = self.source(self.operand(inst, 2)?, "u32")?;
        let waits = if barrier { self.wide_address(self.operand(inst, 3)?)? } else { NONE };
        let blocks = if multicast { self.source(self.operand(inst, 4)?, "u16")? } else { NONE };
        self.emit(handler, [blocks, src, size, waits, dst, 0], number);
        Ok(())
    }

    /// Copies of tiles by tensor map.
    fn lower_tensor(&mut self, inst: &Inst<'a>, mut mods: Modifiers<'a>, reduces: bool) -> Result<()> {
        let hinted = mods.has("L2::cache_hint");
        let barrier = mods.has("mbarrier::complete_tx::bytes");
        let group = mods.has("bulk_group");
        let multicast = mods.has("multicast::cluster");
        let prefetch = mods.has("prefetch") && mods.has("L2");
        mods.has("tile");
        let rank = mods.one_of(&["1d", "2d", "3d", "4d", "5d"]).and_then(|d| d[..1].parse::<usize>().ok());
        let to = mods.one_of(&["shared::cluster", "shared::cta", "global"]);
        let from = mods.one_of(&["shared::cta", "global"]);
        let operation = if reduces { mods.one_of(&tensor_copy::OPERATIONS[1..]) } else { Some("") };
        let number = tensor_copy::OPERATIONS.iter().position(|o| Some(*o) == operation);
        let load = !prefetch && to != Some("global");
        let known = match (prefetch, load) {
            (true, _) => to == Some("global") && from.is_none() && !barrier && !group && !reduces,
            (_, true) => from == Some("global") && barrier && !group && !reduces,
            (_, false) => from == Some("shared::cta") && group && !barrier && !multicast,
        };
        let (Some(rank), Some(number), true) = (rank, number, known && mods.done()) else {
            return self.unknown(inst);
        };
        if prefetch {
            self.emit(special_register::NOTHING, [0; 6], 0);
            return Ok(());
        }
        let expected = 2 + usize::from(load) + usize::from(multicast) + usize::from(hinted);
        let place = usize::from(load);
        let (Operand::Bracket(parts), true) = (self.operand(inst, place)?, inst.operands.len() == expected)
        else {
            return self.unknown(inst);
        };
        let [Operand::Name(map, addend), coordinates] = parts.as_slice() else { return self.unknown(inst) };
        let list = coordinates.elements();
        if list.len() != rank {
            return self.error(format!("{} coordinates for {rank} dimensions", list.len()));
        }
        let map = self.wide_address(&Operand::Address(Some(map), *addend))?;
        let mut ext = vec![rank as u32];
        for op in list {
            ext.push(self.source(op, "s32")?);
        }
        let at = self.ext.len() as u32;
        self.ext.extend(ext);
        let tile = self.wide_address(self.operand(inst, 1 - place)?)?;
        let waits = if load { self.wide_address(self.operand(inst, 2)?)? } else { NONE };
        let blocks = if multicast { self.source(self.operand(inst, 3)?, "u16")? } else { NONE };
        let handler = if load { tensor_copy::LOAD } else { tensor_copy::STORE };
        self.emit(handler, [blocks, map, at, waits, tile, 0], number as i64);
        Ok(())
    }

    /// `st.async` and `red.async`: the store or reduction, and the bytes that it completes on a barrier.
    pub fn lower_store_async(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let known = mods.has("async") && mods.has("mbarrier::complete_tx::bytes");
        mods.one_of(&["weak", "relaxed"]);
        mods.has("cluster");
        mods.has("shared::cluster");
        let vector = mods.one_of(&["v2", "v4"]).filter(|_| inst.name == "st");
        let ty = mods.last();
        let op = mods.one_of(&["add", "min", "max", "and", "or", "xor", "inc", "dec"]);
        let Some(bits @ (32 | 64)) = type_bits(ty).filter(|_| known && mods.done()) else {
            return self.unknown(inst);
        };
        let (row, narrow, offset, _) = self.address_row(self.operand(inst, 0)?)?;
        let flags = if narrow { ADDRESS_32 } else { 0 };
        let count = vector.map_or(1, |v| if v == "v2" { 2 } else { 4 });
        let mut r = [NONE; 6];
        r[4] = row;
        match (inst.name, op) {
            ("st", None) => {
                let inputs = self.operand(inst, 1)?.elements();
                if inputs.len() != count {
                    return self.unknown(inst);
                }
                for (slot, input) in r.iter_mut().zip(inputs) {
                    *slot = self.source(input, ty)?;
                }
                let handler = memory::store_handler(Space::Shared, bits, count);
                let handler = self.found(inst, handler, &mods)?;
                self.emit_flags(handler, r, offset, flags);
            }
            ("red", Some(op)) => {
                let handler = self.found(inst, atomic::handler(op, ty, Space::Shared), &mods)?;
                let b = self.source(self.operand(inst, 1)?, ty)?;
                self.emit_flags(handler, [NONE, b, b, 0, row, 0], offset, flags);
            }
            _ => return self.unknown(inst),
        }
        let bytes = Operand::Int(u64::from(bits) / 8 * count as u64);
        self.act(Action::Complete, self.operand(inst, 2)?, None, Some(&bytes), NONE)
    }

    /// Emits an operation on a barrier.
    fn act(
        &mut self,
        action: Action,
        address: &Operand<'a>,
        count: Option<&Operand<'a>>,
        bytes: Option<&Operand<'a>>,
        state: u32,
    ) -> Result<()> {
        let count = match count {
            Some(op) => self.source(op, "u32")?,
            None => self.constant(32, 1),
        };
        let bytes = match bytes {
            Some(op) => self.source(op, "u32")?,
            None => self.constant(32, 0),
        };
        let (row, narrow, offset, _) = self.address_row(address)?;
        let flags = if narrow { ADDRESS_32 } else { 0 };
        self.emit_flags(ACT, [state, count, bytes, action as u32, row, 0], offset, flags);
        Ok(())
    }

    pub fn lower_mbarrier(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let what = if mods.done() { "" } else { mods.take_first() };
        let noted = mods.has("noComplete");
        let expect = mods.has("expect_tx");
        let parity = mods.has("parity");
        let b64 = mods.has("b64");
        mods.one_of(&["release", "acquire", "relaxed"]);
        mods.one_of(&["cta", "cluster"]);
        let remote = mods.one_of(&["shared", "shared::cta", "shared::cluster"]) == Some("shared::cluster");
        if !mods.done() || !b64 && !matches!(what, "complete_tx" | "expect_tx") {
            return self.unknown(inst);
        }
        let ops = &inst.operands;
        match what {
            "init" => {
                self.act(Action::Init, self.operand(inst, 0)?, Some(self.operand(inst, 1)?), None, NONE)
            }
            "inval" => self.act(Action::Invalidate, self.operand(inst, 0)?, None, None, NONE),
            "expect_tx" | "complete_tx" => {
                let action = if what == "expect_tx" { Action::Expect } else { Action::Complete };
                self.act(action, self.operand(inst, 0)?, None, Some(self.operand(inst, 1)?), NONE)
            }
            "arrive" | "arrive_drop" => {
                // There is a state operand unless the barrier belongs to another block; a cluster of one
                // block has no other.
                let has_state = !remote && matches!(ops.first(), Some(Operand::Name(..) | Operand::Sink));
                let at = usize::from(!matches!(ops.first(), Some(Operand::Address(..))));
                let state =
                    if has_state && ops[0] != Operand::Sink { self.destination(&ops[0], 64)? } else { NONE };
                let last = ops.get(at + 1);
                let drop = what == "arrive_drop";
                let action = match (drop, expect) {
                    (false, false) => Action::Arrive,
                    (true, false) => Action::ArriveDrop,
                    (false, true) => Action::ArriveExpect,
                    (true, true) => Action::ArriveDropExpect,
                };
                let (count, bytes) = if expect { (None, last) } else { (last, None) };
                if noted && count.is_none() {
                    return self.unknown(inst);
                }
                self.act(action, self.operand(inst, at)?, count, bytes, state)
            }
            "test_wait" | "try_wait" => {
                let (row, narrow, offset, _) = self.address_row(self.operand(inst, 1)?)?;
                let (state, parity) = if parity {
                    (NONE, self.source(self.operand(inst, 2)?, "u32")?)
                } else {
                    (self.source(self.operand(inst, 2)?, "u64")?, NONE)
                };
                let p = self.destination(self.operand(inst, 0)?, 1)?;
                let flags = if narrow { ADDRESS_32 } else { 0 };
                self.emit_flags(TEST, [p, state, parity, 0, row, 0], offset, flags);
                Ok(())
            }
            "pending_count" => {
                let state = self.source(self.operand(inst, 1)?, "u64")?;
                let to = self.destination(self.operand(inst, 0)?, 32)?;
                self.emit(PENDING, [to, state, 0, 0, 0, 0], 0);
                Ok(())
            }
            _ => self.unknown(inst),
        }
    }
}
