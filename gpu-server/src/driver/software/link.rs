//! The linker. The linked image is an ELF file with the inputs as its sections. Loading it links them like
//! parts of one program, so references between them are resolved when they are lowered.

use protocol::Status;
use protocol::ops::module::*;

use object::{Object, ObjectSection};
use software_gpu::{Error, FunctionInfo, Unsupported};

use super::code;
use super::kernels::MAX_IMAGE;
use crate::driver::gpu::LinkInput;

/// Maximum number of inputs of a linker.
const INPUTS: usize = 1024;
/// Maximum length of a message about an input, in characters.
const LOG: usize = 448;

/// The beginning of an image: that of a 64-bit little-endian ELF file, with our own mark in the padding.
const IDENT: [u8; 16] = *b"\x7fELF\x02\x01\x01\0\0rgpusw\0";
/// Size of an ELF file's header, and of a section header, in bytes.
const HEADER: usize = 64;

/// Offset of the kernels' maximum number of registers in an image: in the ELF flags.
const REGISTERS: std::ops::Range<usize> = 48..52;
/// `CU_JIT_MAX_REGISTERS`.
const MAX_REGISTERS: u32 = 0;

/// A linker with its inputs.
pub struct Link {
    registers: u32,
    inputs: Vec<Vec<u8>>,
    bytes: u64,
    error_log: String,
    image: Option<Vec<u8>>,
}

/// The maximum number of registers that these options allow. 0: unlimited.
fn allowed(options: &[JitOption]) -> u32 {
    options.iter().rfind(|option| option.option == MAX_REGISTERS).map_or(0, |option| option.value as u32)
}

/// The maximum number of registers of an image's kernels, from the options of its load or of the linker that
/// made it.
pub(super) fn most_registers(image: &[u8], options: &[JitOption]) -> u32 {
    let linked = image.strip_prefix(&IDENT).and_then(|_| image.get(REGISTERS)?.first_chunk());
    let said = [allowed(options), linked.map_or(0, |bytes| u32::from_le_bytes(*bytes))];
    said.into_iter().filter(|&most| most != 0).min().unwrap_or(u32::MAX)
}

/// Makes an image of these inputs.
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

/// The inputs of an image that a linker has made. `None` for other images.
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

/// The fat binaries in a host object file, or in those of an archive: the contents of `nvcc`'s sections.
fn embedded(data: &[u8]) -> Result<Vec<&[u8]>, object::Error> {
    let mut all = Vec::new();
    let mut look = |member| {
        let file = object::File::parse(member)?;
        for section in file.sections() {
            if matches!(section.name(), Ok("__nv_relfatbin" | ".nv_fatbin")) {
                all.push(section.data()?);
            }
        }
        Ok(())
    };
    if data.starts_with(&object::archive::MAGIC) {
        for member in object::read::archive::ArchiveFile::parse(data)?.members() {
            look(member?.data(data)?)?;
        }
    } else {
        look(data)?;
    }
    Ok(all)
}

/// The size of these parts and the existing ones, if a linker can take that many.
fn together(already: u64, parts: &[&[u8]]) -> Option<u64> {
    let all = parts.iter().try_fold(already, |sum, part| sum.checked_add(part.len() as u64))?;
    (all <= MAX_IMAGE).then_some(all)
}

/// The log that NVIDIA's driver writes for PTX that `ptxas` refuses: the line, and the error. It uses the
/// same name for every input.
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

/// The error log of a module that was loaded although some of its kernels cannot be launched: a line for each
/// of them, truncated to fit into a reply.
pub(super) fn told_of_kernels(kernels: &[FunctionInfo]) -> String {
    let lines = kernels.iter().filter_map(|kernel| {
        let Unsupported { line, what, .. } = kernel.unsupported.as_ref()?;
        Some(format!(
            "ptxas application ptx input, line {line}; warning : {what} is not supported by the software GPU: kernel {} cannot be launched\n",
            kernel.name
        ))
    });
    let mut text: String = lines.collect();
    text.truncate(text.floor_char_boundary(LOG));
    text
}

impl Link {
    /// A linker with these options.
    pub(super) fn new(options: &[JitOption]) -> Link {
        let (inputs, error_log) = (Vec::new(), String::new());
        Link { registers: allowed(options), inputs, bytes: 0, error_log, image: None }
    }

    /// Logs why an input, or the whole link, is refused.
    fn refuse(&mut self, status: Status, name: &str, why: &str) -> Status {
        tracing::warn!("linker: {name}: {why}");
        self.error_log = why.to_owned();
        status
    }

    fn logs(&self) -> [String; 2] {
        [String::new(), self.error_log.clone()]
    }

    /// Adds an input. Returns its result and the logs so far.
    pub(super) fn add_input(
        &mut self,
        gpu: &software_gpu::Gpu,
        input: LinkInput<'_>,
    ) -> (Status, [String; 2]) {
        let result = match self.add(gpu, input.kind, input.data) {
            Ok(()) => Status::SUCCESS,
            Err((status, why)) => self.refuse(status, input.name, &why),
        };
        (result, self.logs())
    }

    /// Links, unless that was done before. Returns the result and the logs so far.
    pub(super) fn complete(&mut self, gpu: &software_gpu::Gpu) -> (Status, [String; 2]) {
        let mut result = Status::SUCCESS;
        if self.image.is_none() {
            let inputs: Vec<&[u8]> = self.inputs.iter().map(Vec::as_slice).collect();
            let linked = if inputs.is_empty() { Ok(None) } else { gpu.link_module(&inputs).map(Some) };
            match linked {
                Ok(Some(_)) => {
                    let mut image = pack(&self.inputs);
                    image[REGISTERS].copy_from_slice(&self.registers.to_le_bytes());
                    self.image = Some(image);
                }
                Ok(None) => result = self.refuse(Status::INVALID_VALUE, "the whole", "there is no input"),
                Err(error) => result = self.refuse(code(&error), "the whole", &told(&error)),
            }
        }
        (result, self.logs())
    }

    /// The linked image.
    pub(super) fn image(&self) -> Option<&[u8]> {
        self.image.as_deref()
    }

    /// Adds an input. On failure, returns the reason.
    fn add(&mut self, gpu: &software_gpu::Gpu, kind: u32, data: Vec<u8>) -> Result<(), (Status, String)> {
        if self.image.is_some() {
            return Err((Status::INVALID_VALUE, "an input was added after linking".into()));
        }
        let inside = matches!(kind, jit_input::OBJECT | jit_input::LIBRARY);
        let parts = match kind {
            jit_input::PTX | jit_input::FATBINARY => vec![&data[..]],
            _ if inside => embedded(&data).map_err(|error| (Status::INVALID_IMAGE, error.to_string()))?,
            _ => {
                return Err((
                    Status::NOT_SUPPORTED,
                    "the software GPU links only PTX, not machine code".into(),
                ));
            }
        };
        // Checked before anything is copied, because the sections of an object file may overlap.
        let bytes = together(self.bytes, &parts).filter(|_| self.inputs.len() + parts.len() <= INPUTS);
        let bytes = bytes.ok_or((Status::OUT_OF_MEMORY, "there are too many inputs".into()))?;
        let mut taken = Vec::new();
        for part in parts {
            match gpu.check_image(part) {
                Ok(()) => taken.push(part.to_vec()),
                // Inputs without PTX are not linked. They may be unnecessary, such as the device runtime,
                // which this device has built in. Missing symbols are reported at the end.
                Err(_) if inside => {}
                Err(error) => return Err((code(&error), told(&error))),
            }
        }
        if taken.is_empty() && kind == jit_input::OBJECT {
            return Err((Status::NO_BINARY_FOR_GPU, "it has no PTX that the software GPU runs".into()));
        }
        self.bytes = bytes;
        self.inputs.extend(taken);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An object file with these sections.
    fn object(sections: &[(&str, &[u8])]) -> Vec<u8> {
        let (mut names, mut parts) = (vec![0], vec![(0, Vec::new())]);
        for (name, data) in sections {
            parts.push((names.len(), data.to_vec()));
            names.extend_from_slice(name.as_bytes());
            names.push(0);
        }
        parts.push((names.len(), [names, b".shstrtab\0".to_vec()].concat()));
        let bytes: Vec<Vec<u8>> = parts.iter().map(|(_, data)| data.clone()).collect();
        let mut file = pack(&bytes);
        // ET_REL for EM_X86_64, with names.
        file[..16].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
        file[16..20].copy_from_slice(&[1, 0, 62, 0]);
        file[62] = (parts.len() - 1) as u8;
        for (number, (name, _)) in parts.iter().enumerate() {
            let header = &mut file[HEADER * (1 + number)..][..HEADER];
            header[..4].copy_from_slice(&(*name as u32).to_le_bytes());
            match number {
                0 => header.fill(0),
                // SHT_STRTAB
                n if n == parts.len() - 1 => header[4] = 3,
                _ => {}
            }
        }
        file
    }

    fn archive(members: &[&[u8]]) -> Vec<u8> {
        let mut file = object::archive::MAGIC.to_vec();
        for (number, member) in members.iter().enumerate() {
            let name = format!("{number}.o/");
            file.extend_from_slice(
                format!("{name:<16}{:<12}{:<6}{:<6}{:<8}{:<10}`\n", 0, 0, 0, 644, member.len()).as_bytes(),
            );
            file.extend_from_slice(member);
            file.resize(file.len().next_multiple_of(2), b'\n');
        }
        file
    }

    #[test]
    fn fat_binaries_are_found_in_objects_and_in_archives_of_them() {
        let one = object(&[(".text", b"code"), ("__nv_relfatbin", b"first"), (".nv_fatbin", b"second")]);
        let other = object(&[(".nv_fatbin", b"third!")]);
        assert_eq!(embedded(&one).unwrap(), [&b"first"[..], b"second"]);
        let all = archive(&[&one, &object(&[(".text", b"code")]), &other]);
        assert_eq!(embedded(&all).unwrap(), [&b"first"[..], b"second", b"third!"]);
        assert!(embedded(b"no object file").is_err());
        // Sections may overlap; all of them count.
        let part = vec![0; 1 << 20];
        let over = vec![&part[..]; (MAX_IMAGE >> 20) as usize];
        assert_eq!((together(0, &over), together(1, &over)), (Some(MAX_IMAGE), None));
        assert!(embedded(&archive(&[b"no object file"])).is_err());
    }

    proptest! {
        #[test]
        fn inputs_come_out_as_they_went_in(inputs in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..6)) {
            let image = pack(&inputs);
            prop_assert_eq!(unpack(&image).unwrap(), inputs);
        }

        #[test]
        fn an_image_that_lies_about_its_parts_has_none(mut bytes in proptest::collection::vec(any::<u8>(), 16..300)) {
            bytes[..16].copy_from_slice(&IDENT);
            // Nothing outside the file is read, whatever it claims.
            let _ = unpack(&bytes);
            prop_assert!(unpack(&bytes[16..]).is_none());
        }
    }
}
