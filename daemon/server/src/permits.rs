//! Limits on concurrent work and on memory: the share of each principal first, the total second.
//!
//! A principal that has used up its share waits for its own work to end, in the order of its requests. When the total is
//! used up, the next units go to the principal that holds the fewest, so that a principal with many requests cannot delay
//! one with few by more than the work in progress. Among those that hold equally many, the order is that of the requests.
//!
//! Shares shrink when several principals use a pool: who holds some gets more only while at least as many units are left
//! as it then holds. So n principals that want all they can get hold 1/(n+1) of the total each, and the rest is left for
//! the next one, which need not wait. (Choudhury and Hahne describe such dynamic thresholds for the buffers of switches,
//! IEEE/ACM Transactions on Networking 6(2), 1998.)
//!
//! Some work can last without limit (a transfer with a rate limit, a file on an unreachable network), and a
//! few principals could block the total with it. [`PermitPool::with_first_for_each`] makes a pool for such
//! work: the first unit of each principal does not depend on the total.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use tokio::sync::oneshot;
use tracing_mutex::stdsync::Mutex;

use crate::locks::lock;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) per_principal: u32,
    pub(crate) total: u32,
}

#[derive(Debug)]
pub(crate) struct PermitPool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limits: Limits,
    /// The most units for principals that have none while the total is used up.
    firsts: u32,
    order: Order,
    is_for_long_work: bool,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// The principal that holds the fewest, and shares shrink.
    FewestFirst,
    /// That of the requests.
    OfRequests,
}

#[derive(Debug, Default)]
struct State {
    used: u32,
    /// Units in use that do not depend on the total.
    used_firsts: u32,
    /// The number of requests so far, which gives each its place in the order.
    requests: u64,
    principals: BTreeMap<u32, Share>,
}

#[derive(Debug, Default)]
struct Share {
    held: u32,
    waiting: VecDeque<Request>,
}

#[derive(Debug)]
struct Request {
    number: u64,
    units: u32,
    /// Closed when the request no longer waits.
    reply: oneshot::Sender<Permit>,
}

struct QueuePlace<'p> {
    pool: &'p Arc<Shared>,
    reply: oneshot::Receiver<Permit>,
}

impl Drop for QueuePlace<'_> {
    /// Smaller requests may have waited behind this one.
    fn drop(&mut self) {
        self.reply.close();
        self.pool.grant(&mut lock(&self.pool.state));
    }
}

/// Units in use; returned on drop.
#[derive(Debug)]
#[must_use]
pub(crate) struct Permit {
    pool: Arc<Shared>,
    uid: u32,
    units: u32,
    /// Whether its one unit does not depend on the total.
    is_first: bool,
}

impl Permit {
    pub(crate) const fn units(&self) -> usize {
        self.units as usize
    }

    /// Whether the work that it permits runs at a lower priority than short work.
    pub(crate) fn is_for_long_work(&self) -> bool {
        self.pool.is_for_long_work
    }

    pub(crate) fn shrink(&mut self, units: usize) {
        let kept = u32::try_from(units).unwrap_or(u32::MAX).min(self.units);
        // A first unit is single and stays.
        if !self.is_first {
            let returned = self.units - kept;
            self.units = kept;
            self.pool.give_back(self.uid, returned, false);
        }
    }

    pub(crate) fn merge(&mut self, mut other: Self) {
        self.units += other.units;
        other.units = 0;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.pool.give_back(self.uid, self.units, self.is_first);
    }
}

/// All units of the principal or of the pool are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exhausted;

impl PermitPool {
    pub(crate) fn new(limits: Limits) -> Self {
        Self::with(limits, 0, Order::FewestFirst, false)
    }

    /// Shares do not shrink, and units are given in the order of the requests: for work that needs more and more units.
    /// If all that hold some had to wait until others end, none would.
    pub(crate) fn in_order_of_requests(limits: Limits) -> Self {
        Self::with(limits, 0, Order::OfRequests, false)
    }

    /// A principal without units gets its first unit even if the total is used up. The number of such units is also
    /// limited to the total.
    pub(crate) fn with_first_for_each(limits: Limits) -> Self {
        Self::with(limits, limits.total, Order::FewestFirst, false)
    }

    /// As [`Self::with_first_for_each`], for work that can keep a processor busy for seconds, see
    /// [`Permit::is_for_long_work`].
    pub(crate) fn for_long_work(limits: Limits) -> Self {
        let Limits { total: firsts, .. } = limits;
        Self::with(limits, firsts, Order::FewestFirst, true)
    }

    fn with(limits: Limits, firsts: u32, order: Order, is_for_long_work: bool) -> Self {
        Self(Arc::new(Shared { limits, firsts, order, is_for_long_work, state: Mutex::default() }))
    }

    /// Dropping the future leaves the queue.
    pub(crate) async fn acquire(&self, uid: u32) -> Permit {
        self.acquire_many(uid, 1).await
    }

    /// A number above the principal's limit is reduced to that, so that one large request runs alone instead of never.
    pub(crate) async fn acquire_many(&self, uid: u32, units: u32) -> Permit {
        let units = self.clamp(units);
        loop {
            let mut place = match self.0.request(uid, units) {
                Ok(permit) => return permit,
                Err(reply) => QueuePlace { pool: &self.0, reply },
            };
            // The pool keeps a request until its receiver is closed, so this succeeds at the first try.
            if let Ok(permit) = (&mut place.reply).await {
                return permit;
            }
        }
    }

    pub(crate) fn try_acquire(&self, uid: u32) -> Result<Permit, Exhausted> {
        self.try_acquire_many(uid, 1)
    }

    pub(crate) fn try_acquire_many(&self, uid: u32, units: u32) -> Result<Permit, Exhausted> {
        self.0.take_now(&mut lock(&self.0.state), uid, self.clamp(units)).ok_or(Exhausted)
    }

    /// Waits for one unit, and takes up to `most` in total, but at most one in `part` of the units that the principal
    /// has left. So even many requests that hold their units for long leave some for the next one.
    pub(crate) async fn acquire_part(&self, uid: u32, most: u32, part: usize) -> Permit {
        let mut permit = self.acquire(uid).await;
        let more = u32::try_from(self.left(uid) / part.max(1)).unwrap_or(u32::MAX);
        let more = more.min(most.saturating_sub(1));
        // A first unit stays single, because it is not part of the total.
        if more > 0
            && !permit.is_first
            && let Ok(grown) = self.try_acquire_many(uid, more)
        {
            permit.merge(grown);
        }
        permit
    }

    fn left(&self, uid: u32) -> usize {
        let state = lock(&self.0.state);
        let of_share = self.0.limits.per_principal.saturating_sub(state.held(uid));
        let left = self.0.limits.total.saturating_sub(state.used);
        of_share.min(left) as usize
    }

    pub(crate) fn waiting(&self) -> usize {
        let state = lock(&self.0.state);
        let waiting = state.principals.values().flat_map(|principal| &principal.waiting);
        waiting.filter(|request| !request.reply.is_closed()).count()
    }

    pub(crate) fn in_use(&self) -> usize {
        let state = lock(&self.0.state);
        state.used as usize + state.used_firsts as usize
    }

    /// The limit of all principals, without the first units that do not depend on it.
    pub(crate) fn total(&self) -> usize {
        self.0.limits.total as usize
    }

    pub(crate) fn share(&self) -> usize {
        self.clamp(u32::MAX) as usize
    }

    fn clamp(&self, units: u32) -> u32 {
        units.min(self.0.limits.per_principal).min(self.0.limits.total)
    }
}

impl Shared {
    fn request(self: &Arc<Self>, uid: u32, units: u32) -> Result<Permit, oneshot::Receiver<Permit>> {
        let mut state = lock(&self.state);
        if let Some(permit) = self.take_now(&mut state, uid, units) {
            return Ok(permit);
        }
        let (reply, receiver) = oneshot::channel();
        state.requests += 1;
        let number = state.requests;
        let principal = state.principals.entry(uid).or_default();
        principal.waiting.retain(|request| !request.reply.is_closed());
        principal.waiting.push_back(Request { number, units, reply });
        Err(receiver)
    }

    /// Takes units unless an earlier request has to come first.
    fn take_now(self: &Arc<Self>, state: &mut State, uid: u32, units: u32) -> Option<Permit> {
        // All that can be granted has been: who still waits within its share waits for the total.
        let has_earlier = state.principals.get(&uid).is_some_and(Share::is_waiting);
        let is_first = self.next(state).is_some() || !state.fits(&self.limits, units);
        let allowed = !has_earlier && self.is_within_share(state, uid, units);
        (allowed && (!is_first || self.has_first(state, uid, units)))
            .then(|| self.permit(state, uid, units, is_first))
    }

    /// The principal whose turn is next, if any waits within its share.
    fn next(&self, state: &mut State) -> Option<u32> {
        state.principals.retain(|_, principal| principal.forget_gone());
        let waiting = state.principals.iter().filter_map(|(uid, principal)| {
            let first = principal.waiting.front()?;
            let held = if self.order == Order::FewestFirst { principal.held } else { 0 };
            self.is_within_share(state, *uid, first.units).then_some((held, first.number, *uid))
        });
        waiting.min().map(|(_, _, uid)| uid)
    }

    /// Whether the principal may hold `units` more, if there are as many.
    fn is_within_share(&self, state: &State, uid: u32, units: u32) -> bool {
        let held = state.held(uid);
        let after = held.saturating_add(units);
        let left = self.limits.total.saturating_sub(state.used).saturating_sub(units);
        let is_alone = || state.principals.keys().all(|other| *other == uid);
        let has_shrunk = self.order == Order::FewestFirst && held > 0 && after > left && !is_alone();
        after <= self.limits.per_principal && !has_shrunk
    }

    /// Whether the principal gets a unit that does not depend on the total.
    fn has_first(&self, state: &State, uid: u32, units: u32) -> bool {
        units == 1 && state.held(uid) == 0 && state.used_firsts < self.firsts
    }

    fn permit(self: &Arc<Self>, state: &mut State, uid: u32, units: u32, is_first: bool) -> Permit {
        state.principals.entry(uid).or_default().held += units;
        *(if is_first { &mut state.used_firsts } else { &mut state.used }) += units;
        Permit { pool: Arc::clone(self), uid, units, is_first }
    }

    fn give_back(self: &Arc<Self>, uid: u32, units: u32, is_first: bool) {
        if units > 0 {
            let mut state = lock(&self.state);
            state.give_back(uid, units, is_first);
            self.grant(&mut state);
        }
    }

    /// Gives units to those that wait, as long as they are enough for the next one.
    fn grant(self: &Arc<Self>, state: &mut State) {
        while let Some(uid) = self.next(state) {
            let first = state.principals.get(&uid).and_then(|share| share.waiting.front());
            let Some(units) = first.map(|request| request.units) else { return };
            let is_first = !state.fits(&self.limits, units);
            if is_first && !self.has_first(state, uid, units) {
                return;
            }
            let waiting = state.principals.get_mut(&uid).and_then(|share| share.waiting.pop_front());
            let Some(request) = waiting else { return };
            let permit = self.permit(state, uid, units, is_first);
            if let Err(mut unwanted) = request.reply.send(permit) {
                // Not by its drop, which would lock the state again.
                unwanted.units = 0;
                state.give_back(uid, units, is_first);
            }
        }
    }
}

impl State {
    fn held(&self, uid: u32) -> u32 {
        self.principals.get(&uid).map_or(0, |principal| principal.held)
    }

    const fn fits(&self, limits: &Limits, units: u32) -> bool {
        units <= limits.total.saturating_sub(self.used)
    }

    fn give_back(&mut self, uid: u32, units: u32, is_first: bool) {
        *(if is_first { &mut self.used_firsts } else { &mut self.used }) -= units;
        if let Some(principal) = self.principals.get_mut(&uid) {
            principal.held -= units;
        }
    }
}

impl Share {
    /// Removes requests that no longer wait from the front of the queue. Returns whether anything is left.
    fn forget_gone(&mut self) -> bool {
        while self.waiting.pop_front_if(|request| request.reply.is_closed()).is_some() {}
        self.held > 0 || !self.waiting.is_empty()
    }

    fn is_waiting(&self) -> bool {
        self.waiting.iter().any(|request| !request.reply.is_closed())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const MOMENT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn principal_that_has_used_up_its_share_waits_and_others_do_not() {
        let pool = PermitPool::new(Limits { per_principal: 2, total: 8 });
        let (first, _second) = (pool.acquire(1).await, pool.acquire(1).await);
        let third = pool.acquire(1);
        tokio::pin!(third);
        assert!(timeout(MOMENT, third.as_mut()).await.is_err(), "it waits");
        assert_eq!((pool.waiting(), pool.in_use(), pool.total()), (1, 2, 8), "the total is not used up");
        assert_eq!(pool.try_acquire(1).unwrap_err(), Exhausted);
        assert!(pool.try_acquire(2).is_ok());
        drop(first);
        let _third = third.await;
        assert!(timeout(MOMENT, pool.acquire(1)).await.is_err());
        assert_eq!(pool.waiting(), 0, "who leaves the queue is not counted");
        assert_eq!(pool.in_use(), 2);
    }

    #[tokio::test]
    async fn principal_with_many_requests_takes_only_its_share_of_the_queue_for_the_total() {
        let pool = Arc::new(PermitPool::new(Limits { per_principal: 1, total: 1 }));
        let held = pool.acquire(1).await;
        let waiting = |uid| {
            let pool = Arc::clone(&pool);
            tokio::spawn(async move { drop(pool.acquire(uid).await) })
        };
        let greedy: Vec<_> = (0..100).map(|_| waiting(1)).collect();
        tokio::task::yield_now().await;
        let other = waiting(2);
        tokio::task::yield_now().await;
        drop(held);
        timeout(Duration::from_secs(10), other).await.expect("the other principal's turn").unwrap();
        for task in greedy {
            task.await.unwrap();
        }
        assert_eq!(pool.in_use(), 0);
    }

    #[tokio::test]
    async fn first_unit_of_a_principal_does_not_depend_on_the_others() {
        let pool = PermitPool::with_first_for_each(Limits { per_principal: 2, total: 3 });
        let held = [1, 1, 2].map(|uid| pool.try_acquire(uid).unwrap());
        let first = pool.acquire(3).await;
        assert_eq!(pool.try_acquire(3).unwrap_err(), Exhausted, "only the first");
        assert!(timeout(MOMENT, pool.acquire(3)).await.is_err());
        assert_eq!(pool.try_acquire(1).unwrap_err(), Exhausted, "its share is used up");
        assert_eq!(pool.in_use(), 4);
        drop(first);
        let _again = pool.try_acquire(3).unwrap();
        drop(held);
        let _second = pool.acquire(3).await;
    }

    #[tokio::test]
    async fn principal_that_holds_units_of_the_total_gets_no_first_unit() {
        let pool = PermitPool::with_first_for_each(Limits { per_principal: 2, total: 3 });
        let mut held: Vec<_> = [1, 1, 2].map(|uid| pool.try_acquire(uid).unwrap()).into();
        assert_eq!(pool.try_acquire(2).unwrap_err(), Exhausted, "it holds one already");
        held.extend([3, 4, 5].map(|uid| pool.try_acquire(uid).unwrap()));
        assert_eq!(pool.in_use(), 6);
    }

    #[tokio::test]
    async fn next_units_go_to_the_principal_that_holds_the_fewest() {
        let pool = Arc::new(PermitPool::new(Limits { per_principal: 3, total: 3 }));
        let mut held: Vec<_> = [1, 1, 2].map(|uid| pool.try_acquire(uid).unwrap()).into();
        let order = Arc::<Mutex<Vec<u32>>>::default();
        let mut waiting = Vec::new();
        for uid in [1, 2, 3, 3, 4] {
            let (pool, order) = (Arc::clone(&pool), Arc::clone(&order));
            waiting.push(tokio::spawn(async move {
                let permit = pool.acquire(uid).await;
                order.lock().unwrap().push(uid);
                permit
            }));
            tokio::task::yield_now().await;
        }
        while let Some(permit) = held.pop() {
            drop(permit);
            tokio::time::sleep(MOMENT).await;
        }
        assert_eq!(*order.lock().unwrap(), [2, 3, 1], "3 before 1, which asked earlier and still held one");
        assert_eq!(pool.waiting(), 2);
        for task in waiting {
            drop(task.await.unwrap());
        }
        assert_eq!((pool.in_use(), pool.waiting()), (0, 0));
    }

    #[tokio::test]
    async fn shares_shrink_so_that_one_more_principal_need_not_wait() {
        for principals in 1..12 {
            let pool = PermitPool::new(Limits { per_principal: 30, total: 60 });
            let mut held = Vec::new();
            for uid in (0..principals).cycle().take(1000) {
                held.extend(pool.try_acquire(uid));
            }
            let fair = 60 / (principals as usize + 1);
            assert!(pool.in_use() >= fair * principals as usize, "{principals}: {}", pool.in_use());
            let newcomer = std::iter::from_fn(|| pool.try_acquire(99).ok()).take(fair / 2);
            assert_eq!(newcomer.collect::<Vec<_>>().len(), fair / 2, "{principals}");
        }
    }

    #[tokio::test]
    async fn share_that_others_limited_grows_when_they_have_finished() {
        let pool = Arc::new(PermitPool::new(Limits { per_principal: 4, total: 6 }));
        let others = [2, 3].map(|uid| pool.try_acquire(uid).unwrap());
        let _own = [pool.try_acquire(1).unwrap(), pool.try_acquire(1).unwrap()];
        let more = Arc::clone(&pool);
        let more = tokio::spawn(async move { [more.acquire(1).await, more.acquire(1).await] });
        tokio::time::sleep(MOMENT).await;
        assert_eq!((pool.in_use(), pool.waiting()), (4, 1), "as many as it holds must be left");
        drop(others);
        drop(timeout(Duration::from_secs(10), more).await.expect("granted").unwrap());
    }

    #[tokio::test]
    async fn work_that_takes_more_and_more_gets_it_in_the_order_of_requests() {
        let pool = PermitPool::in_order_of_requests(Limits { per_principal: 6, total: 8 });
        let held = [1, 2, 3].map(|uid| pool.try_acquire_many(uid, 2).unwrap());
        let _more = pool.try_acquire_many(1, 2).expect("its share does not shrink");
        let mut second = Box::pin(pool.acquire(2));
        assert!(timeout(MOMENT, second.as_mut()).await.is_err());
        assert_eq!(pool.try_acquire(4).unwrap_err(), Exhausted);
        drop(held);
        drop(timeout(Duration::from_secs(10), second).await.expect("granted"));
    }

    #[tokio::test]
    async fn requests_behind_a_large_one_that_leaves_the_queue_are_granted() {
        let pool = Arc::new(PermitPool::new(Limits { per_principal: 8, total: 10 }));
        let _held = pool.acquire_many(1, 5).await;
        let mut large = Box::pin(pool.acquire_many(2, 8));
        assert!(timeout(MOMENT, large.as_mut()).await.is_err());
        assert_eq!(pool.try_acquire(3).unwrap_err(), Exhausted, "the large one comes first");
        let small = Arc::clone(&pool);
        let small = tokio::spawn(async move { small.acquire(3).await });
        tokio::task::yield_now().await;
        drop(large);
        drop(timeout(Duration::from_secs(10), small).await.expect("granted").unwrap());
    }

    #[tokio::test]
    async fn first_units_beyond_the_total_are_limited_too() {
        let pool = PermitPool::with_first_for_each(Limits { per_principal: 1, total: 2 });
        let _held: Vec<_> = (0..4).map(|uid| pool.try_acquire(uid).unwrap()).collect();
        assert_eq!(pool.try_acquire(4).unwrap_err(), Exhausted);
    }

    #[tokio::test]
    async fn request_larger_than_a_share_takes_the_whole_share() {
        let pool = PermitPool::new(Limits { per_principal: 4, total: 10 });
        let _all = pool.acquire_many(1, 100).await;
        assert_eq!(pool.in_use(), 4);
        assert_eq!(pool.try_acquire_many(1, 1).unwrap_err(), Exhausted);
    }

    #[tokio::test]
    async fn parts_get_smaller_the_more_of_them_are_held() {
        let pool = PermitPool::new(Limits { per_principal: 64, total: 1000 });
        let mut held = Vec::new();
        for _ in 0..8 {
            held.push(pool.acquire_part(1, 32, 4).await);
        }
        let units: Vec<_> = held.iter().map(Permit::units).collect();
        assert!(units.is_sorted_by(|a, b| a >= b) && units[0] == 16 && units[7] >= 1, "{units:?}");
        assert_eq!(pool.in_use(), units.iter().sum::<usize>());
        assert_eq!(pool.acquire_part(2, 8, 4).await.units(), 8, "no more than asked for");
        drop(held);
        assert_eq!(pool.in_use(), 0);
    }

    #[tokio::test]
    async fn units_that_are_not_needed_after_all_are_returned() {
        let pool = PermitPool::new(Limits { per_principal: 8, total: 10 });
        let mut permit = pool.acquire_many(1, 8).await;
        permit.shrink(9);
        assert_eq!(permit.units(), 8, "it does not grow");
        permit.shrink(3);
        assert_eq!((permit.units(), pool.in_use()), (3, 3));
        assert!(pool.try_acquire_many(1, 5).is_ok() && pool.try_acquire_many(2, 7).is_ok());
        permit.shrink(0);
        assert_eq!(pool.in_use(), 0);
    }

    #[tokio::test]
    async fn unused_shares_are_forgotten() {
        let pool = PermitPool::new(Limits { per_principal: 1, total: 8 });
        for uid in 0..100 {
            drop(pool.acquire(uid).await);
        }
        let _held = pool.acquire(7).await;
        assert_eq!(lock(&pool.0.state).principals.len(), 1);
    }
}
