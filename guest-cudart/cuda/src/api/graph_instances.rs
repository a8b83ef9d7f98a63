//! Instantiating graphs, and launching and changing instances.

use std::ffi::c_char;
use std::sync::Arc;

use crate::abi::arguments::{In, InOut, Out};
use crate::abi::result::{Result, code};
use crate::abi::types::{
    BatchMemOpNodeParams, GraphNodeParams, HostNodeParams, InstantiateParams, KernelNodeParams,
    KernelNodeParams1, Memcpy3D, MemsetNodeParams, UpdateResultInfo,
};
use crate::api::execution::wait_if_blocking;
use crate::graph::instance::{EXECS, Exec, flag, update};
use crate::graph::node_work::Work;
use crate::graph::{Graph, conditional, node_description, of, told, work_of};
use crate::process::context;
use crate::process::driver::{Driver, driver};
use crate::process::stream::Stream;
use crate::streams::stream_table;
use client::Status;

/// `CUgraphInstantiateResult`.
mod answer {
    pub const SUCCESS: u32 = 0;
    pub const ERROR: u32 = 1;
    pub const UNUSED_CONDITION: u32 = 5;
}

fn exec(handle: usize) -> Result<(&'static Driver, Arc<Exec>)> {
    let driver = driver()?;
    Ok((driver, EXECS.get(handle).ok_or(Status::INVALID_VALUE)?))
}

/// A graph that is to be instantiated, or compared with an instance. That is not done with a graph that was
/// moved into another.
fn whole(handle: usize) -> Result<Arc<Graph>> {
    let graph = of(handle)?;
    graph.not_moved().map(|()| graph)
}

fn instantiate(graph: usize, flags: u64) -> Result<usize> {
    let graph = whole(graph)?;
    if flags & !flag::ALL != 0 {
        return Err(Status::INVALID_VALUE);
    }
    if flags & flag::DEVICE_LAUNCH != 0 {
        return refuse_form!("a graph that kernels launch");
    }
    if conditional::has_unused(&graph) {
        return Err(Status::INVALID_VALUE);
    }
    let handle = EXECS.insert(Arc::new(Exec::new(&graph, flags)?)).ok_or(Status::OUT_OF_MEMORY)?;
    told::instantiated(&graph, handle);
    Ok(handle)
}

/// The stream of a launch or upload, of any context: a graph may have kernels of several.
fn on(handle: usize, per_thread: bool) -> Result<Arc<Stream>> {
    let (_, context, _lent) = stream_table::ready_on(handle)?;
    stream_table::any(context, handle, per_thread)
}

fn upload(handle: usize, stream: usize, per_thread: bool) -> Result {
    let (driver, exec) = exec(handle)?;
    let stream = on(stream, per_thread)?;
    crate::streams::capture_rules::forbid(&stream)?;
    exec.upload(driver, &stream)
}

fn launch(handle: usize, stream: usize, per_thread: bool) -> Result {
    let (driver, exec) = exec(handle)?;
    let stream = on(stream, per_thread)?;
    crate::streams::capture_rules::forbid(&stream)?;
    exec.launch(driver, &stream)?;
    exec.context.limits.launched_graph();
    wait_if_blocking(driver, &stream)
}

fn set(handle: usize, node: usize, work: Result<Work>) -> Result {
    let (_, exec) = exec(handle)?;
    exec.change(node, |before| Ok(work?.in_place_of(before)))
}

fn apply(handle: usize, graph: usize, info: Out<UpdateResultInfo>) -> Result {
    info.required()?;
    let (driver, exec) = exec(handle)?;
    let graph = whole(graph)?;
    let (result, node, from) = match exec.update(driver, &graph) {
        Ok(()) => (update::SUCCESS, 0, 0),
        Err(why) => why,
    };
    info.put(UpdateResultInfo { result, errorNode: node, errorFromNode: from })?;
    if result == update::SUCCESS { Ok(()) } else { Err(code::GRAPH_EXEC_UPDATE_FAILURE) }
}

api! {
    fn cuGraphInstantiate(made: Out<usize>, graph: usize, error: Out<usize>, log: Out<c_char>, size: usize) {
        made.required()?;
        error.put_if_wanted(0);
        if size != 0 {
            log.put_if_wanted(0);
        }
        made.put(instantiate(graph, 0)?)
    }
    alias cuGraphInstantiate_v2 = cuGraphInstantiate(made: Out<usize>, graph: usize, error: Out<usize>, log: Out<c_char>, size: usize);

    fn cuGraphInstantiateWithFlags(made: Out<usize>, graph: usize, flags: u64) {
        made.required()?;
        if flags & flag::UPLOAD != 0 {
            return Err(Status::INVALID_VALUE);
        }
        made.put(instantiate(graph, flags)?)
    }

    fn cuGraphInstantiateWithParams / cuGraphInstantiateWithParams_ptsz(made: Out<usize>, graph: usize, params: InOut<InstantiateParams>) |pt| {
        made.required()?;
        let mut p = params.get()?;
        // Assume an error until it succeeds.
        (p.error_node, p.result) = (0, answer::ERROR);
        params.put(p)?;
        let handle = instantiate(graph, p.flags).inspect_err(|_| {
            if of(graph).is_ok_and(|graph| conditional::has_unused(&graph)) {
                p.result = answer::UNUSED_CONDITION;
            }
        });
        params.put(p)?;
        let handle = handle?;
        if p.flags & flag::UPLOAD != 0 {
            upload(handle, p.stream, pt).inspect_err(|_| drop(EXECS.remove(handle)))?;
        }
        p.result = answer::SUCCESS;
        params.put(p)?;
        made.put(handle)
    }

    fn cuGraphExecGetFlags(handle: usize, flags: Out<u64>) {
        // "CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD will not be returned by this API as it does not affect the
        // resulting executable graph."
        flags.put(exec(handle)?.1.flags & !flag::UPLOAD)
    }

    fn cuGraphUpload / cuGraphUpload_ptsz(handle: usize, stream: usize) |pt| {
        upload(handle, stream, pt)
    }

    fn cuGraphLaunch / cuGraphLaunch_ptsz(handle: usize, stream: usize) |pt| {
        launch(handle, stream, pt)
    }

    fn cuGraphExecDestroy(handle: usize) {
        driver()?;
        EXECS.remove(handle).map(drop).ok_or(Status::INVALID_VALUE)
    }

    fn cuGraphExecUpdate_v2(handle: usize, graph: usize, info: Out<UpdateResultInfo>) {
        apply(handle, graph, info)
    }

    fn cuGraphExecUpdate(handle: usize, graph: usize, node: Out<usize>, result: Out<u32>) {
        result.required()?;
        let mut info = UpdateResultInfo { result: 0, errorNode: 0, errorFromNode: 0 };
        let applied = apply(handle, graph, Out::from(&mut info));
        result.put(info.result)?;
        node.put_if_wanted(info.errorNode);
        applied
    }

    unsafe fn cuGraphExecKernelNodeSetParams(handle: usize, node: usize, p: In<KernelNodeParams1>) {
        p.required()?;
        // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
        let work = unsafe { node_description::kernel(In::from(&KernelNodeParams::from(&p.get()?))) };
        set(handle, node, work)
    }

    unsafe fn cuGraphExecKernelNodeSetParams_v2(handle: usize, node: usize, p: In<KernelNodeParams>) {
        // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
        let work = unsafe { node_description::kernel(p) };
        set(handle, node, work)
    }

    fn cuGraphExecMemcpyNodeSetParams(handle: usize, node: usize, p: In<Memcpy3D>, ctx: usize) {
        context::of(ctx)?;
        set(handle, node, Work::copy(driver()?, &p.get()?))
    }

    fn cuGraphExecMemsetNodeSetParams(handle: usize, node: usize, p: In<MemsetNodeParams>, ctx: usize) {
        context::of(ctx)?;
        set(handle, node, Work::fill(driver()?, &p.get()?))
    }

    fn cuGraphExecHostNodeSetParams(handle: usize, node: usize, p: In<HostNodeParams>) {
        set(handle, node, node_description::host(p))
    }

    fn cuGraphExecChildGraphNodeSetParams(handle: usize, node: usize, part: usize) {
        set(handle, node, node_description::child(part))
    }

    unsafe fn cuGraphExecBatchMemOpNodeSetParams(handle: usize, node: usize, p: In<BatchMemOpNodeParams>) {
        // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
        let work = unsafe { node_description::words(p) };
        set(handle, node, work)
    }

    fn cuGraphExecEventRecordNodeSetEvent(handle: usize, node: usize, event: usize) {
        set(handle, node, node_description::recorded(event))
    }

    fn cuGraphExecEventWaitNodeSetEvent(handle: usize, node: usize, event: usize) {
        set(handle, node, node_description::waited(event))
    }

    unsafe fn cuGraphExecNodeSetParams(handle: usize, node: usize, p: In<GraphNodeParams>) {
        work_of(node)?;
        // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
        let work = unsafe { node_description::described(p) };
        set(handle, node, work)
    }

    fn cuGraphNodeSetEnabled(handle: usize, node: usize, enabled: u32) {
        exec(handle)?.1.enabled(node, Some(enabled != 0)).map(|_| ())
    }

    fn cuGraphNodeGetEnabled(handle: usize, node: usize, enabled: Out<u32>) {
        enabled.put(exec(handle)?.1.enabled(node, None)?.into())
    }
}
