//! The byte stream of a link, cut anywhere.
#![no_main]

use host_bridge::framing::FrameReader;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, &[u8])| {
    let (step, stream) = input;
    let mut reader = FrameReader::new();
    for piece in stream.chunks(usize::from(step) + 1) {
        let mut piece = piece;
        while !piece.is_empty() {
            if reader.fill(&mut piece).is_err() {
                return;
            }
            loop {
                match reader.next_frame() {
                    Ok(Some((_, body))) => assert!(body.len() <= stream.len()),
                    Ok(None) => break,
                    Err(_) => return,
                }
            }
        }
    }
});
