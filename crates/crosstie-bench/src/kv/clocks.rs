//! Compares the clocks of ranks on several machines: bounds of each rank's offset from rank 0's clock.
//!
//! A barrier ends on no rank before it has begun on all. So the time at which rank r began a barrier and the time at which it ended for
//! rank 0, each on its own clock, bound the offset from below; the other two readings bound it from above. Of several barriers the one
//! with the narrowest bounds counts. Comparing before the first operation and after the last one bounds the offset for all operations
//! in between, even if the clocks drift steadily.
//!
//! Operations of another machine are moved to rank 0's clock: the call as early and the return as late as the bounds allow. An order
//! that explains the real history also explains this one, so the check never fails wrongly. It may miss a wrong response if all
//! operations that contradict it happened within the bounds.

use crosstie::bootstrap::Bootstrap;

use crate::error::Error;
use crate::history::{Event, now};
use crate::runner::Collective;

/// Number of barriers of a comparison.
const ROUNDS: usize = 24;

/// Bounds of how far a rank's clock is ahead of rank 0's, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClockOffset {
    min: i128,
    max: i128,
}

/// The result of the first comparison of all ranks' clocks.
pub(super) struct Clocks {
    /// By rank: whether it is on another machine than rank 0.
    on_other_machine: Vec<bool>,
    before: Vec<ClockOffset>,
}

impl Clocks {
    /// Makes the first comparison, if there are several clocks.
    pub(super) fn new(job: &mut dyn Bootstrap, on_other_machine: &[bool]) -> Result<Clocks, Error> {
        let mut clocks = Clocks {
            on_other_machine: on_other_machine.to_vec(),
            before: vec![ClockOffset::NONE; on_other_machine.len()],
        };
        clocks.before = clocks.compare_now(job)?;
        Ok(clocks)
    }

    /// Compares again. Returns bounds that held the whole time.
    pub(super) fn offsets_until_now(&self, job: &mut dyn Bootstrap) -> Result<Vec<ClockOffset>, Error> {
        let now = self.compare_now(job)?;
        Ok(self.before.iter().zip(now).map(|(before, now)| before.union(now)).collect())
    }

    fn compare_now(&self, job: &mut dyn Bootstrap) -> Result<Vec<ClockOffset>, Error> {
        if !self.on_other_machine.contains(&true) {
            return Ok(self.before.clone());
        }
        let found = compare(job)?;
        let own = |(offset, on_other_machine): (ClockOffset, &bool)| {
            if *on_other_machine { offset } else { ClockOffset::NONE }
        };
        Ok(found.into_iter().zip(&self.on_other_machine).map(own).collect())
    }
}

/// Compares the clocks of all ranks with that of rank 0.
fn compare(job: &mut dyn Bootstrap) -> Result<Vec<ClockOffset>, Error> {
    let mut own_times = [[0; 2]; ROUNDS];
    for round in &mut own_times {
        let begun = now();
        job.barrier()?;
        *round = [begun, now()];
    }
    let all = Collective { job }.gather_values(Ok(own_times))?;
    let first = all.first().ok_or(Error::Protocol)?;
    all.iter().map(|times| bounds(times, first).ok_or(Error::Protocol)).collect()
}

/// The bounds of one clock's offset from another, from the times of the barriers. `None` if the times contradict each other.
fn bounds(times: &[[u64; 2]], first: &[[u64; 2]]) -> Option<ClockOffset> {
    let difference = |one: u64, other: u64| i128::from(one) - i128::from(other);
    let bound = |(times, first): (&[u64; 2], &[u64; 2])| ClockOffset {
        min: difference(times[0], first[1]),
        max: difference(times[1], first[0]),
    };
    let best = times.iter().zip(first).map(bound).min_by_key(ClockOffset::width)?;
    (best.width() >= 0).then_some(best)
}

impl ClockOffset {
    /// No offset: the same clock.
    const NONE: ClockOffset = ClockOffset { min: 0, max: 0 };

    /// Bounds that hold at both comparisons.
    fn union(self, other: ClockOffset) -> ClockOffset {
        ClockOffset { min: self.min.min(other.min), max: self.max.max(other.max) }
    }

    /// The uncertainty of the offset.
    pub(super) fn width(&self) -> i128 {
        self.max - self.min
    }

    /// An operation as rank 0's clock would have seen it, at the earliest and at the latest.
    pub(super) fn widen(&self, event: &Event) -> Event {
        let moved =
            |time: u64, by: i128| (i128::from(time) - by).clamp(0, i128::from(Event::NEVER - 1)) as u64;
        let called = moved(event.called, self.max);
        let returned = match event.returned {
            Event::NEVER => Event::NEVER,
            returned => moved(returned, self.min).max(called),
        };
        Event { called, returned, ..*event }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{Failure, History, Recorder, check};
    use crosstie_kv::wire::{Op, Status, WordRequest, WordResponse};

    /// The offset of the second clock in the tests.
    const AHEAD: u64 = 1_000_000;

    #[test]
    fn bounds_contain_the_offset_and_come_from_the_narrowest_barrier() {
        let first = [[100, 900], [1000, 1040], [2000, 2500]];
        let second = [[150, 950], [1010, 1050], [2400, 2500]].map(|round| round.map(|time| time + AHEAD));
        let offset = bounds(&second, &first).unwrap();
        assert!(offset.min <= i128::from(AHEAD) && i128::from(AHEAD) <= offset.max, "{offset:?}");
        assert_eq!(offset.width(), 80);
        // Seen from the second clock, the first clock is behind.
        let behind = bounds(&first, &second).unwrap();
        assert_eq!((behind.min, behind.max), (-offset.max, -offset.min));
        // A barrier that ended before it began is invalid.
        assert_eq!(bounds(&[[10, 5]], &[[10, 5]]), None);
        assert_eq!(offset.union(ClockOffset::NONE), ClockOffset { min: 0, max: offset.max });
    }

    #[test]
    fn check_with_clock_bounds_accepts_right_responses_and_finds_wrong_ones() {
        // Rank 0 puts 6, then 7. A rank whose clock is a second behind then gets 7, which is right, or 6, which is wrong.
        let event = |op, value, response, called, returned| {
            let mut recorder = Recorder::new(0, 1);
            let request = WordRequest { value, ..WordRequest::new(op, 0, 42) };
            let call = recorder.begin(&request).unwrap();
            recorder.end(call, &WordResponse::new(Status::Done, response));
            Event { called, returned, ..recorder.events()[0] }
        };
        let second = 1_000_000_000;
        let before = event(Op::Put, 6, 0, 2 * second, 2 * second + 10);
        let put = event(Op::Put, 7, 0, 2 * second + 100, 2 * second + 200);
        let right = event(Op::Get, 0, 7, second + 300, second + 400);
        let wrong = event(Op::Get, 0, 6, second + 500, second + 600);
        let behind = ClockOffset { min: -(second as i128) - 20, max: -(second as i128) + 20 };
        let histories =
            |other: Event| [History { events: vec![before, put] }, History { events: vec![other] }];
        // Without the offset, the get seems to return 7 before it was put.
        assert!(matches!(check(&histories(right)), Err(Failure::Violation { .. })));
        check(&histories(behind.widen(&right))).unwrap();
        assert!(matches!(check(&histories(behind.widen(&wrong))), Err(Failure::Violation { .. })));
        // With bounds wider than the time between the operations, the wrong response cannot be proved wrong.
        let wide = ClockOffset { min: behind.min - 1000, max: behind.max + 1000 };
        check(&histories(wide.widen(&wrong))).unwrap();
        // An operation that never returned stays so. Extreme times and bounds do not overflow.
        let never = Event { called: 0, returned: Event::NEVER, ..right };
        assert_eq!(behind.widen(&never).returned, Event::NEVER);
        let extreme = ClockOffset { min: -i128::from(u64::MAX), max: i128::from(u64::MAX) };
        let widened = extreme.widen(&Event { called: u64::MAX - 1, returned: u64::MAX - 1, ..right });
        assert!(widened.called <= widened.returned && widened.returned < Event::NEVER);
    }
}
