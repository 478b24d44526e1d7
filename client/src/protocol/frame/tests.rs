use proptest::prelude::*;

use super::*;
use crate::protocol::error::ErrorCode;

fn tensor(name: &str, fd: Option<u32>) -> TensorLocation {
    let (name, type_name) = (name.to_owned(), "F32".to_owned());
    TensorLocation { name, type_name, shape: vec![8, 2], layer: 0, fd, offset: 0, size: 64, experts: None }
}

fn decode_all(bytes: &[u8]) -> Result<Vec<Frame>, FrameError> {
    let mut decoder = FrameDecoder::new();
    decoder.push(bytes);
    let mut frames = Vec::new();
    while let Some(frame) = decoder.next_frame()? {
        frames.push(frame);
    }
    Ok(frames)
}

fn progress(completed: u64, total: u64) -> Frame {
    Frame::Progress(ImportProgress { completed, total, ..ImportProgress::default() })
}

#[test]
fn each_kind_of_frame_has_the_documented_json() {
    let pieces = vec![
        OpenPiece::Fd { fd: 1, offset: 0, length: 64 },
        OpenPiece::Zeros { zeros: 32 },
        OpenPiece::Literal { literal: vec![0xff, 0, 1] },
    ];
    for (frame, json) in [
        (Frame::Fds { first: 64, count: 3 }, r#"{"fds":{"first":64,"count":3}}"#),
        (Frame::Want { first: 16, count: 2 }, r#"{"want":{"first":16,"count":2}}"#),
        (Frame::Ack { received: 67 }, r#"{"ack":{"received":67}}"#),
        (progress(1, 2), r#"{"progress":{"completed":1,"total":2}}"#),
        (
            Frame::Pieces { layer: 1, pieces },
            r#"{"pieces":{"layer":1,"pieces":[{"fd":1,"offset":0,"length":64},{"zeros":32},{"literal":"/wAB"}]}}"#,
        ),
        (
            Frame::Tensors(vec![tensor("a", Some(2)), tensor("b", None)]),
            concat!(
                r#"{"tensors":[{"name":"a","type":"F32","shape":[8,2],"layer":0,"fd":2,"offset":0,"size":64},"#,
                r#"{"name":"b","type":"F32","shape":[8,2],"layer":0,"offset":0,"size":64}]}"#,
            ),
        ),
        (
            Frame::Error(ErrorBody::new(ErrorCode::NotFound, "no model")),
            r#"{"error":{"code":"not_found","message":"no model"}}"#,
        ),
    ] {
        let bytes = frame.encode().unwrap();
        assert_eq!(std::str::from_utf8(&bytes[4..]).unwrap(), json);
        assert_eq!(bytes[..4], u32::try_from(json.len()).unwrap().to_le_bytes());
        assert_eq!(json.split('"').nth(1), Some(frame.kind()));
        assert_eq!(decode_all(&bytes).unwrap(), [frame]);
    }
}

#[test]
fn unknown_field_is_ignored_and_unknown_kind_is_an_error() {
    let ack = br#"{"ack":{"received":1,"later":true}}"#;
    let later = br#"{"later":{"received":1}}"#;
    let framed = |json: &[u8]| [&u32::try_from(json.len()).unwrap().to_le_bytes(), json].concat();
    assert_eq!(decode_all(&framed(ack)).unwrap(), [Frame::Ack { received: 1 }]);
    assert!(matches!(decode_all(&framed(later)), Err(FrameError::Malformed { .. })));
}

#[test]
fn decoder_with_a_lower_limit_refuses_a_longer_frame_by_its_length() {
    let mut decoder = FrameDecoder::with_limit(100);
    decoder.push(&Frame::Ack { received: 1 }.encode().unwrap());
    assert_eq!(decoder.next_frame(), Ok(Some(Frame::Ack { received: 1 })));
    decoder.push(&101_u32.to_le_bytes());
    assert_eq!(decoder.next_frame(), Err(FrameError::TooLong { found: 101, limit: 100 }));
}

#[test]
fn length_above_the_limit_is_refused_before_the_json_arrives() {
    let mut decoder = FrameDecoder::new();
    decoder.push(&u32::MAX.to_le_bytes());
    let refused = Err(FrameError::TooLong { found: u32::MAX as usize, limit: MAX_FRAME_BYTES });
    assert_eq!(decoder.next_frame(), refused);
    decoder.push(b"more");
    assert_eq!(decoder.next_frame(), refused);
}

#[test]
fn encoding_a_too_long_frame_fails_and_leaves_the_buffer_unchanged() {
    let mut out = b"before".to_vec();
    let error = ErrorBody::new(ErrorCode::Internal, "x".repeat(MAX_FRAME_BYTES));
    assert!(matches!(Frame::Error(error).encode_into(&mut out), Err(FrameError::TooLong { .. })));
    assert_eq!(out, b"before");
}

#[test]
fn long_tensor_list_is_split_into_frames_without_loss() {
    let tensors: Vec<_> = (0..5_000).map(|i| tensor(&format!("blk.{i}.weight"), Some(i))).collect();
    let mut bytes = Vec::new();
    encode_tensors(&tensors, &mut bytes).unwrap();
    let frames = decode_all(&bytes).unwrap();
    assert!(frames.len() > 5, "{} frames", frames.len());
    let mut found = Vec::new();
    for frame in frames {
        let Frame::Tensors(part) = frame else { panic!("{}", frame.kind()) };
        found.extend(part);
    }
    assert_eq!(found, tensors);
}

#[test]
fn empty_list_needs_no_frame() {
    let mut bytes = Vec::new();
    encode_tensors(&[], &mut bytes).unwrap();
    encode_pieces(0, &[], &mut bytes).unwrap();
    assert!(bytes.is_empty());
}

#[test]
fn long_literal_is_split_into_pieces_that_fit_a_frame() {
    let literal: Vec<u8> = (0..=255).cycle().take(3 * MAX_FRAME_BYTES).collect();
    let whole = vec![OpenPiece::Zeros { zeros: 1 }, OpenPiece::Literal { literal: literal.clone() }];
    assert!(matches!(encode_pieces(0, &whole, &mut Vec::new()), Err(FrameError::TooLong { .. })));

    let (mut bytes, mut found) = (Vec::new(), Vec::new());
    encode_pieces(7, &cut_literals(whole), &mut bytes).unwrap();
    for frame in decode_all(&bytes).unwrap() {
        let Frame::Pieces { layer: 7, pieces } = frame else { panic!("{}", frame.kind()) };
        for piece in pieces {
            if let OpenPiece::Literal { literal } = piece {
                found.extend(literal);
            }
        }
    }
    assert_eq!(found, literal);
}

fn any_frame() -> impl Strategy<Value = Frame> {
    prop_oneof![
        (any::<u32>(), any::<u32>()).prop_map(|(first, count)| Frame::Fds { first, count }),
        any::<u32>().prop_map(|received| Frame::Ack { received }),
        (any::<u64>(), any::<u64>()).prop_map(|(completed, total)| progress(completed, total)),
        "\\PC{0,200}".prop_map(|message| Frame::Error(ErrorBody::new(ErrorCode::Busy, message))),
        prop::collection::vec(("\\PC{0,20}", any::<Option<u32>>()), 0..5)
            .prop_map(|names| Frame::Tensors(names.iter().map(|(name, fd)| tensor(name, *fd)).collect())),
        (any::<u32>(), prop::collection::vec(any::<u8>(), 0..50)).prop_map(|(layer, literal)| {
            Frame::Pieces { layer, pieces: vec![OpenPiece::Literal { literal }] }
        }),
    ]
}

proptest! {
    #[test]
    fn frames_are_decoded_from_parts_of_any_size(
        frames in prop::collection::vec(any_frame(), 0..8),
        portions in prop::collection::vec(1usize..40, 1..20),
    ) {
        let mut bytes = Vec::new();
        for frame in &frames {
            frame.encode_into(&mut bytes).unwrap();
        }
        let (mut decoder, mut found, mut rest) = (FrameDecoder::new(), Vec::new(), &bytes[..]);
        for portion in portions.iter().cycle() {
            let (now, later) = rest.split_at((*portion).min(rest.len()));
            decoder.push(now);
            while let Some(frame) = decoder.next_frame().unwrap() {
                found.push(frame);
            }
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(found, frames);
        prop_assert!(!decoder.is_inside_frame());
    }

    #[test]
    fn garbage_is_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        // The result does not matter; the call must return.
        let _outcome = decode_all(&bytes);
    }

    #[test]
    fn garbage_json_is_refused_without_panic(text in "[\\[\\]{}\":,a-z0-9 ]{0,80}") {
        let length = u32::try_from(text.len()).unwrap().to_le_bytes();
        let _outcome = decode_all(&[&length, text.as_bytes()].concat());
    }
}
