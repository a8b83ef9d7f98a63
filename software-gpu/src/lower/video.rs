//! Lowers video instructions: on two halves or four bytes, as used by the CUDA headers' `__vabsdiffu4` and
//! related functions, and on single values selected from words.

use super::function::Lowering;
use super::inst::Modifiers;
use crate::error::Result;
use crate::exec::video::{SIDE_BY_SIDE, SINGLE, field};
use crate::ptx::ast::{Inst, Operand};

const COMPARISONS: [&str; 6] = ["eq", "ne", "lt", "le", "gt", "ge"];

/// The register of an operand, and the selected part of it, if any.
fn chosen<'a, 'i>(op: &'i Operand<'a>) -> (std::borrow::Cow<'i, Operand<'a>>, Option<&'a str>) {
    match op {
        Operand::Part(name, part) => (std::borrow::Cow::Owned(Operand::Name(name, 0)), Some(part)),
        op => (std::borrow::Cow::Borrowed(op), None),
    }
}

/// The digits after the letter of a selector, last one first.
fn digits(part: &str, letter: char) -> Option<Vec<i64>> {
    part.strip_prefix(letter)?.bytes().rev().map(|c| Some(i64::from(c.checked_sub(b'0')?))).collect()
}

impl<'a> Lowering<'a, '_> {
    pub fn lower_video(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let (name, parts) = inst.name.split_at(inst.name.len() - 1);
        let Some(operation) = Self::video_operation(name, &mut mods) else { return self.unknown(inst) };
        let (letter, count) = if parts == "4" { ('b', 4) } else { ('h', 2) };
        let mut imm = operation | if parts == "4" { field::BYTES } else { 0 };
        imm |= if mods.has("sat") { field::SATURATE } else { 0 };
        imm |= if mods.has("add") { field::SUM } else { 0 };
        let Some(types) = Self::video_types(operation, &mut mods) else { return self.unknown(inst) };
        imm |= types;
        let (to, mask) = chosen(self.operand(inst, 0)?);
        imm |= match mask.map(|part| digits(part, letter)) {
            None => (1 << count) - 1,
            Some(Some(list)) if list.iter().all(|n| *n < count) => list.iter().fold(0, |m, n| m | 1 << n),
            Some(_) => return self.unknown(inst),
        } << field::MASK;
        let mut rows = [0; 6];
        for (n, at) in [(1, field::CHOICE_A), (2, field::CHOICE_B)] {
            let (op, choice) = chosen(self.operand(inst, n)?);
            let list = match choice {
                None => (0..count).map(|k| k + count * (n as i64 - 1)).collect(),
                Some(part) => digits(part, letter).unwrap_or_default(),
            };
            if list.len() as i64 != count || list.iter().any(|k| *k >= 2 * count) {
                return self.unknown(inst);
            }
            imm |= list.iter().rev().fold(0, |v, k| v << 3 | k) << at;
            rows[n] = self.source(&op, "b32")?;
        }
        rows[3] = self.source(self.operand(inst, 3)?, "b32")?;
        rows[0] = self.destination(&to, 32)?;
        let handler = self.found(inst, Some(SIDE_BY_SIDE), &mods)?;
        self.emit(handler, rows, imm);
        Ok(())
    }

    /// The number of an operation that exists for single values and for parts side by side.
    fn video_operation(name: &str, mods: &mut Modifiers<'a>) -> Option<i64> {
        Some(match name {
            "vadd" => field::ADD,
            "vsub" => field::SUB,
            "vavrg" => field::AVERAGE,
            "vabsdiff" => field::DIFFERENCE,
            "vmin" => field::MIN,
            "vmax" => field::MAX,
            "vshl" => field::SHIFT_LEFT,
            "vshr" => field::SHIFT_RIGHT,
            "vmad" => field::PRODUCT,
            _ => {
                let compare = mods.one_of(&COMPARISONS)?;
                field::EQ + COMPARISONS.iter().position(|c| *c == compare)? as i64
            }
        })
    }

    /// Takes the operand types and the result type, which a comparison does not name.
    fn video_types(operation: i64, mods: &mut Modifiers<'a>) -> Option<i64> {
        let typed = !(field::EQ..field::EQ + 6).contains(&operation);
        let flags = [field::SIGNED_B, field::SIGNED_A, field::SIGNED_RESULT];
        flags.into_iter().take(2 + usize::from(typed)).try_fold(0, |all, flag| match mods.last() {
            "s32" => Some(all | flag),
            "u32" => Some(all),
            _ => None,
        })
    }

    /// Lowers the video instructions on single values.
    pub fn lower_single_video(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let Some(operation) = Self::video_operation(inst.name, &mut mods) else { return self.unknown(inst) };
        let mut imm = operation | if mods.has("sat") { field::SATURATE } else { 0 };
        imm |= match mods.one_of(&["add", "min", "max"]) {
            Some("add") => field::SUM,
            Some("min") => field::SECOND_MIN,
            Some(_) => field::SECOND_MAX,
            None => 0,
        };
        let second = imm & (field::SUM | field::SECOND_MIN | field::SECOND_MAX) != 0;
        let product = operation == field::PRODUCT;
        if product {
            imm |= if mods.has("po") { field::PLUS_ONE } else { 0 };
            imm |= match mods.one_of(&["shr7", "shr15"]) {
                Some("shr7") => 7,
                Some(_) => 15,
                None => 0,
            } << field::SCALE;
        } else if matches!(operation, field::SHIFT_LEFT | field::SHIFT_RIGHT) {
            match mods.one_of(&["wrap", "clamp"]) {
                Some("wrap") => imm |= field::WRAP,
                Some(_) => {}
                None => return self.unknown(inst),
            }
        }
        let Some(types) = Self::video_types(operation, &mut mods) else { return self.unknown(inst) };
        imm |= types;
        if inst.name == "vset" && types == field::SIGNED_A | field::SIGNED_B {
            imm |= field::SIGNED_RESULT;
        }
        let part = |choice: Option<&str>| match choice {
            None => Some(0),
            Some(choice) => {
                ["b0", "b1", "b2", "b3", "h0", "h1"].iter().position(|p| *p == choice).map(|n| n as i64 + 1)
            }
        };
        let (to, merged) = chosen(self.operand(inst, 0)?);
        let count = 3 + usize::from(merged.is_some() || second || product);
        if inst.operands.len() != count || merged.is_some() && (second || product) || second && product {
            return self.unknown(inst);
        }
        let mut minus = [false; 3];
        let mut rows = [0; 6];
        for n in 1..count {
            let op = match self.operand(inst, n)? {
                Operand::Minus(inner) if product => {
                    minus[n - 1] = true;
                    inner
                }
                op => op,
            };
            let (op, choice) = chosen(op);
            let (Some(code), true) = (part(choice), n < 3 || choice.is_none()) else {
                return self.unknown(inst);
            };
            imm |= match n {
                1 => code << field::PART_A,
                2 => code << field::PART_B,
                _ => 0,
            };
            rows[n] = self.source(&op, "b32")?;
        }
        if count == 3 {
            rows[3] = rows[2];
        }
        imm |= if minus[0] != minus[1] { field::MINUS_PRODUCT } else { 0 };
        imm |= if minus[2] { field::MINUS_C } else { 0 };
        // An H200 does not do what PTX specifies for these.
        let saturates = imm & field::SATURATE != 0;
        let whole = |flag: i64, at: u32| types & flag == 0 && imm >> at & 7 == 0;
        let whole_unsigned = whole(field::SIGNED_A, field::PART_A) || whole(field::SIGNED_B, field::PART_B);
        let signs = field::SIGNED_A | field::SIGNED_B;
        let unlike_ptx = match operation {
            field::SHIFT_LEFT => saturates,
            field::PRODUCT => (saturates || imm >> field::SCALE != 0) && types & signs != signs,
            field::SUB => {
                let larger = saturates || imm & (field::SECOND_MIN | field::SECOND_MAX) != 0;
                larger && types != 0 && whole_unsigned
            }
            _ => false,
        };
        if unlike_ptx {
            return self.unknown(inst);
        }
        let Some(code) = part(merged) else { return self.unknown(inst) };
        imm |= code << field::PART_RESULT;
        rows[0] = self.destination(&to, 32)?;
        let handler = self.found(inst, Some(SINGLE), &mods)?;
        self.emit(handler, rows, imm);
        Ok(())
    }
}
