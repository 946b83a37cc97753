//! Reserving positions in an MPSC ring whose producers are processes that may die: the death of one does not stall the
//! ring.
//!
//! A ring of `depth` slots has a `head` (the next free position, counted without wrapping) that producers advance, and a
//! `consumed` count that its one consumer advances. Each slot has a sequence number: `position + 1` once the slot is
//! published. Each producer also owns a *claim*: a word that nobody else writes while the producer lives.
//!
//! ```text
//!  producer                                 consumer                recovery (when a producer has died)
//!  claim = p          (announce)            slot[p].seq == p+1 ?    p = claim of the dead producer
//!  head: p -> p+1     (reserve, CAS)        read slot               head > p ?
//!  write slot[p]                            consumed = p+1          no live claim == p ?
//!  slot[p].seq = p+1  (publish)                                     slot[p].seq != p+1 ?  then p is abandoned:
//!  claim = IDLE       (clear_claim)                                 skip it, or publish an empty entry
//! ```
//!
//! A ring with one producer needs no compare-and-swap, which is expensive: the processor must first complete all earlier
//! stores. So a ring has a *mode*: [`EXCLUSIVE`] while one producer uses it, otherwise [`SHARED`]. The owner of the ring
//! calls [`switch_to_shared`] and waits until the first producer's claim is idle or its position is reserved, before it admits a second
//! one. It may store [`EXCLUSIVE`] again, with Release, when it
//! knows that all producers but one are gone.
//!
//! **Promise.** If a producer dies between reserving and publishing, [`is_abandoned`] recognises its position. It never
//! reports a position that a live producer may still write.
//!
//! Why this is safe: the claim of a producer equals `p` from before its reservation of `p` until after its publication of
//! `p`. A thread that sees `head > p` sees that claim, or a later value of it, which the producer stored after the
//! publication. So if `head > p`, no live claim equals `p` and, read after that, `p` is not published, then no live
//! producer owns `p`.

use core::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use super::{Word, fence};

/// The value of a claim while its producer is not reserving.
pub(crate) const IDLE: u64 = u64::MAX;

/// The mode of a ring with any number of producers.
pub(crate) const SHARED: u64 = 0;
/// The mode of a ring with one producer.
pub(crate) const EXCLUSIVE: u64 = 1;

/// Reserves the next position. None if `has_room` returns false for it.
///
/// The claim stays set until [`clear_claim`].
#[inline]
pub(crate) fn reserve<W: Word, C: Word>(
    head: &W,
    mode: &W,
    claim: &C,
    has_room: impl FnMut(u64) -> bool,
) -> Option<u64> {
    // Release, partner: the Acquire load of `head` in `is_abandoned`. It makes the claim visible to every thread that sees
    // the reservation; later reservations by other producers continue the release sequence.
    // Acquire, partner: the Release store of EXCLUSIVE by the owner. It makes the last reservations of the producers that
    // are gone visible to the remaining one.
    reserve_ordered(head, mode, claim, has_room, (Release, Acquire), fence::light)
}

#[inline]
fn reserve_ordered<W: Word, C: Word>(
    head: &W,
    mode: &W,
    claim: &C,
    mut has_room: impl FnMut(u64) -> bool,
    (order, mode_order): (Ordering, Ordering),
    light_fence: impl Fn(),
) -> Option<u64> {
    let mut position = head.load(Relaxed);
    loop {
        if !has_room(position) {
            // Release is not needed for safety here (nothing was published), but keeps one rule: IDLE is stored last.
            claim.store(IDLE, Release);
            return None;
        }
        claim.store(position, Relaxed);
        // Orders the claim before the load of the mode. `switch_to_shared` stores the mode, executes a heavy barrier, and
        // then looks at the claim.
        light_fence();
        if mode.load(mode_order) == EXCLUSIVE {
            // Other producers may have reserved after our load of `head`, before they ended.
            let current = head.load(Relaxed);
            if current == position {
                head.store(position.wrapping_add(1), order);
                return Some(position);
            }
            position = current;
            continue;
        }
        match head.compare_exchange_weak(position, position.wrapping_add(1), order, Relaxed) {
            Ok(_) => return Some(position),
            Err(current) => position = current,
        }
    }
}

/// Prepares a ring for a second producer. The second one may begin when the claim of the present producer is idle or less than `head`:
/// then only publishing is left of a reservation without compare-and-swap; or when the present producer is dead. This function does not
/// wait: the present producer may be stopped.
pub(crate) fn switch_to_shared<W: Word>(mode: &W) {
    mode.store(SHARED, Relaxed);
    fence::heavy();
}

/// Whether a ring of `depth` slots has room at `position`, if the consumer has read all positions below `consumed`.
///
/// A producer that was preempted may ask about a position that others have reserved and the consumer has read in the
/// meantime. Then the result is true: the reservation fails anyway, and the producer tries the next position.
#[inline]
pub(crate) fn has_room(position: u64, consumed: u64, depth: u64) -> bool {
    (position.wrapping_sub(consumed) as i64) < depth as i64
}

/// Clears the claim, after the slot has been published.
#[inline]
pub(crate) fn clear_claim<C: Word>(claim: &C) {
    // Release, partner: the Acquire load of claims in `is_abandoned`. A thread that sees IDLE sees the publication before it.
    claim.store(IDLE, Release);
}

/// Whether `position` was reserved by a dead producer, and so will never be published.
///
/// `live_claims` are the claims of all producers that may still run. `published` is called last. False may become true
/// later, when a live producer changes its claim; true is final.
pub(crate) fn is_abandoned<'a, W: Word, C: Word + 'a>(
    head: &W,
    position: u64,
    mut live_claims: impl Iterator<Item = &'a C>,
    published: impl FnOnce() -> bool,
) -> bool {
    // Acquire, partner: the Release reservation in `reserve`.
    head.load(Acquire) > position
        // Acquire, partner: the Release store in `clear_claim`.
        && live_claims.all(|claim| claim.load(Acquire) != position)
        && !published()
}

#[cfg(test)]
mod tests {
    use super::has_room;

    #[test]
    fn ring_is_full_at_its_depth_but_not_for_positions_already_read() {
        assert!(has_room(0, 0, 4) && has_room(3, 0, 4) && !has_room(4, 0, 4));
        assert!(has_room(10, 12, 4), "the consumer has read it already");
        assert!(has_room(u64::MAX, u64::MAX - 3, 4) && !has_room(0, u64::MAX - 3, 4));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicU64};
    use loom::thread;

    use super::*;

    const DEPTH: u64 = 2;

    struct Slot {
        seq: AtomicU64,
        value: loom::cell::UnsafeCell<u64>,
    }

    struct Ring {
        head: AtomicU64,
        mode: AtomicU64,
        claims: [AtomicU64; 2],
        dead: AtomicBool,
        slots: [Slot; DEPTH as usize],
    }

    impl Ring {
        fn new() -> Arc<Ring> {
            let slot = || Slot { seq: AtomicU64::new(0), value: loom::cell::UnsafeCell::new(0) };
            Arc::new(Ring {
                head: AtomicU64::new(0),
                mode: AtomicU64::new(SHARED),
                claims: [AtomicU64::new(IDLE), AtomicU64::new(IDLE)],
                dead: AtomicBool::new(false),
                slots: [slot(), slot()],
            })
        }

        fn slot(&self, position: u64) -> &Slot {
            &self.slots[(position % DEPTH) as usize]
        }

        /// Reserves in a shared ring without the light barrier. That barrier is for changes of the mode; under loom it is a
        /// full fence, which would hide a wrong ordering.
        fn reserve(&self, producer: usize, order: Ordering) -> u64 {
            let orders = (order, Acquire);
            reserve_ordered(&self.head, &self.mode, &self.claims[producer], |_| true, orders, || ()).unwrap()
        }

        fn publish(&self, position: u64, value: u64) {
            // SAFETY: only this thread has reserved the position, or recovers it; loom checks that claim.
            self.slot(position).value.with_mut(|v| unsafe { *v = value });
            self.slot(position).seq.store(position + 1, Release);
        }

        /// Reads a published value. Loom reports a race if the publication does not order it.
        fn read(&self, position: u64) -> Option<u64> {
            (self.slot(position).seq.load(Acquire) == position + 1)
                // SAFETY: published slots are not written any more in this test.
                .then(|| self.slot(position).value.with(|v| unsafe { *v }))
        }
    }

    const EMPTY_ENTRY: u64 = 99;

    /// The point at which a producer dies.
    #[derive(Clone, Copy, PartialEq)]
    enum Death {
        BeforeAnnouncing,
        Announced,
        Reserved,
        Published,
    }

    /// The orderings of the surviving producer: the real ones, or one of them weakened.
    #[derive(Clone, Copy)]
    struct Orders {
        reserve: Ordering,
        clear_claim: Ordering,
    }

    const REAL: Orders = Orders { reserve: Release, clear_claim: Release };

    /// Producer 0 survives, producer 1 dies, and a recovery publishes an empty entry at the position that it left. Every
    /// reserved position must be published exactly once, and one of them holds the survivor's value.
    fn check(death: Death, orders: Orders) {
        loom::model(move || {
            let ring = Ring::new();
            let survivor = thread::spawn({
                let ring = ring.clone();
                move || {
                    let p = ring.reserve(0, orders.reserve);
                    ring.publish(p, 7);
                    ring.claims[0].store(IDLE, orders.clear_claim);
                }
            });
            let dying = thread::spawn({
                let ring = ring.clone();
                move || {
                    match death {
                        Death::BeforeAnnouncing => {}
                        Death::Announced => ring.claims[1].store(ring.head.load(Relaxed), Relaxed),
                        Death::Reserved | Death::Published => {
                            let p = ring.reserve(1, Release);
                            if death == Death::Published {
                                ring.publish(p, 8);
                            }
                        }
                    }
                    // The notification of the kernel orders everything that the dead process did before its death is seen.
                    ring.dead.store(true, Release);
                }
            });
            let recover = || {
                let p = ring.claims[1].load(Relaxed);
                let published = || ring.slot(p).seq.load(Acquire) == p + 1;
                if p != IDLE && is_abandoned(&ring.head, p, [&ring.claims[0]].into_iter(), published) {
                    ring.publish(p, EMPTY_ENTRY);
                }
            };
            if ring.dead.load(Acquire) {
                recover();
            }
            survivor.join().unwrap();
            dying.join().unwrap();
            // What the first attempt could not decide, the second decides.
            recover();
            let head = ring.head.load(Acquire);
            let seen: Vec<u64> =
                (0..head).map(|p| ring.read(p).expect("a position that is not published")).collect();
            assert_eq!(seen.iter().filter(|v| **v == 7).count(), 1, "{seen:?}");
            assert_eq!(seen.len(), if matches!(death, Death::Reserved | Death::Published) { 2 } else { 1 });
        });
    }

    #[test]
    fn loom_death_before_announcing() {
        check(Death::BeforeAnnouncing, REAL);
    }

    #[test]
    fn loom_death_before_reserving() {
        check(Death::Announced, REAL);
    }

    #[test]
    fn loom_death_between_reserving_and_publishing() {
        check(Death::Reserved, REAL);
    }

    #[test]
    fn loom_death_after_publishing() {
        check(Death::Published, REAL);
    }

    /// A twin that must fail: if the clearing of the claim does not release, the recovery takes a published slot for an
    /// abandoned one.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_clear_claim_is_caught() {
        check(Death::Announced, Orders { clear_claim: Relaxed, ..REAL });
    }

    /// A twin that must fail: if the reservation does not release, the recovery misses the survivor's claim.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_reservation_is_caught() {
        check(Death::Announced, Orders { reserve: Relaxed, ..REAL });
    }

    #[test]
    fn loom_two_producers_never_share_a_position() {
        loom::model(|| {
            let ring = Ring::new();
            let threads: Vec<_> = (0..2)
                .map(|i| {
                    let ring = ring.clone();
                    thread::spawn(move || {
                        let p = reserve(&ring.head, &ring.mode, &ring.claims[i], |_| true).unwrap();
                        ring.publish(p, i as u64);
                        clear_claim(&ring.claims[i]);
                    })
                })
                .collect();
            for thread in threads {
                thread.join().unwrap();
            }
            let mut seen: Vec<_> = (0..2).map(|p| ring.read(p).unwrap()).collect();
            seen.sort();
            assert_eq!(seen, [0, 1]);
        });
    }

    /// Whether the producer with this claim is outside a reservation without compare-and-swap that it began before
    /// [`switch_to_shared`]. Its claim is idle, or its position is reserved already: only publishing it is left.
    fn has_reserved<W: Word, C: Word>(head: &W, claim: &C) -> bool {
        // Acquire, partner: the Release store in `clear_claim`.
        let position = claim.load(Acquire);
        // Acquire, partner: the Release reservation in `reserve`. The second producer continues from this head.
        position == IDLE || head.load(Acquire) > position
    }

    /// A second producer is admitted while the first one reserves without compare-and-swap. `wait` is what the owner does
    /// before.
    fn second_producer(wait: impl Fn(&Ring) + Send + Sync + Copy + 'static) {
        loom::model(move || {
            let ring = Ring::new();
            ring.mode.store(EXCLUSIVE, Relaxed);
            let first = thread::spawn({
                let ring = ring.clone();
                move || {
                    let p = reserve(&ring.head, &ring.mode, &ring.claims[0], |_| true).unwrap();
                    ring.publish(p, 0);
                    clear_claim(&ring.claims[0]);
                }
            });
            wait(&ring);
            let p = reserve(&ring.head, &ring.mode, &ring.claims[1], |_| true).unwrap();
            ring.publish(p, 1);
            clear_claim(&ring.claims[1]);
            first.join().unwrap();
            let mut seen: Vec<_> = (0..2).map(|p| ring.read(p).unwrap()).collect();
            seen.sort();
            assert_eq!(seen, [0, 1]);
        });
    }

    #[test]
    fn loom_second_producer_is_admitted_safely() {
        second_producer(|ring| {
            switch_to_shared(&ring.mode);
            while !has_reserved(&ring.head, &ring.claims[0]) {
                thread::yield_now();
            }
        });
    }

    /// A twin that must fail: an owner that does not wait for the first producer's claim.
    #[test]
    #[should_panic]
    fn loom_twin_owner_that_does_not_wait_is_caught() {
        second_producer(|ring| switch_to_shared(&ring.mode));
    }

    /// One of two producers ends, and the owner lets the other one reserve without compare-and-swap.
    fn first_producer_again(mode_order: Ordering) {
        loom::model(move || {
            let ring = Ring::new();
            let remaining = thread::spawn({
                let ring = ring.clone();
                move || {
                    let orders = (Release, mode_order);
                    let p = reserve_ordered(&ring.head, &ring.mode, &ring.claims[0], |_| true, orders, || ())
                        .unwrap();
                    ring.publish(p, 0);
                    clear_claim(&ring.claims[0]);
                }
            });
            let ending = thread::spawn({
                let ring = ring.clone();
                move || {
                    let p = ring.reserve(1, Release);
                    ring.publish(p, 1);
                    ring.dead.store(true, Release);
                }
            });
            if ring.dead.load(Acquire) {
                ring.mode.store(EXCLUSIVE, Release);
            }
            remaining.join().unwrap();
            ending.join().unwrap();
            let mut seen: Vec<_> =
                (0..2).map(|p| ring.read(p).expect("a position was reserved twice")).collect();
            seen.sort();
            assert_eq!(seen, [0, 1]);
        });
    }

    #[test]
    fn loom_remaining_producer_becomes_exclusive_safely() {
        first_producer_again(Acquire);
    }

    /// A twin that must fail: without the Acquire the remaining producer may miss the last reservation of the other one.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_mode_is_caught() {
        first_producer_again(Relaxed);
    }
}
