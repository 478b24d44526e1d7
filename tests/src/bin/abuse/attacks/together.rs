//! All attacks at once, in one process.

use super::{ATTACKS, Begin, find};
use crate::Outcome;
use crate::context::AttackContext;

const NAME: &str = "together";

pub(crate) fn prepare(context: &AttackContext) -> Outcome<Begin> {
    // An attack by several users needs several processes.
    let single = ATTACKS.iter().filter(|attack| attack.users.len() == 1);
    let names = single.map(|attack| attack.name).filter(|name| *name != NAME);
    let prepared: Outcome<Vec<Begin>> =
        names.filter_map(find).map(|attack| (attack.prepare)(context)).collect();
    let begins = prepared?;
    Ok(Box::new(move || begins.into_iter().try_for_each(|begin| begin())))
}
