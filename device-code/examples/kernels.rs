//! Prints what this crate reads from the cubins in some images, one line for each kernel, for comparison with
//! what NVIDIA's driver reports.
//!
//! `cargo run -p device-code --example kernels -- IMAGE…`

use device_code::{cubin, fatbin};

fn show(image: &str, code: &[u8]) {
    match cubin::read(code) {
        Ok(cubin) => {
            for k in &cubin.kernels {
                let params: Vec<String> =
                    k.params.iter().map(|p| format!("{}:{}", p.offset, p.size)).collect();
                println!(
                    "{image}\t{}\t{}\tptx={} constants={} registers={} shared={} stack={} barriers={} max={:?} required={:?} cluster={:?} needs={}",
                    k.name,
                    params.join(","),
                    cubin.ptx_arch,
                    cubin.constants,
                    k.registers,
                    k.shared,
                    k.stack,
                    k.barriers,
                    k.max_threads,
                    k.required_threads,
                    k.cluster,
                    k.needs_cluster
                );
            }
        }
        Err(why) => println!("{image}\t-\t{why}"),
    }
}

fn main() -> std::io::Result<()> {
    for path in std::env::args().skip(1) {
        let image = std::fs::read(&path)?;
        if cubin::is_elf(&image) {
            show(&path, &image);
        }
        for entries in fatbin::containers(&image) {
            match entries {
                Ok(entries) => {
                    for entry in entries {
                        println!(
                            "{path}\t{:?} {} specific={} {} bytes",
                            entry.kind,
                            entry.arch,
                            entry.specific,
                            entry.len()
                        );
                        if entry.kind == fatbin::Kind::Elf {
                            match entry.code(1 << 30) {
                                Ok(code) => show(&path, &code),
                                Err(error) => println!("{path}\t-\t{error}"),
                            }
                        }
                    }
                }
                Err(error) => println!("{path}\t-\t{error}"),
            }
        }
    }
    Ok(())
}
