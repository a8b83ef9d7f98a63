//! Conditional nodes of graphs. A condition is a word of device memory, whose address is the name that kernels know it by; what a node's graphs do is checked when the graph is
//! launched and done by the stream's thread, which alone knows then what the condition is.

use std::collections::HashMap;
use std::sync::Arc;

use protocol::Status;
use protocol::handle::{ContextId, GraphId};
use protocol::ops::graph::{GraphNode, GraphParts, condition_flag, conditional};
use software_gpu::{Function, Gpu, LaunchConfig, Result};

use super::kernels::prepare;
use super::streams::{Place, Word};
use super::transfer::Again;
use super::{Software, code};
use crate::driver::call::{Call, Errors};
use crate::driver::graph::{Work, work};
use crate::driver::session::Session;

/// The drafts of a session.
pub(super) type Drafts = crate::driver::conditional::Drafts<(), (), Arc<Cell>>;

/// A condition's word.
pub(super) struct Cell {
    gpu: Gpu,
    /// Its address.
    pub(super) address: u64,
    /// What it is at the beginning of each launch; otherwise what it was.
    default: Option<u32>,
}

impl Drop for Cell {
    fn drop(&mut self) {
        // What it would not free it does not have.
        let _ = self.gpu.free(self.address);
    }
}

impl Cell {
    /// A word on a device.
    pub(super) fn new(gpu: &Gpu, default: u32, flags: u32) -> std::result::Result<Cell, Status> {
        let address = gpu.allocate(8).map_err(|e| code(&e))?;
        let default = (flags & condition_flag::ASSIGN_DEFAULT != 0).then_some(default);
        Ok(Cell { gpu: gpu.clone(), address, default })
    }
}

/// A conditional node of an instance: its condition, and the nodes of its graphs.
struct Conditional {
    cell: Arc<Cell>,
    kind: u32,
    bodies: Vec<Vec<GraphNode>>,
}

/// All conditional nodes of an instance, by the first of their graphs, and its conditions.
#[derive(Default)]
pub(super) struct Conditionals {
    nodes: HashMap<u32, Conditional>,
    cells: Vec<Arc<Cell>>,
}

/// What a graph does, ready to be done.
enum Step {
    Kernel(Function, LaunchConfig, Vec<u8>),
    Data(Again),
    Choice(Choice),
}

/// A conditional node, ready to be done.
struct Choice {
    cell: Arc<Cell>,
    kind: u32,
    bodies: Vec<Vec<Step>>,
}

/// Whom steps serve.
struct Run {
    errors: Errors,
    context: ContextId,
    seq: u64,
    word: Arc<Word>,
}

impl Run {
    fn all(&self, gpu: &Gpu, steps: &[Step]) -> Result<()> {
        for step in steps {
            match step {
                Step::Kernel(function, config, params) => gpu.run(function, *config, params)?,
                Step::Data(work) => match work() {
                    Err(e) if gpu.status().is_ok() => {
                        self.errors.publish(self.context, code(&e), self.seq);
                    }
                    done => done?,
                },
                Step::Choice(choice) => self.choose(gpu, choice)?,
            }
        }
        Ok(())
    }

    fn choose(&self, gpu: &Gpu, choice: &Choice) -> Result<()> {
        let condition = || gpu.load(choice.cell.address, false).map(|value| value as usize);
        if choice.kind == conditional::WHILE {
            while condition()? != 0 && !gpu.is_cancelled() && !self.word.is_gone() {
                self.all(gpu, &choice.bodies[0])?;
            }
            return Ok(());
        }
        let chosen = match condition()? {
            0 if choice.kind == conditional::IF => 1,
            _ if choice.kind == conditional::IF => 0,
            n => n,
        };
        choice.bodies.get(chosen).map_or(Ok(()), |body| self.all(gpu, body))
    }
}

impl Session<Software> {
    /// The conditional nodes of a draft's parts, which were checked.
    pub(super) fn conditionals(
        &self,
        draft: GraphId,
        parts: &GraphParts,
    ) -> std::result::Result<Conditionals, Status> {
        let mut all = Conditionals::default();
        for node in parts.parts.iter().flat_map(|part| &part.nodes) {
            let Work::Conditional(first) = work(node)? else { continue };
            let known = self.gpu.drafts.node(first)?;
            let nodes = |body: &u32| {
                let part = parts.parts.iter().find(|part| part.graph.0 == *body);
                part.map(|part| part.nodes.clone()).ok_or(Status::INVALID_VALUE)
            };
            let bodies = known.bodies.iter().map(nodes).collect::<std::result::Result<_, Status>>()?;
            let cell = Arc::clone(self.gpu.drafts.condition(known.handle)?);
            all.nodes.insert(first.0, Conditional { cell, kind: known.kind, bodies });
        }
        all.cells = self.gpu.drafts.conditions_of(draft.0).cloned().collect();
        Ok(all)
    }

    /// Everything that a conditional node does, checked.
    fn choice(
        &mut self,
        cx: &mut Call,
        place: &Place,
        all: &Conditionals,
        first: GraphId,
    ) -> std::result::Result<Choice, Status> {
        let node = all.nodes.get(&first.0).ok_or(Status::INVALID_VALUE)?;
        let mut bodies = Vec::with_capacity(node.bodies.len());
        for body in &node.bodies {
            let mut steps = Vec::with_capacity(body.len());
            for node in body {
                steps.push(match work(node)? {
                    Work::Empty => continue,
                    Work::Launch(op) => {
                        cx.context = place.context;
                        let (function, config) =
                            prepare(&self.modules.function_to_launch(cx, op.function)?.native, &op)?;
                        Step::Kernel(function, config, op.params.to_vec())
                    }
                    Work::Memset(op) => match self.checked_fill(&op, place.device)? {
                        Some(fill) => Step::Data(self.gpu.fill_work(&fill)?),
                        None => continue,
                    },
                    Work::Copy(op) => Step::Data(self.gpu.line_work(&self.checked_line(&op, place.device)?)?),
                    Work::Copy3D(op) => match self.checked_box(&op, place.device)? {
                        Some(copy) => Step::Data(self.gpu.box_work(&copy)?),
                        None => continue,
                    },
                    Work::Words(op) => {
                        let operations = self.memory_ops(&op.operations, place.device)?;
                        Step::Data(self.gpu.words_work(place, operations))
                    }
                    Work::Conditional(first) => Step::Choice(self.choice(cx, place, all, first)?),
                });
            }
            bodies.push(steps);
        }
        Ok(Choice { cell: Arc::clone(&node.cell), kind: node.kind, bodies })
    }

    /// Puts a conditional node on a stream.
    pub(super) fn launch_conditional(
        &mut self,
        cx: &mut Call,
        place: &Place,
        all: &Conditionals,
        first: GraphId,
    ) -> std::result::Result<(), Status> {
        let choice = self.choice(cx, place, all, first)?;
        let (errors, context) = place.errors();
        let run = Run { errors, context, seq: cx.seq, word: place.word() };
        place.stream.enqueue(move |gpu| run.choose(gpu, &choice)).map_err(|e| code(&e))
    }
}

impl Conditionals {
    /// Puts the conditions' defaults on a stream, at the beginning of a launch.
    pub(super) fn begin(&self, place: &Place) -> std::result::Result<(), Status> {
        let cells = self.cells.clone();
        let set = move |gpu: &Gpu| {
            let with_default = cells.iter().filter_map(|cell| Some((cell.address, cell.default?)));
            for (address, default) in with_default {
                gpu.store(address, false, default.into())?;
            }
            Ok(())
        };
        if self.cells.is_empty() { Ok(()) } else { place.stream.enqueue(set).map_err(|e| code(&e)) }
    }

    /// Keeps the conditions until a stream has come to the end of a launch.
    pub(super) fn end(&self, place: &Place) -> std::result::Result<(), Status> {
        let cells = self.cells.clone();
        let keep = move |_: &Gpu| {
            drop(cells);
            Ok(())
        };
        if self.cells.is_empty() { Ok(()) } else { place.stream.enqueue(keep).map_err(|e| code(&e)) }
    }
}
