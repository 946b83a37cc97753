//! Reserving places in a ring that many processes write, so that the death of one stalls nobody.
//!
//! A ring of `depth` slots has a `head` (the next free position, counted without wrapping) that producers advance, and a
//! `consumed` count that its one consumer advances. Each slot holds a sequence number: `position + 1` once the slot is
//! published. Beside these every producer owns one *claim*, a word that nobody else writes while it lives:
//!
//! ```text
//!  producer                                 consumer                healer (when a producer has died)
//!  claim = p          (announce)            slot[p].seq == p+1 ?    p = claim of the dead
//!  head: p -> p+1     (reserve, CAS)        read slot               head > p ?
//!  write slot[p]                            consumed = p+1          no live claim == p ?
//!  slot[p].seq = p+1  (publish)                                     slot[p].seq != p+1 ?  then p is void:
//!  claim = IDLE       (settle)                                      write a void entry, publish it
//! ```
//!
//! A ring with one producer needs no compare-and-swap, whose price is that all earlier stores must have left the
//! processor first. So a ring has a *mode*: [`EXCLUSIVE`] as long as one producer uses it, else [`SHARED`]; the owner of the
//! ring changes it with [`switch_to_shared`] before it lets a second one in, and may store [`EXCLUSIVE`] again, with Release, when all
//! producers but one are known to be gone.
//!
//! **Promise.** If a producer dies between reserving and publishing, [`is_abandoned`] recognises its position, and never one
//! that a live producer may still write. Why it is safe: a producer's claim equals `p` from before its reservation of `p`
//! until after its publication. Whoever sees `head > p` sees that claim, or a later one of the same producer, which is
//! stored after publication. So with `head > p`, no live claim equal to `p` and, read after that, no publication of
//! `p`, nobody alive owns `p`.

use core::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use super::{Word, fence};

/// Value of a claim whose producer is not reserving.
pub(crate) const IDLE: u64 = u64::MAX;

/// Mode of a ring that any number of producers use.
pub(crate) const SHARED: u64 = 0;
/// Mode of a ring that one producer uses.
pub(crate) const EXCLUSIVE: u64 = 1;

/// Reserves the next position, or says that there is no room at it.
///
/// `has_room` is asked for the position about to be taken. The claim stays set until [`clear_claim`].
#[inline]
pub(crate) fn reserve<W: Word, C: Word>(
    head: &W,
    mode: &W,
    claim: &C,
    has_room: impl FnMut(u64) -> bool,
) -> Option<u64> {
    // Release, partner: the Acquire load of `head` in `is_abandoned`. It makes the claim visible to whoever sees the
    // reservation; later reservations by others continue the release sequence.
    // Acquire, partner: the Release store of EXCLUSIVE by the owner. It makes the last reservations of those who are gone
    // visible to the one who is left.
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
            // Release: not needed for safety (nothing was published), but keeps the one rule "IDLE comes last".
            claim.store(IDLE, Release);
            return None;
        }
        claim.store(position, Relaxed);
        // Claim before mode: `switch_to_shared` stores the mode, passes a heavy barrier and waits for the claim.
        light_fence();
        if mode.load(mode_order) == EXCLUSIVE {
            // The others may have reserved after our look at `head`, and before they were gone.
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

/// Makes a ring fit for a second producer. `has_left_reserve` is asked until the present one, if it was inside [`reserve`], is no
/// longer: its claim changed, or it is dead.
pub(crate) fn switch_to_shared<W: Word>(mode: &W, mut has_left_reserve: impl FnMut() -> bool) {
    mode.store(SHARED, Relaxed);
    fence::heavy();
    while !has_left_reserve() {
        pause();
    }
}

#[cfg(not(all(test, loom)))]
fn pause() {
    std::thread::yield_now();
}

#[cfg(all(test, loom))]
fn pause() {
    loom::thread::yield_now();
}

/// Whether a ring of `depth` has room at a position, of which those before `consumed` have been read.
///
/// A producer that was held up may ask about a position that others have reserved and the consumer has read meanwhile. It
/// is not to be told that the ring is full: its reservation fails, and it asks again.
#[inline]
pub(crate) fn has_room(position: u64, consumed: u64, depth: u64) -> bool {
    (position.wrapping_sub(consumed) as i64) < depth as i64
}

/// Ends a reservation whose slot has been published.
#[inline]
pub(crate) fn clear_claim<C: Word>(claim: &C) {
    // Release, partner: the Acquire load of claims in `is_abandoned`. Whoever sees IDLE sees the publication before it.
    claim.store(IDLE, Release);
}

/// Whether `position` was reserved by somebody dead and will never be published.
///
/// `live_claims` are the claims of every producer that may still run. `published` is asked last. A `false` may become
/// `true` later (a live producer may be about to move on), a `true` is final.
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
    fn a_ring_is_full_when_it_is_and_not_for_those_who_come_late() {
        assert!(has_room(0, 0, 4) && has_room(3, 0, 4) && !has_room(4, 0, 4));
        assert!(has_room(10, 12, 4), "read already: somebody else took it");
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

        /// Reserves in a shared ring without the light fence: that is for changes of mode, and as the full fence which
        /// loom makes of it it would hide a wrong order.
        fn reserve(&self, producer: usize, order: Ordering) -> u64 {
            let orders = (order, Acquire);
            reserve_ordered(&self.head, &self.mode, &self.claims[producer], |_| true, orders, || ()).unwrap()
        }

        fn publish(&self, position: u64, value: u64) {
            // SAFETY: the position is reserved by, or healed for, this thread alone; loom checks that claim.
            self.slot(position).value.with_mut(|v| unsafe { *v = value });
            self.slot(position).seq.store(position + 1, Release);
        }

        /// Reads a published value; loom reports a race if the publication does not order it.
        fn read(&self, position: u64) -> Option<u64> {
            (self.slot(position).seq.load(Acquire) == position + 1)
                // SAFETY: published slots are no longer written in this test.
                .then(|| self.slot(position).value.with(|v| unsafe { *v }))
        }
    }

    const VOID: u64 = 99;

    /// Where a producer dies.
    #[derive(Clone, Copy, PartialEq)]
    enum Death {
        BeforeAnnouncing,
        Announced,
        Reserved,
        Published,
    }

    /// Orderings of the survivor; the shipped ones, or one weakened.
    #[derive(Clone, Copy)]
    struct Orders {
        reserve: Ordering,
        settle: Ordering,
    }

    const SHIPPED: Orders = Orders { reserve: Release, settle: Release };

    /// Producer 0 lives, producer 1 dies; a healer voids what it left. Every reserved position ends up published exactly
    /// once, the survivor's value among them.
    fn check(death: Death, orders: Orders) {
        loom::model(move || {
            let ring = Ring::new();
            let survivor = thread::spawn({
                let ring = ring.clone();
                move || {
                    let p = ring.reserve(0, orders.reserve);
                    ring.publish(p, 7);
                    ring.claims[0].store(IDLE, orders.settle);
                }
            });
            let casualty = thread::spawn({
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
                    // A death is seen after everything the dead did: the kernel's notification orders it.
                    ring.dead.store(true, Release);
                }
            });
            let heal = || {
                let p = ring.claims[1].load(Relaxed);
                let published = || ring.slot(p).seq.load(Acquire) == p + 1;
                if p != IDLE && is_abandoned(&ring.head, p, [&ring.claims[0]].into_iter(), published) {
                    ring.publish(p, VOID);
                }
            };
            if ring.dead.load(Acquire) {
                heal();
            }
            survivor.join().unwrap();
            casualty.join().unwrap();
            // What the first look could not decide, the second does.
            heal();
            let head = ring.head.load(Acquire);
            let seen: Vec<u64> = (0..head).map(|p| ring.read(p).expect("a hole")).collect();
            assert_eq!(seen.iter().filter(|v| **v == 7).count(), 1, "{seen:?}");
            assert_eq!(seen.len(), if matches!(death, Death::Reserved | Death::Published) { 2 } else { 1 });
        });
    }

    #[test]
    fn loom_death_before_announcing() {
        check(Death::BeforeAnnouncing, SHIPPED);
    }

    #[test]
    fn loom_death_before_reserving() {
        check(Death::Announced, SHIPPED);
    }

    #[test]
    fn loom_death_between_reserving_and_publishing() {
        check(Death::Reserved, SHIPPED);
    }

    #[test]
    fn loom_death_after_publishing() {
        check(Death::Published, SHIPPED);
    }

    /// A twin that must fail: with a settle that does not release, the healer takes a published slot for a hole.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_settle_is_caught() {
        check(Death::Announced, Orders { settle: Relaxed, ..SHIPPED });
    }

    /// A twin that must fail: with a reservation that does not release, the healer misses the survivor's claim.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_reservation_is_caught() {
        check(Death::Announced, Orders { reserve: Relaxed, ..SHIPPED });
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

    /// A second producer is let in while the first works without compare-and-swap. `wait` is what the owner does about it.
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
    fn loom_a_second_producer_is_let_in() {
        second_producer(|ring| switch_to_shared(&ring.mode, || ring.claims[0].load(Acquire) == IDLE));
    }

    /// A twin that must fail: not waiting for the first producer's claim.
    #[test]
    #[should_panic]
    fn loom_twin_impatient_owner_is_caught() {
        second_producer(|ring| switch_to_shared(&ring.mode, || true));
    }

    /// One of two producers ends, and the owner lets the other do without compare-and-swap.
    fn first_producer_again(mode_order: Ordering) {
        loom::model(move || {
            let ring = Ring::new();
            let stays = thread::spawn({
                let ring = ring.clone();
                move || {
                    let orders = (Release, mode_order);
                    let p = reserve_ordered(&ring.head, &ring.mode, &ring.claims[0], |_| true, orders, || ())
                        .unwrap();
                    ring.publish(p, 0);
                    clear_claim(&ring.claims[0]);
                }
            });
            let leaves = thread::spawn({
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
            stays.join().unwrap();
            leaves.join().unwrap();
            let mut seen: Vec<_> = (0..2).map(|p| ring.read(p).expect("a position taken twice")).collect();
            seen.sort();
            assert_eq!(seen, [0, 1]);
        });
    }

    #[test]
    fn loom_the_first_producer_is_alone_again() {
        first_producer_again(Acquire);
    }

    /// A twin that must fail: without the Acquire the one who stays may miss the other's last reservation.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_mode_is_caught() {
        first_producer_again(Relaxed);
    }
}
