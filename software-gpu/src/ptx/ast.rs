//! The syntax tree of PTX. Everything borrows from the text.

/// State spaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Reg,
    Global,
    Const,
    Shared,
    Local,
    Param,
    Generic,
}

impl Space {
    pub fn name(self) -> &'static str {
        match self {
            Space::Reg => "register",
            Space::Global => "global",
            Space::Const => "const",
            Space::Shared => "shared",
            Space::Local => "local",
            Space::Param => "param",
            Space::Generic => "generic",
        }
    }
}

/// Visibility of a name outside its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Linkage {
    #[default]
    Local,
    Visible,
    /// Overridden by a visible definition, and by an earlier one of its kind: `.weak` and `.common`.
    Weak,
    Extern,
}

/// A variable, a register or numbered family of registers, or a parameter.
#[derive(Debug, Clone)]
pub(crate) struct Var<'a> {
    pub space: Space,
    /// Alignment in bytes; 0 if not given.
    pub align: u32,
    /// `b32`, `f16`, `pred`, `texref`, ...
    pub ty: &'a str,
    /// Elements of a vector type; 1 for a scalar.
    pub vector: u32,
    pub name: &'a str,
    /// `%r<5>` declares `%r0` to `%r4`.
    pub family: Option<u32>,
    /// Product of the array dimensions; `None` for a scalar, `Some(0)` for an open array without initial
    /// values.
    pub elements: Option<u64>,
    /// The initial values, each with the number of the scalar that has it. Others are zero.
    pub init: Vec<(u64, Init<'a>)>,
    pub linkage: Linkage,
    pub managed: bool,
    pub line: u32,
}

/// One element of an initializer.
#[derive(Debug, Clone)]
pub(crate) enum Init<'a> {
    Int(u64),
    F32(u32),
    F64(u64),
    /// The address of a variable or function plus an offset. `mask` selects one byte of it (`0xff00(name)`).
    /// Global addresses equal their generic addresses, so `generic(name)` means the same.
    Symbol {
        name: &'a str,
        addend: i64,
        mask: Option<u64>,
    },
}

#[derive(Debug)]
pub(crate) struct Function<'a> {
    pub name: &'a str,
    pub linkage: Linkage,
    pub kernel: bool,
    pub returns: Vec<Var<'a>>,
    pub params: Vec<Var<'a>>,
    pub body: Option<Vec<Stmt<'a>>>,
    pub max_ntid: Option<[u32; 3]>,
    pub req_ntid: Option<[u32; 3]>,
    pub max_registers: Option<u32>,
    pub cluster: Clusters,
    /// A directive that this GPU does not implement.
    pub unsupported: Option<&'static str>,
    pub line: u32,
}

/// A kernel's requirements on the clusters of its grid.
#[derive(Debug, Default)]
pub(crate) struct Clusters {
    /// `.reqnctapercluster`.
    pub required: Option<[u32; 3]>,
    /// `.explicitcluster`: the launch or `.reqnctapercluster` must give the cluster size.
    pub explicit: bool,
    /// `.maxclusterrank`: the most blocks in a cluster.
    pub max_blocks: Option<u32>,
}

#[derive(Debug)]
pub(crate) enum Stmt<'a> {
    /// With its line.
    Label(&'a str, u32),
    Var(Var<'a>),
    Inst(Inst<'a>),
    Block(Vec<Stmt<'a>>),
    /// `.branchtargets`.
    Targets(&'a str, Vec<&'a str>),
    Prototype {
        name: &'a str,
        returns: Vec<Var<'a>>,
        params: Vec<Var<'a>>,
    },
}

#[derive(Debug)]
pub(crate) struct Inst<'a> {
    /// Predicate register, and whether it is negated.
    pub guard: Option<(&'a str, bool)>,
    /// The name without modifiers: `add`.
    pub name: &'a str,
    /// `["rn", "f32"]`.
    pub modifiers: Vec<&'a str>,
    pub operands: Vec<Operand<'a>>,
    /// `.pragma "used_bytes_mask …"`: a bit for each byte of a load that is needed. Memory may end before the
    /// others.
    pub used_bytes: Option<u32>,
    pub line: u32,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operand<'a> {
    /// A register, special register (`%tid.x`), label, function or variable; `sym+4` has an addend.
    Name(&'a str, i64),
    /// `array[3]`, `array[%r]` or `array[%r+3]`: an element, or its address where a value is expected. `ty`
    /// and `vector` are those of the variable's declaration.
    Element {
        array: &'a str,
        index: Box<Operand<'a>>,
        ty: &'a str,
        vector: u32,
    },
    Int(u64),
    F32(u32),
    F64(u64),
    /// `[base + offset]`; a constant address has no base.
    Address(Option<&'a str>, i64),
    /// `[base, {coordinates}]` and similar, for textures, surfaces and tensors.
    Bracket(Vec<Operand<'a>>),
    /// `{a, b}`.
    Vector(Vec<Operand<'a>>),
    /// `(a, b)`: arguments of a call.
    List(Vec<Operand<'a>>),
    /// `!%p`.
    Not(&'a str),
    /// `%r.b0`, `%r.h1`, `%r.h32`: a part of a register, as video instructions select it.
    Part(&'a str, &'a str),
    /// `-%r`, which only `vmad` uses.
    Minus(Box<Operand<'a>>),
    /// `%p|%q`.
    Pair(Box<Operand<'a>>, Box<Operand<'a>>),
    /// `_`.
    Sink,
}

impl<'a> Operand<'a> {
    /// The elements of a vector, or the operand itself.
    pub fn elements(&self) -> &[Operand<'a>] {
        match self {
            Operand::Vector(list) => list,
            one => std::slice::from_ref(one),
        }
    }
}

#[derive(Debug)]
pub(crate) struct File<'a> {
    pub version: (u32, u32),
    pub target: &'a str,
    pub globals: Vec<Var<'a>>,
    pub functions: Vec<Function<'a>>,
    /// `.alias alias, aliasee`.
    pub aliases: Vec<(&'a str, &'a str)>,
}
