//! Cubins: ELF files with the machine code of kernels for one architecture.
//!
//! | where | what |
//! |---|---|
//! | symbol table | a kernel is a function with the flag `STO_CUDA_ENTRY` |
//! | `.nv.info` | registers and stack of each kernel |
//! | `.nv.info.KERNEL` | its parameters, launch bounds, clusters, barriers |
//! | `.nv.shared.KERNEL` | its static shared memory, behind what is reserved for the system |
//! | `.note.nv.cuinfo`, the header's flags | the architectures of the machine code and of the PTX that it was made from |
//! | `.text.KERNEL`'s flags | with CUDA 12's version of the ABI: its barriers |
//!
//! The format is not documented. What this module reads was compared with what NVIDIA's driver reports for
//! the same cubins, for two versions of the ABI ([`Abi`]) and for [`ARCHITECTURES`]. [`read`] refuses all
//! other cubins and those that contradict themselves; the caller then asks the driver.

use std::collections::HashMap;

use object::LittleEndian;
use object::elf::{ET_EXEC, FileHeader64, SHN_UNDEF, SHT_SYMTAB, STT_FUNC, SectionHeader64};
use object::read::elf::{FileHeader, SectionHeader, Sym};

/// The architectures whose cubins [`read`] accepts: 90 for compute capability 9.0.
pub const ARCHITECTURES: &[u32] = &[90];
/// Bytes at the beginning of each block's shared memory that are reserved for the system on these
/// architectures.
pub const RESERVED_SHARED: u64 = 1024;
/// Maximum threads of a block on these architectures.
pub const MOST_THREADS: u64 = 1024;

/// The ABI versions that [`read`] accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Abi {
    /// Version 7, of CUDA 12's tools. Many kernels in the libraries of CUDA 13 have this version, too.
    Cuda12,
    /// Version 8, of CUDA 13's tools.
    Cuda13,
}

/// `EM_CUDA`.
const MACHINE: u16 = 190;
/// `STO_CUDA_ENTRY`.
const ENTRY: u8 = 0x10;
/// Maximum parameters of a kernel, and maximum bytes of them. The toolkit's own limits are lower.
const MOST_PARAMS: usize = 4096;
const MOST_PARAM_BYTES: u64 = 40 << 10;
/// Maximum bytes of a name.
const MOST_NAME: usize = 16 << 10;
/// Maximum total bytes of all names, as a multiple of the image's size. Names may share bytes, but not
/// without limit.
const MOST_SHARING: usize = 4;
/// Limits of kernels of [`ARCHITECTURES`]: registers and stack bytes of a thread; barriers and shared memory
/// bytes of a block; blocks of a cluster.
const MOST_REGISTERS: u32 = 255;
const MOST_STACK: u32 = 512 << 10;
const MOST_BARRIERS: u32 = 16;
const MOST_SHARED: u64 = 227 << 10;
const MOST_CLUSTER: u64 = 16;
/// Maximum bytes of constant variables.
const MOST_CONSTANTS: u64 = 64 << 10;

/// `EIATTR_…`: kinds of items in `.nv.info` sections.
mod item {
    pub const MAX_THREADS: u8 = 0x05;
    pub const REQUIRED_THREADS: u8 = 0x10;
    pub const MIN_STACK_SIZE: u8 = 0x12;
    pub const PARAM: u8 = 0x17;
    pub const PARAM_BYTES: u8 = 0x19;
    pub const REGISTERS: u8 = 0x2f;
    pub const CLUSTER: u8 = 0x3d;
    pub const EXPLICIT_CLUSTER: u8 = 0x3e;
    pub const LARGE_PARAM: u8 = 0x45;
    pub const BARRIERS: u8 = 0x4c;
}

/// Why [`read`] refuses a cubin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unread {
    /// It is not an ELF file, or it is damaged.
    #[error("the cubin is damaged: {0}")]
    Damaged(String),
    /// It is of an unknown kind.
    #[error("the cubin's {what} is {value:#x}, which is unknown")]
    Unknown {
        /// What is unknown.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// The description of a kernel is incomplete, or contradicts itself.
    #[error("kernel {kernel}: {what}")]
    Kernel {
        /// The kernel's name.
        kernel: String,
        /// What is wrong.
        what: &'static str,
    },
}

/// Where a parameter is in the parameter block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Offset in bytes.
    pub offset: u32,
    /// Size in bytes.
    pub size: u32,
}

/// A kernel's description in a cubin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Mangled name.
    pub name: String,
    /// Parameters in order.
    pub params: Vec<Param>,
    /// Registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block in bytes, excluding the part reserved for the system.
    pub shared: u32,
    /// Stack of a thread in bytes, as far as the compiler could determine it.
    pub stack: u32,
    /// Barriers of a block.
    pub barriers: u32,
    /// Maximum threads of a block in x, y and z (`__launch_bounds__`, `.maxntid`).
    pub max_threads: Option<[u32; 3]>,
    /// Required threads of a block (`.reqntid`).
    pub required_threads: Option<[u32; 3]>,
    /// Blocks of a cluster (`__cluster_dims__`).
    pub cluster: Option<[u32; 3]>,
    /// Whether it can only be launched in clusters.
    pub needs_cluster: bool,
}

/// What a cubin contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cubin {
    /// The architecture: 90 for compute capability 9.0.
    pub arch: u32,
    /// The architecture of the PTX that it was made from.
    pub ptx_arch: u32,
    /// Constant variables of all kernels together, in bytes.
    pub constants: u64,
    /// Its kernels, in the order of their names.
    pub kernels: Vec<Kernel>,
    /// Whether any of its kernels may call `printf`.
    pub prints: bool,
}

/// Whether an image is an ELF file.
pub fn is_elf(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF")
}

type Elf = FileHeader64<LittleEndian>;

fn damaged(error: object::Error) -> Unread {
    Unread::Damaged(error.to_string())
}

/// Reads a name. `left` is the number of bytes that names may still have; this subtracts the name's.
fn name<'a>(bytes: object::Result<&'a [u8]>, left: &mut usize) -> Result<&'a str, Unread> {
    let bytes = bytes.map_err(damaged)?;
    let fits = left.checked_sub(bytes.len()).filter(|_| bytes.len() <= MOST_NAME);
    *left = fits.ok_or_else(|| Unread::Damaged(format!("a name of {} bytes", bytes.len())))?;
    std::str::from_utf8(bytes).map_err(|_| Unread::Damaged("a name is not UTF-8".into()))
}

/// An item of a `.nv.info` section.
struct Item<'a> {
    kind: u8,
    /// A byte or half word that is in the item itself.
    short: u16,
    bytes: &'a [u8],
}

impl Item<'_> {
    fn word(&self, index: usize) -> Option<u32> {
        self.bytes.get(4 * index..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
    }

    fn half(&self, at: usize) -> Option<u16> {
        self.bytes.get(at..)?.first_chunk().map(|bytes| u16::from_le_bytes(*bytes))
    }

    fn triple(&self) -> Option<[u32; 3]> {
        Some([self.word(0)?, self.word(1)?, self.word(2)?])
    }
}

/// The items of a `.nv.info` section. `None` stands for an item that is cut off or of an unknown form, and is
/// the last one.
fn items(mut bytes: &[u8]) -> impl Iterator<Item = Option<Item<'_>>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let item = (|| {
            let (&[form, kind, low, high], rest) = bytes.split_first_chunk()?;
            let short = u16::from_le_bytes([low, high]);
            let len = match form {
                // EIFMT_NVAL, BVAL, HVAL
                1..=3 => 0,
                // EIFMT_SVAL
                4 => usize::from(short),
                _ => return None,
            };
            let (data, rest) = rest.split_at_checked(len)?;
            bytes = rest;
            Some(Item { kind, short, bytes: data })
        })();
        if item.is_none() {
            bytes = &[];
        }
        Some(item)
    })
}

/// Sets a value that may be given once. `None` if it was given before.
fn once<T>(place: &mut Option<T>, value: T) -> Option<()> {
    place.replace(value).is_none().then_some(())
}

/// What has been read about a kernel so far.
#[derive(Default)]
struct Found {
    /// By ordinal.
    params: Vec<Option<Param>>,
    param_bytes: Option<u32>,
    max_threads: Option<[u32; 3]>,
    required_threads: Option<[u32; 3]>,
    cluster: Option<[u32; 3]>,
    needs_cluster: bool,
    barriers: Option<u32>,
}

impl Found {
    fn of(bytes: &[u8]) -> Option<Found> {
        let mut found = Found::default();
        for item in items(bytes) {
            let item = item?;
            match item.kind {
                item::PARAM | item::LARGE_PARAM => {
                    let ordinal = usize::from(item.half(4)?);
                    let (offset, size) = (item.half(6)?, item.word(2)?);
                    // The lower bits of the size say where the parameter may be.
                    let size = if item.kind == item::PARAM { size >> 18 } else { size };
                    if ordinal >= MOST_PARAMS || item.bytes.len() != 12 {
                        return None;
                    }
                    if found.params.len() <= ordinal {
                        found.params.resize(ordinal + 1, None);
                    }
                    let place = found.params.get_mut(ordinal)?;
                    if place.replace(Param { offset: offset.into(), size }).is_some() {
                        return None;
                    }
                }
                item::PARAM_BYTES => once(&mut found.param_bytes, item.short.into())?,
                item::MAX_THREADS => once(&mut found.max_threads, item.triple()?)?,
                item::REQUIRED_THREADS => once(&mut found.required_threads, item.triple()?)?,
                item::CLUSTER => once(&mut found.cluster, item.triple()?)?,
                item::EXPLICIT_CLUSTER => found.needs_cluster = true,
                item::BARRIERS => once(&mut found.barriers, u32::from(item.short & 0xff))?,
                _ => {}
            }
        }
        Some(found)
    }

    /// Whether a kernel can have these sizes.
    fn is_possible(&self) -> bool {
        let within = |sizes: Option<[u32; 3]>, most: u64| {
            sizes.is_none_or(|sizes| {
                let product =
                    sizes.iter().try_fold(1_u64, |product, size| product.checked_mul((*size).into()));
                product.is_some_and(|product| (1..=most).contains(&product))
            })
        };
        within(self.max_threads, MOST_THREADS)
            && within(self.required_threads, MOST_THREADS)
            && within(self.cluster, MOST_CLUSTER)
            && self.barriers.is_none_or(|barriers| barriers <= MOST_BARRIERS)
    }

    /// The parameters, if none is missing, none overlaps the next, and their total size is as given.
    fn params(&self) -> Option<Vec<Param>> {
        let params: Vec<Param> = self.params.iter().copied().collect::<Option<_>>()?;
        let mut end = 0;
        for param in &params {
            if u64::from(param.offset) < end || param.size == 0 {
                return None;
            }
            end = u64::from(param.offset) + u64::from(param.size);
        }
        (end <= MOST_PARAM_BYTES && end == u64::from(self.param_bytes.unwrap_or(0))).then_some(params)
    }
}

/// The architecture of the PTX, from the note that the toolkit writes: a header, "NVIDIA Corp", a version,
/// and the number.
fn ptx_arch(note: &[u8]) -> Option<u32> {
    let (head, rest) = note.split_first_chunk::<24>()?;
    let (version, rest) = rest.split_first_chunk::<2>()?;
    let arch = u16::from_le_bytes(*rest.first_chunk()?);
    (head[12..] == *b"NVIDIA Corp\0" && u16::from_le_bytes(*version) == 2).then_some(arch.into())
}

/// Reads a cubin.
///
/// # Errors
/// [`Unread`], if anything is unknown. The driver may still load such a cubin.
pub fn read(image: &[u8]) -> Result<Cubin, Unread> {
    let endian = LittleEndian;
    let header = Elf::parse(image).map_err(damaged)?;
    let unknown = |what, value: u64| Unread::Unknown { what, value };
    header.endian().map_err(damaged)?;
    if header.e_machine(endian).0 != MACHINE {
        return Err(unknown("machine", header.e_machine(endian).0.into()));
    }
    // Other types must be linked first.
    if header.e_type(endian) != ET_EXEC {
        return Err(unknown("type", header.e_type(endian).0.into()));
    }
    let abi = match header.e_ident().abi_version {
        7 => Abi::Cuda12,
        8 => Abi::Cuda13,
        version => return Err(unknown("ABI", version.into())),
    };
    let flags = header.e_flags(endian).0;
    let arch = match abi {
        Abi::Cuda12 => flags & 0xff,
        Abi::Cuda13 => flags >> 8 & 0xff,
    };
    if !ARCHITECTURES.contains(&arch) {
        return Err(unknown("architecture", arch.into()));
    }
    let sections = header.sections(endian, image).map_err(damaged)?;
    // Bytes that names may still have.
    let mut left = image.len().saturating_mul(MOST_SHARING);
    let mut by_name = HashMap::with_capacity(sections.len());
    let mut tables = 0;
    for (index, section) in sections.enumerate() {
        let name = name(sections.section_name(endian, section), &mut left)?;
        // Every section must be inside the image, including those that are not read here.
        section.data(endian, image).map_err(damaged)?;
        tables += usize::from(section.sh_type(endian) == SHT_SYMTAB);
        if by_name.insert(name, (index, section)).is_some() {
            return Err(Unread::Damaged(format!("two sections have the name {name}")));
        }
    }
    if tables != 1 {
        return Err(Unread::Damaged(format!("{tables} symbol tables")));
    }
    // CUDA 12's tools omit this section, but reserve the memory in each kernel's section.
    if abi == Abi::Cuda13 && !by_name.contains_key(".nv.shared.reserved.0") {
        return Err(unknown("shared memory, without a reserved part,", 0));
    }
    let constants = by_name.get(".nv.constant3").map_or(0, |(_, section)| section.sh_size(endian));
    if constants > MOST_CONSTANTS {
        return Err(unknown("size of all constant variables", constants));
    }
    let symbols = sections.symbols(endian, image, SHT_SYMTAB).map_err(damaged)?;
    let data = |name: &str| match by_name.get(name) {
        Some((_, section)) => section.data(endian, image).map_err(damaged),
        None => Ok(&[][..]),
    };
    let ptx_arch = match abi {
        Abi::Cuda12 => flags >> 16 & 0xff,
        Abi::Cuda13 => ptx_arch(data(".note.nv.cuinfo")?).ok_or_else(|| unknown("note", 0))?,
    };
    // Registers and stack, by symbol.
    let (mut registers, mut stacks) = (HashMap::new(), HashMap::new());
    for item in items(data(".nv.info")?) {
        let item = item.ok_or_else(|| Unread::Damaged(".nv.info".into()))?;
        let table = match item.kind {
            item::REGISTERS => &mut registers,
            item::MIN_STACK_SIZE => &mut stacks,
            _ => continue,
        };
        let entry = item.word(0).zip(item.word(1)).filter(|_| item.bytes.len() == 8);
        let (symbol, value) = entry.ok_or_else(|| Unread::Damaged(".nv.info".into()))?;
        if table.insert(symbol as usize, value).is_some() {
            return Err(Unread::Damaged(format!(".nv.info describes symbol {symbol} twice")));
        }
    }
    let (mut kernels, mut prints) = (Vec::new(), false);
    for (index, symbol) in symbols.enumerate() {
        let name = name(symbols.symbol_name(endian, symbol), &mut left)?;
        prints |= name == "vprintf";
        if symbol.st_type() != STT_FUNC || symbol.st_other().0 & ENTRY == 0 {
            continue;
        }
        let refuse = |what| Unread::Kernel { kernel: name.to_owned(), what };
        if symbol.st_shndx(endian) == SHN_UNDEF {
            return Err(refuse("it is defined elsewhere"));
        }
        if name.is_empty() {
            return Err(refuse("it has no name"));
        }
        let (code, text) =
            *by_name.get(format!(".text.{name}").as_str()).ok_or_else(|| refuse("it has no code"))?;
        if symbols.symbol_section(endian, symbol, index).ok().flatten() != Some(code) {
            return Err(refuse("its code is elsewhere"));
        }
        // The section that describes a kernel refers to the kernel's code by its own name, and by the number
        // of the code's section.
        let belongs = |section: &SectionHeader64<LittleEndian>| section.sh_info(endian) as usize == code.0;
        let said = match by_name.get(format!(".nv.info.{name}").as_str()) {
            Some((_, section)) if belongs(section) => section.data(endian, image).map_err(damaged)?,
            Some(_) => return Err(refuse("its section .nv.info belongs to another kernel")),
            None => &[],
        };
        let mut found = Found::of(said).ok_or_else(|| refuse("its section .nv.info is damaged"))?;
        if abi == Abi::Cuda12 {
            let barriers = (text.sh_flags(endian).0 >> 20) as u32 & 0x7f;
            once(&mut found.barriers, barriers).ok_or_else(|| refuse("its barriers are given twice"))?;
        }
        if !found.is_possible() {
            return Err(refuse("its sizes are impossible"));
        }
        // Without its own section it has only the reserved part.
        let shared = match by_name.get(format!(".nv.shared.{name}").as_str()) {
            Some((_, section)) if belongs(section) => section.sh_size(endian).checked_sub(RESERVED_SHARED),
            Some(_) => None,
            None => Some(0),
        };
        let shared = shared
            .filter(|size| *size <= MOST_SHARED)
            .ok_or_else(|| refuse("its shared memory is impossible"))? as u32;
        let number =
            |table: &HashMap<usize, u32>, most: u32| table.get(&index.0).copied().filter(|n| *n <= most);
        let params = found.params().ok_or_else(|| refuse("its parameters contradict each other"))?;
        kernels.push(Kernel {
            name: name.to_owned(),
            params,
            registers: number(&registers, MOST_REGISTERS)
                .ok_or_else(|| refuse("its registers are unknown or too many"))?,
            shared,
            stack: number(&stacks, MOST_STACK).ok_or_else(|| refuse("its stack is unknown or too large"))?,
            barriers: found.barriers.unwrap_or(0),
            max_threads: found.max_threads,
            required_threads: found.required_threads,
            cluster: found.cluster,
            needs_cluster: found.needs_cluster,
        });
    }
    kernels.sort_by(|a, b| a.name.cmp(&b.name));
    if kernels.windows(2).any(|pair| pair[0].name == pair[1].name) {
        return Err(Unread::Damaged("two kernels have the same name".into()));
    }
    Ok(Cubin { arch, ptx_arch, constants, kernels, prints })
}
