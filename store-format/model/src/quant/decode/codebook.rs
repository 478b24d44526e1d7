//! The codebooks of the IQ types, included at compile time from `docs/codebooks`, which `docs/FORMATS.md` describes.
//!
//! A line is an entry: one digit for each of its 4 or 8 neighbouring elements. The digit selects one of a few values.

/// The content of a codebook's file.
macro_rules! text {
    ($name:literal) => {
        include_bytes!(concat!("../../../../../docs/codebooks/", $name, ".txt"))
    };
}

pub(super) static IQ2_XXS: [[i8; 8]; 256] = parsed(text!("iq2_xxs"), &[8, 25, 43]);
pub(super) static IQ2_XS: [[i8; 8]; 512] = parsed(text!("iq2_xs"), &[8, 25, 43]);
pub(super) static IQ2_S: [[i8; 8]; 1024] = parsed(text!("iq2_s"), &[8, 25, 43]);
pub(super) static IQ3_XXS: [[i8; 4]; 256] = parsed(text!("iq3_xxs"), &[4, 12, 20, 28, 36, 44, 52, 62]);
pub(super) static IQ3_S: [[i8; 4]; 512] = parsed(text!("iq3_s"), &[1, 3, 5, 7, 9, 11, 13, 15]);
/// `IQ1_M` uses this codebook too.
pub(super) static IQ1_S: [[i8; 8]; 2048] = parsed(text!("iq1_s"), &[-1, 0, 1]);

/// Parses a file of `N` lines of `ELEMENTS` digits. Another number of lines, or a digit without a value, is a compile
/// error.
const fn parsed<const ELEMENTS: usize, const N: usize>(text: &[u8], values: &[i8]) -> [[i8; ELEMENTS]; N] {
    assert!(text.len() == N * (ELEMENTS + 1));
    let mut entries = [[0; ELEMENTS]; N];
    let mut entry = 0;
    while entry < N {
        let line = entry * (ELEMENTS + 1);
        let mut element = 0;
        while element < ELEMENTS {
            entries[entry][element] = values[(text[line + element] - b'0') as usize];
            element += 1;
        }
        assert!(text[line + ELEMENTS] == b'\n');
        entry += 1;
    }
    entries
}
