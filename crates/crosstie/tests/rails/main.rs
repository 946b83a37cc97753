//! Messages over several rails: right bytes, exact counters, failover.

mod failover;
mod flush;
mod observe;
mod pair;
mod peers;
mod registrations;
mod transfers;

use crosstie_testkit::allocations::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;
