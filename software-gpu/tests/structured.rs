//! Compares random structured kernels (branches, loops, switches, barriers, shuffles, votes) with a simple
//! reference that runs them thread by thread.

#![allow(clippy::unwrap_used)]

mod common;

use common::Bench;
use proptest::prelude::*;
use software_gpu::LaunchConfig;

/// The number of registers per thread that programs use.
const REGISTERS: usize = 5;

/// What a thread does independently of others.
#[derive(Debug, Clone)]
enum Stmt {
    /// Register, operation, sources.
    Compute(usize, u8, usize, usize),
    Constant(usize, u32),
    /// Taken if the lowest bits of a register are below the number.
    If(usize, u32, Vec<Stmt>, Vec<Stmt>),
    /// Repeated as often as the lowest two bits of a register say.
    Loop(usize, Vec<Stmt>),
    /// A loop that is left when the lowest bits of a register are zero.
    LoopUntil(usize, usize, Vec<Stmt>),
    /// Selected by the lowest two bits of a register.
    Switch(usize, [Vec<Stmt>; 4]),
    /// Ends the current function for the thread if a register is odd; only at the end of the top level.
    AtomicAdd(usize),
}

/// What a block's threads do together.
#[derive(Debug, Clone)]
enum Joint {
    Alone(Vec<Stmt>),
    /// Destination, source, lane mask of a butterfly shuffle.
    Shuffle(usize, usize, u32),
    /// Destination, source: the ballot of its lowest bit.
    Ballot(usize, usize),
    /// Destination, source, key: the sum over the warp's lanes with the same lowest two bits in the key.
    SumByKey(usize, usize, usize),
    /// Destination, source, distance: the value of another thread in the block.
    Exchange(usize, usize, u32),
    /// Destination, source: the number of threads in the block with an odd value.
    Count(usize, usize),
    Repeat(u32, Vec<Joint>),
    /// Both sides of a branch shuffle the same register in one shuffle.
    SplitShuffle(usize, usize, usize),
}

fn compute(op: u8, a: u32, b: u32) -> u32 {
    match op {
        0 => a.wrapping_add(b),
        1 => a.wrapping_sub(b),
        2 => a.wrapping_mul(b),
        3 => a ^ b,
        4 => a.min(b),
        5 => a.rotate_left(b & 31),
        _ => a.wrapping_mul(b).wrapping_add(a) >> 3,
    }
}

struct Writer {
    text: String,
    label: u32,
}

impl Writer {
    fn line(&mut self, line: &str) {
        self.text.push_str("  ");
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn labels(&mut self) -> u32 {
        self.label += 1;
        self.label
    }

    fn stmts(&mut self, list: &[Stmt]) {
        for stmt in list {
            self.stmt(stmt);
        }
    }

    fn stmt(&mut self, stmt: &Stmt) {
        match stmt {
            Stmt::Compute(d, op, a, b) => match op {
                0 => self.line(&format!("add.u32 %r{d}, %r{a}, %r{b};")),
                1 => self.line(&format!("sub.u32 %r{d}, %r{a}, %r{b};")),
                2 => self.line(&format!("mul.lo.u32 %r{d}, %r{a}, %r{b};")),
                3 => self.line(&format!("xor.b32 %r{d}, %r{a}, %r{b};")),
                4 => self.line(&format!("min.u32 %r{d}, %r{a}, %r{b};")),
                5 => self.line(&format!("shf.l.wrap.b32 %r{d}, %r{a}, %r{a}, %r{b};")),
                _ => {
                    self.line(&format!("mad.lo.u32 %r{d}, %r{a}, %r{b}, %r{a};"));
                    self.line(&format!("shr.u32 %r{d}, %r{d}, 3;"));
                }
            },
            Stmt::Constant(d, v) => self.line(&format!("mov.u32 %r{d}, {v};")),
            Stmt::If(r, below, yes, no) => {
                let l = self.labels();
                self.line(&format!("and.b32 %x, %r{r}, 31;"));
                self.line(&format!("setp.ge.u32 %p, %x, {below};"));
                self.line(&format!("@%p bra else{l};"));
                self.stmts(yes);
                self.line(&format!("bra.uni end{l};"));
                self.line(&format!("else{l}:"));
                self.stmts(no);
                self.line(&format!("end{l}:"));
            }
            Stmt::Loop(r, body) | Stmt::LoopUntil(r, _, body) => {
                let l = self.labels();
                self.line("{");
                self.line(".reg .u32 %n; .reg .pred %q;");
                self.line(&format!("and.b32 %n, %r{r}, 3;"));
                self.line(&format!("top{l}:"));
                self.line(&format!("setp.eq.u32 %q, %n, 0;\n  @%q bra end{l};"));
                self.stmts(body);
                if let Stmt::LoopUntil(_, s, _) = stmt {
                    self.line(&format!("and.b32 %x, %r{s}, 7;\n  setp.eq.u32 %q, %x, 0;\n  @%q bra end{l};"));
                }
                self.line(&format!("sub.u32 %n, %n, 1;\n  bra top{l};"));
                self.line(&format!("end{l}:"));
                self.line("}");
            }
            Stmt::Switch(r, arms) => {
                let l = self.labels();
                self.line(&format!("list{l}: .branchtargets a{l}, b{l}, c{l}, d{l};"));
                self.line(&format!("and.b32 %x, %r{r}, 3;\n  brx.idx %x, list{l};"));
                for (arm, name) in arms.iter().zip(["a", "b", "c", "d"]) {
                    self.line(&format!("{name}{l}:"));
                    self.stmts(arm);
                    self.line(&format!("bra end{l};"));
                }
                self.line(&format!("end{l}:"));
            }
            Stmt::AtomicAdd(r) => self.line(&format!("red.global.add.u32 [%sum], %r{r};")),
        }
    }

    fn joint(&mut self, joint: &Joint) {
        match joint {
            Joint::Alone(list) => self.stmts(list),
            Joint::Shuffle(d, s, mask) => {
                self.line(&format!("shfl.sync.bfly.b32 %r{d}, %r{s}, {mask}, 0x1f, -1;"));
            }
            Joint::Ballot(d, s) => {
                self.line(&format!("and.b32 %x, %r{s}, 1;\n  setp.ne.u32 %p, %x, 0;"));
                self.line(&format!("vote.sync.ballot.b32 %r{d}, %p, -1;"));
            }
            Joint::SumByKey(d, s, key) => {
                self.line(&format!("and.b32 %x, %r{key}, 3;\n  match.any.sync.b32 %x, %x, -1;"));
                self.line(&format!("redux.sync.add.u32 %r{d}, %r{s}, %x;"));
            }
            Joint::Exchange(d, s, distance) => {
                self.line(&format!("st.shared.u32 [%mine], %r{s};\n  bar.sync 0;"));
                self.line(&format!("add.u32 %x, %t, {distance};\n  rem.u32 %x, %x, %n;"));
                self.line("mad.lo.u32 %x, %x, 4, %base;");
                self.line(&format!("ld.shared.u32 %r{d}, [%x];\n  bar.sync 0;"));
            }
            Joint::Count(d, s) => {
                self.line(&format!("and.b32 %x, %r{s}, 1;\n  setp.ne.u32 %p, %x, 0;"));
                self.line(&format!("bar.red.popc.u32 %r{d}, 0, %p;"));
            }
            Joint::Repeat(n, body) => {
                let l = self.labels();
                self.line("{");
                self.line(&format!(".reg .u32 %i; .reg .pred %q;\n  mov.u32 %i, {n};"));
                self.line(&format!("top{l}:"));
                for joint in body {
                    self.joint(joint);
                }
                self.line(&format!("sub.u32 %i, %i, 1;\n  setp.ne.u32 %q, %i, 0;\n  @%q bra top{l};"));
                self.line("}");
            }
            Joint::SplitShuffle(d, s, by) => {
                let l = self.labels();
                self.line(&format!("and.b32 %x, %r{by}, 1;\n  setp.ne.u32 %p, %x, 0;\n  @%p bra else{l};"));
                self.line(&format!(
                    "shfl.sync.idx.b32 %r{d}, %r{s}, 5, 0x1f, -1;\n  add.u32 %r{d}, %r{d}, 1;"
                ));
                self.line(&format!("bra end{l};\n  else{l}:"));
                self.line(&format!("shfl.sync.idx.b32 %r{d}, %r{s}, 5, 0x1f, -1;"));
                self.line(&format!("end{l}:"));
            }
        }
    }
}

fn kernel(program: &[Joint]) -> String {
    let mut w = Writer { text: String::new(), label: 0 };
    w.text.push_str(".version 7.8\n.target sm_80\n.address_size 64\n");
    w.text.push_str(".visible .entry k(.param .u64 out, .param .u64 total)\n{\n");
    w.text.push_str("  .shared .align 4 .b8 box[4096];\n  .reg .pred %p;\n  .reg .b64 %o, %off, %sum;\n");
    w.text.push_str(&format!("  .reg .b32 %r<{REGISTERS}>;\n  .reg .b32 %x, %t, %n, %mine, %base, %id;\n"));
    w.line("ld.param.u64 %o, [out];\n  ld.param.u64 %sum, [total];\n  mov.u32 %t, %tid.x;\n  mov.u32 %n, %ntid.x;");
    w.line("mov.u32 %base, box;\n  mad.lo.u32 %mine, %t, 4, %base;\n  mov.u32 %id, %ctaid.x;");
    w.line("mad.lo.u32 %id, %id, %n, %t;");
    for (r, (factor, addend)) in SEEDS.iter().enumerate() {
        w.line(&format!("mad.lo.u32 %r{r}, %id, {factor}, {addend};"));
    }
    for joint in program {
        w.joint(joint);
    }
    w.line(&format!("mul.wide.u32 %off, %id, {};\n  add.u64 %o, %o, %off;", REGISTERS * 4));
    for r in 0..REGISTERS {
        w.line(&format!("st.global.u32 [%o+{}], %r{r};", r * 4));
    }
    w.text.push_str("  ret;\n}\n");
    w.text
}

const SEEDS: [(u32, u32); REGISTERS] = [(1, 0), (7, 3), (2654435761, 12345), (3, 77), (40503, 9)];

type Thread = [u32; REGISTERS];

fn run_alone(list: &[Stmt], r: &mut Thread, total: &mut u32) {
    for stmt in list {
        match stmt {
            Stmt::Compute(d, op, a, b) => r[*d] = compute(*op, r[*a], r[*b]),
            Stmt::Constant(d, v) => r[*d] = *v,
            Stmt::If(c, below, yes, no) => {
                run_alone(if r[*c] & 31 < *below { yes } else { no }, r, total);
            }
            Stmt::Loop(n, body) | Stmt::LoopUntil(n, _, body) => {
                for _ in 0..r[*n] & 3 {
                    run_alone(body, r, total);
                    if let Stmt::LoopUntil(_, s, _) = stmt
                        && r[*s] & 7 == 0
                    {
                        break;
                    }
                }
            }
            Stmt::Switch(c, arms) => run_alone(&arms[(r[*c] & 3) as usize], r, total),
            Stmt::AtomicAdd(s) => *total = total.wrapping_add(r[*s]),
        }
    }
}

fn run_jointly(list: &[Joint], threads: &mut [Thread], total: &mut u32) {
    for joint in list {
        let before = threads.to_vec();
        match joint {
            Joint::Alone(body) => threads.iter_mut().for_each(|r| run_alone(body, r, total)),
            Joint::Repeat(n, body) => (0..*n).for_each(|_| run_jointly(body, threads, total)),
            Joint::Exchange(d, s, distance) => {
                for t in 0..threads.len() {
                    threads[t][*d] = before[(t + *distance as usize) % before.len()][*s];
                }
            }
            Joint::Count(d, s) => {
                let odd = before.iter().filter(|r| r[*s] & 1 == 1).count() as u32;
                threads.iter_mut().for_each(|r| r[*d] = odd);
            }
            _ => {
                for (t, r) in threads.iter_mut().enumerate() {
                    let first = t / 32 * 32;
                    let warp = &before[first..(first + 32).min(before.len())];
                    let lane = t % 32;
                    match joint {
                        Joint::Shuffle(d, s, mask) => r[*d] = warp[lane ^ *mask as usize][*s],
                        Joint::Ballot(d, s) => {
                            r[*d] = warp.iter().enumerate().fold(0, |m, (l, r)| m | (r[*s] & 1) << l);
                        }
                        Joint::SumByKey(d, s, key) => {
                            let mine = before[t][*key] & 3;
                            let peers = warp.iter().filter(|r| r[*key] & 3 == mine);
                            r[*d] = peers.fold(0u32, |sum, r| sum.wrapping_add(r[*s]));
                        }
                        Joint::SplitShuffle(d, s, by) => {
                            r[*d] = warp[5][*s].wrapping_add(1 - (before[t][*by] & 1));
                        }
                        _ => {}
                    }
                }
            }
        }
    }
}

fn register() -> impl Strategy<Value = usize> {
    0..REGISTERS
}

fn stmts() -> impl Strategy<Value = Vec<Stmt>> {
    let leaf = prop_oneof![
        6 => (register(), 0u8..7, register(), register()).prop_map(|(d, o, a, b)| Stmt::Compute(d, o, a, b)),
        1 => (register(), any::<u32>()).prop_map(|(d, v)| Stmt::Constant(d, v)),
        1 => register().prop_map(Stmt::AtomicAdd),
    ];
    let tree = leaf.prop_recursive(4, 40, 4, |inner| {
        let list = prop::collection::vec(inner, 0..4);
        prop_oneof![
            3 => (register(), 0u32..32, list.clone(), list.clone()).prop_map(|(r, n, a, b)| Stmt::If(r, n, a, b)),
            2 => (register(), list.clone()).prop_map(|(r, b)| Stmt::Loop(r, b)),
            2 => (register(), register(), list.clone()).prop_map(|(r, s, b)| Stmt::LoopUntil(r, s, b)),
            1 => (register(), [list.clone(), list.clone(), list.clone(), list]).prop_map(|(r, a)| Stmt::Switch(r, a)),
        ]
    });
    prop::collection::vec(tree, 1..6)
}

fn program() -> impl Strategy<Value = Vec<Joint>> {
    let leaf = prop_oneof![
        4 => stmts().prop_map(Joint::Alone),
        1 => (register(), register(), 0u32..32).prop_map(|(d, s, m)| Joint::Shuffle(d, s, m)),
        1 => (register(), register()).prop_map(|(d, s)| Joint::Ballot(d, s)),
        1 => (register(), register(), register()).prop_map(|(d, s, k)| Joint::SumByKey(d, s, k)),
        1 => (register(), register(), 0u32..200).prop_map(|(d, s, n)| Joint::Exchange(d, s, n)),
        1 => (register(), register()).prop_map(|(d, s)| Joint::Count(d, s)),
        1 => (register(), register(), register()).prop_map(|(d, s, b)| Joint::SplitShuffle(d, s, b)),
    ];
    let tree = leaf.prop_recursive(2, 12, 3, |inner| {
        (1u32..4, prop::collection::vec(inner, 1..4)).prop_map(|(n, b)| Joint::Repeat(n, b))
    });
    prop::collection::vec(tree, 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn structured_kernels_match_the_thread_by_thread_reference(program in program(), warps in 1usize..4) {
        let (blocks, size) = (2, warps * 32);
        let bench = Bench::new();
        let text = kernel(&program);
        let module = bench.gpu.load_module(text.as_bytes()).map_err(|e| TestCaseError::fail(format!("{e}\n{text}")))?;
        let out = bench.upload(&vec![0u32; blocks * size * REGISTERS]);
        let sum = bench.upload(&[0u32]);
        let params = [out.to_le_bytes(), sum.to_le_bytes()].concat();
        let ran = bench.run(&module, "k", LaunchConfig::linear(blocks as u32, size as u32), &params);
        prop_assert!(ran.is_ok(), "{}\n{text}", ran.unwrap_err());
        let got: Vec<u32> = bench.download(out, blocks * size * REGISTERS);
        let mut total = 0;
        for block in 0..blocks {
            let mut threads: Vec<Thread> = (0..size)
                .map(|t| SEEDS.map(|(m, a)| ((block * size + t) as u32).wrapping_mul(m).wrapping_add(a)))
                .collect();
            run_jointly(&program, &mut threads, &mut total);
            let want: Vec<u32> = threads.concat();
            prop_assert_eq!(&got[block * size * REGISTERS..][..want.len()], &want[..], "block {}\n{}", block, text);
        }
        prop_assert_eq!(bench.download::<u32>(sum, 1)[0], total);
    }
}
