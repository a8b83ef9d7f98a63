//! Attributes of streams. The server's driver keeps them. The stream also keeps a copy of those that its
//! captured kernels inherit.

use std::sync::Arc;

use crate::abi::arguments::{In, InOut};
use crate::abi::result::Result;
use crate::abi::types::AttrValue;
use crate::process::stream::Stream;
use crate::streams::stream_table;
use client::ops::launch::LaunchAttribute;
use client::ops::stream::{StreamCopyAttributes, StreamGetAttribute, StreamSetAttribute, attribute};
use client::{Status, lock};

/// Whether kernel nodes have this attribute, too.
fn is_of_kernels(id: u32) -> bool {
    id != attribute::SYNCHRONIZATION_POLICY
}

fn get(stream: &Stream, attribute: u32) -> Result<[u8; 64]> {
    Ok(stream.session().call(&StreamGetAttribute { stream: stream.id, attribute })?.value)
}

/// Updates the copy of the stream's priority.
fn follow_priority(stream: &Stream) -> Result {
    let value = get(stream, attribute::PRIORITY)?;
    stream.set_priority(value.first_chunk().map_or(0, |bytes| i32::from_le_bytes(*bytes)));
    Ok(())
}

fn set(stream: &Arc<Stream>, id: u32, value: [u8; 64]) -> Result {
    let new = LaunchAttribute { id, value };
    stream.session().call(&StreamSetAttribute { stream: stream.id, attribute: new.clone() })?;
    if is_of_kernels(id) {
        let mut all = lock(stream.attributes());
        all.retain(|other| other.id != id);
        all.push(new);
    }
    if id == attribute::PRIORITY { follow_priority(stream) } else { Ok(()) }
}

api! {
    fn cuStreamSetAttribute / cuStreamSetAttribute_ptsz(stream: usize, attribute: u32, value: In<AttrValue>) |pt| {
        value.required()?;
        let (_, stream) = stream_table::ask(stream, pt)?;
        set(&stream, attribute, value.get()?.0)
    }

    fn cuStreamGetAttribute / cuStreamGetAttribute_ptsz(stream: usize, attribute: u32, value: InOut<AttrValue>) |pt| {
        let before = value.get()?;
        let (_, stream) = stream_table::ask(stream, pt)?;
        value.put(before.with(attribute, &get(&stream, attribute)?))
    }

    fn cuStreamCopyAttributes / cuStreamCopyAttributes_ptsz(dst: usize, src: usize) |pt| {
        let (_, dst) = stream_table::ask(dst, pt)?;
        let (_, src) = stream_table::ask(src, pt)?;
        if !std::ptr::eq(dst.context, src.context) {
            return Err(Status::INVALID_VALUE);
        }
        dst.session().call(&StreamCopyAttributes { dst: dst.id, src: src.id })?;
        if !Arc::ptr_eq(&dst, &src) {
            let all = lock(src.attributes()).clone();
            *lock(dst.attributes()) = all;
        }
        follow_priority(&dst)
    }
}
