//! All attacks at once, by one process.

use super::{ATTACKS, Begin, find};
use crate::Outcome;
use crate::ground::Ground;

const NAME: &str = "together";

pub(crate) fn prepare(ground: &Ground) -> Outcome<Begin> {
    let names = ATTACKS.iter().map(|attack| attack.name).filter(|name| *name != NAME);
    let prepared: Outcome<Vec<Begin>> =
        names.filter_map(find).map(|attack| (attack.prepare)(ground)).collect();
    let begins = prepared?;
    Ok(Box::new(move || begins.into_iter().try_for_each(|begin| begin())))
}
