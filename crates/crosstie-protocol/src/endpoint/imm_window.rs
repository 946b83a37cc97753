//! How many immediates a side may send: never more than receives are posted for them (invariant I5).
//!
//! The receiver keeps a receive posted for each immediate of its window. It gives credit when the program has taken an immediate, as
//! the total number that may have been sent: a number that is lost or repeated does no harm. So a sender never finds the receive
//! queue empty, and a program that takes no immediates holds up the sender, not the memory.

use super::message::Violation;

/// The most immediates that can be under way.
pub const MAX_WINDOW: u32 = 1 << 15;

/// The sender's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImmSender {
    window: u32,
    sent: u32,
    granted: u32,
}

impl ImmSender {
    /// The peer has this window.
    pub const fn new(window: u32) -> ImmSender {
        ImmSender { window, sent: 0, granted: window }
    }

    /// Immediates that may be sent now.
    #[inline]
    pub const fn room(&self) -> u32 {
        self.granted.wrapping_sub(self.sent)
    }

    /// Notes that an immediate was sent. `false`: there is no credit.
    #[inline]
    pub const fn send(&mut self) -> bool {
        if self.room() == 0 {
            return false;
        }
        self.sent = self.sent.wrapping_add(1);
        true
    }

    /// Notes that an immediate was not sent after all.
    pub const fn take_back(&mut self) {
        self.sent = self.sent.wrapping_sub(1);
    }

    /// Takes the peer's credit.
    pub const fn credit(&mut self, granted: u32) -> Result<(), Violation> {
        let more = granted.wrapping_sub(self.granted);
        if more > self.window || granted.wrapping_sub(self.sent) > self.window {
            return Err(Violation::Credit { window: self.window });
        }
        self.granted = granted;
        Ok(())
    }
}

/// The receiver's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImmReceiver {
    window: u32,
    /// Immediates that are taken before credit is sent: half of the window, but at least one.
    each_credit: u32,
    arrived: u32,
    taken: u32,
    announced: u32,
}

impl ImmReceiver {
    /// A window of so many immediates.
    pub const fn new(window: u32) -> ImmReceiver {
        let each_credit = if window < 2 { 1 } else { window / 2 };
        ImmReceiver { window, each_credit, arrived: 0, taken: 0, announced: 0 }
    }

    /// An immediate arrived.
    #[inline]
    pub const fn arrive(&mut self) -> Result<(), Violation> {
        // What was announced, not what was taken: the peer knows no more.
        if self.arrived.wrapping_sub(self.announced) >= self.window {
            return Err(Violation::Window { window: self.window });
        }
        self.arrived = self.arrived.wrapping_add(1);
        Ok(())
    }

    /// The program has taken an immediate.
    #[inline]
    pub const fn take(&mut self) {
        self.taken = self.taken.wrapping_add(1);
    }

    /// The credit to send, if half of the window has been taken since the last one.
    #[inline]
    pub const fn credit_due(&self) -> Option<u32> {
        let new = self.taken.wrapping_sub(self.announced);
        if new >= self.each_credit { Some(self.taken.wrapping_add(self.window)) } else { None }
    }

    /// Notes that the credit was sent.
    pub const fn note_credit(&mut self, granted: u32) {
        self.announced = granted.wrapping_sub(self.window);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::VecDeque;
    use proptest::prelude::*;

    proptest! {
        /// I5: two honest sides never violate the window, a receive is posted for every immediate, at most three credits are
        /// under way, and the sender never starves: when all that was sent is taken and all credit has arrived, there is room.
        #[test]
        fn window_is_kept_and_never_starves(window in 1u32..9, steps in proptest::collection::vec(0u8..4, 0..300)) {
            let (mut sender, mut receiver) = (ImmSender::new(window), ImmReceiver::new(window));
            let (mut imms, mut arrived, mut credits) = (0u32, 0u32, VecDeque::new());
            let mut posted = window;
            let take = |receiver: &mut ImmReceiver, credits: &mut VecDeque<u32>| {
                receiver.take();
                if let Some(granted) = receiver.credit_due() {
                    receiver.note_credit(granted);
                    credits.push_back(granted);
                }
            };
            for step in steps {
                match step {
                    0 if sender.send() => {
                        imms += 1;
                        prop_assert!(posted > 0, "a receive is posted");
                        posted -= 1;
                    }
                    1 if imms > 0 => {
                        imms -= 1;
                        arrived += 1;
                        posted += 1;
                        prop_assert_eq!(receiver.arrive(), Ok(()));
                    }
                    2 if arrived > 0 => {
                        arrived -= 1;
                        take(&mut receiver, &mut credits);
                    }
                    3 => {
                        if let Some(granted) = credits.pop_front() {
                            prop_assert_eq!(sender.credit(granted), Ok(()));
                        }
                    }
                    _ => {}
                }
                prop_assert!(credits.len() <= 3, "{} credits", credits.len());
            }
            (0..imms).for_each(|_| receiver.arrive().unwrap());
            (0..imms + arrived).for_each(|_| take(&mut receiver, &mut credits));
            credits.into_iter().for_each(|granted| sender.credit(granted).unwrap());
            prop_assert!(sender.room() > 0);
        }
    }

    #[test]
    fn forged_credit_and_uncredited_immediates_are_violations() {
        let mut sender = ImmSender::new(4);
        assert_eq!(sender.credit(5), Err(Violation::Credit { window: 4 }), "nothing was sent");
        assert!(sender.send());
        assert_eq!(sender.credit(5), Ok(()));
        assert_eq!(sender.credit(3), Err(Violation::Credit { window: 4 }), "backwards");
        let mut receiver = ImmReceiver::new(2);
        assert_eq!((receiver.arrive(), receiver.arrive()), (Ok(()), Ok(())));
        assert_eq!(receiver.arrive(), Err(Violation::Window { window: 2 }));
    }
}
