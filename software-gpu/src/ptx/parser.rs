//! The grammar of PTX.

mod expressions;

use std::collections::HashMap;

use self::expressions::FACTOR;
use super::ast::{Clusters, File, Function, Init, Inst, Linkage, Operand, Space, Stmt, Var};
use super::lexer::{Token, tokens};
use crate::error::{Error, Result};

/// The deepest nesting of blocks, lists and expressions. Compilers do not come near it.
const MAX_DEPTH: u32 = 200;

struct Parser<'a> {
    tokens: Vec<(Token<'a>, u32)>,
    at: usize,
    depth: u32,
    /// `.pragma "used_bytes_mask …"`, which is about the next instruction.
    used_bytes: Option<u32>,
    /// Whether the instruction is a call, whose operands in parentheses are lists.
    calling: bool,
    /// The type of each variable's elements and the length of their vectors, and what names of enclosing
    /// scopes meant.
    arrays: HashMap<&'a str, (&'a str, u32)>,
    hidden: Vec<(&'a str, Option<(&'a str, u32)>)>,
}

/// Parses a PTX file.
pub(crate) fn parse(text: &str) -> Result<File<'_>> {
    let mut p = Parser {
        tokens: tokens(text)?,
        at: 0,
        depth: 0,
        used_bytes: None,
        calling: false,
        arrays: HashMap::new(),
        hidden: Vec::new(),
    };
    let mut file =
        File { version: (0, 0), target: "", globals: Vec::new(), functions: Vec::new(), aliases: Vec::new() };
    while p.peek() != Token::End {
        p.top_level(&mut file)?;
    }
    Ok(file)
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Token<'a> {
        self.tokens[self.at].0
    }

    fn peek2(&self) -> Token<'a> {
        self.tokens.get(self.at + 1).map_or(Token::End, |t| t.0)
    }

    fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    fn next(&mut self) -> Token<'a> {
        let token = self.tokens[self.at].0;
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
        token
    }

    fn error<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(Error::InvalidPtx { line: self.line(), message: message.into() })
    }

    fn unexpected<T>(&self, wanted: &str) -> Result<T> {
        self.error(format!("expected {wanted}, found {:?}", self.peek()))
    }

    fn eat(&mut self, c: u8) -> bool {
        let found = self.peek() == Token::Punct(c);
        if found {
            self.next();
        }
        found
    }

    fn expect(&mut self, c: u8) -> Result<()> {
        if self.eat(c) { Ok(()) } else { self.unexpected(&format!("{:?}", char::from(c))) }
    }

    fn ident(&mut self) -> Result<&'a str> {
        match self.peek() {
            Token::Ident(name) => {
                self.next();
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn int(&mut self) -> Result<u64> {
        match self.peek() {
            Token::Int(value) => {
                self.next();
                Ok(value)
            }
            _ => self.unexpected("an integer"),
        }
    }

    fn top_level(&mut self, file: &mut File<'a>) -> Result<()> {
        let mut linkage = Linkage::default();
        let hidden = self.hidden.len();
        loop {
            match self.peek() {
                Token::Dot("version") => {
                    self.next();
                    let value = match self.next() {
                        Token::F64(bits) => f64::from_bits(bits),
                        Token::Int(n) => n as f64,
                        _ => return self.error("expected a version"),
                    };
                    let tenths = (value * 10.0).round() as u32;
                    file.version = (tenths / 10, tenths % 10);
                    return Ok(());
                }
                Token::Dot("target") => {
                    self.next();
                    file.target = self.ident()?;
                    while self.eat(b',') {
                        self.ident()?;
                    }
                    return Ok(());
                }
                Token::Dot("address_size") => {
                    self.next();
                    if self.int()? != 64 {
                        return self.error("only 64-bit addresses are supported");
                    }
                    return Ok(());
                }
                Token::Dot("file") => {
                    let line = self.line();
                    while self.line() == line && self.peek() != Token::End {
                        self.next();
                    }
                    return Ok(());
                }
                Token::Dot("section") => return self.skip_section(),
                Token::Dot("alias") => {
                    self.next();
                    let alias = self.ident()?;
                    self.expect(b',')?;
                    let target = self.ident()?;
                    self.expect(b';')?;
                    file.aliases.push((alias, target));
                    return Ok(());
                }
                Token::Dot("extern") => {
                    linkage = Linkage::Extern;
                    self.next();
                }
                Token::Dot("visible") => {
                    linkage = Linkage::Visible;
                    self.next();
                }
                Token::Dot("weak" | "common") => {
                    linkage = Linkage::Weak;
                    self.next();
                }
                Token::Dot("entry") => {
                    let f = self.function(true, linkage)?;
                    self.leave_scope(hidden);
                    file.functions.push(f);
                    return Ok(());
                }
                Token::Dot("func") => {
                    let f = self.function(false, linkage)?;
                    self.leave_scope(hidden);
                    file.functions.push(f);
                    return Ok(());
                }
                Token::Dot("pragma") => return self.skip_to_semicolon(),
                Token::Dot("global" | "const" | "shared" | "local" | "tex") => {
                    return self.variables(linkage, &mut |var| file.globals.push(var));
                }
                Token::Punct(b';') => {
                    self.next();
                    return Ok(());
                }
                _ => return self.unexpected("a directive"),
            }
        }
    }

    fn skip_to_semicolon(&mut self) -> Result<()> {
        while !matches!(self.peek(), Token::Punct(b';') | Token::End) {
            self.next();
        }
        self.expect(b';')
    }

    fn skip_section(&mut self) -> Result<()> {
        while !matches!(self.peek(), Token::Punct(b'{') | Token::End) {
            self.next();
        }
        self.expect(b'{')?;
        while !matches!(self.peek(), Token::Punct(b'}') | Token::End) {
            self.next();
        }
        self.expect(b'}')
    }

    fn space(name: &str) -> Option<Space> {
        Some(match name {
            "reg" => Space::Reg,
            "global" | "tex" => Space::Global,
            "const" => Space::Const,
            "shared" => Space::Shared,
            "local" => Space::Local,
            "param" => Space::Param,
            _ => return None,
        })
    }

    /// `.space .align N .v4 .type name[..] = .., name2 ..;`
    fn variables(&mut self, linkage: Linkage, sink: &mut dyn FnMut(Var<'a>)) -> Result<()> {
        let var = self.variable(linkage)?;
        let (space, align, ty, vector) = (var.space, var.align, var.ty, var.vector);
        sink(var);
        while self.eat(b',') {
            let mut more = Var { space, align, ty, vector, ..Self::blank(linkage, self.line()) };
            self.declarator(&mut more)?;
            sink(more);
        }
        self.expect(b';')
    }

    fn blank(linkage: Linkage, line: u32) -> Var<'a> {
        Var {
            space: Space::Reg,
            align: 0,
            ty: "",
            vector: 1,
            name: "",
            family: None,
            elements: None,
            init: Vec::new(),
            linkage,
            managed: false,
            line,
        }
    }

    fn variable(&mut self, linkage: Linkage) -> Result<Var<'a>> {
        let mut var = Self::blank(linkage, self.line());
        match self.next() {
            Token::Dot(name) => match Self::space(name) {
                Some(space) => var.space = space,
                None => return self.error(format!("unknown state space .{name}")),
            },
            _ => return self.error("expected a state space"),
        }
        self.declaration_rest(&mut var)?;
        Ok(var)
    }

    fn declaration_rest(&mut self, var: &mut Var<'a>) -> Result<()> {
        while let Token::Dot(word) = self.peek() {
            self.next();
            match word {
                "align" => var.align = self.int()? as u32,
                "v2" => var.vector = 2,
                "v4" => var.vector = 4,
                "v8" => var.vector = 8,
                "attribute" => var.managed |= self.attribute()?,
                "ptr" => {
                    // A hint about the target of a pointer parameter.
                    while let Token::Dot(hint) = self.peek() {
                        match hint {
                            "align" => {
                                self.next();
                                self.int()?;
                            }
                            "global" | "const" | "shared" | "local" => {
                                self.next();
                            }
                            _ => break,
                        }
                    }
                }
                ty => var.ty = ty,
            }
        }
        self.declarator(var)
    }

    fn declarator(&mut self, var: &mut Var<'a>) -> Result<()> {
        match self.peek() {
            Token::Ident(name) => {
                self.next();
                var.name = name;
            }
            // A prototype may leave a parameter unnamed.
            _ if var.space == Space::Param => return Ok(()),
            _ => return self.unexpected("a name"),
        }
        if self.eat(b'<') {
            var.family = Some(self.int()? as u32);
            self.expect(b'>')?;
        }
        let mut dimensions = Vec::new();
        while self.eat(b'[') {
            // Only the first may be left to the initial values.
            let open = dimensions.is_empty() && self.peek() == Token::Punct(b']');
            dimensions.push(if open { 0 } else { self.expression(0)? });
            self.expect(b']')?;
        }
        if !dimensions.is_empty() {
            var.elements = Some(dimensions.iter().fold(1, |all: u64, &n| all.saturating_mul(n)));
        }
        if var.space != Space::Reg {
            let before = self.arrays.insert(var.name, (var.ty, var.vector));
            self.hidden.push((var.name, before));
        }
        if self.eat(b'=') {
            // The number of scalars within each pair of braces, from the outermost one in.
            let mut sizes = vec![u64::from(var.vector.max(1))];
            for &n in dimensions.iter().skip(1).rev() {
                sizes.push(sizes[sizes.len() - 1].saturating_mul(n));
            }
            let row = sizes[sizes.len() - 1];
            let open = dimensions.first() == Some(&0);
            match dimensions.first() {
                None => {}
                Some(0) => sizes.push(u64::MAX),
                Some(&n) => sizes.push(row.saturating_mul(n)),
            }
            sizes.reverse();
            let end = self.initialiser(&sizes, 0, &mut var.init)?;
            if open && row > 0 {
                var.elements = Some(end.div_ceil(row).saturating_mul(row / u64::from(var.vector.max(1))));
            }
        }
        Ok(())
    }

    /// Initial values from scalar `at` on. Like in C, those that a list in braces leaves out are zero.
    /// Returns the number of the scalar after them.
    fn initialiser(&mut self, sizes: &[u64], at: u64, out: &mut Vec<(u64, Init<'a>)>) -> Result<u64> {
        if self.peek() == Token::Punct(b'{') {
            let size = sizes.first().copied().unwrap_or(1);
            self.deeper("initial values")?;
            self.next();
            let mut next = at;
            while !self.eat(b'}') {
                next = self.initialiser(sizes.get(1..).unwrap_or(&[]), next, out)?;
                if !self.eat(b',') && self.peek() != Token::Punct(b'}') {
                    return self.unexpected("',' or '}'");
                }
            }
            self.depth -= 1;
            return match () {
                _ if next - at > size => self.error("more initial values than elements"),
                // The outermost list may say how many elements there are.
                _ if size == u64::MAX => Ok(next),
                _ if size == 0 || at.is_multiple_of(size) => Ok(at.saturating_add(size)),
                _ => self.error("braces inside an element of an array"),
            };
        }
        let value = match self.peek() {
            Token::F32(bits) => {
                self.next();
                Init::F32(bits)
            }
            Token::F64(bits) => {
                self.next();
                Init::F64(bits)
            }
            Token::Int(mask) if self.peek2() == Token::Punct(b'(') => {
                self.next();
                self.next();
                let init = self.symbol_init(Some(mask))?;
                self.expect(b')')?;
                init
            }
            Token::Punct(b'-') if let Token::F32(bits) = self.peek2() => {
                self.next();
                self.next();
                Init::F32(bits ^ (1 << 31))
            }
            Token::Punct(b'-') if let Token::F64(bits) = self.peek2() => {
                self.next();
                self.next();
                Init::F64(bits ^ (1 << 63))
            }
            Token::Int(_) | Token::Punct(b'-' | b'+' | b'~' | b'!' | b'(') => Init::Int(self.expression(0)?),
            Token::Ident("WARP_SZ") => Init::Int(self.expression(0)?),
            Token::Ident(_) => self.symbol_init(None)?,
            // For example `.reg .texref t = { addr_mode_0 = wrap, ... }`.
            _ => return self.unexpected("an initial value"),
        };
        out.push((at, value));
        Ok(at.saturating_add(1))
    }

    fn symbol_init(&mut self, mask: Option<u64>) -> Result<Init<'a>> {
        let mut name = self.ident()?;
        let generic = name == "generic" && self.peek() == Token::Punct(b'(');
        if generic {
            self.next();
            name = self.ident()?;
        }
        let mut addend = self.addend()?;
        if generic {
            self.expect(b')')?;
            addend = addend.wrapping_add(self.addend()?);
        }
        Ok(Init::Symbol { name, addend, mask })
    }

    /// What is added to a name.
    fn addend(&mut self) -> Result<i64> {
        let mut sum = 0i64;
        loop {
            if self.eat(b'+') {
                sum = sum.wrapping_add(self.expression(FACTOR)? as i64);
            } else if self.eat(b'-') {
                sum = sum.wrapping_sub(self.expression(FACTOR)? as i64);
            } else {
                return Ok(sum);
            }
        }
    }

    /// Enters something that contains more of its kind.
    fn deeper(&mut self, what: &str) -> Result<()> {
        self.depth += 1;
        if self.depth > MAX_DEPTH { self.error(format!("{what} nested too deeply")) } else { Ok(()) }
    }

    /// What is in parentheses after `.attribute`. Returns whether it contains `.managed`.
    fn attribute(&mut self) -> Result<bool> {
        self.expect(b'(')?;
        let (mut open, mut managed) = (1, false);
        while open > 0 {
            match self.next() {
                Token::Punct(b'(') => open += 1,
                Token::Punct(b')') => open -= 1,
                Token::Dot("managed") => managed = true,
                Token::End => return self.error("unterminated attribute"),
                _ => {}
            }
        }
        Ok(managed)
    }

    fn parameters(&mut self) -> Result<Vec<Var<'a>>> {
        let mut out = Vec::new();
        self.expect(b'(')?;
        while !self.eat(b')') {
            if self.peek() == Token::Ident("_") {
                self.next();
            } else {
                out.push(self.variable(Linkage::Local)?);
            }
            if !self.eat(b',') && self.peek() != Token::Punct(b')') {
                return self.unexpected("',' or ')'");
            }
        }
        Ok(out)
    }

    fn dimensions(&mut self) -> Result<[u32; 3]> {
        let mut out = [1; 3];
        out[0] = self.int()? as u32;
        for slot in &mut out[1..] {
            if self.eat(b',') {
                *slot = self.int()? as u32;
            }
        }
        Ok(out)
    }

    fn function(&mut self, kernel: bool, linkage: Linkage) -> Result<Function<'a>> {
        let line = self.line();
        self.next();
        // `.func .attribute(...)`.
        if self.peek() == Token::Dot("attribute") {
            self.next();
            self.attribute()?;
        }
        let returns =
            if !kernel && self.peek() == Token::Punct(b'(') { self.parameters()? } else { Vec::new() };
        let name = self.ident()?;
        let params = if self.peek() == Token::Punct(b'(') { self.parameters()? } else { Vec::new() };
        let mut f = Function {
            name,
            linkage,
            kernel,
            returns,
            params,
            body: None,
            max_ntid: None,
            max_registers: None,
            req_ntid: None,
            cluster: Clusters::default(),
            unsupported: None,
            line,
        };
        loop {
            match self.peek() {
                Token::Dot("maxntid") => {
                    self.next();
                    f.max_ntid = Some(self.dimensions()?);
                }
                Token::Dot("reqntid") => {
                    self.next();
                    f.req_ntid = Some(self.dimensions()?);
                }
                Token::Dot("maxnreg") => {
                    self.next();
                    f.max_registers = Some(self.int()? as u32);
                }
                Token::Dot("minnctapersm" | "maxnctapersm" | "abi_preserve" | "abi_preserve_control") => {
                    self.next();
                    self.int()?;
                }
                Token::Dot("maxclusterrank") => {
                    self.next();
                    f.cluster.max_blocks = Some(self.int()? as u32);
                }
                Token::Dot("explicitcluster") => {
                    self.next();
                    f.cluster.explicit = true;
                }
                Token::Dot("noreturn" | "unified") => {
                    self.next();
                }
                Token::Dot("reqnctapercluster") => {
                    self.next();
                    f.cluster.required = Some(self.dimensions()?);
                }
                // Grid dimensions counted in clusters: they change the meaning of launches and special
                // registers.
                Token::Dot("blocksareclusters") => {
                    self.next();
                    f.unsupported = Some(".blocksareclusters");
                }
                Token::Dot("pragma") => self.skip_to_semicolon()?,
                Token::Punct(b';') => {
                    self.next();
                    return Ok(f);
                }
                Token::Punct(b'{') => {
                    self.next();
                    f.body = Some(self.block()?);
                    return Ok(f);
                }
                _ => return self.unexpected("a function's body"),
            }
        }
    }

    /// Ends the scope that began when `hidden` had this length.
    fn leave_scope(&mut self, hidden: usize) {
        for (name, before) in self.hidden.drain(hidden..).rev() {
            match before {
                Some(element) => self.arrays.insert(name, element),
                None => self.arrays.remove(name),
            };
        }
    }

    fn block(&mut self) -> Result<Vec<Stmt<'a>>> {
        let hidden = self.hidden.len();
        self.deeper("blocks")?;
        let mut out = Vec::new();
        while !self.eat(b'}') {
            self.statement(&mut out)?;
        }
        self.depth -= 1;
        self.leave_scope(hidden);
        Ok(out)
    }

    fn statement(&mut self, out: &mut Vec<Stmt<'a>>) -> Result<()> {
        match self.peek() {
            Token::Punct(b'{') => {
                self.next();
                out.push(Stmt::Block(self.block()?));
            }
            Token::Punct(b';') => {
                self.next();
            }
            Token::Dot("loc") => {
                let line = self.line();
                while self.line() == line && self.peek() != Token::End {
                    self.next();
                }
            }
            Token::Dot("pragma") => {
                self.next();
                if let Token::Str(text) = self.peek()
                    && let Some(mask) = text.strip_prefix("used_bytes_mask ")
                {
                    // NVIDIA's compiler writes it in decimal, the manual in hexadecimal.
                    self.used_bytes = match mask.trim().strip_prefix("0x") {
                        Some(digits) => u32::from_str_radix(digits, 16).ok(),
                        None => mask.trim().parse().ok(),
                    };
                }
                self.skip_to_semicolon()?;
            }
            Token::Dot("section") => self.skip_section()?,
            Token::Dot("reg" | "local" | "shared" | "param" | "global" | "const") => {
                self.variables(Linkage::Local, &mut |var| out.push(Stmt::Var(var)))?;
            }
            Token::Dot("extern") if self.peek2() == Token::Dot("shared") => {
                self.next();
                self.variables(Linkage::Extern, &mut |var| out.push(Stmt::Var(var)))?;
            }
            Token::Ident(name) if self.peek2() == Token::Punct(b':') => {
                let line = self.line();
                self.next();
                self.next();
                match self.peek() {
                    // The functions that a call may reach are no matter.
                    Token::Dot("calltargets") => self.skip_to_semicolon()?,
                    Token::Dot("branchtargets") => {
                        self.next();
                        let mut names = vec![self.ident()?];
                        while self.eat(b',') {
                            names.push(self.ident()?);
                        }
                        self.expect(b';')?;
                        out.push(Stmt::Targets(name, names));
                    }
                    Token::Dot("callprototype") => {
                        self.next();
                        let returns =
                            if self.peek() == Token::Punct(b'(') { self.parameters()? } else { Vec::new() };
                        self.ident()?;
                        let params =
                            if self.peek() == Token::Punct(b'(') { self.parameters()? } else { Vec::new() };
                        self.skip_to_semicolon()?;
                        out.push(Stmt::Prototype { name, returns, params });
                    }
                    _ => out.push(Stmt::Label(name, line)),
                }
            }
            Token::Punct(b'@') | Token::Ident(_) => out.push(Stmt::Inst(self.instruction()?)),
            _ => return self.unexpected("a statement"),
        }
        Ok(())
    }

    fn instruction(&mut self) -> Result<Inst<'a>> {
        let mut guard = None;
        if self.eat(b'@') {
            let negated = self.eat(b'!');
            guard = Some((self.ident()?, negated));
        }
        let line = self.line();
        let name = self.ident()?;
        let mut modifiers = Vec::new();
        while let Token::Dot(word) = self.peek() {
            self.next();
            modifiers.push(word);
        }
        let mut operands = Vec::new();
        self.calling = name == "call";
        if self.peek() != Token::Punct(b';') {
            loop {
                operands.push(self.operand()?);
                if !self.eat(b',') {
                    break;
                }
            }
        }
        self.expect(b';')?;
        let used_bytes = self.used_bytes.take();
        Ok(Inst { guard, name, modifiers, operands, used_bytes, line })
    }

    fn operand(&mut self) -> Result<Operand<'a>> {
        let first = self.simple_operand()?;
        if self.eat(b'|') {
            let second = self.simple_operand()?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    /// A name with its dotted suffix (`%tid.x`) as one slice of the text.
    fn dotted(&mut self, name: &'a str) -> &'a str {
        if name.starts_with('%')
            && let Token::Dot(part @ ("x" | "y" | "z" | "w")) = self.peek()
        {
            self.next();
            return special(name, part).unwrap_or(name);
        }
        name
    }

    fn list(&mut self, close: u8) -> Result<Vec<Operand<'a>>> {
        self.deeper("operands")?;
        let mut out = Vec::new();
        while !self.eat(close) {
            out.push(self.operand()?);
            if !self.eat(b',') && self.peek() != Token::Punct(close) {
                return self.unexpected(&format!("',' or {:?}", char::from(close)));
            }
        }
        self.depth -= 1;
        Ok(out)
    }

    /// The index of an array's element: a number, or a register with or without an addend.
    fn index(&mut self) -> Result<Operand<'a>> {
        match self.peek() {
            Token::Ident(name) => {
                self.next();
                Ok(Operand::Name(name, self.addend()?))
            }
            _ => Ok(Operand::Int(self.expression(0)?)),
        }
    }

    fn simple_operand(&mut self) -> Result<Operand<'a>> {
        match self.peek() {
            Token::Ident("_") => {
                self.next();
                Ok(Operand::Sink)
            }
            Token::Ident("WARP_SZ") | Token::Int(_) => Ok(Operand::Int(self.expression(0)?)),
            Token::Ident(name) => {
                self.next();
                if let Token::Dot(part) = self.peek()
                    && part.starts_with(['b', 'h'])
                    && part.len() > 1
                    && part[1..].bytes().all(|c| c.is_ascii_digit())
                {
                    self.next();
                    return Ok(Operand::Part(name, part));
                }
                if !name.starts_with('%') && self.eat(b'[') {
                    let index = Box::new(self.index()?);
                    self.expect(b']')?;
                    let Some(&(ty, vector)) = self.arrays.get(name) else {
                        return self.error(format!("{name} is not a variable with elements"));
                    };
                    return Ok(Operand::Element { array: name, index, ty, vector });
                }
                let name = self.dotted(name);
                let addend = self.addend()?;
                Ok(Operand::Name(name, addend))
            }
            Token::F32(n) => {
                self.next();
                Ok(Operand::F32(n))
            }
            Token::F64(n) => {
                self.next();
                Ok(Operand::F64(n))
            }
            Token::Punct(b'-') => match self.peek2() {
                Token::Ident(name) if name != "WARP_SZ" => {
                    self.next();
                    Ok(Operand::Minus(Box::new(self.simple_operand()?)))
                }
                Token::F32(n) => {
                    self.next();
                    self.next();
                    Ok(Operand::F32(n ^ (1 << 31)))
                }
                Token::F64(n) => {
                    self.next();
                    self.next();
                    Ok(Operand::F64(n ^ (1 << 63)))
                }
                _ => Ok(Operand::Int(self.expression(0)?)),
            },
            Token::Punct(b'~' | b'+') => Ok(Operand::Int(self.expression(0)?)),
            Token::Punct(b'!') if !matches!(self.peek2(), Token::Ident(_)) => {
                Ok(Operand::Int(self.expression(0)?))
            }
            Token::Punct(b'(') if !self.calling => Ok(Operand::Int(self.expression(0)?)),
            Token::Punct(b'!') => {
                self.next();
                Ok(Operand::Not(self.ident()?))
            }
            Token::Punct(b'{') => {
                self.next();
                Ok(Operand::Vector(self.list(b'}')?))
            }
            Token::Punct(b'(') => {
                self.next();
                Ok(Operand::List(self.list(b')')?))
            }
            Token::Punct(b'[') => {
                self.next();
                let mut parts = self.list(b']')?;
                if parts.len() == 1 {
                    match parts.remove(0) {
                        Operand::Name(name, addend) => return Ok(Operand::Address(Some(name), addend)),
                        Operand::Int(n) => return Ok(Operand::Address(None, n as i64)),
                        other => return Ok(Operand::Bracket(vec![other])),
                    }
                }
                Ok(Operand::Bracket(parts))
            }
            _ => self.unexpected("an operand"),
        }
    }
}

/// The names of special registers with components.
fn special(name: &str, part: &str) -> Option<&'static str> {
    const NAMES: [&str; 32] = [
        "%tid.x",
        "%tid.y",
        "%tid.z",
        "%tid.w",
        "%ntid.x",
        "%ntid.y",
        "%ntid.z",
        "%ntid.w",
        "%ctaid.x",
        "%ctaid.y",
        "%ctaid.z",
        "%ctaid.w",
        "%nctaid.x",
        "%nctaid.y",
        "%nctaid.z",
        "%nctaid.w",
        "%clusterid.x",
        "%clusterid.y",
        "%clusterid.z",
        "%clusterid.w",
        "%nclusterid.x",
        "%nclusterid.y",
        "%nclusterid.z",
        "%nclusterid.w",
        "%cluster_ctaid.x",
        "%cluster_ctaid.y",
        "%cluster_ctaid.z",
        "%cluster_ctaid.w",
        "%cluster_nctaid.x",
        "%cluster_nctaid.y",
        "%cluster_nctaid.z",
        "%cluster_nctaid.w",
    ];
    NAMES.into_iter().find(|n| n.len() == name.len() + 2 && n.starts_with(name) && n.ends_with(part))
}
