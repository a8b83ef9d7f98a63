//! Reading a cubin that nvcc has made, whole, damaged, and packed into a fat binary.

#![allow(clippy::unwrap_used, reason = "a test, whose helpers fail as it does")]

use device_code::cubin::{self, Param, Unread};
use device_code::fatbin::{self, Kind};
use proptest::prelude::*;

const CUBIN: &[u8] = include_bytes!("kernels.cubin");
/// The same kernels, from CUDA 12.9's assembler.
const CUDA12: &[u8] = include_bytes!("kernels-12.cubin");

fn kernel(name: &str) -> cubin::Kernel {
    let cubin = cubin::read(CUBIN).unwrap();
    cubin.kernels.into_iter().find(|kernel| kernel.name == name).unwrap()
}

#[test]
fn a_cubin_says_what_its_kernels_need() {
    let cubin = cubin::read(CUBIN).unwrap();
    assert_eq!((cubin.arch, cubin.ptx_arch, cubin.constants, cubin.prints), (90, 90, 400, false));
    let names: Vec<&str> = cubin.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
    assert_eq!(names, ["barriers", "big", "bounds", "clustered", "empty", "frame", "params", "shared"]);
    assert_eq!(kernel("frame").stack, 24);
    assert_eq!((kernel("shared").shared, kernel("shared").barriers), (301, 1));
    assert_eq!((kernel("barriers").shared, kernel("barriers").barriers), (0, 6));
    assert_eq!(kernel("bounds").max_threads, Some([100, 1, 1]));
    assert_eq!((kernel("clustered").cluster, kernel("clustered").needs_cluster), (Some([2, 1, 1]), true));
    assert_eq!((kernel("empty").registers, kernel("params").registers), (4, 10));
}

#[test]
fn parameters_are_where_the_kernel_expects_them() {
    let places = |name| kernel(name).params.iter().map(|p| (p.offset, p.size)).collect::<Vec<_>>();
    assert_eq!(places("empty"), []);
    assert_eq!(places("params"), [(0, 1), (8, 8), (16, 24), (40, 2), (48, 8), (56, 4)]);
    assert_eq!(kernel("big").params, [Param { offset: 0, size: 5000 }, Param { offset: 5000, size: 8 }]);
}

#[test]
fn a_kernels_required_shape_is_not_its_maximum() {
    let cubin = cubin::read(include_bytes!("required.cubin")).unwrap();
    let shapes = |kernel: &cubin::Kernel| (kernel.required_threads, kernel.max_threads);
    let found: Vec<_> = cubin.kernels.iter().map(|kernel| (kernel.name.as_str(), shapes(kernel))).collect();
    let expected = [
        ("aligned", (None, None)),
        ("cuboid", (Some([16, 8, 2]), None)),
        ("line", (Some([128, 1, 1]), None)),
        ("most", (None, Some([100, 1, 1]))),
    ];
    assert_eq!(found, expected);
    // The parameter block does not begin at a multiple of 64 bytes, so aligned parameters come after a gap.
    let places: Vec<_> = cubin.kernels[0].params.iter().map(|p| (p.offset, p.size)).collect();
    assert_eq!(places, [(0, 4), (48, 64), (112, 128)]);
}

#[test]
fn the_same_kernels_are_read_from_both_abi_versions() {
    let (older, newer) = (cubin::read(CUDA12).unwrap(), cubin::read(CUBIN).unwrap());
    assert_eq!((CUDA12[8], CUBIN[8]), (7, 8));
    assert_eq!(older, newer);
}

#[test]
fn unknown_kinds_of_cubins_are_refused() {
    let changed = |at: usize, value: u8| {
        let mut image = CUBIN.to_vec();
        image[at] = value;
        cubin::read(&image)
    };
    let unknown =
        |what| move |error: Unread| matches!(error, Unread::Unknown { what: found, .. } if found == what);
    // ABI version, machine, type, architecture.
    for (at, value, what) in [(8, 6, "ABI"), (18, 62, "machine"), (16, 1, "type"), (49, 80, "architecture")] {
        assert!(changed(at, value).is_err_and(unknown(what)), "{what}");
    }
}

/// Offset of the header of a section in [`CUBIN`].
fn header_of(name: &str) -> usize {
    let word = |at: usize, len: usize| {
        CUBIN[at..at + len].iter().rev().fold(0, |word, byte| word << 8 | usize::from(*byte))
    };
    let (headers, count, names) = (word(0x28, 8), word(0x3c, 2), word(0x3e, 2));
    let names = word(headers + 64 * names + 0x18, 8);
    let wanted = format!("{name}\0");
    let is_named = |at: &usize| CUBIN[names + word(*at, 4)..].starts_with(wanted.as_bytes());
    (0..count).map(|index| headers + 64 * index).find(is_named).unwrap()
}

/// [`CUBIN`] with other bytes at one place.
fn with(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut image = CUBIN.to_vec();
    image[at..at + bytes.len()].copy_from_slice(bytes);
    image
}

#[test]
fn sections_outside_the_image_or_of_another_kernel_are_refused() {
    let refused = |section: &str, at: usize, bytes: &[u8]| {
        cubin::read(&with(header_of(section) + at, bytes)).unwrap_err().to_string()
    };
    let far = (CUBIN.len() as u64).to_le_bytes();
    // sh_offset, sh_size
    for at in [0x18, 0x20] {
        for section in [".text.empty", ".nv.info.params", ".nv.info", ".symtab"] {
            assert!(refused(section, at, &far).contains("damaged"), "{section}");
            assert!(refused(section, at, &[0xff; 8]).contains("damaged"), "{section}");
        }
    }
    // A section without bytes, which the end of the file does not limit.
    for size in [0, 1023, 1 << 20, u64::MAX] {
        let error = refused(".nv.shared.shared", 0x20, &size.to_le_bytes());
        assert_eq!(error, "kernel shared: its shared memory is impossible");
    }
    // sh_info: the section that it belongs to.
    assert!(refused(".nv.info.params", 0x2c, &[1]).contains("another kernel"));
    // sh_name
    let name = &CUBIN[header_of(".text.empty")..][..4];
    assert!(refused(".text.bounds", 0, name).contains("two sections have the name .text.empty"));
    // sh_type
    assert!(refused(".strtab", 4, &[2]).contains("2 symbol tables"));
}

#[test]
fn numbers_that_no_kernel_can_have_are_refused() {
    // The table of registers: form, kind, length, then a symbol and a number.
    let places = CUBIN.windows(4).enumerate().filter(|(_, item)| *item == [4, 0x2f, 8, 0]);
    let places: Vec<usize> = places.map(|(at, _)| at).collect();
    assert_eq!(places.len(), cubin::read(CUBIN).unwrap().kernels.len());
    let refused = |at, bytes: &[u8]| cubin::read(&with(at, bytes)).unwrap_err().to_string();
    assert!(refused(places[0] + 8, &256_u32.to_le_bytes()).contains("its registers are unknown or too many"));
    // The second item describes the symbol of the first.
    let symbol = &CUBIN[places[0] + 4..][..4];
    assert!(refused(places[1] + 4, symbol).contains("twice"));
}

/// A fat binary of one entry.
fn fat(payload: &[u8], flags: u64, size: usize) -> Vec<u8> {
    let mut head = [0; 72];
    head[0] = 2;
    head[4] = 72;
    head[8..16].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    head[0x10..0x14].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    head[0x1c] = 90;
    head[0x28..0x30].copy_from_slice(&flags.to_le_bytes());
    head[0x38..0x40].copy_from_slice(&(size as u64).to_le_bytes());
    let mut image = fatbin::MAGIC.to_le_bytes().to_vec();
    image.extend([1, 0, 16, 0]);
    image.extend((payload.len() as u64 + 72).to_le_bytes());
    image.extend(head);
    image.extend_from_slice(payload);
    image
}

#[test]
fn packed_code_is_unpacked_up_to_a_limit() {
    let packed = lz4_flex::block::compress(CUBIN);
    let image = fat(&packed, 0x2000, CUBIN.len());
    let entries = fatbin::containers(&image).next().unwrap().unwrap();
    assert_eq!((entries.len(), entries[0].kind, entries[0].arch), (1, Kind::Elf, 90));
    assert_eq!(*entries[0].code(1 << 20).unwrap(), *CUBIN);
    let limit = CUBIN.len() as u64 - 1;
    assert_eq!(entries[0].code(limit), Err(fatbin::Error::TooLong(limit + 1)));
    assert!(fatbin::containers(&image[..image.len() - 1]).next().unwrap().is_err());
}

#[test]
fn code_that_unpacks_to_another_length_is_refused() {
    let packed = lz4_flex::block::compress(CUBIN);
    // A frame of zstd with one raw block of five bytes.
    let raw = [0x28, 0xb5, 0x2f, 0xfd, 0x20, 5, 0x29, 0, 0, b'e', b'm', b'p', b't', b'y'];
    let code = |payload: &[u8], flags, size| {
        let image = fat(payload, flags, size);
        let entries = fatbin::containers(&image).next().unwrap().unwrap();
        entries[0].code(1 << 40).map(|code| code.into_owned())
    };
    assert_eq!(code(&raw, 0x8000, 5), Ok(b"empty".to_vec()));
    for (payload, flags, size) in [(&packed[..], 0x2000, CUBIN.len()), (&raw[..], 0x8000, 5)] {
        for lie in [0, size - 1, size + 1, 1 << 39] {
            assert!(matches!(code(payload, flags, lie), Err(fatbin::Error::Packed(_))), "{flags:x} {lie}");
        }
    }
}

/// An offset in [`CUBIN`], preferably in its header or in the headers of its sections, which are at its end.
fn place() -> impl Strategy<Value = usize> {
    let headers = CUBIN.len() - 64 * 40;
    prop_oneof![0..CUBIN.len(), 0..64_usize, headers..CUBIN.len(), (0..64_usize).prop_map(header_word)]
}

/// A word of the header of an important section.
fn header_word(choice: usize) -> usize {
    const SECTIONS: [&str; 8] = [
        ".text.empty",
        ".nv.info.params",
        ".nv.info",
        ".symtab",
        ".strtab",
        ".nv.shared.shared",
        ".nv.constant3",
        ".note.nv.cuinfo",
    ];
    header_of(SECTIONS[choice / 8]) + 8 * (choice % 8)
}

/// Values that are likely to have an effect.
fn value() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![Just(0), Just(u64::MAX), Just(1 << 31), Just(1 << 63), 0..CUBIN.len() as u64];
    prop_oneof![any::<u8>().prop_map(|byte| vec![byte]), word.prop_map(|word| word.to_le_bytes().to_vec())]
}

/// Checks that a cubin claims nothing that no kernel can have.
fn check(cubin: &cubin::Cubin) -> Result<(), TestCaseError> {
    prop_assert!(cubin.constants <= 64 << 10);
    for kernel in &cubin.kernels {
        for param in &kernel.params {
            prop_assert!(u64::from(param.offset) + u64::from(param.size) <= 40 << 10);
        }
        prop_assert!(kernel.registers <= 255 && kernel.shared <= 227 << 10 && kernel.barriers <= 16);
        for (sizes, most) in
            [(kernel.max_threads, 1024), (kernel.required_threads, 1024), (kernel.cluster, 16)]
        {
            let product = sizes.map_or(1, |sizes| sizes.iter().map(|size| u64::from(*size)).product());
            prop_assert!((1..=most).contains(&product));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever bytes change, reading ends, and returns only numbers that a kernel can have.
    #[test]
    fn damaged_cubins_are_read_without_panic(
        changes in prop::collection::vec((place(), value()), 1..6), end in 0..CUBIN.len()
    ) {
        let mut image = CUBIN.to_vec();
        for (at, value) in changes {
            let at = at.min(image.len() - value.len());
            image[at..at + value.len()].copy_from_slice(&value);
        }
        for image in [&image[..], &image[..end]] {
            if let Ok(cubin) = cubin::read(image) {
                check(&cubin)?;
            }
        }
    }

    #[test]
    fn damaged_fat_binaries_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), flags in prop::sample::select(vec![0u64, 0x2000, 0x8000])) {
        let mut image = fat(&bytes, flags, 1000);
        for at in 0..image.len().min(60) {
            let old = image[at];
            image[at] = bytes.get(at).copied().unwrap_or(0xff);
            for entries in fatbin::containers(&image).flatten() {
                for entry in entries {
                    let _ = entry.code(1 << 16);
                }
            }
            image[at] = old;
        }
    }
}
