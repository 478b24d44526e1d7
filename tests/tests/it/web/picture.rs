//! Screenshots: decodes them, and compares what does not depend on fonts.

use std::collections::HashMap;
use std::io::Read as _;

use flate2::read::ZlibDecoder;

/// Red, green and blue.
pub(super) type Colour = [u8; 3];

/// A rectangle in pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rectangle {
    pub(super) x: usize,
    pub(super) y: usize,
    pub(super) width: usize,
    pub(super) height: usize,
}

/// A picture without transparency.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Picture {
    width: usize,
    height: usize,
    pixels: Vec<Colour>,
}

impl Picture {
    /// Decodes a PNG as Chromium writes them: 8 bits per channel, with or without transparency, not interlaced. The
    /// crate `png` would bring a second version of `miniz_oxide`.
    pub(super) fn decode(png: &[u8]) -> Self {
        assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"), "not a PNG");
        let chunks = chunks(&png[8..]);
        let of = |kind: &[u8]| -> Vec<u8> {
            chunks.iter().filter(|(own, _)| *own == kind).flat_map(|(_, data)| *data).copied().collect()
        };
        let header = of(b"IHDR");
        let step = match header[8..] {
            [8, 2, 0, 0, 0] => 3,
            [8, 6, 0, 0, 0] => 4,
            _ => panic!("another form of PNG: {header:?}"),
        };
        let mut lines = Vec::new();
        ZlibDecoder::new(&*of(b"IDAT")).read_to_end(&mut lines).unwrap();
        let (width, height) = (number(&header[..4]), number(&header[4..8]));
        assert_eq!(lines.len(), height * (1 + width * step));
        Self { width, height, pixels: pixels(&lines, width, step) }
    }

    /// A part of it, which must be inside.
    pub(super) fn part(&self, at: Rectangle) -> Self {
        assert!(
            at.x + at.width <= self.width && at.y + at.height <= self.height,
            "{at:?} of {} x {}",
            self.width,
            self.height
        );
        let line = |y: usize| &self.pixels[y * self.width + at.x..][..at.width];
        let pixels = (at.y..at.y + at.height).flat_map(line).copied().collect();
        Self { width: at.width, height: at.height, pixels }
    }

    /// The leftmost pixels, which only the background of a page has.
    pub(super) fn margin(&self) -> Self {
        self.part(Rectangle { x: 0, y: 0, width: 4, height: self.height })
    }

    /// The most frequent colour, and its share of all pixels.
    pub(super) fn main_colour(&self) -> (Colour, f64) {
        let mut counts = HashMap::new();
        for pixel in &self.pixels {
            *counts.entry(*pixel).or_insert(0) += 1;
        }
        let (colour, count) = counts.into_iter().max_by_key(|(_, count)| *count).unwrap();
        (colour, share(count, self.pixels.len()))
    }

    /// From 0 for black to 1 for white, on average.
    pub(super) fn brightness(&self) -> f64 {
        let sum = self.pixels.iter().flatten().map(|channel| usize::from(*channel)).sum();
        share(sum, self.pixels.len() * 3 * 255)
    }

    /// The share of pixels that look different; all if the sizes differ.
    pub(super) fn difference(&self, other: &Self) -> f64 {
        if (self.width, self.height) != (other.width, other.height) {
            return 1.0;
        }
        let differs = |(a, b): &(&Colour, &Colour)| a.iter().zip(*b).any(|(a, b)| a.abs_diff(*b) > 8);
        share(self.pixels.iter().zip(&other.pixels).filter(differs).count(), self.pixels.len())
    }

    /// The colours of the connected areas of one colour that fill a good part of a rectangle with sides of `least` pixels
    /// or more: not letters, and not the lines between rectangles.
    pub(super) fn tiles(&self, least: usize) -> Vec<Colour> {
        let mut seen = vec![false; self.pixels.len()];
        let mut tiles = Vec::new();
        for start in 0..self.pixels.len() {
            if seen[start] {
                continue;
            }
            let (area, width, height) = self.flood(start, &mut seen);
            if width.min(height) >= least && area * 10 >= width * height * 3 {
                tiles.push(self.pixels[start]);
            }
        }
        tiles
    }

    /// Marks the connected area of one colour, and returns its pixels, width and height.
    fn flood(&self, start: usize, seen: &mut [bool]) -> (usize, usize, usize) {
        let (mut area, mut next) = (0, vec![start]);
        let (mut left, mut right, mut top, mut bottom) = (usize::MAX, 0, usize::MAX, 0);
        seen[start] = true;
        while let Some(at) = next.pop() {
            let (x, y) = (at % self.width, at / self.width);
            area += 1;
            (left, right, top, bottom) = (left.min(x), right.max(x), top.min(y), bottom.max(y));
            let beside = [(x > 0).then(|| at - 1), (x + 1 < self.width).then_some(at + 1)];
            let above_below = [at.checked_sub(self.width), Some(at + self.width)];
            for near in beside.into_iter().chain(above_below).flatten() {
                if self.pixels.get(near) == Some(&self.pixels[start]) && !seen[near] {
                    seen[near] = true;
                    next.push(near);
                }
            }
        }
        (area, right - left + 1, bottom - top + 1)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of pixels")]
fn share(count: usize, all: usize) -> f64 {
    count as f64 / all as f64
}

/// The kinds and contents of a PNG's chunks.
fn chunks(mut rest: &[u8]) -> Vec<(&[u8], &[u8])> {
    let mut chunks = Vec::new();
    while rest.len() >= 12 {
        let length = number(&rest[..4]);
        chunks.push((&rest[4..8], &rest[8..8 + length]));
        rest = &rest[12 + length..];
    }
    chunks
}

fn number(bytes: &[u8]) -> usize {
    usize::try_from(u32::from_be_bytes(bytes.try_into().unwrap())).unwrap()
}

/// Undoes the filters of lines whose pixels have `step` bytes.
fn pixels(lines: &[u8], width: usize, step: usize) -> Vec<Colour> {
    let mut pixels = Vec::new();
    let mut above = vec![0; width * step];
    for line in lines.chunks_exact(1 + width * step) {
        let mut plain = line[1..].to_vec();
        for at in 0..plain.len() {
            let before = |line: &[u8]| at.checked_sub(step).map_or(0, |left| line[left]);
            let guess = predict(line[0], before(&plain), above[at], before(&above));
            plain[at] = plain[at].wrapping_add(guess);
        }
        pixels.extend(plain.chunks_exact(step).map(|pixel| [pixel[0], pixel[1], pixel[2]]));
        above = plain;
    }
    pixels
}

/// What a filter of PNG adds to a byte, from those to the left, above, and above on the left.
fn predict(filter: u8, left: u8, above: u8, corner: u8) -> u8 {
    match filter {
        0 => 0,
        1 => left,
        2 => above,
        3 => u8::midpoint(left, above),
        4 => {
            let estimate = i16::from(left) + i16::from(above) - i16::from(corner);
            let distance = |byte: &u8| (i16::from(*byte) - estimate).abs();
            // Of equal ones the first, as the format demands.
            [left, above, corner].into_iter().min_by_key(distance).unwrap()
        }
        _ => panic!("filter {filter}"),
    }
}

/// A picture of one character per pixel.
#[cfg(test)]
fn drawn(lines: &[&str]) -> Picture {
    let pixels: Vec<Colour> = lines.iter().flat_map(|line| line.bytes()).map(|byte| [byte; 3]).collect();
    Picture { width: lines[0].len(), height: lines.len(), pixels }
}

#[test]
fn tiles_are_distinguished_from_lines_and_letters() {
    let picture = drawn(&[
        "aaaa|bbbb", //
        "axxa|bbbb",
        "aaaa|bbbb",
        "----|----",
        "aaaa|cccc",
        "aaaa|cccc",
        "aaaa|cccc",
    ]);
    assert_eq!(picture.tiles(3), [[b'a'; 3], [b'b'; 3], [b'a'; 3], [b'c'; 3]]);
    assert_eq!(picture.main_colour().0, [b'a'; 3]);
}

#[test]
fn difference_of_pictures_is_the_share_of_differing_pixels() {
    let (one, other) = (drawn(&["aaaa", "zzzz"]), drawn(&["aaaa", "zzaz"]));
    assert!((one.difference(&other) - 0.125).abs() < 1e-9);
    assert!(one.difference(&one.clone()) < 1e-9);
    assert!(one.difference(&drawn(&["aaaa"])) > 0.99);
    assert!(drawn(&["\0"]).brightness() < 1e-9);
}

/// Each filter, as the format's specification defines it.
#[test]
fn filters_of_png_are_undone() {
    let lines =
        [[1, 10, 20, 30, 1, 2, 3], [2, 1, 1, 1, 1, 1, 1], [3, 2, 2, 2, 2, 2, 2], [4, 5, 5, 5, 5, 5, 5]];
    let expected = [
        [[10, 20, 30], [11, 22, 33]],
        [[11, 21, 31], [12, 23, 34]],
        [[7, 12, 17], [11, 19, 27]],
        [[12, 17, 22], [17, 24, 32]],
    ];
    assert_eq!(pixels(&lines.concat(), 2, 3), expected.concat());
}
