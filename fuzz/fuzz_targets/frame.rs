//! Frames of the socket protocol.
//!
//! Invariant: any bytes, in any portions, yield the same frames and the same end; an error stays;
//! every frame that was read can be sent, and reads back as itself.
#![no_main]

use blobd_client::protocol::frame::{
    Frame, FrameDecoder, FrameError, MAX_FRAME_BYTES, cut_literals, encode_pieces,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((portion, bytes)) = input.split_first() else { return };
    let whole = decode(bytes, bytes.len().max(1));
    assert!(whole == decode(bytes, usize::from(*portion) + 1), "portions change what is read");
    for frame in &whole.0 {
        // The frame may have been received in a shorter form of JSON than it is written in.
        let Ok(encoded) = frame.encode() else { continue };
        assert!(encoded.len() <= MAX_FRAME_BYTES + 4);
        let (again, end) = decode(&encoded, encoded.len());
        assert!(end == End::Clean && again.len() == 1 && again[0] == *frame, "{frame:?}");
        if let Frame::Pieces { layer, pieces } = frame {
            let mut encoded = Vec::new();
            let pieces = cut_literals(pieces.clone());
            encode_pieces(*layer, &pieces, &mut encoded).expect("cut pieces fit their frames");
            assert_eq!(decode(&encoded, encoded.len().max(1)).1, End::Clean);
        }
    }
});

/// How a stream ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Clean,
    InsideFrame,
    Refused(FrameError),
}

fn decode(bytes: &[u8], portion: usize) -> (Vec<Frame>, End) {
    let (mut decoder, mut frames) = (FrameDecoder::new(), Vec::new());
    for part in bytes.chunks(portion) {
        decoder.push(part);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => {
                    assert!(decoder.next_frame() == Err(error.clone()), "an error stays");
                    return (frames, End::Refused(error));
                }
            }
        }
    }
    let end = if decoder.is_inside_frame() { End::InsideFrame } else { End::Clean };
    (frames, end)
}
