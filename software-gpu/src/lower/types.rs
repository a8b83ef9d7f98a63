//! The sizes of types and variables.

use crate::error::{Error, Result};
use crate::ptx::ast::Var;

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

/// The size and alignment of a variable in bytes.
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
