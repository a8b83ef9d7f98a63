//! The sizes of types and variables, and where variables lie in memory that has a limit.

use crate::error::{Error, Result};
use crate::ptx::ast::{Linkage, Space, Var};

/// The width in bits of a value of type `ty`, or `None` if no value can have that type.
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

/// The largest alignment of a variable in bytes.
const MAX_ALIGNMENT: u32 = 64 << 10;

/// The size and alignment of a variable in bytes.
pub(crate) fn layout(var: &Var<'_>) -> Result<(u64, u32)> {
    let bits = type_bits(var.ty).filter(|&b| b >= 8).ok_or_else(|| Error::InvalidPtx {
        line: var.line,
        message: format!("a variable of type .{}", var.ty),
    })?;
    let element = u64::from(bits / 8 * var.vector);
    if var.space == Space::Shared && var.linkage != Linkage::Extern && var.elements == Some(0) {
        let message = format!("{} has no size; dynamic shared memory is .extern", var.name);
        return Err(Error::InvalidPtx { line: var.line, message });
    }
    let size = element.checked_mul(var.elements.unwrap_or(1)).filter(|&s| s < 1 << 40);
    let size = size
        .ok_or_else(|| Error::InvalidPtx { line: var.line, message: format!("{} is too large", var.name) })?;
    let align = var.align.max(element as u32);
    if !align.is_power_of_two() || align > MAX_ALIGNMENT {
        return Err(Error::InvalidPtx {
            line: var.line,
            message: format!("alignment {align} of {}", var.name),
        });
    }
    Ok((size, align))
}

/// Memory in which variables lie one after the other.
pub(crate) struct Placement<'a> {
    /// What it is and whose, for errors.
    what: &'static str,
    of: &'a str,
    /// The most bytes that it can have.
    most: u32,
    /// The end of the variables in use.
    pub end: u32,
    /// The largest end so far.
    pub size: u32,
    /// The largest alignment so far.
    pub align: u32,
}

impl<'a> Placement<'a> {
    pub fn new(what: &'static str, of: &'a str, most: u32) -> Self {
        Placement { what, of, most, end: 0, size: 0, align: 1 }
    }

    /// Places `size` bytes, which a variable in this line has, at a multiple of `align`.
    pub fn place(&mut self, size: u64, align: u32, line: u32) -> Result<u32> {
        let at = u64::from(self.end).next_multiple_of(align.into());
        let end = at.saturating_add(size);
        if end > self.most.into() {
            let Placement { what, of, most, .. } = self;
            let message = format!("the {what} of {of} takes {end} bytes; at most {most} are possible");
            return Err(Error::InvalidPtx { line, message });
        }
        self.end = end as u32;
        self.size = self.size.max(self.end);
        self.align = self.align.max(align);
        Ok(at as u32)
    }

    /// Places a variable. Returns its offset and size.
    pub fn place_variable(&mut self, var: &Var<'_>) -> Result<(u32, u32)> {
        let (size, align) = layout(var)?;
        let at = self.place(size, align, var.line)?;
        Ok((at, self.end - at))
    }
}
