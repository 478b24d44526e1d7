//! The look of the page, as far as it does not depend on the fonts of the machine.

use std::collections::BTreeSet;

use blobd_tests::browser::Browser;
use serde_json::Value as Json;

use super::super::picture::{Picture, Rectangle};

/// A picture has a dark or a light background, with something on it.
pub(super) fn check_scheme(picture: &Picture, scheme: &str, what: &str) {
    let is_dark = scheme == "dark";
    let (background, share) = picture.margin().main_colour();
    assert!(share > 0.99, "{what}: the margin has one colour, but {share}");
    let is_right = |channel: &u8| if is_dark { *channel < 50 } else { *channel > 230 };
    assert!(background.iter().all(is_right), "{what}: {background:?}");
    // Most of it is background, panels and areas of the treemap, which are neither dark nor light.
    let brightness = picture.brightness();
    assert!(if is_dark { brightness < 0.4 } else { brightness > 0.55 }, "{what}: {brightness}");
    let (_, share) = picture.main_colour();
    assert!(share < 0.97, "{what}: blank, {share} have one colour");
}

/// The areas of the treemap are in the picture, at least so many of them.
pub(super) fn check_treemap(browser: &mut Browser, least: usize) {
    hold(browser);
    browser.show_in(1400, 1000, "light");
    browser.wait_for("document.getElementById('treemap').viewBox.baseVal.width > 1300");
    browser.evaluate("document.getElementById('treemap').scrollIntoView({ block: 'center' })");
    let picture = Picture::decode(&browser.screenshot()).part(rectangle(browser, "treemap"));
    let tiles = picture.tiles(12);
    // The lines between them take some pixels. Of those between the two limits, some may be too small.
    let [sure, possible] = [16, 12].map(|side| count(browser, &rectangles(side)));
    assert!(
        (sure..=possible).contains(&tiles.len()),
        "tiles: expected {sure} to {possible}, found {}",
        tiles.len()
    );
    assert!(tiles.len() >= least, "{} tiles", tiles.len());
    // Of one model, of several, and the rest.
    let colours = BTreeSet::from_iter(&tiles);
    assert!(colours.len() >= 3, "{colours:?}");
    release(browser);
}

/// The colours in the legend can be told apart.
pub(super) fn check_legend(browser: &mut Browser) {
    let colours = browser.evaluate(
        "[...document.querySelectorAll('#legend span')]\
         .map((one) => getComputedStyle(one).backgroundColor.match(/\\d+/g).map(Number))",
    );
    let colours: Vec<[u8; 3]> = serde_json::from_value(colours).unwrap();
    assert!(colours.len() >= 3, "{colours:?}");
    let distance = |a: &[u8; 3], b: &[u8; 3]| a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max();
    for (place, one) in colours.iter().enumerate() {
        assert!(colours[..place].iter().all(|other| distance(one, other) > Some(32)), "{one:?}: {colours:?}");
    }
}

/// The number of the treemap's rectangles whose sides have `side` pixels or more.
fn rectangles(side: u32) -> String {
    format!(
        "[...document.querySelectorAll('#treemap rect')].map((one) => one.getBBox())\
         .filter((box) => Math.min(box.width, box.height) >= {side}).length"
    )
}

/// Answers that stay the same look the same, at every moment: nothing flickers, moves or vanishes meanwhile.
pub(super) fn check_steady(browser: &mut Browser) {
    hold(browser);
    browser.show_in(1400, 1000, "light");
    browser.evaluate("scrollTo(0, 0)");
    let first = browser.screenshot();
    for _ in 0..3 {
        // While the page waits for answers, and after them.
        browser.evaluate(REFRESH);
        let waiting = browser.screenshot();
        browser.wait_for(IS_REFRESHED);
        for next in [waiting, browser.screenshot()] {
            // An edge may be drawn a little differently; a digit has more pixels.
            let differs = || Picture::decode(&first).difference(&Picture::decode(&next));
            assert!(first == next || differs() < 0.00002, "{} of the pixels", differs());
        }
    }
    release(browser);
}

/// From now on, the page gets the same answers again and again, each after a moment, and its clock stands still.
fn hold(browser: &mut Browser) {
    browser.evaluate(
        "(() => {
           const [fetch, now, kept] = [window.fetch, Date.now, new Map()];
           const time = now();
           window.release = () => { [window.fetch, Date.now] = [fetch, now]; };
           Date.now = () => time;
           window.fetch = async (path, options) => {
             if (!kept.has(path)) kept.set(path, fetch(path, options).then((answer) => answer.text()));
             await new Promise((done) => setTimeout(done, 150));
             return new Response(await kept.get(path));
           };
         })()",
    );
    // The first may be the end of an earlier refresh, with its answers.
    refresh(browser);
    refresh(browser);
}

fn release(browser: &mut Browser) {
    browser.evaluate("window.release()");
}

/// Has the page ask for everything, and waits until it shows the answers about the disk.
pub(super) fn refresh(browser: &mut Browser) {
    browser.evaluate(REFRESH);
    browser.wait_for(IS_REFRESHED);
}

const REFRESH: &str =
    "window.old = document.querySelector('#figures div'), document.getElementById('refresh').click()";
const IS_REFRESHED: &str = "!window.old.isConnected";

fn rectangle(browser: &mut Browser, id: &str) -> Rectangle {
    let place =
        browser.evaluate(&format!("document.getElementById('{id}').getBoundingClientRect().toJSON()"));
    let [x, y, width, height] = ["x", "y", "width", "height"].map(|side| pixels(&place[side]));
    Rectangle { x, y, width, height }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "inside the window")]
fn pixels(length: &Json) -> usize {
    length.as_f64().unwrap() as usize
}

fn count(browser: &mut Browser, expression: &str) -> usize {
    usize::try_from(browser.evaluate(expression).as_u64().unwrap()).unwrap()
}
