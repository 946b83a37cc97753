//! How often a seeded plan injects each kind of fault.

use core::fmt;
use core::str::FromStr;

/// How often a seeded [`Plan`](super::Plan) injects each kind of fault: once in so many posts, completions or datagrams on
/// average; 0 means never. The method of `Plan` with the same effect describes each kind.
///
/// As text, in the name of a device, the kinds are separated by `/`; those that are not named never happen:
///
/// ```
/// use crosstie::device::fault::Odds;
/// let odds: Odds = "fail=500/down=2000".parse().unwrap();
/// assert_eq!((odds.fail, odds.down, odds.lose), (500, 2000, 0));
/// assert_eq!(odds.to_string(), "fail=500/down=2000");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Odds {
    /// Refused posts: [`Plan::fail_post`](super::Plan::fail_post).
    pub refuse: u32,
    /// Send requests that fail before they have an effect: [`Plan::lose_post`](super::Plan::lose_post).
    pub lose: u32,
    /// Lost datagrams: [`Plan::drop_datagram`](super::Plan::drop_datagram).
    pub drop: u32,
    /// Send requests that fail after they had their effect: [`Plan::fail_completion`](super::Plan::fail_completion).
    pub fail: u32,
    /// Receives that fail after the message was acknowledged: [`Plan::fail_completion`](super::Plan::fail_completion).
    pub fail_receive: u32,
    /// Completions that are late or overtaken: [`Plan::delay_completion`](super::Plan::delay_completion),
    /// [`Plan::overtake_completion`](super::Plan::overtake_completion).
    pub hold: u32,
    /// Ports that go down for a while: [`Plan::port_down`](super::Plan::port_down).
    pub down: u32,
    /// Links that pass nothing for a while, without an event: [`Plan::stall`](super::Plan::stall).
    pub stall: u32,
}

impl Odds {
    /// No faults.
    pub const NEVER: Odds =
        Odds { refuse: 0, lose: 0, drop: 0, fail: 0, fail_receive: 0, hold: 0, down: 0, stall: 0 };

    /// Whether all requests still succeed: completions are late, or overtake those of other queue pairs, and nothing else.
    pub fn only_delays(self) -> bool {
        self == Odds { hold: self.hold, ..Odds::NEVER }
    }

    /// The kinds by name, in the order in which they are printed.
    fn kinds(&mut self) -> [(&'static str, &mut u32); 8] {
        [
            ("refuse", &mut self.refuse),
            ("lose", &mut self.lose),
            ("drop", &mut self.drop),
            ("fail", &mut self.fail),
            ("fail-receive", &mut self.fail_receive),
            ("hold", &mut self.hold),
            ("down", &mut self.down),
            ("stall", &mut self.stall),
        ]
    }
}

impl Default for Odds {
    /// So rare that a workload that reconnects makes progress. Links do not stall.
    fn default() -> Odds {
        Odds {
            refuse: 256,
            lose: 8192,
            drop: 64,
            fail: 8192,
            fail_receive: 8192,
            hold: 16,
            down: 16384,
            stall: 0,
        }
    }
}

impl fmt::Display for Odds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut odds, mut separator) = (*self, "");
        for (name, odds) in odds.kinds() {
            if *odds > 0 {
                write!(f, "{separator}{name}={odds}")?;
                separator = "/";
            }
        }
        Ok(())
    }
}

/// The text does not name odds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "give KIND=N separated by /, with a KIND of refuse, lose, drop, fail, fail-receive, hold, down and stall: one in N fails"
)]
pub struct InvalidOdds;

impl FromStr for Odds {
    type Err = InvalidOdds;

    fn from_str(text: &str) -> Result<Odds, InvalidOdds> {
        let mut odds = Odds::NEVER;
        for part in text.split('/').filter(|_| !text.is_empty()) {
            let (name, number) = part.split_once('=').ok_or(InvalidOdds)?;
            let number = number.parse().map_err(|_| InvalidOdds)?;
            let (_, kind) = odds.kinds().into_iter().find(|(known, _)| *known == name).ok_or(InvalidOdds)?;
            *kind = number;
        }
        Ok(odds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odds_survive_printing_and_wrong_texts_are_refused() {
        for odds in [Odds::NEVER, Odds::default(), Odds { stall: 7, fail_receive: u32::MAX, ..Odds::NEVER }] {
            assert_eq!(odds.to_string().parse(), Ok(odds));
        }
        assert!(Odds { hold: 3, ..Odds::NEVER }.only_delays() && Odds::NEVER.only_delays());
        assert!(!Odds::default().only_delays() && !Odds { refuse: 9, ..Odds::NEVER }.only_delays());
        for text in ["fail", "fail=", "fail=-1", "fail=1//lose=2", "=3", "fail=1/", "explode=2"] {
            assert_eq!(text.parse::<Odds>(), Err(InvalidOdds), "{text}");
        }
    }
}
