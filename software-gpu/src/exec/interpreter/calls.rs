//! Calls, returns, exits, and `alloca`.

use std::sync::Arc;

use super::{Frame, Group, Interpreter, MAX_DEPTH, State, Step};
use crate::error::Fault;
use crate::exec::{device_runtime, rows};
use crate::machine::program::{Inst, NONE};
use crate::machine::properties::MAX_FRAMES;
use crate::machine::row::{LANES, Line};
use crate::machine::warp::Flow;

impl Interpreter {
    /// Allocates local memory for the rest of a call: the same range for all lanes, as large as the largest
    /// request.
    pub(super) fn alloca(&mut self, inst: &Inst, mask: u32) -> Step {
        let frame = self.groups[self.current].frame as usize;
        // SAFETY: the lowering guarantees rows of 64 bits, or of 32 if `r[2]` is 1.
        let sizes: [u64; LANES] = unsafe {
            if inst.r[2] == 1 {
                let row: [u32; LANES] = rows::get(&self.warp, inst.r[1]);
                row.map(u64::from)
            } else {
                rows::get(&self.warp, inst.r[1])
            }
        };
        let largest = (0..LANES).filter(|l| mask >> l & 1 != 0).map(|l| sizes[l]).max().unwrap_or(0);
        let base = u64::from(self.warp.local_base + self.code().local_bytes + self.frames[frame].extra);
        let at = base.next_multiple_of(inst.imm as u64);
        let end = at.saturating_add(largest).saturating_add(15) & !15;
        let limit = u64::from(self.warp.block().local_limit);
        if end > limit {
            let lane = mask.trailing_zeros() as usize;
            return self.fault(Fault::StackOverflow { bytes: end, limit }, lane);
        }
        self.warp.local.reserve(end as u32);
        self.frames[frame].extra = end as u32 - self.warp.local_base - self.code().local_bytes;
        // SAFETY: the lowering guarantees rows of 64 bits, or of 32 if `r[2]` is 1.
        unsafe {
            if inst.r[2] == 1 {
                rows::put(&self.warp, inst.r[0], mask, &[at as u32; LANES]);
            } else {
                rows::put(&self.warp, inst.r[0], mask, &[at; LANES]);
            }
        }
        Step::Continue
    }

    pub(super) fn exit(&mut self, mask: u32) {
        self.warp.live &= !mask;
        self.groups[self.current].mask &= !mask;
        let mut frame = self.groups[self.current].frame;
        while frame != NONE {
            self.frames[frame as usize].lanes &= !mask;
            let parent = self.frames[frame as usize].parent;
            if self.frames[frame as usize].lanes == 0 && parent != NONE {
                self.free_frame(frame);
            }
            frame = parent;
        }
        self.warp.block().exit(mask.count_ones());
        self.leave_counted_barriers();
        self.leave_cluster(mask);
    }

    /// Releases a frame in which no lane is left.
    fn free_frame(&mut self, id: u32) {
        let rows = std::mem::take(&mut self.frames[id as usize].rows);
        self.frame_bytes -= size_of_val(rows.as_slice()) as u32;
        self.free_frames.push(id);
    }

    /// Starts a call for the lanes in `mask` of the current group, which stays at the instruction after the
    /// call.
    pub(super) fn call(&mut self, function: usize, ext: u32, mask: u32) -> Step {
        let Some(callee) = self.program().functions.get(function).map(Arc::as_ptr) else {
            let what = format!("call of function {function}, which does not exist");
            return self.fault(Fault::InvalidPc(what), 0);
        };
        let caller = self.groups[self.current];
        // SAFETY: the launch keeps the program alive.
        let (callee, code) = unsafe { (&*callee, &*self.frames[caller.frame as usize].code) };
        let lane = mask.trailing_zeros() as usize;
        let depth = self.frames[caller.frame as usize].depth + 1;
        let parent = &self.frames[caller.frame as usize];
        // Both are at most the limit, and an alignment is far from the end of the numbers.
        let local_base =
            (parent.local_base + code.local_bytes + parent.extra).next_multiple_of(callee.local_align);
        let needed = u64::from(local_base) + u64::from(callee.local_bytes);
        let limit = u64::from(self.warp.block().local_limit);
        if needed > limit || depth > MAX_DEPTH {
            return self.fault(Fault::StackOverflow { bytes: needed, limit }, lane);
        }
        let rows = u64::from(self.frame_bytes) + u64::from(callee.frame_bytes);
        if rows > MAX_FRAMES.into() {
            let each = LANES as u64;
            let fault = Fault::StackOverflow { bytes: rows / each, limit: u64::from(MAX_FRAMES) / each };
            return self.fault(fault, lane);
        }
        if let Some(reason) = &callee.unsupported {
            return self.fault(Fault::IllegalInstruction(reason.to_string()), lane);
        }
        self.warp.local.reserve(needed as u32);
        let list = &code.ext[ext as usize..];
        let (args, rets) = (list[0] as usize, list[1] as usize);
        // A result that the callee does not have stays unchanged, as on hardware: Numba declares a result for
        // functions that return nothing.
        if args != callee.params.len() {
            let what = format!("call of {} with {args} arguments", callee.name);
            return self.fault(Fault::InvalidPc(what), lane);
        }
        let from = self.frames[caller.frame as usize].local_base;
        for (&src, &(dst, size)) in list[2..2 + args].iter().zip(&callee.params) {
            self.copy_local(mask, from + src, local_base + dst, size);
        }
        if let Some(builtin) = callee.builtin {
            let result = callee.returns.first().map_or(0, |r| local_base + r.0);
            if device_runtime::run(&mut self.warp, builtin, mask, local_base, &callee.params, result)
                == Flow::Fault
            {
                return Step::Fault;
            }
            for (&dst, &(src, size)) in list[2 + args..2 + args + rets].iter().zip(&callee.returns) {
                self.copy_local(mask, local_base + src, from + dst, size);
            }
            return Step::Schedule;
        }
        let frame = Frame {
            code: callee,
            rows: vec![Line([0; 64]); callee.frame_bytes as usize / 64],
            parent: caller.frame,
            return_pc: caller.pc,
            call_ext: ext,
            depth,
            local_base,
            extra: 0,
            lanes: mask,
        };
        self.frame_bytes = rows as u32;
        let id = match self.free_frames.pop() {
            Some(id) => {
                self.frames[id as usize] = frame;
                id
            }
            None => {
                self.frames.push(frame);
                self.frames.len() as u32 - 1
            }
        };
        self.groups[self.current].mask &= !mask;
        self.groups.push(Group { pc: 0, mask, frame: id, state: State::Ready, turns: caller.turns });
        Step::Schedule
    }

    /// Returns the current group, which consists of `mask`, to its caller.
    pub(super) fn leave(&mut self, mask: u32) {
        let id = self.groups[self.current].frame;
        let frame = &self.frames[id as usize];
        let (parent, return_pc, ext, base) =
            (frame.parent, frame.return_pc, frame.call_ext, frame.local_base);
        // SAFETY: the launch keeps the program alive.
        let (callee, code) = unsafe { (&*frame.code, &*self.frames[parent as usize].code) };
        let to = self.frames[parent as usize].local_base;
        let list = &code.ext[ext as usize..];
        let (args, rets) = (list[0] as usize, list[1] as usize);
        for (&dst, &(src, size)) in list[2 + args..2 + args + rets].iter().zip(&callee.returns) {
            self.copy_local(mask, base + src, to + dst, size);
        }
        let frame = &mut self.frames[id as usize];
        frame.lanes &= !mask;
        if frame.lanes == 0 {
            self.free_frame(id);
        }
        let group = &mut self.groups[self.current];
        group.frame = parent;
        group.pc = return_pc;
    }

    pub(super) fn copy_local(&mut self, mask: u32, src: u32, dst: u32, size: u32) {
        for l in 0..LANES {
            if mask >> l & 1 != 0
                && let (Some(s), Some(d)) =
                    (self.warp.local.at(l, u64::from(src), size), self.warp.local.at(l, u64::from(dst), size))
            {
                // SAFETY: `at` has checked `size` bytes of each; the caller's and callee's frames do not
                // overlap.
                unsafe { std::ptr::copy(s, d, size as usize) };
            }
        }
    }
}
