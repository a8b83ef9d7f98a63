//! Writes the corpus of `tests/h200` for its runner: `cargo run -p software-gpu --example h200_corpus --
//! FOLDER`.

// Only the test uses the functions that compare results.
#[allow(dead_code)]
#[path = "../tests/h200/corpus.rs"]
mod corpus;

use std::io::Write;

fn main() -> std::io::Result<()> {
    let folder = std::path::PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| ".".into()));
    std::fs::create_dir_all(&folder)?;
    let cases = corpus::cases();
    let mut out = Vec::new();
    let word = |out: &mut Vec<u8>, n: usize| out.extend((n as u32).to_le_bytes());
    word(&mut out, cases.chunks(corpus::MODULE).count());
    let mut bytes = 0;
    for (n, chunk) in cases.chunks(corpus::MODULE).enumerate() {
        let mut text = corpus::ptx(chunk).into_bytes();
        std::fs::write(folder.join(format!("module{n}.ptx")), &text)?;
        text.push(0);
        word(&mut out, text.len());
        out.extend(text);
        word(&mut out, chunk.len());
        for case in chunk {
            let input = case.input_bytes();
            word(&mut out, corpus::threads(case));
            word(&mut out, case.out_bytes);
            case.grid.iter().for_each(|n| word(&mut out, *n as usize));
            out.extend(case.hash().to_le_bytes());
            word(&mut out, input.len());
            out.extend(&input);
            bytes += corpus::threads(case) * case.out_bytes + 12;
        }
    }
    std::fs::File::create(folder.join("corpus.bin"))?.write_all(&out)?;
    println!("{} cases, {bytes} bytes of results", cases.len());

    let cases = corpus::textures::cases();
    let kernels = corpus::textures::kernels(&cases);
    let mut text = corpus::textures::ptx(&kernels).into_bytes();
    std::fs::write(folder.join("textures.ptx"), &text)?;
    text.push(0);
    let mut out = Vec::new();
    word(&mut out, text.len());
    out.extend(text);
    word(&mut out, cases.len());
    for case in &cases {
        let body = case.body();
        let kernel = kernels.iter().position(|k| *k == body).unwrap_or(0);
        out.extend(case.hash().to_le_bytes());
        out.extend(case.bytes(kernel as u32));
    }
    std::fs::File::create(folder.join("textures.bin"))?.write_all(&out)?;
    println!("{} cases of textures, {} kernels, {} bytes", cases.len(), kernels.len(), out.len());
    Ok(())
}
