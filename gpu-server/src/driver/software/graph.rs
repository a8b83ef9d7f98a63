//! Graphs. An instance is a list of steps in an order that respects their dependencies. A launch is one
//! operation of its stream, whose thread runs the steps one after another. A condition is a word of device
//! memory, and its address is the handle.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::graph::{condition_flag, conditional};
use protocol::ops::stream::MemoryOp;
use software_gpu::{Function, Gpu, LaunchConfig};

use super::activity::{Records, What};
use super::kernels::prepare;
use super::stream_memory::Bell;
use super::streams::{Place, Word};
use super::transfer::Again;
use super::{Software, code};
use crate::driver::activity::now;
use crate::driver::call::{Call, Errors, Result};
use crate::driver::gpu::{GpuGraphs, Node, NodeWork};

/// The work of one node, ready to run.
enum Step {
    Kernel(Function, LaunchConfig, Vec<u8>, u32),
    Data(Again, What),
    MemoryOps(Vec<(MemoryOp, Gpu)>),
    Choice(Arc<Choice>),
}

/// What a draft was filled with.
type Steps = Arc<OnceLock<Vec<Step>>>;
type Conditions = Arc<Mutex<Vec<Arc<Condition>>>>;

/// A graph that is not instantiated.
#[derive(Default)]
pub struct Draft {
    steps: Steps,
    /// The conditions of its root.
    conditions: Conditions,
}

/// A condition's word.
struct Condition {
    gpu: Gpu,
    address: u64,
    /// Its value at the start of each launch. `None`: it keeps its value.
    default: Option<u32>,
}

impl Drop for Condition {
    fn drop(&mut self) {
        // Fails only if the device's memory no longer exists.
        let _ = self.gpu.free(self.address);
    }
}

/// A conditional node.
pub struct Choice {
    condition: u64,
    kind: u32,
    bodies: Vec<Steps>,
}

/// An instantiated graph.
pub struct Instance {
    steps: Steps,
    conditions: Vec<Arc<Condition>>,
    /// Stack per thread that its kernels need, in bytes.
    stack: u64,
    /// Distinguishes it from other instances of this process.
    number: u32,
}

/// The maximum stack that these steps' kernels need, in bytes.
fn stack(steps: &Steps) -> u64 {
    let of_step = |step: &Step| match step {
        Step::Kernel(function, ..) => function.info().local_bytes.into(),
        Step::Choice(choice) => choice.bodies.iter().map(stack).max().unwrap_or(0),
        Step::Data(..) | Step::MemoryOps(_) => 0,
    };
    steps.get().into_iter().flatten().map(of_step).max().unwrap_or(0)
}

/// A launch, in its stream's thread.
struct Run {
    graph: Arc<Instance>,
    bell: Arc<Bell>,
    word: Arc<Word>,
    errors: Errors,
    context: ContextId,
    seq: u64,
    /// Where its nodes' work is recorded.
    records: Option<Records>,
}

impl Run {
    fn run(&self, gpu: &Gpu) -> software_gpu::Result<()> {
        for condition in &self.graph.conditions {
            if let Some(default) = condition.default {
                gpu.store(condition.address, false, default.into())?;
            }
        }
        self.steps(gpu, &self.graph.steps)
    }

    fn steps(&self, gpu: &Gpu, steps: &Steps) -> software_gpu::Result<()> {
        for step in steps.get().into_iter().flatten() {
            let begin = if self.records.is_some() { now() } else { 0 };
            let done = match step {
                Step::Kernel(function, config, params, _) => gpu.run(function, *config, params),
                Step::Choice(choice) => self.choose(gpu, choice),
                Step::Data(work, _) => self.survive(gpu, work()),
                Step::MemoryOps(all) => self.survive(gpu, self.bell.run(all, &|| self.word.is_gone())),
            };
            done?;
            if let Some(records) = &self.records {
                self.record(records, step, begin);
            }
        }
        Ok(())
    }

    /// Records a finished step. Its address distinguishes it from the graph's other steps, and the graph's
    /// address from other graphs.
    fn record(&self, records: &Records, step: &Step, begin: u64) {
        let kernel;
        let what = match step {
            Step::Kernel(function, config, _, registers) => {
                kernel = What::kernel(function, config, *registers);
                &kernel
            }
            Step::Data(_, what) => what,
            Step::MemoryOps(_) | Step::Choice(_) => return,
        };
        records.node(what, self.graph.number, std::ptr::from_ref(step) as u64, begin);
    }

    /// Copies and memory operations that fail do not fail the device: as on a stream, they become the
    /// context's deferred error.
    fn survive(&self, gpu: &Gpu, done: software_gpu::Result<()>) -> software_gpu::Result<()> {
        match done {
            Err(e) if gpu.status().is_ok() => {
                self.errors.publish(self.context, code(&e), self.seq);
                Ok(())
            }
            done => done,
        }
    }

    fn choose(&self, gpu: &Gpu, choice: &Choice) -> software_gpu::Result<()> {
        let condition = || gpu.load(choice.condition, false).map(|value| value as usize);
        if choice.kind == conditional::WHILE {
            while condition()? != 0 && !gpu.is_cancelled() && !self.word.is_gone() {
                self.steps(gpu, &choice.bodies[0])?;
            }
            return Ok(());
        }
        let chosen = match condition()? {
            0 if choice.kind == conditional::IF => 1,
            _ if choice.kind == conditional::IF => 0,
            n => n,
        };
        choice.bodies.get(chosen).map_or(Ok(()), |body| self.steps(gpu, body))
    }
}

impl Software {
    /// The work of a node, or `None` if there is none.
    fn step(&self, gpu: &Gpu, work: NodeWork<'_, Software>) -> Result<Option<Step>> {
        Ok(Some(match work {
            NodeWork::Empty => return Ok(None),
            NodeWork::Launch { function, launch } => {
                let registers = function.registers();
                let (function, config, params) = prepare(function, &launch)?;
                gpu.check_launch(&function, config, &params)
                    .map_err(|e| super::kernels::refused(&function, &e))?;
                Step::Kernel(function, config, params.into_owned(), registers)
            }
            NodeWork::Fill(fill) => Step::Data(self.fill_work(&fill)?, What::fill(&fill)),
            NodeWork::CopyLine(copy) => {
                Step::Data(self.line_work(&copy)?, What::between(copy.from, copy.to, copy.len))
            }
            NodeWork::CopyBox(copy) => {
                let bytes = What::bytes(&copy.source);
                Step::Data(self.box_work(&copy)?, What::between(copy.from, copy.to, bytes))
            }
            NodeWork::MemoryOps(operations) => Step::MemoryOps(operations),
            NodeWork::Conditional(choice) => Step::Choice(Arc::clone(choice)),
        }))
    }

    fn gpu_of(&self, context: ContextId) -> Result<&Gpu> {
        Ok(&self.device(self.context(context)?.device)?.gpu)
    }
}

impl GpuGraphs for Software {
    type Draft = Draft;
    type Conditional = Arc<Choice>;
    type Graph = Arc<Instance>;

    fn make_draft(&mut self, _context: ContextId) -> Result<Draft> {
        Ok(Draft::default())
    }

    fn make_condition(&mut self, context: ContextId, draft: &Draft, default: u32, flags: u32) -> Result<u64> {
        let gpu = self.gpu_of(context)?.clone();
        let address = gpu.allocate(8).map_err(|e| code(&e))?;
        let default = (flags & condition_flag::ASSIGN_DEFAULT != 0).then_some(default);
        let condition = Arc::new(Condition { gpu, address, default });
        draft.conditions.lock().unwrap_or_else(|e| e.into_inner()).push(condition);
        Ok(address)
    }

    fn add_conditional(
        &mut self,
        _context: ContextId,
        draft: &Draft,
        condition: u64,
        kind: u32,
        count: usize,
    ) -> Result<(Arc<Choice>, Vec<Draft>)> {
        let body = |_| Draft { steps: Steps::default(), conditions: Arc::clone(&draft.conditions) };
        let drafts: Vec<Draft> = (0..count).map(body).collect();
        let bodies = drafts.iter().map(|draft| Arc::clone(&draft.steps)).collect();
        Ok((Arc::new(Choice { condition, kind, bodies }), drafts))
    }

    fn remove_conditional(&mut self, _context: ContextId, _node: &Arc<Choice>) -> Result {
        // Nothing refers to it before its draft is filled.
        Ok(())
    }

    fn fill_draft(&self, context: ContextId, draft: &Draft, nodes: Vec<Node<'_, Software>>) -> Result {
        let gpu = self.gpu_of(context)?;
        let steps = nodes.into_iter().filter_map(|node| self.step(gpu, node.work).transpose());
        let steps = steps.collect::<Result<Vec<Step>>>()?;
        draft.steps.set(steps).map_err(|_| Status::NOT_SUPPORTED)
    }

    fn instantiate(&mut self, _context: ContextId, draft: &Draft, _flags: u64) -> Result<Arc<Instance>> {
        let conditions = draft.conditions.lock().unwrap_or_else(|e| e.into_inner()).clone();
        let steps = Arc::clone(&draft.steps);
        static NUMBER: AtomicU32 = AtomicU32::new(1);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Instance { stack: stack(&steps), steps, conditions, number }))
    }

    fn update_graph(
        &mut self,
        context: ContextId,
        graph: &mut Arc<Instance>,
        draft: &Draft,
        flags: u64,
    ) -> Result {
        *graph = self.instantiate(context, draft, flags)?;
        Ok(())
    }

    fn launch_graph(&mut self, cx: &Call, place: &Place, graph: &Arc<Instance>) -> Result {
        self.grow_stack(place.context, graph.stack);
        let (errors, context) = place.errors();
        let (graph, bell, word) = (Arc::clone(graph), Arc::clone(&self.bell), place.word());
        let run = Run { graph, bell, word, errors, context, seq: cx.seq, records: self.records(place) };
        place.stream.enqueue(move |gpu| run.run(gpu)).map_err(|e| code(&e))
    }

    fn upload_graph(&mut self, _place: &Place, _graph: &Arc<Instance>) -> Result {
        // There is nowhere to upload it to.
        Ok(())
    }

    fn destroy_graph(&mut self, _context: ContextId, _graph: Arc<Instance>) -> Result {
        Ok(())
    }
}
