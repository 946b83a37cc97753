//! Simulator: the protocols of `crosstie-protocol` under virtual time, with checkers that share no code with them.
//!
//! ```text
//!    scenario (application)  ──>  protocol state machines  ──>  Network: latency, loss, duplicates, partitions
//!            |                        (one per member)                    |  virtual time, one seed
//!            v                                                            v
//!         checkers: see what applications ask for and get, and nothing of the protocol's state
//! ```
//!
//! [`run`] simulates one [`Plan`]. The same plan gives the same [`Outcome`], to the last packet.
//!
//! ```
//! use crosstie_sim::{Plan, Scenario, run};
//! let outcome = run(&Plan { members: 8, operations: 20, ..Plan::new(Scenario::Lock) })?;
//! assert_eq!(outcome.failures, Vec::<String>::new());
//! assert_eq!(outcome, run(&Plan { members: 8, operations: 20, ..Plan::new(Scenario::Lock) })?);
//! # Ok::<(), crosstie_sim::PlanError>(())
//! ```
#![forbid(unsafe_code)]

mod check;
mod network;
mod outcome;
mod plan;
mod plot;
mod random;
mod scenario;

pub use outcome::Outcome;
pub use plan::{Jitter, Plan, PlanError, Scenario};
pub use plot::{ScalingPoint, scaling_plot};

/// Simulates one plan.
pub fn run(plan: &Plan) -> Result<Outcome, PlanError> {
    plan.check()?;
    Ok(match plan.scenario {
        Scenario::Lock => scenario::lock::run(plan),
        Scenario::Barrier => scenario::barrier::run(plan),
        Scenario::Message => scenario::message::run(plan),
        Scenario::Credits => scenario::credits::run(plan),
        Scenario::Rails => scenario::rails::run(plan),
    })
}
