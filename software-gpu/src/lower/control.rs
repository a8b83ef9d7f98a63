//! Lowers control flow, barriers, fences and warp-wide operations.

use super::function::{Lowering, Symbol};
use super::inst::Modifiers;
use crate::error::Result;
use crate::exec::{special_register, warp_ops};
use crate::machine::program::{Kind, NONE, barrier, joint};
use crate::ptx::ast::{Inst, Operand};

impl<'a> Lowering<'a, '_> {
    pub(super) fn lower_warp(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let last = inst.operands.len().saturating_sub(1);
        if inst.name == "activemask" {
            let to = self.destination(self.operand(inst, 0)?, 32)?;
            self.emit(warp_ops::ACTIVEMASK, [to, 0, 0, 0, 0, 0], 0);
            return Ok(());
        }
        if !mods.has("sync") {
            return self.unknown(inst);
        }
        match inst.name {
            "shfl" => {
                mods.has("b32");
                let mode = mods.last();
                let handler = self.found(inst, warp_ops::shuffle(mode), &mods)?;
                let members = self.source(self.operand(inst, 4)?, "b32")?;
                let a = self.source(self.operand(inst, 1)?, "b32")?;
                let b = self.source(self.operand(inst, 2)?, "b32")?;
                let c = self.source(self.operand(inst, 3)?, "b32")?;
                let (to, p) = match self.operand(inst, 0)? {
                    Operand::Pair(d, p) => (self.destination(d, 32)?, self.destination(p, 1)?),
                    d => (self.destination(d, 32)?, NONE),
                };
                self.converge(joint::SHUFFLE, handler, [to, a, b, c, p, members], 0);
            }
            "vote" => {
                mods.one_of(&["pred", "b32"]);
                let mode = mods.last();
                let handler = self.found(inst, warp_ops::vote(mode), &mods)?;
                let members = self.source(self.operand(inst, 2)?, "b32")?;
                let (p, negated) = self.predicate(self.operand(inst, 1)?)?;
                let to = self.destination(self.operand(inst, 0)?, if mode == "ballot" { 32 } else { 1 })?;
                let shape = if mode == "ballot" { joint::BALLOT } else { joint::VOTE };
                self.converge(shape, handler, [to, p, 0, 0, 0, members], i64::from(negated));
            }
            "match" => {
                let ty = mods.last();
                let mode = mods.last();
                let handler = self.found(inst, warp_ops::matching(mode, ty), &mods)?;
                let members = self.source(self.operand(inst, last)?, "b32")?;
                let a = self.source(self.operand(inst, 1)?, ty)?;
                let (to, p) = match self.operand(inst, 0)? {
                    Operand::Pair(d, p) => (self.destination(d, 32)?, self.destination(p, 1)?),
                    d => (self.destination(d, 32)?, NONE),
                };
                let shape = if ty == "b64" { joint::MATCH_64 } else { joint::MATCH_32 };
                self.converge(shape, handler, [to, a, p, 0, 0, members], 0);
            }
            "redux" => {
                let ty = mods.last();
                let op = mods.last();
                let handler = self.found(inst, warp_ops::redux(op, ty), &mods)?;
                let members = self.source(self.operand(inst, 2)?, "b32")?;
                let a = self.source(self.operand(inst, 1)?, ty)?;
                let to = self.destination(self.operand(inst, 0)?, 32)?;
                self.converge(joint::REDUX, handler, [to, a, 0, 0, 0, members], 0);
            }
            _ => {
                let members = self.source(self.operand(inst, 1)?, "b32")?;
                let Operand::Pair(d, p) = self.operand(inst, 0)? else { return self.unknown(inst) };
                let (to, p) = (self.destination(d, 32)?, self.destination(p, 1)?);
                self.converge(joint::ELECT, warp_ops::ELECT, [to, p, 0, 0, 0, members], 0);
            }
        }
        Ok(())
    }

    pub(super) fn lower_control(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        match inst.name {
            "bra" => {
                mods.has("uni");
                let Operand::Name(label, 0) = self.operand(inst, 0)? else { return self.unknown(inst) };
                self.branch(label)?;
            }
            "brx" => {
                mods.has("uni");
                mods.has("idx");
                let Operand::Name(list, 0) = self.operand(inst, 1)? else { return self.unknown(inst) };
                let Some(&Symbol::Targets(at)) = self.lookup(list) else {
                    return self.error(format!("no target list {list}"));
                };
                let index = self.source(self.operand(inst, 0)?, "u32")?;
                self.control(Kind::BranchIndexed, [at, index, 0, 0, 0, 0]);
            }
            "call" => return self.lower_call(inst),
            "ret" => {
                mods.has("uni");
                self.control(Kind::Return, [0; 6]);
            }
            "exit" => self.control(Kind::Exit, [0; 6]),
            "trap" => self.emit(special_register::TRAP, [0; 6], 0),
            "brkpt" | "pmevent" | "griddepcontrol" => {
                mods.one_of(&["wait", "launch_dependents", "mask"]);
                self.emit(special_register::NOTHING, [0; 6], 0);
            }
            "membar" => {
                if mods.one_of(&["cta", "gl", "sys"]).is_none() {
                    return self.unknown(inst);
                }
                self.emit(crate::exec::memory::FENCE, [0; 6], 0);
            }
            "fence" => {
                self.take_fence(&mut mods);
                self.emit(crate::exec::memory::FENCE, [0; 6], 0);
            }
            "nanosleep" => {
                mods.has("u32");
                let ns = self.source(self.operand(inst, 0)?, "u32")?;
                self.emit(special_register::NANOSLEEP, [0, ns, 0, 0, 0, 0], 0);
            }
            _ => return self.lower_barrier(inst, mods),
        }
        if mods.done() { Ok(()) } else { self.unknown(inst) }
    }

    /// Takes a fence's modifiers; every fence here is the strongest. Operations through other proxies
    /// (asynchronous copies, constants, textures) take effect in program order anyway.
    pub(super) fn take_fence(&self, mods: &mut Modifiers<'a>) {
        if mods.has("proxy") {
            if mods.one_of(&["alias", "async", "async::generic", "tensormap::generic"]).is_some() {
                mods.one_of(&["acquire", "release"]);
                mods.has("sync_restrict::shared::cta");
                mods.has("sync_restrict::shared::cluster");
                mods.one_of(&["global", "shared::cta", "shared::cluster"]);
            } else {
                // The proxy is not named, so the remaining modifiers are the error.
                mods.left.push("proxy");
                return;
            }
        } else if mods.has("mbarrier_init") {
            mods.has("release");
        } else {
            mods.one_of(&["sc", "acq_rel", "acquire", "release"]);
            mods.one_of(&["sync_restrict::shared::cta", "sync_restrict::shared::cluster"]);
        }
        mods.one_of(&["cta", "cluster", "gpu", "sys"]);
    }

    pub(super) fn lower_barrier(&mut self, inst: &Inst<'a>, mut mods: Modifiers<'a>) -> Result<()> {
        if mods.has("warp") {
            if !mods.has("sync") || !mods.done() {
                return self.unknown(inst);
            }
            let members = self.source(self.operand(inst, 0)?, "b32")?;
            self.control(Kind::WarpSync, [0, 0, 0, 0, 0, members]);
            return Ok(());
        }
        mods.has("cta");
        mods.has("aligned");
        if mods.has("cluster") {
            let kind = match mods.one_of(&["arrive", "wait"]) {
                Some("arrive") => Kind::ClusterArrive,
                Some(_) => Kind::ClusterWait,
                None => return self.unknown(inst),
            };
            mods.one_of(&["acquire", "release", "relaxed"]);
            if !mods.done() {
                return self.unknown(inst);
            }
            self.control(kind, [0; 6]);
            return Ok(());
        }
        if mods.has("red") {
            let ty = mods.last();
            let kind = match mods.last() {
                "popc" if ty == "u32" => barrier::RED_POPC,
                "and" if ty == "pred" => barrier::RED_AND,
                "or" if ty == "pred" => barrier::RED_OR,
                _ => return self.unknown(inst),
            };
            let id = self.source(self.operand(inst, 1)?, "u32")?;
            let count =
                if inst.operands.len() > 3 { self.source(self.operand(inst, 2)?, "u32")? } else { NONE };
            let last = self.operand(inst, inst.operands.len() - 1)?;
            let (p, negated) = self.predicate(last)?;
            let to =
                self.destination(self.operand(inst, 0)?, if kind == barrier::RED_POPC { 32 } else { 1 })?;
            self.emit_kind(
                Kind::Barrier,
                special_register::NOTHING,
                [id, count, kind, p, to, 0],
                i64::from(negated),
            );
            return if mods.done() { Ok(()) } else { self.unknown(inst) };
        }
        let kind = match mods.one_of(&["sync", "arrive"]) {
            Some("sync") => barrier::SYNC,
            Some(_) => barrier::ARRIVE,
            None => return self.unknown(inst),
        };
        if !mods.done() {
            return self.unknown(inst);
        }
        let id = self.source(self.operand(inst, 0)?, "u32")?;
        let count = if inst.operands.len() > 1 { self.source(self.operand(inst, 1)?, "u32")? } else { NONE };
        self.control(Kind::Barrier, [id, count, kind, 0, 0, 0]);
        Ok(())
    }
}
