//! Lock-free queues in shared memory, whose writers may die at any instruction: an MPSC ring ([`reservation`], [`stalled`], [`notices`]), and an SPSC
//! lane of request-response slots ([`lane`]) with the caller's table of calls in flight ([`call_table`]). [`presence`] says who
//! is still inside an operation, and [`ready_set`] which of many SPSC lanes their reader has to look at. Between threads of one
//! process: [`operation_table`], [`combining_lock`] and [`biased_lock`].
//!
//! The code is generic over its atomic words ([`Word`]), so that loom checks the same code that ships. [`fence`] is the
//! asymmetric memory barrier that the other modules use.

pub(crate) mod biased_lock;
pub(crate) mod call_table;
mod cell;
pub(crate) mod combining_lock;
pub(crate) mod fence;
pub(crate) mod lane;
pub(crate) mod notices;
pub(crate) mod operation_table;
pub(crate) mod presence;
pub(crate) mod ready_set;
pub(crate) mod reservation;
pub(crate) mod stalled;
mod word;

pub(crate) use word::Word;
