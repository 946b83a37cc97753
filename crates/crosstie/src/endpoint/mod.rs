//! Operations on the memory of a peer, whose completions have one owner.
//!
//! An [`Endpoint`] is one side of a connection. It [reads](Endpoint::read) and [writes](Endpoint::write) memory of the peer, [sends](Endpoint::send)
//! and [receives](Endpoint::recv) messages, signals with [immediates](Endpoint::write_imm), and moves thousands of blocks with one
//! [`Batch`]. For every operation the program learns when it is over, how it ended, and when its buffer belongs to the program again.
//!
//! ```
//! use crosstie::endpoint::{Endpoint, EndpointConfig};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let here = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
//! let there = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
//! // Between processes the addresses are sent as bytes, see `EndpointAddress` and `crosstie::bootstrap`.
//! here.connect(&there.address())?;
//! there.connect(&here.address())?;
//!
//! let (buffer, target) = (here.allocate(4096)?, there.allocate(4096)?);
//! buffer.write(0, b"hello")?;
//! let write = here.write_imm(buffer, ..5, &target.remote(), 0, 42)?;
//! let event = there.imm_recv()?.wait()?;
//! assert_eq!((event.imm, event.bytes), (Some(42), 5));
//! assert_eq!(&target.to_vec()[..5], b"hello");
//! let buffer = write.wait()?.buffer;
//! # drop(buffer);
//! # Ok(()) }
//! ```
//!
//! # Four layers
//!
//! ```text
//!   OperationFuture       the program's handle: await, wait, poll, cancel
//!        |  key of the operation
//!   operation state       one per operation: has it ended, how, whose is the buffer?     ring::operation_table
//!        |  held by
//!   slot                  which operation the work requests belong to; leased and         crosstie_protocol::endpoint::slots
//!        |                released through a free ring
//!        |  named by
//!   work request          wr_id = kind, queue pair, slot, generation, position            crosstie_protocol::endpoint::wr_id
//! ```
//!
//! These invariants keep the layers apart. Each has a test that fails without it.
//!
//! | | invariant | test |
//! | --- | --- | --- |
//! | I1 | **Signal exclusivity.** The state of an operation is seen by one future. Its entry is used again only when neither the future nor the engine sees it, with the next generation | `loom_entry_is_reused_only_when_nobody_sees_it`, `first_cause_wins_and_memory_comes_back_once` |
//! | I2 | **Slot reuse.** A slot returns to the free ring when every work request that names it has completed. A completion of a former lease finds no slot: it is counted and changes nothing | `slots_follow_the_model`, `stale_and_duplicate_completions_change_nothing`, `transfer_that_completes_at_once_uses_up_its_wr_id` |
//! | I3 | **Lifetime of what a completion needs.** A completion carries an integer, never a pointer. What it leads to is held by the slot | `each_request_completes_once_in_order`, `stale_and_duplicate_completions_change_nothing` |
//! | I4 | **Operation lifetime.** An operation lives while its future or the engine holds it. Nothing else keeps it alive: `cancel_all` walks the table, and holds nothing | `loom_cancel_and_completion_agree`, `loom_reserved_entry_has_one_operation_which_ends_once`, `dropped_futures_give_their_buffers_back_to_nobody_and_leak_nothing` |
//! | I5 | **A receive is always posted.** Receives are posted before the connection begins, and each again before what it brought is used. A peer has credit for fewer messages than that, so it is never told to retry (RNR) | `window_is_kept_and_never_starves`, `more_messages_than_slots_wait_their_turn` |
//!
//! # Whose buffer it is
//!
//! An operation takes its [`Buffer`], and its result gives it back. In between the program cannot touch it:
//!
//! ```compile_fail,E0382
//! # use crosstie::{device::RemoteMemory, endpoint::{Buffer, Endpoint}};
//! fn read_in_flight(endpoint: &Endpoint, buffer: Buffer, remote: &RemoteMemory) {
//!     let write = endpoint.write(buffer, .., remote, 0);
//!     let mut bytes = [0; 8];
//!     buffer.read(0, &mut bytes);
//!     drop(write);
//! }
//! ```
//! ```compile_fail,E0382
//! # use crosstie::{device::RemoteMemory, endpoint::{Buffer, Endpoint}};
//! fn write_in_flight(endpoint: &Endpoint, buffer: Buffer, remote: &RemoteMemory) {
//!     let read = endpoint.read(buffer, .., remote, 0);
//!     buffer.write(0, b"too early");
//!     drop(read);
//! }
//! ```
//! ```compile_fail,E0382
//! # use crosstie::endpoint::{Buffer, Endpoint};
//! fn free_in_flight(endpoint: &Endpoint, buffer: Buffer) {
//!     let recv = endpoint.recv(buffer, ..);
//!     drop(buffer);
//!     drop(recv);
//! }
//! ```
//! ```compile_fail,E0382
//! # use crosstie::endpoint::{Batch, Endpoint};
//! fn change_in_flight(endpoint: &Endpoint, mut batch: Batch) {
//!     let write = endpoint.write_batch(batch);
//!     batch.clear_blocks();
//!     drop(write);
//! }
//! ```
//!
//! An operation ends with success, or with a [`Cause`]. When it is cancelled, or its deadline passes, or its future is dropped, it ends at
//! once; but the device may still carry it out. So [`Failed`] has a [`BufferReturn`], which is the buffer when the device is done
//! with it: when its work requests have completed, or when the queue pairs are in ERR and drained. A buffer that was never handed to the
//! device comes back at once. A program that drops the future, or the `BufferReturn`, never gets the memory, and neither does anybody
//! else while the device may touch it.
//!
//! # Who does the work
//!
//! By default a thread of the endpoint polls the device; it sleeps while nothing happens. With [`Progress::Caller`] there is no thread:
//! the program calls [`Endpoint::progress`], or waits for a future, which polls as well. In both modes any thread can start operations
//! and wait for them, and futures work with any executor.
//!
//! A thread that starts an operation posts its work requests itself if no other thread is polling at that moment. On the software device the
//! thread that posts also copies the bytes, so a `read` or a `write` has usually completed then: its future is ready, and nothing was shared
//! with another thread. If a completion is to come, as on a NIC, the thread polls once.
//!
//! # When something fails
//!
//! A failed work request ends the connection, as on every RDMA device: the operation ends with its cause, the others with
//! [`Cause::Flushed`]. [`Endpoint::ended`] says why. [`Endpoint::reopen`] makes a new address; when both sides have exchanged addresses again,
//! they connect again. This is also how a peer that was restarted is reached.
//!
//! Blocks and ranges are checked against the length of the remote region before anything is posted, so a mistake there is refused and
//! ends nothing.
//!
//! Both errors, [`Refused`] and [`Failed`], have the buffer for a program that wants it. With `?` they become any boxed error:
//!
//! ```
//! use crosstie::device::RemoteMemory;
//! use crosstie::endpoint::{Buffer, Endpoint};
//!
//! type AnyError = Box<dyn std::error::Error + Send + Sync>;
//!
//! fn write(endpoint: &Endpoint, buffer: Buffer, remote: &RemoteMemory) -> Result<Buffer, AnyError> {
//!     Ok(endpoint.write(buffer, .., remote, 0)?.wait()?.buffer)
//! }
//! ```
//!
//! # Adding an operation
//!
//! 1. In `operations.rs` a method of [`Endpoint`] that calls the one of [`Submit`], which checks the arguments, moves the buffer into an
//!    `Operation`, and starts it. A new variant of `Kind` (`operation.rs`) says what it is. If it takes something else than a buffer, a
//!    batch or nothing, that is a variant of `Stored` (`lend.rs`).
//! 2. `Link::begin` (`engine/transfer.rs`) posts it. What becomes work requests gets a `Plan` and its arm in `Poster::post` (`engine/posting.rs`). It
//!    posts as far as there is room, and leases a slot if the device has not executed all of that; then it goes on there later. An operation
//!    that waits for the peer's program has no slot: `engine/immediate.rs` is the shortest example.
//! 3. Its completions come to `complete_slot_work`, and the last one gives the operation back. What needs more than a count gets a
//!    `WorkKind` (`crosstie_protocol::endpoint::wr_id`) and an arm in `engine/completions.rs`.
//! 4. It ends in every state: where it waits, `Link::end` gives it back with the cause, and `Link::reap_ended` when it was cancelled. What it has
//!    received is not lost if its future is dropped (`Handle::keep_result` in `future.rs`).
//! 5. What the peer sends for it is decoded in `crosstie_protocol::endpoint::message`, with a typed violation for all that no correct peer
//!    sends; then `VERSION` in `address.rs` rises, and `docs/wire-format.md` has a row.
//! 6. Tests: its bytes in `tests/endpoint/operations.rs`, its ends in `cancel.rs`, each failing post and completion in
//!    `tests/endpoint/failure/faults.rs`, a hostile peer in `malicious_peer.rs`, no allocation in `tests/budget/endpoint.rs`.

mod address;
mod batch;
mod buffer;
mod cause;
mod config;
mod counters;
#[allow(clippy::module_inception)]
mod endpoint;
mod engine;
mod flags;
mod future;
#[cfg(all(test, not(loom)))]
mod fuzz_tests;
mod lend;
mod operation;
mod operations;
mod path;
mod registration;
mod returned;
mod shared;
#[cfg(all(test, not(loom)))]
mod shared_tests;
mod status;
#[cfg(all(test, not(loom)))]
mod test_pair;

pub use address::EndpointAddress;
pub use batch::{Batch, FailedBlocks, Local, Remote, Strided};
pub use buffer::{Buffer, KeptBecause, NotGivenBack, PoolBuffer};
pub use cause::{BatchError, Cause, ConnectError, NotStarted, Peer, Refused};
pub use config::{EndpointConfig, MAX_MESSAGES, MAX_OPERATIONS, MAX_RETIRED, PathPolicy, Progress};
pub use counters::EndpointCounters;
pub use endpoint::{Endpoint, Submit};
pub use future::{BufferReturn, Completed, Failed, JoinAll, OperationFuture, OperationResult, join_all};
pub use lend::{Lend, OneBuffer};
pub use path::Path;

pub use crosstie_protocol::endpoint::layout::LayoutError;
