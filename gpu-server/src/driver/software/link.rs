//! The linker. The image that comes of it is an ELF file with the inputs as its sections, which a load links as it does the parts of one program: what they are to each other is
//! told when they are lowered.

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::module::*;

use software_gpu::Error;

use super::kernels::{MAX_IMAGE, write_if_it_fits};
use super::{Software, code};
use crate::driver::call::Call;

/// Linkers of a session at most.
const MOST: usize = 256;
/// Inputs of a linker at most.
const INPUTS: usize = 1024;
/// Characters of what is said of an input.
const LOG: usize = 448;

/// How an image begins: as a 64-bit little-endian ELF file, with a mark of our own in the bytes that mean nothing.
const IDENT: [u8; 16] = *b"\x7fELF\x02\x01\x01\0\0rgpusw\0";
/// Bytes of an ELF file's header, and of one of its sections'.
const HEADER: usize = 64;

/// A linker at work.
pub(super) struct Link {
    pub(super) context: u32,
    inputs: Vec<Vec<u8>>,
    bytes: u64,
    error_log: String,
    image: Option<Vec<u8>>,
}

/// An image with these inputs.
fn pack(inputs: &[Vec<u8>]) -> Vec<u8> {
    let tables = HEADER * (1 + inputs.len());
    let mut image = IDENT.to_vec();
    image.resize(HEADER, 0);
    image[40..48].copy_from_slice(&(HEADER as u64).to_le_bytes());
    image[52..54].copy_from_slice(&(HEADER as u16).to_le_bytes());
    image[58..60].copy_from_slice(&(HEADER as u16).to_le_bytes());
    image[60..62].copy_from_slice(&(inputs.len() as u16).to_le_bytes());
    let mut at = tables;
    for input in inputs {
        let mut section = [0; HEADER];
        // SHT_PROGBITS
        section[4] = 1;
        section[24..32].copy_from_slice(&(at as u64).to_le_bytes());
        section[32..40].copy_from_slice(&(input.len() as u64).to_le_bytes());
        image.extend_from_slice(&section);
        at += input.len();
    }
    inputs.iter().for_each(|input| image.extend_from_slice(input));
    image
}

/// The inputs of an image that a linker has made; `None`: it is another.
pub(super) fn unpack(image: &[u8]) -> Option<Vec<&[u8]>> {
    image.strip_prefix(&IDENT)?;
    let count = usize::from(u16::from_le_bytes(*image.get(60..)?.first_chunk()?));
    let input = |number: usize| {
        let section = image.get(HEADER * (1 + number)..)?.get(..HEADER)?;
        let word = |at: usize| usize::try_from(u64::from_le_bytes(*section[at..].first_chunk()?)).ok();
        image.get(word(24)?..)?.get(..word(32)?)
    };
    (0..count).map(input).collect()
}

/// What NVIDIA's driver has in its log of PTX that `ptxas` refuses: on which line, and what is wrong there. It calls every input the same.
pub(super) fn told(error: &Error) -> String {
    let input = "application ptx input";
    let mut text = match error {
        Error::InvalidPtx { line, message } => {
            format!("ptxas {input}, line {line}; error   : {message}")
        }
        Error::UnsupportedPtx { line, what } => {
            format!("ptxas {input}, line {line}; error   : {what} is not supported by the software GPU")
        }
        other => format!("ptxas {input}; error   : {other}"),
    };
    text.truncate(text.floor_char_boundary(LOG));
    text + "\nptxas fatal   : Ptx assembly aborted due to errors"
}

impl Link {
    /// Says why an input is refused.
    fn refuse(&mut self, status: Status, why: &str) -> u32 {
        tracing::warn!("linker: {why}");
        self.error_log = why.to_owned();
        status.0
    }
}

impl Software {
    fn link(&mut self, cx: &mut Call, id: u32) -> Result<&mut Link, Status> {
        let link = self.links.get_mut(&id).ok_or(Status::INVALID_HANDLE)?;
        cx.context = ContextId(link.context);
        Ok(link)
    }

    /// The GPU that a linker's image is for.
    fn gpu_of_link(&mut self, cx: &mut Call, id: u32) -> Result<software_gpu::Gpu, Status> {
        let context = ContextId(self.link(cx, id)?.context);
        let device = self.context(context)?.device;
        Ok(self.device(device)?.gpu.clone())
    }

    pub(super) fn create_link(&mut self, cx: &mut Call, op: &LinkCreate) -> Result<(), Status> {
        cx.context = op.context;
        self.context(op.context)?;
        if self.links.contains_key(&op.link.0) {
            return Err(Status::INVALID_HANDLE);
        }
        if self.links.len() >= MOST {
            return Err(Status::OUT_OF_MEMORY);
        }
        let (inputs, error_log) = (Vec::new(), String::new());
        self.links
            .insert(op.link.0, Link { context: op.context.0, inputs, bytes: 0, error_log, image: None });
        Ok(())
    }

    pub(super) fn add_to_link(&mut self, cx: &mut Call, op: LinkAdd<'_>) -> Result<LinkAddReply, Status> {
        if op.kind > jit_input::LAST {
            return Err(Status::INVALID_VALUE);
        }
        let mut data = cx.input(op.data)?.collect(MAX_IMAGE)?;
        if op.kind == jit_input::PTX && data.last() != Some(&0) {
            data.push(0);
        }
        let gpu = self.gpu_of_link(cx, op.link.0)?;
        let link = self.link(cx, op.link.0)?;
        let bytes = link.bytes + data.len() as u64;
        let result = if link.image.is_some() {
            link.refuse(Status::INVALID_VALUE, "an input comes after the end")
        } else if !matches!(op.kind, jit_input::PTX | jit_input::FATBINARY) {
            let why =
                format!("{}: the software GPU links PTX alone, no machine code and no archives", op.name);
            link.refuse(Status::NOT_SUPPORTED, &why)
        } else if link.inputs.len() >= INPUTS || bytes > MAX_IMAGE {
            link.refuse(Status::OUT_OF_MEMORY, "the inputs are too many")
        } else if let Err(error) = gpu.check_image(&data) {
            link.refuse(code(&error), &told(&error))
        } else {
            link.bytes = bytes;
            link.inputs.push(data);
            0
        };
        Ok(LinkAddReply { result, info_log: String::new(), error_log: link.error_log.clone() })
    }

    pub(super) fn complete_link(
        &mut self,
        cx: &mut Call,
        op: LinkComplete,
    ) -> Result<LinkCompleteReply, Status> {
        let gpu = self.gpu_of_link(cx, op.link.0)?;
        let link = self.link(cx, op.link.0)?;
        let mut result = 0;
        if link.image.is_none() {
            let inputs: Vec<&[u8]> = link.inputs.iter().map(Vec::as_slice).collect();
            let linked = if inputs.is_empty() { Ok(None) } else { gpu.link_module(&inputs).map(Some) };
            match linked {
                Ok(Some(_)) => link.image = Some(pack(&link.inputs)),
                Ok(None) => result = link.refuse(Status::INVALID_VALUE, "there is no input"),
                Err(error) => result = link.refuse(code(&error), &told(&error)),
            }
        }
        let error_log = link.error_log.clone();
        let image = link.image.take();
        let size = image.as_ref().map_or(0, |image| image.len() as u64);
        let written = image.as_ref().map_or(Ok(()), |image| write_if_it_fits(cx, op.image, image));
        self.link(cx, op.link.0)?.image = image;
        written?;
        Ok(LinkCompleteReply { result, size, info_log: String::new(), error_log })
    }

    pub(super) fn destroy_link(&mut self, cx: &mut Call, op: &LinkDestroy) -> Result<(), Status> {
        // One that is unknown has gone with its context.
        if let Some(link) = self.links.remove(&op.link.0) {
            cx.context = ContextId(link.context);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn inputs_come_out_as_they_went_in(inputs in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..6)) {
            let image = pack(&inputs);
            prop_assert_eq!(unpack(&image).unwrap(), inputs);
        }

        #[test]
        fn an_image_that_lies_about_its_parts_has_none(mut bytes in proptest::collection::vec(any::<u8>(), 16..300)) {
            bytes[..16].copy_from_slice(&IDENT);
            // Whatever it says, nothing outside of it is read.
            let _ = unpack(&bytes);
            prop_assert!(unpack(&bytes[16..]).is_none());
        }
    }
}
