//! The functions of the API that instantiate graphs, launch and change instances.

use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::{Result, code, refuse_form};
use crate::abi::types::{
    BatchMemOpNodeParams, GraphNodeParams, HostNodeParams, InstantiateParams, KernelNodeParams,
    KernelNodeParams1, Memcpy3D, MemsetNodeParams, UpdateResultInfo,
};
use crate::graph::instance::{EXECS, Exec, flag, update};
use crate::graph::node_work::Work;
use crate::graph::{conditional, node_description, of, work_of};
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

fn instantiate(graph: usize, flags: u64) -> Result<usize> {
    static SAID: AtomicBool = AtomicBool::new(false);
    let graph = of(graph)?;
    if flags & !flag::ALL != 0 {
        return Err(Status::INVALID_VALUE);
    }
    if flags & flag::DEVICE_LAUNCH != 0 {
        return refuse_form("a graph that kernels launch", &SAID);
    }
    if conditional::has_unused(&graph) {
        return Err(Status::INVALID_VALUE);
    }
    EXECS.insert(Arc::new(Exec::new(&graph, flags)?)).ok_or(Status::OUT_OF_MEMORY)
}

/// The stream of a launch or an upload, of the instance's context.
fn on(driver: &Driver, exec: &Exec, handle: usize, per_thread: bool) -> Result<Arc<Stream>> {
    let (_, context, _lent) = stream_table::ready_on(handle)?;
    let stream = stream_table::any(driver, context, handle, per_thread)?;
    if std::ptr::eq(stream.context, exec.context) { Ok(stream) } else { Err(Status::INVALID_VALUE) }
}

fn upload(handle: usize, stream: usize, per_thread: bool) -> Result {
    let (driver, exec) = exec(handle)?;
    let stream = on(driver, &exec, stream, per_thread)?;
    crate::streams::capture_rules::forbid(&stream)?;
    exec.upload(driver, &stream)
}

fn launch(handle: usize, stream: usize, per_thread: bool) -> Result {
    let (driver, exec) = exec(handle)?;
    let stream = on(driver, &exec, stream, per_thread)?;
    crate::streams::capture_rules::forbid(&stream)?;
    exec.launch(driver, &stream)?;
    stream.context.limits.launched_graph();
    Ok(())
}

fn set(handle: usize, node: usize, work: Result<Work>) -> Result {
    let (_, exec) = exec(handle)?;
    exec.change(node, |before| {
        let work = work?;
        Ok(match (before, work) {
            // Attributes are not among the parameters.
            (Work::Kernel(before), Work::Kernel(work)) => {
                Work::Kernel(Arc::new(work.with_attributes(before.attributes.clone())))
            }
            (_, work) => work,
        })
    })
}

unsafe fn apply(handle: usize, graph: usize, info: *mut UpdateResultInfo) -> Result {
    non_null(info)?;
    let (driver, exec) = exec(handle)?;
    let graph = of(graph)?;
    let (result, node, from) = match exec.update(driver, &graph) {
        Ok(()) => (update::SUCCESS, 0, 0),
        Err(why) => why,
    };
    // SAFETY: not NULL; the program says that it may be written.
    unsafe { put(info, UpdateResultInfo { result, errorNode: node, errorFromNode: from }) }?;
    if result == update::SUCCESS { Ok(()) } else { Err(code::GRAPH_EXEC_UPDATE_FAILURE) }
}

api! {
    fn cuGraphInstantiate(made: *mut usize, graph: usize, error: *mut usize, log: *mut c_char, size: usize) {
        non_null(made)?;
        if !error.is_null() {
            put(error, 0)?;
        }
        if !log.is_null() && size != 0 {
            put(log, 0)?;
        }
        put(made, instantiate(graph, 0)?)
    }
    alias cuGraphInstantiate_v2 = cuGraphInstantiate(made: *mut usize, graph: usize, error: *mut usize, log: *mut c_char, size: usize);

    fn cuGraphInstantiateWithFlags(made: *mut usize, graph: usize, flags: u64) {
        non_null(made)?;
        if flags & flag::UPLOAD != 0 {
            return Err(Status::INVALID_VALUE);
        }
        put(made, instantiate(graph, flags)?)
    }

    fn cuGraphInstantiateWithParams / cuGraphInstantiateWithParams_ptsz(made: *mut usize, graph: usize, params: *mut InstantiateParams) |pt| {
        non_null(made)?;
        non_null(params)?;
        (*params).error_node = 0;
        // Until it is otherwise.
        (*params).result = answer::ERROR;
        let handle = instantiate(graph, (*params).flags).inspect_err(|_| {
            if of(graph).is_ok_and(|graph| conditional::has_unused(&graph)) {
                (*params).result = answer::UNUSED_CONDITION;
            }
        })?;
        if (*params).flags & flag::UPLOAD != 0 {
            upload(handle, (*params).stream, pt).inspect_err(|_| drop(EXECS.remove(handle)))?;
        }
        (*params).result = answer::SUCCESS;
        put(made, handle)
    }

    fn cuGraphExecGetFlags(handle: usize, flags: *mut u64) {
        put(flags, exec(handle)?.1.flags)
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

    fn cuGraphExecUpdate_v2(handle: usize, graph: usize, info: *mut UpdateResultInfo) {
        apply(handle, graph, info)
    }

    fn cuGraphExecUpdate(handle: usize, graph: usize, node: *mut usize, result: *mut u32) {
        non_null(result)?;
        let mut info = UpdateResultInfo { result: 0, errorNode: 0, errorFromNode: 0 };
        let applied = apply(handle, graph, &mut info);
        put(result, info.result)?;
        if !node.is_null() {
            put(node, info.errorNode)?;
        }
        applied
    }

    fn cuGraphExecKernelNodeSetParams(handle: usize, node: usize, p: *const KernelNodeParams1) {
        non_null(p)?;
        set(handle, node, node_description::kernel(&KernelNodeParams::from(&*p)))
    }

    fn cuGraphExecKernelNodeSetParams_v2(handle: usize, node: usize, p: *const KernelNodeParams) {
        set(handle, node, node_description::kernel(p))
    }

    fn cuGraphExecMemcpyNodeSetParams(handle: usize, node: usize, p: *const Memcpy3D, ctx: usize) {
        context::of(ctx)?;
        set(handle, node, Work::copy(driver()?, p))
    }

    fn cuGraphExecMemsetNodeSetParams(handle: usize, node: usize, p: *const MemsetNodeParams, ctx: usize) {
        context::of(ctx)?;
        set(handle, node, Work::fill(driver()?, p))
    }

    fn cuGraphExecHostNodeSetParams(handle: usize, node: usize, p: *const HostNodeParams) {
        set(handle, node, node_description::host(p))
    }

    fn cuGraphExecChildGraphNodeSetParams(handle: usize, node: usize, part: usize) {
        set(handle, node, node_description::child(part))
    }

    fn cuGraphExecBatchMemOpNodeSetParams(handle: usize, node: usize, p: *const BatchMemOpNodeParams) {
        set(handle, node, node_description::words(p))
    }

    fn cuGraphExecEventRecordNodeSetEvent(handle: usize, node: usize, event: usize) {
        set(handle, node, node_description::recorded(event))
    }

    fn cuGraphExecEventWaitNodeSetEvent(handle: usize, node: usize, event: usize) {
        set(handle, node, node_description::waited(event))
    }

    fn cuGraphExecNodeSetParams(handle: usize, node: usize, p: *mut GraphNodeParams) {
        work_of(node)?;
        set(handle, node, node_description::described(p))
    }

    fn cuGraphNodeSetEnabled(handle: usize, node: usize, enabled: u32) {
        exec(handle)?.1.enabled(node, Some(enabled != 0)).map(|_| ())
    }

    fn cuGraphNodeGetEnabled(handle: usize, node: usize, enabled: *mut u32) {
        put(enabled, exec(handle)?.1.enabled(node, None)?.into())
    }
}
