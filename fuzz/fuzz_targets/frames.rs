//! The byte stream of a link, cut anywhere: a greeting, or frames.
#![cfg_attr(not(standalone), no_main)]

use host_bridge::framing::FrameReader;
use protocol::link::{Greeting, Hello, Welcome, greeting};
use protocol::version::OURS;

/// A greeting is judged once, and the same however much of the stream comes with it.
fn greet<T: Greeting>(stream: &[u8], step: usize) {
    let whole = greeting::<T>(stream, &OURS).map(|judged| judged.map(|(_, version)| version));
    for end in (0..=stream.len()).step_by(step) {
        match greeting::<T>(&stream[..end], &OURS) {
            Ok(None) => {}
            judged => {
                assert_eq!(judged.map(|judged| judged.map(|(_, version)| version)), whole);
                return;
            }
        }
    }
}

rgpu_fuzz::target!(|input: (u8, &[u8])| {
    let (step, stream) = input;
    greet::<Hello>(stream, usize::from(step) + 1);
    greet::<Welcome>(stream, usize::from(step) + 1);
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
