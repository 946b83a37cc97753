//! The rules of `crosstie::endpoint`: operations whose completions have one owner.
//!
//! | module | rule |
//! | --- | --- |
//! | [`operation`] | the state word of an operation: it ends once, and its memory comes back once |
//! | [`slots`] | slots with a generation, leased and released through a free ring |
//! | [`wr_id`] | the integer in a work request: slot, queue pair, generation, position |
//! | [`send_queue`] | which work requests of one queue pair have not completed |
//! | [`message`] | bytes and immediates of `send` and `recv` |
//! | [`pairing`] | the k-th `send` belongs to the k-th announced buffer |
//! | [`imm_matching`] | immediates and the calls that wait for them |
//! | [`imm_window`] | how many immediates a side may send, so that a receive is always posted |
//! | [`split`] | how one operation is divided over several queue pairs |
//! | [`batch`] | blocks, strided runs, and the work requests that they become |
//! | [`layout`] | the blocks of a batch as bytes, for a peer |
//!
//! Nothing here knows a device. The tests run each rule against a model, and feed the decoders with arbitrary bytes.

pub mod batch;
pub mod imm_matching;
pub mod imm_window;
pub mod layout;
pub mod message;
pub mod operation;
pub mod pairing;
pub mod send_queue;
pub mod slots;
pub mod split;
pub mod wr_id;
