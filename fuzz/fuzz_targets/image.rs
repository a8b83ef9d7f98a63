//! An image that the guest library reads in the program's process: a cubin or a fat binary. Reading ends, and
//! returns only numbers that a kernel can have.
#![cfg_attr(not(standalone), no_main)]

use device_code::{cubin, fatbin};

fn read(code: &[u8]) {
    let Ok(cubin) = cubin::read(code) else { return };
    assert!(cubin.kernels.iter().map(|kernel| kernel.name.len()).sum::<usize>() <= 4 * code.len());
    for kernel in &cubin.kernels {
        let end = kernel.params.last().map_or(0, |param| u64::from(param.offset) + u64::from(param.size));
        assert!(end <= 40 << 10 && kernel.registers <= 255 && kernel.shared <= 227 << 10);
    }
}

rgpu_fuzz::target!(|image: &[u8]| {
    read(image);
    for entry in fatbin::containers(image).flatten().flatten() {
        if let Ok(code) = entry.code(1 << 20) {
            assert_eq!(code.len() as u64, entry.len());
            read(&code);
        }
    }
});
