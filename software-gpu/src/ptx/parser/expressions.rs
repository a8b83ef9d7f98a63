//! Constant expressions (PTX manual, 4.6): their value, while the text is parsed.

use super::Parser;
use crate::error::Result;
use crate::ptx::lexer::Token;

/// How strongly multiplication and division bind; see [`Parser::operator`].
pub(super) const FACTOR: u8 = 10;

impl Parser<'_> {
    /// A constant expression of operators that bind at least this strongly.
    pub(super) fn expression(&mut self, least: u8) -> Result<u64> {
        self.deeper("expression")?;
        let mut value = self.factor()?;
        while let Some((operator, strength)) = self.operator().filter(|(_, strength)| *strength >= least) {
            for _ in 0..operator.len() {
                self.next();
            }
            let other = self.expression(strength + 1)?;
            value = self.apply(operator, value, other)?;
        }
        if least == 0 && self.eat(b'?') {
            let yes = self.expression(0)?;
            self.expect(b':')?;
            let no = self.expression(0)?;
            value = if value != 0 { yes } else { no };
        }
        self.depth -= 1;
        Ok(value)
    }

    /// The operator that comes next, and how strongly it binds.
    fn operator(&self) -> Option<(&'static str, u8)> {
        let (Token::Punct(first), second) = (self.peek(), self.peek2()) else { return None };
        let second = if let Token::Punct(c) = second { c } else { 0 };
        Some(match (first, second) {
            (b'<', b'<') => ("<<", 8),
            (b'>', b'>') => (">>", 8),
            (b'<', b'=') => ("<=", 7),
            (b'>', b'=') => (">=", 7),
            (b'=', b'=') => ("==", 6),
            (b'!', b'=') => ("!=", 6),
            (b'&', b'&') => ("&&", 2),
            (b'|', b'|') => ("||", 1),
            (b'*', _) => ("*", FACTOR),
            (b'/', _) => ("/", FACTOR),
            (b'+', _) => ("+", 9),
            (b'-', _) => ("-", 9),
            (b'<', _) => ("<", 7),
            (b'>', _) => (">", 7),
            (b'&', _) => ("&", 5),
            (b'^', _) => ("^", 4),
            (b'|', _) => ("|", 3),
            _ => return None,
        })
    }

    fn apply(&self, operator: &str, a: u64, b: u64) -> Result<u64> {
        // The result of these depends on the operands' signs, which are not known here.
        let signed = matches!(operator, "/" | ">>" | "<" | ">" | "<=" | ">=") && (a | b) >> 63 != 0;
        if signed || operator == "/" && b == 0 || matches!(operator, "<<" | ">>") && b > 63 {
            return self.error(format!("cannot evaluate {a:#x} {operator} {b:#x}"));
        }
        Ok(match operator {
            "*" => a.wrapping_mul(b),
            "/" => a / b,
            "+" => a.wrapping_add(b),
            "-" => a.wrapping_sub(b),
            "<<" => a << b,
            ">>" => a >> b,
            "<" => (a < b).into(),
            ">" => (a > b).into(),
            "<=" => (a <= b).into(),
            ">=" => (a >= b).into(),
            "==" => (a == b).into(),
            "!=" => (a != b).into(),
            "&" => a & b,
            "^" => a ^ b,
            "|" => a | b,
            "&&" => (a != 0 && b != 0).into(),
            _ => (a != 0 || b != 0).into(),
        })
    }

    /// A number, or an expression with a sign or in parentheses.
    pub(super) fn factor(&mut self) -> Result<u64> {
        self.deeper("expression")?;
        let value = match self.next() {
            Token::Int(n) => n,
            Token::Ident("WARP_SZ") => 32,
            Token::Punct(b'+') => self.factor()?,
            Token::Punct(b'-') => self.factor()?.wrapping_neg(),
            Token::Punct(b'~') => !self.factor()?,
            Token::Punct(b'!') => (self.factor()? == 0).into(),
            Token::Punct(b'(') if matches!(self.peek(), Token::Dot("s64" | "u64")) => {
                self.next();
                self.expect(b')')?;
                self.factor()?
            }
            Token::Punct(b'(') => {
                let value = self.expression(0)?;
                self.expect(b')')?;
                value
            }
            _ => return self.error("expected an integer"),
        };
        self.depth -= 1;
        Ok(value)
    }
}
