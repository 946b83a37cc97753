//! The lanes, and the two ways to hold one: [`Caller`] and [`Callees`]. Everything unsafe of flux is here.
//!
//! **Whose is what lies in a slot.** The slot's word says it, for every moment of the slot's life:
//!
//! ```text
//!  word                  the slot holds              who may touch it
//!  request(call)         the request                 the callee; the caller, once the callee has left
//!    ... and the callee
//!    has it as `held`    nothing: it was received    the callee
//!  answer(call, FULL)    the response                the caller
//!    ... and the call is
//!    not in the book     nothing: it was taken       the caller
//!  answer(_, EMPTY)      nothing                     the caller
//! ```
//!
//! Who leaves makes the words true without what only it knows (the callee what it holds, the caller its book): the
//! callee answers `EMPTY` for what it received and did not answer, the caller writes `EMPTY` over answers that it took. So the last
//! one to go finds in the words alone what there is to drop.

use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use crosstie_protocol::lane::{CallNumber, SlotOwner, response_word, slot_owner};

use super::error::Lost;
use crate::memory::prefetch;
use crate::ring::call_table::CallTable;
use crate::ring::lane::{self, Cursor};
use crate::wait::{self, Parker, WaitStrategy};
use sync::{Arc, AtomicU32, AtomicU64, UnsafeCell};

/// The "length" of an answer that holds a response.
const FULL: usize = 1;
/// The "length" of an answer that holds nothing.
const EMPTY: usize = 0;
/// A slot that was never used.
const FRESH: u64 = response_word(CallNumber::FIRST, EMPTY);

/// Pauses of the processor after the last request of a burst. Looking again at once would take the line from the caller in
/// the middle of its next request.
const CATCH_UP_PAUSES: u32 = 4;
/// Slots that are fetched together.
const FETCHED: usize = 16;
/// Requests that are received from one caller before it is another one's turn.
const TURN: u32 = 32;

union Body<Req, Resp> {
    nothing: (),
    request: ManuallyDrop<Req>,
    response: ManuallyDrop<Resp>,
}

/// Room for a call: its request, then its response. A cache line if they are small.
#[repr(C, align(64))]
struct Slot<Req, Resp> {
    word: AtomicU64,
    body: UnsafeCell<Body<Req, Resp>>,
}

// SAFETY: a slot moves requests and responses between threads, hence both must be `Send`; it never gives out a reference to
// one, so they need not be `Sync`. Access to the body follows the word, see the table above.
unsafe impl<Req: Send, Resp: Send> Sync for Slot<Req, Resp> {}
// SAFETY: as above.
unsafe impl<Req: Send, Resp: Send> Send for Slot<Req, Resp> {}

impl<Req, Resp> Slot<Req, Resp> {
    fn new() -> Self {
        Slot { word: AtomicU64::new(FRESH), body: UnsafeCell::new(Body { nothing: () }) }
    }

    /// # Safety
    /// The slot holds nothing, and it is this thread's turn.
    #[inline(always)]
    unsafe fn put_request(&self, request: Req) {
        // SAFETY: nobody else touches the body; nothing in it needs dropping.
        self.body.with_mut(|body| unsafe { (&raw mut (*body).request).write(ManuallyDrop::new(request)) });
    }

    /// # Safety
    /// The slot holds a request, and it is this thread's turn. Afterwards it holds nothing.
    #[inline(always)]
    unsafe fn take_request(&self) -> Req {
        // SAFETY: nobody else touches the body, and nobody will take the request for one again.
        self.body.with_mut(|body| unsafe { ManuallyDrop::into_inner((&raw const (*body).request).read()) })
    }

    /// # Safety
    /// The slot holds nothing, and it is this thread's turn.
    #[inline(always)]
    unsafe fn put_response(&self, response: Resp) {
        // SAFETY: as in `put_request`.
        self.body.with_mut(|body| unsafe { (&raw mut (*body).response).write(ManuallyDrop::new(response)) });
    }

    /// # Safety
    /// The slot holds a response, and it is this thread's turn. Afterwards it holds nothing.
    #[inline(always)]
    unsafe fn take_response(&self) -> Resp {
        // SAFETY: as in `take_request`.
        self.body.with_mut(|body| unsafe { ManuallyDrop::into_inner((&raw const (*body).response).read()) })
    }
}

impl<Req, Resp> Drop for Slot<Req, Resp> {
    /// Drops what nobody took. Caller and callee have left, see the module's docs, for they hold the lane by `Arc`.
    fn drop(&mut self) {
        match slot_owner(self.word.load(Relaxed)) {
            // SAFETY: a callee that left has answered all that it held, so this request was not received; nor was it taken
            // back, for then it is not in the caller's book, and the caller has marked it.
            SlotOwner::Callee(_) => drop(unsafe { self.take_request() }),
            // SAFETY: a caller that left has marked the responses that it took, so this one was not.
            SlotOwner::Caller(_, FULL) => drop(unsafe { self.take_response() }),
            SlotOwner::Caller(..) => {}
        }
    }
}

type Lane<Req, Resp> = Arc<[Slot<Req, Resp>]>;

/// Bytes that the slots of a lane take.
pub(super) const fn lane_bytes<Req, Resp>(capacity: usize) -> usize {
    CallTable::<()>::slots_for(capacity).saturating_mul(size_of::<Slot<Req, Resp>>())
}

/// Bytes that the caller's book of a lane takes.
pub(super) const fn book_bytes<Token>(capacity: usize) -> usize {
    CallTable::<Token>::bytes_for(capacity)
}

/// Of every node there is one, that all nodes see: how to wake it, and whether it is there.
#[repr(align(64))]
#[derive(Default)]
struct Door {
    parker: Parker,
    /// 1 once the node has left, and answers no more.
    gone: AtomicU32,
    /// How many nodes have left, as told to this one.
    departures: AtomicU32,
}

impl Door {
    #[inline(always)]
    fn is_gone(&self) -> bool {
        // Acquire, partner: the Release store in `Callees::leave`.
        self.gone.load(Acquire) != 0
    }
}

/// What a node holds of the lanes: of those on which it calls, by target, and of those on which it is called.
pub(super) type Halves<Req, Resp, Token> = (Box<[Caller<Req, Resp, Token>]>, Callees<Req, Resp>);

/// Lanes between all nodes, and for each node its halves. Lane `i` of them all has the key `first_key + i`.
pub(super) fn lay<Req, Resp, Token>(
    nodes: usize,
    capacity: usize,
    first_key: u64,
) -> Vec<Halves<Req, Resp, Token>> {
    let doors: Arc<[Door]> = sync::collect((0..nodes).map(|_| Door::default()));
    let slots = CallTable::<Token>::slots_for(capacity);
    let lanes: Vec<Lane<Req, Resp>> =
        (0..nodes * nodes).map(|_| sync::collect((0..slots).map(|_| Slot::new()))).collect();
    let caller = |me: usize, target: usize| Caller {
        slots: lanes[me * nodes + target].clone(),
        book: CallTable::new(capacity),
        doors: doors.clone(),
        target,
    };
    let callee = |me: usize, from: usize| Callee {
        slots: lanes[from * nodes + me].clone(),
        cursor: Cursor::START,
        held: vec![false; slots].into(),
        key: first_key + (from * nodes + me) as u64,
    };
    let halves = |me| {
        let callers = (0..nodes).map(|target| caller(me, target)).collect();
        let lanes = (0..nodes).map(|from| callee(me, from)).collect();
        let callees = Callees { lanes, doors: doors.clone(), me, at: 0, burst: 0, departures: 0 };
        (callers, callees)
    };
    (0..nodes).map(halves).collect()
}

/// One node's way to call another: the caller's half of a lane.
pub(super) struct Caller<Req, Resp, Token> {
    slots: Lane<Req, Resp>,
    book: CallTable<Token>,
    doors: Arc<[Door]>,
    target: usize,
}

/// Why a call cannot be made.
pub(super) enum Refusal {
    Full,
    Gone,
}

impl<Req, Resp, Token> Caller<Req, Resp, Token> {
    #[inline(always)]
    pub(super) fn call(&mut self, request: Req, token: Token) -> Result<(), (Refusal, Req, Token)> {
        let door = &self.doors[self.target];
        if door.is_gone() {
            return Err((Refusal::Gone, request, token));
        }
        let begun = match self.book.start(token) {
            Ok(begun) => begun,
            Err(token) => return Err((Refusal::Full, request, token)),
        };
        let slot = &self.slots[begun.slot];
        // SAFETY: the book had the slot as free: it is fresh, or its last call's answer was taken.
        unsafe { slot.put_request(request) };
        lane::request(&slot.word, begun, FULL);
        door.parker.notify();
        Ok(())
    }

    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.book.in_flight()
    }

    /// The response in a slot that is in the book with this call, if it is there.
    #[inline(always)]
    fn take(&mut self, slot: usize, call: CallNumber) -> Option<(Token, Resp)> {
        let at = &self.slots[slot];
        if lane::answered(&at.word, call) != Some(FULL) {
            return None;
        }
        let token = self.book.finish(slot)?;
        // SAFETY: the word says that the response is there; it was not taken before, for then the call would have been
        // out of the book.
        Some((token, unsafe { at.take_response() }))
    }

    /// The next response, in the order of the calls as long as they are answered in that order.
    #[inline(always)]
    pub(super) fn take_due(&mut self) -> Option<(Token, Resp)> {
        let (slot, call) = self.book.expected()?;
        self.take(slot, call)
    }

    /// Has the lines of the next slots fetched for writing: they are about to be read, and written soon after, which would
    /// ask the callee's core twice.
    #[inline(always)]
    pub(super) fn fetch(&self, count: usize) {
        let Some((mut slot, _)) = self.book.expected() else { return };
        for _ in 0..count.min(FETCHED) {
            prefetch::for_write(&raw const self.slots[slot]);
            slot = if slot + 1 == self.slots.len() { 0 } else { slot + 1 };
        }
    }

    /// After [`take_due`](Self::take_due) gave none: whether to look everywhere, with [`take_any`](Self::take_any).
    #[inline(always)]
    pub(super) fn suspects_disorder(&mut self) -> bool {
        self.book.note_miss()
    }

    /// Takes the responses that came out of turn.
    #[cold]
    pub(super) fn take_any(&mut self, mut each: impl FnMut(Token, Resp)) {
        let slots = self.slots.len();
        let front = self.book.expected().map_or(0, |(slot, _)| slot);
        for slot in (front..slots).chain(0..front) {
            if let Some(call) = self.book.call_in(slot)
                && let Some((token, response)) = self.take(slot, call)
            {
                self.book.scan_soon();
                each(token, response);
            }
        }
    }

    /// Whether the response that is due is there.
    #[inline]
    pub(super) fn sees_due(&self) -> bool {
        self.book.expected().is_some_and(|(slot, call)| self.sees(slot, call))
    }

    /// Whether any response is there.
    pub(super) fn sees_any(&self) -> bool {
        self.book.iter().any(|(slot, call)| self.sees(slot, call))
    }

    #[inline]
    fn sees(&self, slot: usize, call: CallNumber) -> bool {
        lane::answered(&self.slots[slot].word, call) == Some(FULL)
    }

    /// If the callee has left: ends the calls that it will not answer. Responses that are there stay there.
    pub(super) fn take_lost(&mut self, mut each: impl FnMut(Lost<Req, Token>)) {
        if !self.doors[self.target].is_gone() {
            return;
        }
        for slot in 0..self.slots.len() {
            let Some(call) = self.book.call_in(slot) else { continue };
            let at = &self.slots[slot];
            let request = match lane::answered(&at.word, call) {
                Some(FULL) => continue,
                Some(_) => None,
                // SAFETY: the callee has left, which we know by Acquire. Had it received the request, it would have
                // answered before; so the request is there, and nobody else looks at the lane any more.
                None => Some(unsafe { at.take_request() }),
            };
            if let Some(token) = self.book.finish(slot) {
                each(Lost { target: self.target, token, request });
            }
        }
    }
}

impl<Req, Resp, Token> Drop for Caller<Req, Resp, Token> {
    fn drop(&mut self) {
        // First the words, all of them, for a response's `drop` may panic. Relaxed: the next to read these is
        // `Slot::drop`, ordered behind by the `Arc`.
        for (index, slot) in self.slots.iter().enumerate() {
            if self.book.call_in(index).is_none() {
                slot.word.store(FRESH, Relaxed);
            }
        }
        for slot in 0..self.slots.len() {
            if let Some(call) = self.book.call_in(slot)
                && let Some(ended) = self.take(slot, call)
            {
                self.slots[slot].word.store(FRESH, Relaxed);
                drop(ended);
            }
        }
    }
}

/// Proof that a request was received and is not yet answered; what [`reply`](super::Node::reply) needs.
///
/// A ticket that is dropped leaves its caller without an answer until the node that received the request goes away.
#[must_use = "whoever called waits for a reply"]
#[derive(Debug)]
pub struct Ticket {
    /// The lane's.
    key: u64,
    from: u32,
    slot: u32,
    call: CallNumber,
}

impl Ticket {
    /// The node that called.
    #[inline]
    pub fn from(&self) -> usize {
        self.from as usize
    }
}

/// One lane on which a node is called.
struct Callee<Req, Resp> {
    slots: Lane<Req, Resp>,
    cursor: Cursor,
    /// By slot: a request was received from it and is not answered.
    held: Box<[bool]>,
    key: u64,
}

impl<Req, Resp> Callee<Req, Resp> {
    #[inline(always)]
    fn sees(&self) -> bool {
        lane::requested(&self.slots[self.cursor.slot].word, self.cursor.call).is_some()
    }

    #[inline(always)]
    fn receive(&mut self, from: usize) -> Option<(usize, Req, Ticket)> {
        let Cursor { slot, call } = self.cursor;
        let at = &self.slots[slot];
        let word = lane::requested(&at.word, call)?;
        self.held[slot] = true;
        // SAFETY: the word says that the request is there. It was not received before, for the cursor passes every call
        // once.
        let request = unsafe { at.take_request() };
        let known = self.cursor.advance(word.next, self.slots.len());
        debug_assert!(known, "callers of this process name slots that exist");
        Some((from, request, Ticket { key: self.key, from: from as u32, slot: slot as u32, call }))
    }
}

/// All lanes on which a node is called, and its door.
pub(super) struct Callees<Req, Resp> {
    lanes: Box<[Callee<Req, Resp>]>,
    doors: Arc<[Door]>,
    me: usize,
    /// The lane whose turn it is.
    at: usize,
    /// How many requests were received from it in a row, since a look found nothing.
    burst: u32,
    /// Departures that have been dealt with.
    departures: u32,
}

/// Why a reply cannot be given.
pub(super) enum Undeliverable {
    /// The ticket is of another node.
    Stranger(Ticket),
    Gone,
}

impl<Req, Resp> Callees<Req, Resp> {
    #[inline(always)]
    pub(super) fn receive(&mut self) -> Option<(usize, Req, Ticket)> {
        if (1..TURN).contains(&self.burst)
            && let Some(received) = self.lanes[self.at].receive(self.at)
        {
            self.burst += 1;
            return Some(received);
        }
        self.receive_from_others()
    }

    #[inline]
    fn receive_from_others(&mut self) -> Option<(usize, Req, Ticket)> {
        // The lane whose turn is over comes last, one that was found empty not at all.
        let lanes = self.lanes.len();
        let looks = lanes - usize::from((1..TURN).contains(&self.burst));
        for _ in 0..looks {
            self.at = if self.at + 1 < lanes { self.at + 1 } else { 0 };
            if let Some(received) = self.lanes[self.at].receive(self.at) {
                self.burst = 1;
                return Some(received);
            }
        }
        if self.burst > 0 {
            self.burst = 0;
            for _ in 0..CATCH_UP_PAUSES {
                core::hint::spin_loop();
            }
        }
        None
    }

    #[inline(always)]
    pub(super) fn reply(&mut self, ticket: Ticket, response: Resp) -> Result<(), (Undeliverable, Resp)> {
        let from = ticket.from();
        let lane = match self.lanes.get_mut(from) {
            Some(lane) if lane.key == ticket.key => lane,
            _ => return Err((Undeliverable::Stranger(ticket), response)),
        };
        let door = &self.doors[from];
        if door.is_gone() {
            return Err((Undeliverable::Gone, response));
        }
        let slot = ticket.slot as usize;
        let at = &lane.slots[slot];
        lane.held[slot] = false;
        // SAFETY: the ticket is this lane's: its key is. So its call was received from the slot and, as there is one ticket
        // for each and it is used up here, is not answered: the slot holds nothing and it is our turn.
        unsafe { at.put_response(response) };
        lane::answer(&at.word, ticket.call, FULL);
        door.parker.notify();
        Ok(())
    }

    /// Whether a request is there.
    #[inline]
    pub(super) fn sees_request(&self) -> bool {
        self.lanes.iter().any(Callee::sees)
    }

    /// How many nodes have left, if more than have been [dealt with](Self::dealt_with).
    #[inline]
    pub(super) fn departures(&self) -> Option<u32> {
        // Acquire, partner: the Release add in `leave`. Who sees it sees that the node is gone.
        let count = self.doors[self.me].departures.load(Acquire);
        (count != self.departures).then_some(count)
    }

    pub(super) fn dealt_with(&mut self, departures: u32) {
        self.departures = departures;
    }

    pub(super) fn is_gone(&self, node: usize) -> bool {
        self.doors[node].is_gone()
    }

    /// Waits until `ready`, which everybody who publishes something for this node wakes it for.
    pub(super) fn wait(
        &self,
        strategy: WaitStrategy,
        deadline: Option<std::time::Instant>,
        ready: impl FnMut() -> bool,
    ) -> bool {
        wait::wait_until(&self.doors[self.me].parker, strategy, deadline, ready)
    }

    /// Receives and answers no more, and says so. `order` is Release, but in a test.
    fn leave(&mut self, order: Ordering) {
        for lane in &mut self.lanes {
            for (slot, held) in lane.slots.iter().zip(&mut lane.held) {
                // Relaxed: what we received from a slot we have seen, and it is our turn.
                if core::mem::take(held)
                    && let SlotOwner::Callee(call) = slot_owner(slot.word.load(Relaxed))
                {
                    lane::answer(&slot.word, call, EMPTY);
                }
            }
        }
        // Release, partner: the Acquire load in `Door::is_gone`. Who sees it sees every answer there will be, and may take
        // back what it does not see answered.
        self.doors[self.me].gone.store(1, order);
        for door in &self.doors[..] {
            // Release, partner: the Acquire load in `departures`.
            door.departures.fetch_add(1, Release);
            door.parker.wake();
        }
    }
}

impl<Req, Resp> Drop for Callees<Req, Resp> {
    fn drop(&mut self) {
        self.leave(Release);
    }
}

/// Atomics and cells: the real ones or, in tests under `cfg(loom)`, loom's.
mod sync {
    #[cfg(not(all(test, loom)))]
    pub(super) use std::sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64},
    };

    #[cfg(all(test, loom))]
    pub(super) use loom::{
        cell::UnsafeCell,
        sync::{
            Arc,
            atomic::{AtomicU32, AtomicU64},
        },
    };

    #[cfg(not(all(test, loom)))]
    pub(super) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

    #[cfg(not(all(test, loom)))]
    impl<T> UnsafeCell<T> {
        pub(super) fn new(value: T) -> Self {
            UnsafeCell(core::cell::UnsafeCell::new(value))
        }

        #[inline(always)]
        pub(super) fn with_mut<R>(&self, access: impl FnOnce(*mut T) -> R) -> R {
            access(self.0.get())
        }
    }

    pub(super) fn collect<T>(items: impl Iterator<Item = T>) -> Arc<[T]> {
        let items: std::sync::Arc<[T]> = items.collect();
        #[cfg(all(test, loom))]
        let items = Arc::from_std(items);
        items
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::thread;

    use super::*;

    /// One node calls twice while the other receives what it sees, answers the first, and leaves. Every call ends once:
    /// answered, lost after it was received, or handed back because it was not.
    fn depart(order: Ordering) {
        loom::model(move || {
            let mut nodes = lay::<u32, u32, u32>(2, 2, 0);
            let (away_callers, mut away) = nodes.pop().unwrap();
            let (mut callers, home) = nodes.pop().unwrap();
            let leaver = thread::spawn(move || {
                let first = away.receive();
                let second = away.receive();
                let received: Vec<u32> =
                    [&first, &second].into_iter().flatten().map(|(_, request, _)| *request).collect();
                if let Some((_, request, ticket)) = first {
                    assert!(away.reply(ticket, request + 100).is_ok());
                }
                away.leave(order);
                drop(away_callers);
                received
            });
            let caller = &mut callers[1];
            let accepted: Vec<u32> = (1..3).filter(|number| caller.call(*number, *number).is_ok()).collect();
            while !home.is_gone(1) {
                thread::yield_now();
            }
            let mut answered = Vec::new();
            while let Some((token, response)) = caller.take_due() {
                assert_eq!(response, token + 100);
                answered.push(token);
            }
            let (mut lost, mut returned) = (Vec::new(), Vec::new());
            caller.take_lost(|call| match call.request {
                Some(request) => {
                    assert_eq!(request, call.token);
                    returned.push(request);
                }
                None => lost.push(call.token),
            });
            assert_eq!(caller.in_flight(), 0);
            let received = leaver.join().unwrap();
            assert_eq!([&answered[..], &lost].concat(), received);
            assert_eq!([received, returned].concat(), accepted);
        });
    }

    #[test]
    fn loom_departure_ends_every_call_once() {
        depart(Release);
    }

    /// A twin that must fail: who sees the departure does not see what was received before it, and takes it back.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_departure_is_caught() {
        depart(Relaxed);
    }
}
