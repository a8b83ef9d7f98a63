//! The device runtime's functions, which PTX calls without defining: printf, assert, malloc, free, launches
//! from kernels, and setting a graph's condition, which is a word at the address that serves as its handle.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::Fault;
use crate::exec::memory::{Generic, Place, Writable};
use crate::machine::launcher::{INVALID_VALUE, LaunchConfig, MEMORY_ALLOCATION, Source, Transfer};
use crate::machine::memory::Plane;
use crate::machine::program::Builtin;
use crate::machine::row::LANES;
use crate::machine::warp::{Flow, Warp};

/// Longer strings are cut off, so that a missing terminator does not read all memory.
const MAX_STRING: u64 = 64 << 10;
/// `cudaErrorInvalidMemcpyDirection`.
const INVALID_DIRECTION: u32 = 21;
/// A `cudaMemcpyKind`.
const DEVICE_TO_DEVICE: u64 = 3;
const DEFAULT_KIND: u64 = 4;
/// `cudaEventDisableTiming`.
const DISABLE_TIMING: u64 = 2;
/// The result of `cudaRuntimeGetVersion` in a kernel.
const RUNTIME_VERSION: u32 = 6000;
/// The handle of every stream and event that a kernel creates.
const ORDER: u64 = 0x100;

/// Runs a device runtime function for each lane in `mask`. Its parameters are in the threads' local memory,
/// like those of any callee.
pub(crate) fn run(
    w: &mut Warp,
    which: Builtin,
    mask: u32,
    base: u32,
    params: &[(u32, u32)],
    result: u32,
) -> Flow {
    for lane in 0..LANES {
        if mask >> lane & 1 == 0 {
            continue;
        }
        let mut values = [0u64; 8];
        for (value, &(offset, size)) in values.iter_mut().zip(params) {
            if let Some(p) = w.local.at(lane, u64::from(base + offset), size) {
                for n in 0..size.min(8) {
                    // SAFETY: `at` has checked `size` bytes.
                    *value |= u64::from(unsafe { p.add(n as usize).read() }) << (8 * n);
                }
            }
        }
        let answer = match which {
            Builtin::Vprintf => match format(w, lane, values[0], values[1]) {
                Ok((text, arguments)) => {
                    (w.block().grid().hardware.printf)(&text);
                    arguments
                }
                Err(address) => {
                    return w.set_fault(
                        Fault::IllegalAddress { access: "read", space: "generic", address, size: 1 },
                        lane,
                    );
                }
            },
            Builtin::AssertFail => {
                let read = |w: &mut Warp, at| {
                    String::from_utf8_lossy(&string(w, lane, at).unwrap_or_default()).into_owned()
                };
                let fault = Fault::Assert {
                    message: read(w, values[0]),
                    file: read(w, values[1]),
                    line: values[2] as u32,
                    function: read(w, values[3]),
                };
                return w.set_fault(fault, lane);
            }
            Builtin::Malloc => w.block().memory().allocate_heap(values[0]).unwrap_or(0),
            Builtin::Free => {
                if values[0] != 0 && w.block().memory().free_heap(values[0]).is_err() {
                    return w.set_fault(
                        Fault::IllegalAddress {
                            access: "free",
                            space: "global",
                            address: values[0],
                            size: 1,
                        },
                        lane,
                    );
                }
                0
            }
            Builtin::SetCondition => {
                let Some(p) = target(w, lane, values[0], 4) else { return Flow::Fault };
                // SAFETY: `target` has checked four aligned bytes.
                unsafe { AtomicU32::from_ptr(p.cast()).store(values[1] as u32, Ordering::Release) };
                0
            }
            Builtin::ParameterBuffer => {
                let offset = |n: usize| params.get(n).map_or(0, |p| base + p.0);
                let config = LaunchConfig {
                    grid: dimensions(w, lane, offset(1)),
                    block: dimensions(w, lane, offset(2)),
                    dynamic_shared: values[3] as u32,
                    cooperative: false,
                    cluster: None,
                };
                let draft = w.block().grid().launcher.draft(values[0], config);
                draft.unwrap_or_else(|error| {
                    w.launch_errors[lane] = error;
                    0
                })
            }
            Builtin::LaunchDevice => {
                let error = w.block().grid().launcher.launch(values[0], values[1]).err().unwrap_or(0);
                if error != 0 {
                    w.launch_errors[lane] = error;
                }
                error.into()
            }
            Builtin::GetLastError => std::mem::take(&mut w.launch_errors[lane]).into(),
            Builtin::PeekAtLastError => w.launch_errors[lane].into(),
            Builtin::MakeEvent if values[1] & DISABLE_TIMING == 0 => {
                w.launch_errors[lane] = INVALID_VALUE;
                INVALID_VALUE.into()
            }
            Builtin::MakeStream | Builtin::MakeEvent => {
                let Some(p) = target(w, lane, values[0], 8) else { return Flow::Fault };
                // SAFETY: `target` has checked eight aligned bytes.
                unsafe { p.cast::<u64>().write(ORDER) };
                0
            }
            Builtin::KeepOrder => 0,
            Builtin::CopyAsync | Builtin::CopyRowsAsync | Builtin::FillAsync | Builtin::FillRowsAsync => {
                let error = transfer(w, which, values).err().unwrap_or(0);
                if error != 0 {
                    w.launch_errors[lane] = error;
                }
                error.into()
            }
            Builtin::TellDevice | Builtin::TellDeviceCount | Builtin::TellVersion => {
                let Some(p) = target(w, lane, values[0], 4) else { return Flow::Fault };
                let word = match which {
                    Builtin::TellDevice => 0,
                    Builtin::TellDeviceCount => 1,
                    _ => RUNTIME_VERSION,
                };
                // SAFETY: `target` has checked four aligned bytes.
                unsafe { p.cast::<u32>().write(word) };
                0
            }
            Builtin::ErrorText | Builtin::ErrorName => {
                let gpu = &w.block().grid().hardware;
                gpu.texts.address(&gpu.memory, values[0] as u32, which == Builtin::ErrorName)
            }
            Builtin::DeviceMalloc => {
                let Some(p) = target(w, lane, values[0], 8) else { return Flow::Fault };
                let found = w.block().memory().allocate_heap(values[1]);
                // SAFETY: `target` has checked eight aligned bytes.
                unsafe { p.cast::<u64>().write(found.unwrap_or(0)) };
                let error = if found.is_some() { 0 } else { MEMORY_ALLOCATION };
                if error != 0 {
                    w.launch_errors[lane] = error;
                }
                error.into()
            }
            Builtin::DeviceFree => {
                let unknown = values[0] != 0 && w.block().memory().free_heap(values[0]).is_err();
                if unknown {
                    w.launch_errors[lane] = INVALID_VALUE;
                }
                u64::from(unknown) * u64::from(INVALID_VALUE)
            }
        };
        if matches!(which, Builtin::Free | Builtin::AssertFail | Builtin::SetCondition) {
            continue;
        }
        let size: u32 = if matches!(
            which,
            Builtin::Malloc | Builtin::ParameterBuffer | Builtin::ErrorText | Builtin::ErrorName
        ) {
            8
        } else {
            4
        };
        if let Some(p) = w.local.at(lane, u64::from(result), size) {
            // SAFETY: `at` has checked `size` bytes.
            unsafe { std::ptr::copy_nonoverlapping(answer.to_le_bytes().as_ptr(), p, size as usize) };
        }
    }
    Flow::Next
}

/// Starts a copy or fill that a kernel requests. The error is one of the runtime's codes.
fn transfer(w: &mut Warp, which: Builtin, v: [u64; 8]) -> Result<(), u32> {
    let rows = |addr: u64, pitch: u64| Plane { addr, pitch };
    // The source, the size, whether a copy's kind involves host memory, and the stream.
    let (to, from, [width, height], kind, stream) = match which {
        Builtin::CopyAsync => (rows(v[0], v[2]), Source::Memory(rows(v[1], v[2])), [v[2], 1], v[3], v[4]),
        Builtin::CopyRowsAsync => {
            (rows(v[0], v[1]), Source::Memory(rows(v[2], v[3])), [v[4], v[5]], v[6], v[7])
        }
        Builtin::FillAsync => (rows(v[0], v[2]), Source::Value(v[1] as u8), [v[2], 1], DEFAULT_KIND, v[3]),
        _ => (rows(v[0], v[1]), Source::Value(v[2] as u8), [v[3], v[4]], DEFAULT_KIND, v[5]),
    };
    if !matches!(kind, DEVICE_TO_DEVICE | DEFAULT_KIND) {
        return Err(INVALID_DIRECTION);
    }
    let transfer = Transfer { to, from, width, height };
    if !transfer.is_inside(&w.block().grid().hardware.memory) {
        return Err(INVALID_VALUE);
    }
    w.block().grid().launcher.transfer(transfer, stream)
}

/// The host address of an output of `size` bytes, if the kernel can write there and it is aligned to `size`.
fn target(w: &mut Warp, lane: usize, address: u64, size: u32) -> Option<*mut u8> {
    let found = Writable::find(w, lane, address, size).filter(|_| address.is_multiple_of(size.into()));
    if found.is_none() {
        w.set_fault(Fault::IllegalAddress { access: "write", space: "generic", address, size }, lane);
    }
    found
}

/// Three numbers in a thread's local memory.
fn dimensions(w: &mut Warp, lane: usize, at: u32) -> [u32; 3] {
    match w.local.at(lane, at.into(), 12) {
        // SAFETY: `at` has checked twelve bytes.
        Some(p) => unsafe { p.cast::<[u32; 3]>().read_unaligned() },
        None => [0; 3],
    }
}

fn byte(w: &mut Warp, lane: usize, address: u64) -> Option<u8> {
    // SAFETY: `find` has checked a byte.
    Generic::find(w, lane, address, 1).map(|p| unsafe { p.read_volatile() })
}

fn string(w: &mut Warp, lane: usize, address: u64) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    for n in 0..MAX_STRING {
        match byte(w, lane, address.wrapping_add(n))? {
            0 => break,
            b => out.push(b),
        }
    }
    Some(out)
}

fn word(w: &mut Warp, lane: usize, address: u64, size: u64) -> Result<u64, u64> {
    (0..size).try_fold(0u64, |v, n| {
        byte(w, lane, address.wrapping_add(n)).map(|b| v | u64::from(b) << (8 * n)).ok_or(address)
    })
}

/// The output of `printf`, and the number of arguments it converted. The error is an address that cannot be
/// read.
fn format(w: &mut Warp, lane: usize, format: u64, args: u64) -> Result<(Vec<u8>, u64), u64> {
    let text = string(w, lane, format).ok_or(format)?;
    let mut out = Vec::with_capacity(text.len());
    let (mut next, mut converted) = (args, 0);
    let mut take = |w: &mut Warp, size: u64| {
        next = next.next_multiple_of(size);
        let value = word(w, lane, next, size);
        next += size;
        value
    };
    let mut i = 0;
    while i < text.len() {
        if text[i] != b'%' {
            out.push(text[i]);
            i += 1;
            continue;
        }
        let start = i;
        i += 1;
        let mut spec = Spec::default();
        while let Some(&c) = text.get(i) {
            match c {
                b'-' => spec.left = true,
                b'+' => spec.plus = true,
                b' ' => spec.space = true,
                b'#' => spec.alternate = true,
                b'0' => spec.zero = true,
                _ => break,
            }
            i += 1;
        }
        let mut number = |i: &mut usize, w: &mut Warp| -> Result<Option<i64>, u64> {
            if text.get(*i) == Some(&b'*') {
                *i += 1;
                return Ok(Some(i64::from(take(w, 4)? as i32)));
            }
            let mut value = None;
            while let Some(d) = text.get(*i).filter(|c| c.is_ascii_digit()) {
                value = Some((value.unwrap_or(0) * 10 + i64::from(d - b'0')).min(4096));
                *i += 1;
            }
            Ok(value)
        };
        if let Some(width) = number(&mut i, w)? {
            spec.left |= width < 0;
            spec.width = width.unsigned_abs().min(4096) as usize;
        }
        if text.get(i) == Some(&b'.') {
            i += 1;
            // A negative one counts as none.
            spec.precision = usize::try_from(number(&mut i, w)?.unwrap_or(0)).ok().map(|p| p.min(4096));
        }
        let mut long = false;
        let mut short = 0;
        while let Some(&c) = text.get(i) {
            match c {
                b'l' | b'j' | b'z' | b't' => long = true,
                b'h' => short += 1,
                b'L' => {}
                _ => break,
            }
            i += 1;
        }
        let Some(&conversion) = text.get(i) else {
            out.extend_from_slice(&text[start..]);
            break;
        };
        i += 1;
        let size = if long { 8 } else { 4 };
        converted += u64::from(b"csdiuxXopfFeEgGaA".contains(&conversion));
        match conversion {
            b'%' => out.push(b'%'),
            b'c' => {
                let c = take(w, 4)? as u8;
                spec.pad(&mut out, b"", &[c], false);
            }
            b's' => {
                let at = take(w, 8)?;
                let mut s = if at == 0 { b"(null)".to_vec() } else { string(w, lane, at).ok_or(at)? };
                s.truncate(spec.precision.unwrap_or(usize::MAX));
                spec.pad(&mut out, b"", &s, false);
            }
            b'd' | b'i' => {
                let v = take(w, size)?;
                let v = match (long, short) {
                    (true, _) => v as i64,
                    (_, 0) => i64::from(v as i32),
                    (_, 1) => i64::from(v as i16),
                    _ => i64::from(v as i8),
                };
                spec.integer(&mut out, v < 0, v.unsigned_abs().to_string(), true, "");
            }
            b'u' | b'x' | b'X' | b'o' => {
                let v = take(w, size)?;
                let v = match (long, short) {
                    (true, _) => v,
                    (_, 0) => u64::from(v as u32),
                    (_, 1) => u64::from(v as u16),
                    _ => u64::from(v as u8),
                };
                let (digits, prefix) = match conversion {
                    b'x' => (format!("{v:x}"), "0x"),
                    b'X' => (format!("{v:X}"), "0X"),
                    b'o' => (format!("{v:o}"), "0"),
                    _ => (v.to_string(), ""),
                };
                spec.integer(
                    &mut out,
                    false,
                    digits,
                    false,
                    if spec.alternate && v != 0 { prefix } else { "" },
                );
            }
            b'p' => {
                let v = take(w, 8)?;
                let text = if v == 0 { "(nil)".into() } else { format!("0x{v:x}") };
                spec.pad(&mut out, b"", text.as_bytes(), false);
            }
            b'f' | b'F' | b'e' | b'E' | b'g' | b'G' | b'a' | b'A' => {
                let v = f64::from_bits(take(w, 8)?);
                spec.float(&mut out, v, conversion);
            }
            _ => out.extend_from_slice(&text[start..i]),
        }
    }
    Ok((out, converted))
}

#[derive(Default)]
struct Spec {
    left: bool,
    plus: bool,
    space: bool,
    alternate: bool,
    zero: bool,
    width: usize,
    precision: Option<usize>,
}

impl Spec {
    fn pad(&self, out: &mut Vec<u8>, sign: &[u8], body: &[u8], zeros: bool) {
        let fill = self.width.saturating_sub(sign.len() + body.len());
        if !self.left && !zeros {
            out.extend(std::iter::repeat_n(b' ', fill));
        }
        out.extend_from_slice(sign);
        if !self.left && zeros {
            out.extend(std::iter::repeat_n(b'0', fill));
        }
        out.extend_from_slice(body);
        if self.left {
            out.extend(std::iter::repeat_n(b' ', fill));
        }
    }

    fn sign(&self, negative: bool, signed: bool) -> &'static str {
        match (negative, signed && self.plus, signed && self.space) {
            (true, ..) => "-",
            (_, true, _) => "+",
            (_, _, true) => " ",
            _ => "",
        }
    }

    fn integer(&self, out: &mut Vec<u8>, negative: bool, digits: String, signed: bool, prefix: &str) {
        let digits = match self.precision {
            Some(0) if digits == "0" => String::new(),
            Some(p) => format!("{digits:0>p$}"),
            None => digits,
        };
        let sign = format!("{}{prefix}", self.sign(negative, signed));
        self.pad(out, sign.as_bytes(), digits.as_bytes(), self.zero && self.precision.is_none());
    }

    fn float(&self, out: &mut Vec<u8>, v: f64, conversion: u8) {
        let upper = conversion.is_ascii_uppercase();
        let mut sign = self.sign(v.is_sign_negative(), true).to_string();
        let a = v.abs();
        let mut body = if a.is_nan() {
            "nan".to_string()
        } else if a.is_infinite() {
            "inf".to_string()
        } else {
            let p = self.precision.unwrap_or(6);
            match conversion.to_ascii_lowercase() {
                b'f' => format!("{a:.p$}") + self.point(p),
                b'e' => exponent(a, p, self.point(p)),
                b'g' => general(a, p.max(1), self.alternate),
                _ => {
                    sign.push_str(if upper { "0X" } else { "0x" });
                    hexadecimal(a, self.precision, self.alternate)
                }
            }
        };
        if upper {
            body = body.to_uppercase();
        }
        self.pad(out, sign.as_bytes(), body.as_bytes(), self.zero && a.is_finite());
    }

    /// The decimal point that `#` keeps although no digits follow.
    fn point(&self, precision: usize) -> &'static str {
        if self.alternate && precision == 0 { "." } else { "" }
    }
}

/// C's `%e`.
fn exponent(a: f64, precision: usize, point: &str) -> String {
    let text = format!("{a:.precision$e}");
    let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
    let power: i32 = power.parse().unwrap_or(0);
    let sign = if power < 0 { '-' } else { '+' };
    format!("{digits}{point}e{sign}{:02}", power.abs())
}

/// C's `%g`.
fn general(a: f64, precision: usize, keep: bool) -> String {
    let scientific = exponent(a, precision - 1, if keep && precision == 1 { "." } else { "" });
    let power: i32 = scientific.split_once('e').and_then(|(_, p)| p.parse().ok()).unwrap_or(0);
    let trim = |s: &str| {
        if keep || !s.contains('.') {
            s.to_string()
        } else {
            s.trim_end_matches('0').trim_end_matches('.').to_string()
        }
    };
    if power < -4 || power >= precision as i32 {
        let (digits, exp) = scientific.split_once('e').unwrap_or((&scientific, "+00"));
        return format!("{}e{exp}", trim(digits));
    }
    let places = (precision as i32 - 1 - power).max(0) as usize;
    trim(&format!("{a:.places$}{}", if keep && places == 0 { "." } else { "" }))
}

/// C's `%a`, without the `0x`.
fn hexadecimal(a: f64, precision: Option<usize>, keep: bool) -> String {
    let bits = a.to_bits();
    let (exponent, fraction) = ((bits >> 52) as i32, bits & ((1 << 52) - 1));
    let (mut lead, power) = match (exponent, fraction) {
        (0, 0) => (0, 0),
        (0, _) => (0, -1022),
        _ => (1, exponent - 1023),
    };
    let digits = match precision {
        None => format!("{fraction:013x}").trim_end_matches('0').to_string(),
        Some(p) if p >= 13 => format!("{fraction:013x}{:0<1$}", "", p - 13),
        Some(p) => {
            // Round to nearest, ties to even.
            let cut = 52 - 4 * p as u32;
            let all = lead << 52 | fraction;
            let (kept, rest, half) = (all >> cut, all & ((1 << cut) - 1), 1u64 << (cut - 1));
            let kept = kept + u64::from(rest > half || rest == half && kept & 1 != 0);
            lead = kept >> (4 * p);
            let digits = kept & ((1 << (4 * p)) - 1);
            if p == 0 { String::new() } else { format!("{digits:0p$x}") }
        }
    };
    let point = if digits.is_empty() && !keep { "" } else { "." };
    format!("{lead}{point}{digits}p{power:+}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn float(spec: Spec, v: f64, conversion: u8) -> String {
        let mut out = Vec::new();
        spec.float(&mut out, v, conversion);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn hexadecimal_floats_are_rounded_and_padded_as_on_an_h200() {
        let p = |precision| Spec { precision: Some(precision), ..Spec::default() };
        assert_eq!(float(p(3), 3.625, b'a'), "0x1.d00p+1");
        assert_eq!(float(p(0), 1.5, b'a'), "0x2p+0");
        assert_eq!(float(p(0), 7.9, b'a'), "0x2p+2");
        assert_eq!(float(Spec { plus: true, ..p(5) }, -2.5, b'a'), "-0x1.40000p+1");
        assert_eq!(
            float(Spec { width: 20, zero: true, ..Spec::default() }, 1.0, b'a'),
            "0x000000000000001p+0"
        );
        assert_eq!(float(Spec { alternate: true, ..Spec::default() }, 2.0, b'a'), "0x1.p+1");
        assert_eq!(float(Spec::default(), 255.5, b'A'), "0X1.FFP+7");
        assert_eq!(float(Spec::default(), 1e-310, b'A'), "0X0.012688B70E62BP-1022");
    }

    #[test]
    fn a_point_without_digits_is_kept_on_request() {
        let spec = || Spec { alternate: true, precision: Some(0), ..Spec::default() };
        assert_eq!(float(spec(), 12345.678, b'e'), "1.e+04");
        assert_eq!(float(spec(), 2.0, b'f'), "2.");
        assert_eq!(float(Spec { alternate: true, ..Spec::default() }, 5.0, b'g'), "5.00000");
        assert_eq!(float(spec(), 5.0, b'g'), "5.");
    }
}
