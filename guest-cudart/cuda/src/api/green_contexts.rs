//! Green contexts and partitions of a device.
//!
//! Memory, modules and events of a green context belong to the device's primary context. It only has its own
//! streams, including the default stream of threads in which it is current.
//!
//! Programs copy [`DevResource`] structures freely. Ours contain the server's ID of the partition; the server
//! keeps what its driver created.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::arguments::{Array, Count, In, InOut, Out, OutArray};
use crate::abi::result::{Result, code};
use crate::abi::types::DevResource;
use crate::api::teardown;
use crate::process::context::{self, Context};
use crate::process::driver::{self, Device, Driver, Server, driver};
use crate::process::fences;
use crate::process::green::{ANY, GREENS, Green};
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use crate::streams::event::{self, Event};
use crate::streams::green_gates::{self, GATES, Whole};
use crate::streams::stream_table;
use client::handle::{DescriptorId, GreenId};
use client::ops::green::{GreenCreate, GreenDestroy, MAX_GROUPS, Part, PartDescribe, PartGet, PartSplit};
use client::{Status, lock};

/// `CU_DEV_RESOURCE_TYPE_SM`.
const SM: u32 = 1;

static IDS: AtomicU32 = AtomicU32::new(1);

/// A descriptor of parts.
struct Descriptor {
    id: DescriptorId,
    server: &'static Server,
    parts: Vec<u32>,
}

/// All descriptors. A descriptor's handle is its index here, starting at 1. A program cannot destroy one
/// (each is valid as long as the process), so the same parts in the same order have the same one.
static DESCRIPTORS: Mutex<Vec<Descriptor>> = Mutex::new(Vec::new());

/// The handle of the descriptor of these parts, if there is one.
fn described(all: &[Descriptor], server: &Server, parts: &[u32]) -> Option<usize> {
    let is_it = |known: &Descriptor| std::ptr::eq(known.server, server) && known.parts == parts;
    all.iter().position(is_it).map(|place| place + 1)
}

fn of(handle: usize) -> Result<(&'static Driver, Arc<Green>)> {
    let driver = driver()?;
    Ok((driver, GREENS.get(handle).ok_or(Status::INVALID_CONTEXT)?))
}

/// The program's streams of a context, or of a green context in it. (This library's own work is done for a
/// stream of the program that is held meanwhile, or for a thread that waits. If it waited for an event behind
/// that stream, both would wait for ever.)
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` if one of them is being captured, which ends the capture.
fn streams(context: &'static Context, green: Option<&Arc<Green>>) -> Result<Vec<Arc<Stream>>> {
    let mut all = stream_table::of_context(context, green);
    all.retain(|stream| !stream.own);
    let captures: Vec<_> = all.iter().filter_map(|stream| stream.capture()).collect();
    if captures.is_empty() {
        return Ok(all);
    }
    captures.iter().for_each(|capture| capture.spoil());
    Err(code::STREAM_CAPTURE_UNSUPPORTED)
}

/// Records an event after all work so far of a context, or of a green context in it.
fn record_all((context, green): Whole, event: &Event) -> Result {
    if !std::ptr::eq(event.context(), context) {
        return Err(Status::INVALID_HANDLE);
    }
    let all = streams(context, green.as_ref())?;
    let last = Arc::new(match &green {
        None => stream_table::unnamed_once(context)?,
        Some(green) => stream_table::in_green(green, 0)?,
    });
    for stream in all {
        fences::join(&stream, &last)?;
    }
    event::record_on(event, last.clone())?;
    stream_table::end(last);
    Ok(())
}

/// Makes all later work in a context, or in a green context in it, wait for an event.
fn wait_all((context, green): Whole, event: &Event) -> Result {
    if let Some((capture, _)) = event.captured() {
        capture.spoil();
        return Err(code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let all = streams(context, green.as_ref())?;
    let mut gates = lock(&GATES);
    let is_it = |other: &Option<Arc<Green>>| match (other, &green) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        _ => false,
    };
    let found = gates.iter().find(|((of, other), _)| std::ptr::eq(*of, context) && is_it(other));
    let gate = match (found, &green) {
        (Some((_, gate)), _) => gate.clone(),
        (None, None) => stream_table::unnamed(context)?,
        (None, Some(green)) => {
            let gate = Arc::new(Stream { own: true, ..stream_table::in_green(green, 0)? });
            stream_table::keep(&gate);
            gate
        }
    };
    event::wait(&gate, event)?;
    if found.is_none() {
        gates.push(((context, green), gate));
    }
    drop(gates);
    for stream in all {
        event::wait(&stream, event)?;
    }
    Ok(())
}

fn part(to: Out<DevResource>, device: &Device, green: Option<GreenId>, kind: u32) -> Result {
    to.required()?;
    if kind != SM {
        return Err(code::INVALID_RESOURCE_TYPE);
    }
    let reply = device.server.session.call(&PartGet { device: device.number, green, kind })?;
    to.put(holding(&reply.part, device.server))
}

/// A part of a device in the form that programs keep.
fn holding(part: &Part, server: &Server) -> DevResource {
    DevResource::holding(part, server.session.index() as u32)
}

/// The server of a part, and its ID there.
fn part_of(driver: &Driver, part: &DevResource) -> Result<(&'static Server, u32)> {
    let (server, number) = part.number()?;
    let server = driver.servers.get(server as usize).ok_or(Status::INVALID_VALUE)?;
    Ok((server, number))
}

fn split(
    groups: OutArray<DevResource>,
    count: InOut<u32>,
    input: In<DevResource>,
    rest: Out<DevResource>,
    flags: u32,
    least: u32,
) -> Result {
    let driver = driver()?;
    let (input, wanted) = (input.get()?, count.get()?);
    if input.kind != SM {
        return Err(code::INVALID_RESOURCE_TYPE);
    }
    let wanted = (!groups.is_null()).then_some(wanted.min(MAX_GROUPS));
    let (server, part) = part_of(driver, &input)?;
    let request = PartSplit { part, groups: wanted, flags, least };
    let reply = server.session.call(&request)?;
    if reply.groups.len() > wanted.unwrap_or(0) as usize {
        return Err(Status::UNKNOWN);
    }
    if !groups.is_null() {
        // SAFETY: there is room for `count` values, by CUDA's manual, and there are no more.
        unsafe { groups.put(reply.groups.iter().map(|group| holding(group, server))) }?;
    }
    rest.put_if_wanted(holding(&reply.rest, server));
    count.put(reply.count)
}

fn describe(to: Out<usize>, parts: Array<DevResource>, count: Count<u32>) -> Result {
    let driver = driver()?;
    to.required()?;
    parts.required()?;
    if count.get() == 0 || count.get() > MAX_GROUPS as usize {
        return Err(Status::INVALID_VALUE);
    }
    let parts = parts.entries(count)?;
    if parts.iter().any(|part| part.kind != SM) {
        return Err(code::INVALID_RESOURCE_TYPE);
    }
    let parts = parts.iter().map(|part| part_of(driver, part)).collect::<Result<Vec<_>>>()?;
    let server = parts[0].0;
    if parts.iter().any(|(other, _)| !std::ptr::eq(*other, server)) {
        return Err(Status::INVALID_VALUE);
    }
    let parts: Vec<u32> = parts.into_iter().map(|(_, part)| part).collect();
    let known = described(&lock(&DESCRIPTORS), server, &parts);
    to.put(match known {
        Some(handle) => handle,
        None => {
            let id = DescriptorId(IDS.fetch_add(1, Ordering::Relaxed));
            server.session.call(&PartDescribe { descriptor: id, parts: parts.clone() })?;
            let mut all = lock(&DESCRIPTORS);
            all.push(Descriptor { id, server, parts });
            all.len()
        }
    })
}

fn create(to: Out<usize>, descriptor: usize, dev: i32, flags: u32) -> Result {
    driver()?;
    to.required()?;
    let device = driver::device(dev)?;
    let found = |place: usize| lock(&DESCRIPTORS).get(place).map(|known| (known.id, known.server));
    let (descriptor, server) = descriptor.checked_sub(1).and_then(found).ok_or(Status::INVALID_VALUE)?;
    if !std::ptr::eq(server, device.server) {
        return Err(Status::INVALID_DEVICE);
    }
    let id = GreenId(IDS.fetch_add(1, Ordering::Relaxed));
    device.server.session.call(&GreenCreate { green: id, descriptor, device: device.number, flags })?;
    let green = Arc::new(Green {
        id,
        context: device.primary,
        unique: unique_id(),
        handle: OnceLock::new(),
        converted: AtomicBool::new(false),
        alive: AtomicBool::new(true),
        default: Mutex::new(None),
    });
    device.primary.retain_for_green();
    match begin(&green) {
        Ok(handle) => to.put(handle),
        Err(status) => {
            let _ = end(&green);
            Err(status)
        }
    }
}

/// Makes a green context's default stream and its handle.
fn begin(green: &Arc<Green>) -> Result<usize> {
    fences::before_stream(green.context.server)?;
    let stream = Arc::new(stream_table::in_green(green, 0)?);
    stream_table::keep(&stream);
    green_gates::inherit(&stream)?;
    *lock(&green.default) = Some(stream);
    let handle = GREENS.insert(green.clone()).ok_or(Status::OUT_OF_MEMORY)?;
    green.handle.get_or_init(|| handle);
    ANY.store(true, Ordering::Release);
    Ok(handle)
}

fn destroy(handle: usize) -> Result {
    let (_, green) = of(handle)?;
    GREENS.remove(handle).ok_or(Status::INVALID_CONTEXT)?;
    let deferred = green.context.deferred();
    end(&green).and(deferred)
}

/// Ends a green context whose handle is gone.
fn end(green: &Arc<Green>) -> Result {
    // Its work must be done before its streams are destroyed.
    green.context.quiesce();
    green.alive.store(false, Ordering::Release);
    stream_table::end_all_of(green);
    lock(&GATES).retain(|((_, other), _)| other.as_ref().is_none_or(|other| !Arc::ptr_eq(other, green)));
    *lock(&green.default) = None;
    let destroyed = green.context.session().call(&GreenDestroy { green: green.id }).map(drop);
    let released = teardown::release_green(green.context);
    destroyed.and(released)
}

api! {
    fn cuDeviceGetDevResource(device: i32, resource: Out<DevResource>, kind: u32) {
        part(resource, driver::device(device)?, None, kind)
    }

    fn cuCtxGetDevResource(ctx: usize, resource: Out<DevResource>, kind: u32) {
        let (context, green) = context::and_green_of(ctx)?;
        part(resource, driver::device(context.device as i32)?, green.map(|green| green.id), kind)
    }

    fn cuGreenCtxGetDevResource(ctx: usize, resource: Out<DevResource>, kind: u32) {
        let (_, green) = of(ctx)?;
        part(resource, driver::device(green.context.device as i32)?, Some(green.id), kind)
    }

    fn cuDevSmResourceSplitByCount(
        groups: OutArray<DevResource>, count: InOut<u32>, input: In<DevResource>, rest: Out<DevResource>, flags: u32, least: u32
    ) {
        split(groups, count, input, rest, flags, least)
    }

    fn cuDevResourceGenerateDesc(descriptor: Out<usize>, resources: Array<DevResource>, count: Count<u32>) {
        describe(descriptor, resources, count)
    }

    fn cuGreenCtxCreate(ctx: Out<usize>, descriptor: usize, dev: i32, flags: u32) {
        create(ctx, descriptor, dev, flags)
    }

    fn cuGreenCtxDestroy(ctx: usize) {
        destroy(ctx)
    }

    fn cuCtxFromGreenCtx(pctx: Out<usize>, ctx: usize) {
        let (_, green) = of(ctx)?;
        pctx.put(green.convert())
    }

    fn cuGreenCtxGetId(ctx: usize, id: Out<u64>) {
        let green = if ctx == 0 { context::current_green().ok_or(Status::INVALID_CONTEXT)? } else { of(ctx)?.1 };
        id.put(green.unique)
    }

    fn cuGreenCtxStreamCreate(stream: Out<usize>, ctx: usize, flags: u32, priority: i32) {
        const NON_BLOCKING: u32 = 1;
        let (_, green) = of(ctx)?;
        green.context.session().check()?;
        green.context.deferred()?;
        if flags != NON_BLOCKING {
            return Err(Status::INVALID_VALUE);
        }
        stream.required()?;
        stream.put(stream_table::create_in(green.context, Some(green), flags, priority)?)
    }

    fn cuStreamGetGreenCtx(stream: usize, ctx: Out<usize>) {
        let (_, stream) = stream_table::ask(stream, false)?;
        ctx.put(stream.green().map_or(0, |green| green.handle()))
    }

    fn cuGreenCtxRecordEvent(ctx: usize, event: usize) {
        let (_, green) = of(ctx)?;
        record_all((green.context, Some(green)), &*event::of(event)?)
    }

    fn cuGreenCtxWaitEvent(ctx: usize, event: usize) {
        let (_, green) = of(ctx)?;
        wait_all((green.context, Some(green)), &*event::of(event)?)
    }

    fn cuCtxRecordEvent(ctx: usize, event: usize) {
        let event = event::of(event)?;
        record_all(context::and_green_of(ctx)?, &event)
    }

    fn cuCtxWaitEvent(ctx: usize, event: usize) {
        let event = event::of(event)?;
        wait_all(context::and_green_of(ctx)?, &event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_parts_in_the_same_order_have_one_descriptor() {
        let [one, other] = [(); 2].map(|()| Server::unused());
        let descriptor = |id, server| Descriptor { id: DescriptorId(id), server, parts: vec![1, 2] };
        let all = [descriptor(7, one), descriptor(8, other)];
        assert_eq!((described(&all, one, &[1, 2]), described(&all, other, &[1, 2])), (Some(1), Some(2)));
        assert_eq!((described(&all, one, &[2, 1]), described(&all, one, &[1])), (None, None));
    }
}
