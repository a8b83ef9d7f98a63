//! Tokens of PTX.

use crate::error::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Token<'a> {
    /// A name: instruction, register, symbol or label.
    Ident(&'a str),
    /// A directive, type or modifier without its dot: `reg`, `u32`, `shared::cta`.
    Dot(&'a str),
    Int(u64),
    F32(u32),
    F64(u64),
    Str(&'a str),
    Punct(u8),
    End,
}

fn is_name(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$')
}

/// Maximum tokens of a text: 1 GiB of memory, at 32 bytes each. Otherwise a text of one-byte tokens would
/// take 32 times its size.
const MAX_TOKENS: usize = 32 << 20;

/// The tokens with their line numbers. `End` is the last.
pub(crate) fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>> {
    up_to(text, MAX_TOKENS)
}

fn up_to(text: &str, most: usize) -> Result<Vec<(Token<'_>, u32)>> {
    let b = text.as_bytes();
    let mut out = Vec::with_capacity((text.len() / 4).min(most));
    let (mut i, mut line) = (0usize, 1u32);
    while i < b.len() {
        if out.len() > most {
            return Err(Error::InvalidPtx { line, message: format!("more than {most} tokens") });
        }
        let c = b[i];
        match c {
            b'\n' => {
                line += 1;
                i += 1;
            }
            b' ' | b'\t' | b'\r' => i += 1,
            b'/' if b.get(i + 1) == Some(&b'/') => {
                while i < b.len() && b[i] != b'\n' {
                    i += 1;
                }
            }
            b'/' if b.get(i + 1) == Some(&b'*') => {
                let from = line;
                i += 2;
                while !b[i.min(b.len())..].starts_with(b"*/") {
                    if i >= b.len() {
                        return Err(Error::InvalidPtx { line: from, message: "unterminated comment".into() });
                    }
                    line += u32::from(b[i] == b'\n');
                    i += 1;
                }
                i += 2;
            }
            b'"' => {
                let start = i + 1;
                i = start;
                while i < b.len() && b[i] != b'"' {
                    i += if b[i] == b'\\' { 2 } else { 1 };
                }
                if i >= b.len() {
                    return Err(Error::InvalidPtx { line, message: "unterminated string".into() });
                }
                out.push((Token::Str(&text[start..i]), line));
                i += 1;
            }
            b'.' if b.get(i + 1).is_some_and(|&c| is_name(c)) => {
                let start = i + 1;
                i = start;
                loop {
                    while i < b.len() && is_name(b[i]) {
                        i += 1;
                    }
                    if b[i..].starts_with(b"::") {
                        i += 2;
                    } else {
                        break;
                    }
                }
                out.push((Token::Dot(&text[start..i]), line));
            }
            b'0'..=b'9' => {
                let start = i;
                let (token, end) = number(text, start).ok_or_else(|| Error::InvalidPtx {
                    line,
                    message: format!("bad number {}", word(text, start)),
                })?;
                i = end;
                out.push((token, line));
            }
            // A percent sign only begins a name, so a register may follow an instruction without a space.
            _ if is_name(c) || c == b'%' => {
                let start = i;
                i += 1;
                while i < b.len() && is_name(b[i]) {
                    i += 1;
                }
                out.push((Token::Ident(&text[start..i]), line));
            }
            b'{' | b'}' | b'(' | b')' | b'[' | b']' | b'<' | b'>' | b',' | b';' | b':' | b'+' | b'-'
            | b'!' | b'|' | b'@' | b'=' | b'*' | b'~' | b'&' | b'/' | b'^' | b'?' => {
                out.push((Token::Punct(c), line));
                i += 1;
            }
            _ => {
                return Err(Error::InvalidPtx {
                    line,
                    message: format!("unexpected character {:?}", text[i..].chars().next().unwrap_or('?')),
                });
            }
        }
    }
    out.push((Token::End, line));
    Ok(out)
}

fn word(text: &str, start: usize) -> &str {
    let end = text[start..].find(|c: char| !c.is_ascii_alphanumeric()).map_or(text.len(), |n| start + n);
    &text[start..end]
}

fn number(text: &str, start: usize) -> Option<(Token<'_>, usize)> {
    let w = word(text, start);
    let end = start + w.len();
    let b = w.as_bytes();
    if b.len() >= 2 && b[0] == b'0' {
        match b[1] {
            b'f' | b'F' => return Some((Token::F32(u32::from_str_radix(&w[2..], 16).ok()?), end)),
            b'd' | b'D' => return Some((Token::F64(u64::from_str_radix(&w[2..], 16).ok()?), end)),
            _ => {}
        }
    }
    let rest = &text.as_bytes()[end..];
    let fraction = rest.first() == Some(&b'.') && rest.get(1).is_some_and(u8::is_ascii_digit);
    let exponent = !w.starts_with("0x") && !w.starts_with("0X") && w.contains(['e', 'E']);
    if fraction || exponent {
        let mut i = start;
        let t = text.as_bytes();
        while i < t.len()
            && (t[i].is_ascii_digit()
                || matches!(t[i], b'.' | b'e' | b'E')
                || (matches!(t[i], b'+' | b'-') && matches!(t[i - 1], b'e' | b'E')))
        {
            i += 1;
        }
        let value: f64 = text[start..i].parse().ok()?;
        return Some((Token::F64(value.to_bits()), i));
    }
    let digits = w.trim_end_matches('U');
    let value = if let Some(h) = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        u64::from_str_radix(h, 16).ok()?
    } else if let Some(h) = digits.strip_prefix("0b").or_else(|| digits.strip_prefix("0B")) {
        u64::from_str_radix(h, 2).ok()?
    } else if digits.len() > 1 && digits.starts_with('0') {
        u64::from_str_radix(&digits[1..], 8).ok()?
    } else {
        digits.parse().ok()?
    };
    Some((Token::Int(value), end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_register_follows_an_instruction_without_a_space() {
        let tokens: Vec<Token> =
            up_to("mov.u32%r6, %tid.x;", 100).unwrap().into_iter().map(|(t, _)| t).collect();
        let (mov, kind, to) = (Token::Ident("mov"), Token::Dot("u32"), Token::Ident("%r6"));
        assert_eq!(tokens[..4], [mov, kind, to, Token::Punct(b',')]);
        assert_eq!(tokens[4..6], [Token::Ident("%tid"), Token::Dot("x")]);
    }

    #[test]
    fn a_text_of_many_tokens_is_refused() {
        assert_eq!(up_to(";;;", 3).unwrap().len(), 4);
        let error = up_to(&";".repeat(1000), 100).unwrap_err().to_string();
        assert!(error.contains("more than 100 tokens"), "{error}");
    }
}
