//! Groups on virtual networks: exhaustive models, random schedules with an oracle, and rules that are broken on purpose.

mod barrier_model;
mod costs;
mod lock_model;
mod net;
