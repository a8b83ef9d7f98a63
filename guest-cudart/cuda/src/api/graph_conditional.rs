//! Conditions of graphs.

use crate::abi::arguments::Out;
use crate::abi::result::Result;
use crate::graph::{Graph, instance};
use crate::process::context;
use crate::process::driver::driver;
use client::ops::graph::{GraphCondition, condition_flag};
use client::{Status, lock, log};

/// Creates a condition of a graph.
pub(crate) fn create(graph: &Graph, ctx: usize, default: u32, flags: u32) -> Result<u64> {
    driver()?;
    if flags & !condition_flag::ASSIGN_DEFAULT != 0 {
        return Err(Status::INVALID_VALUE);
    }
    if !std::ptr::eq(context::of(ctx)?, graph.context) {
        return Err(Status::INVALID_VALUE);
    }
    let id = graph.draft.id().unwrap_or_else(instance::new_id);
    let (context, session) = (graph.context.id, graph.context.session());
    let reply = session.call(&GraphCondition { context, graph: id, default, flags })?;
    // If two threads get here first at once, one of them has made a draft that nobody uses.
    if graph.draft.id.get_or_init(|| (id, session)).0 != id {
        log::warn(format_args!("conditions of one graph were made by two threads at once"));
        return Err(Status::NOT_PERMITTED);
    }
    lock(&graph.draft.conditions).push(reply.handle);
    Ok(reply.handle)
}

api! {
    fn cuGraphConditionalHandleCreate(handle: Out<u64>, graph: usize, ctx: usize, default: u32, flags: u32) {
        handle.required()?;
        handle.put(create(&*crate::graph::of(graph)?, ctx, default, flags)?)
    }
}
