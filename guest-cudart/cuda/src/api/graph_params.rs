//! Reading and changing what a node of a graph does.

use std::sync::Arc;

use crate::abi::arguments::{In, InOut, Out};
use crate::abi::result::Result;
use crate::abi::types::{
    AttrValue, BatchMemOpNodeParams, GraphNodeParams, HostNodeParams, KernelNodeParams, KernelNodeParams1,
    MemAllocNodeParams, MemLocation, MemPoolProps, Memcpy3D, MemsetNodeParams, launch_attr,
};
use crate::graph::node_work::{Kernel, Work};
use crate::graph::{Graph, node_description, set_work, work_of};
use crate::process::driver::driver;
use crate::work::{copy_boxes, launch};
use client::Status;
use client::ops::launch::LaunchAttribute;

/// Replaces a node's work with work of the same kind.
fn replace(handle: usize, work: Result<Work>) -> Result {
    set_work(handle, |before| {
        let work = work?;
        if work.kind() != before.kind() {
            return Err(Status::INVALID_VALUE);
        }
        Ok(work.in_place_of(before))
    })
}

fn kernel(handle: usize) -> Result<Arc<Kernel>> {
    match work_of(handle)? {
        Work::Kernel(kernel) => Ok(kernel),
        _ => Err(Status::INVALID_VALUE),
    }
}

/// Whether nodes have this `CUlaunchAttributeID`: access policy, cooperative, cluster dimension, cluster
/// scheduling, programmatic serialization, priority, the memory synchronization domains, preferred cluster,
/// and shared memory carveout.
fn is_known(attribute: u32) -> bool {
    matches!(attribute, 1 | 2 | 4 | 5 | 6 | 8 | 9 | 10 | 11 | 14)
}

/// The value of an attribute that was never set, if NVIDIA's driver tells one.
fn unset(attribute: u32) -> Option<[u8; 64]> {
    let mut value = [0; 64];
    match attribute {
        // Remote domain: 1.
        launch_attr::MEM_SYNC_DOMAIN_MAP => value[1] = 1,
        launch_attr::PROGRAMMATIC_STREAM_SERIALIZATION | launch_attr::PREFERRED_CLUSTER_DIMENSION => {
            return None;
        }
        // No kernel changes the node.
        launch_attr::DEVICE_UPDATABLE_KERNEL_NODE => {}
        _ if is_known(attribute) => {}
        _ => return None,
    }
    Some(value)
}

fn set_attributes(handle: usize, change: impl FnOnce(&Kernel) -> Vec<LaunchAttribute>) -> Result {
    set_work(handle, |work| match work {
        Work::Kernel(kernel) => Ok(Work::Kernel(Arc::new(kernel.with_attributes(change(kernel))))),
        _ => Err(Status::INVALID_VALUE),
    })
}

api! {
    fn cuGraphKernelNodeGetParams(node: usize, p: Out<KernelNodeParams1>) {
        let KernelNodeParams { func, grid, block, sharedMemBytes, kernelParams, extra, kern, .. } = kernel(node)?.describe();
        // The older form has no kernels.
        let func = if func != 0 { func } else { crate::code::library::function_of(kern)? };
        p.put(KernelNodeParams1 { func, grid, block, sharedMemBytes, kernelParams, extra })
    }

    fn cuGraphKernelNodeGetParams_v2(node: usize, p: Out<KernelNodeParams>) {
        p.put(kernel(node)?.describe())
    }

    unsafe fn cuGraphKernelNodeSetParams(node: usize, p: In<KernelNodeParams1>) {
        p.required()?;
        // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
        let work = unsafe { node_description::kernel(In::from(&KernelNodeParams::from(&p.get()?))) };
        replace(node, work)
    }

    unsafe fn cuGraphKernelNodeSetParams_v2(node: usize, p: In<KernelNodeParams>) {
        // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
        let work = unsafe { node_description::kernel(p) };
        replace(node, work)
    }

    fn cuGraphKernelNodeGetAttribute(node: usize, attribute: u32, value: InOut<AttrValue>) {
        let kernel = kernel(node)?;
        let found = kernel.attributes.iter().find(|found| found.id == attribute).map(|found| found.value);
        let told = found.or_else(|| unset(attribute)).ok_or(Status::INVALID_VALUE)?;
        value.put(value.get()?.with(attribute, &told))
    }

    fn cuGraphKernelNodeSetAttribute(node: usize, attribute: u32, value: In<AttrValue>) {
        value.required()?;
        // NVIDIA's driver takes this hint, too, and does not tell it.
        if attribute == launch_attr::NVLINK_UTIL_CENTRIC_SCHEDULING {
            kernel(node)?;
            return launch::check_nvlink_hint(&value.get()?.0);
        }
        if attribute == launch_attr::DEVICE_UPDATABLE_KERNEL_NODE {
            kernel(node)?;
            return refuse_form!("a graph's node that kernels change");
        }
        if !is_known(attribute) {
            return Err(Status::INVALID_VALUE);
        }
        let value = value.get()?.0;
        set_attributes(node, |kernel| {
            let mut all = kernel.attributes.clone();
            all.retain(|other| other.id != attribute);
            all.push(LaunchAttribute { id: attribute, value });
            all
        })
    }

    fn cuGraphKernelNodeCopyAttributes(to: usize, from: usize) {
        let from = kernel(from)?;
        set_attributes(to, |_| from.attributes.clone())
    }

    fn cuGraphMemcpyNodeGetParams(node: usize, p: Out<Memcpy3D>) {
        match work_of(node)? {
            Work::Copy(copy) => p.put(copy_boxes::told(&copy)),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuGraphMemcpyNodeSetParams(node: usize, p: In<Memcpy3D>) {
        replace(node, Work::copy(driver()?, &p.get()?))
    }

    fn cuGraphMemsetNodeGetParams(node: usize, p: Out<MemsetNodeParams>) {
        match work_of(node)? {
            Work::Fill(fill) => p.put(fill),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuGraphMemsetNodeSetParams(node: usize, p: In<MemsetNodeParams>) {
        replace(node, Work::fill(driver()?, &p.get()?))
    }

    fn cuGraphHostNodeGetParams(node: usize, p: Out<HostNodeParams>) {
        match work_of(node)? {
            Work::Host(function, data) => p.put(HostNodeParams { function: Some(function), userData: data.0 }),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuGraphHostNodeSetParams(node: usize, p: In<HostNodeParams>) {
        replace(node, node_description::host(p))
    }

    fn cuGraphChildGraphNodeGetGraph(node: usize, graph: Out<usize>) {
        match work_of(node)? {
            Work::Child(child) => graph.put(Graph::handle(&child)?),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuGraphBatchMemOpNodeGetParams(node: usize, p: Out<BatchMemOpNodeParams>) {
        match work_of(node)? {
            Work::Words(words) => p.put(BatchMemOpNodeParams {
                ctx: crate::graph::node(node)?.0.context.handle,
                count: words.given.len() as u32,
                // Valid until the node changes.
                paramArray: words.given.as_ptr(),
                flags: 0,
            }),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    unsafe fn cuGraphBatchMemOpNodeSetParams(node: usize, p: In<BatchMemOpNodeParams>) {
        // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
        let work = unsafe { node_description::words(p) };
        replace(node, work)
    }

    fn cuGraphEventRecordNodeGetEvent(node: usize, event: Out<usize>) {
        match work_of(node)? {
            Work::Record(found) => event.put(found),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuGraphEventRecordNodeSetEvent(node: usize, event: usize) {
        replace(node, node_description::recorded(event))
    }

    fn cuGraphEventWaitNodeGetEvent(node: usize, event: Out<usize>) {
        match work_of(node)? {
            Work::Wait(found) => event.put(found),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    fn cuGraphEventWaitNodeSetEvent(node: usize, event: usize) {
        replace(node, node_description::waited(event))
    }

    fn cuGraphMemAllocNodeGetParams(node: usize, p: Out<MemAllocNodeParams>) {
        let Work::Alloc(memory) = work_of(node)? else { return Err(Status::INVALID_VALUE) };
        let access = memory.access();
        p.put(MemAllocNodeParams {
            poolProps: MemPoolProps {
                allocType: 1,
                handleTypes: 0,
                location: MemLocation { kind: 1, id: memory.device() as i32 },
                win32SecurityAttributes: std::ptr::null_mut(),
                maxSize: 0,
                usage: 0,
                reserved: [0; 54],
            },
            // Stays where it is as long as the node.
            accessDescs: if access.is_empty() { std::ptr::null() } else { access.as_ptr() },
            accessDescCount: access.len(),
            bytesize: memory.size as usize,
            dptr: memory.address,
        })
    }

    fn cuGraphMemFreeNodeGetParams(node: usize, address: Out<u64>) {
        match work_of(node)? {
            Work::Free(found) => address.put(found),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    unsafe fn cuGraphNodeSetParams(node: usize, p: In<GraphNodeParams>) {
        work_of(node)?;
        // SAFETY: the program's pointers in the structure are valid, as CUDA's manual requires.
        let work = unsafe { node_description::described(p) };
        replace(node, work)
    }
}
