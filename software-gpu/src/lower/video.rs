//! Video instructions on two halves or four bytes, as the CUDA headers' `__vabsdiffu4` and its like use them. Those that choose
//! bytes of their operands (`.b0`, a mask) are refused.

use super::function::Lowering;
use super::inst::Modifiers;
use crate::error::Result;
use crate::exec::video::{SIDE_BY_SIDE, field};
use crate::ptx::ast::Inst;

impl<'a> Lowering<'a, '_> {
    pub fn lower_video(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let (name, parts) = inst.name.split_at(inst.name.len() - 1);
        let operation = match name {
            "vadd" => field::ADD,
            "vsub" => field::SUB,
            "vavrg" => field::AVERAGE,
            "vabsdiff" => field::DIFFERENCE,
            "vmin" => field::MIN,
            "vmax" => field::MAX,
            _ => {
                let compare = mods.one_of(&["eq", "ne", "lt", "le", "gt", "ge"]);
                match ["eq", "ne", "lt", "le", "gt", "ge"].iter().position(|c| Some(*c) == compare) {
                    Some(n) => field::EQ + n as i64,
                    None => return self.unknown(inst),
                }
            }
        };
        let mut imm = operation | if parts == "4" { field::BYTES } else { 0 };
        imm |= if mods.has("sat") { field::SATURATE } else { 0 };
        imm |= if mods.has("add") { field::SUM } else { 0 };
        // A comparison has no type of its result.
        let typed = operation < field::EQ;
        let flags = [field::SIGNED_B, field::SIGNED_A, field::SIGNED_RESULT];
        for flag in flags.into_iter().take(2 + usize::from(typed)) {
            match mods.last() {
                "s32" => imm |= flag,
                "u32" => {}
                _ => return self.unknown(inst),
            }
        }
        let handler = self.found(inst, Some(SIDE_BY_SIDE), &mods)?;
        self.simple(inst, handler, 32, &["b32"; 3], imm)
    }
}
