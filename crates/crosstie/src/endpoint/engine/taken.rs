//! Completions that have been taken from the queue: they are handled after that, because to handle one needs all of the connection.

use crosstie_protocol::endpoint::message::{CONTROL_SIZE, control_piece};

use crate::device::{Completion, Opcode, Status};

/// Completions that are taken at once.
pub(super) const POLL_BATCH: usize = 64;

/// What an endpoint needs of a completion.
#[derive(Clone, Copy)]
pub(super) struct Taken {
    pub(super) wr_id: u64,
    pub(super) byte_len: u32,
    pub(super) imm: Option<u32>,
    pub(super) status: Status,
    pub(super) opcode: Opcode,
    /// Which of [`TakenCompletions::controls`] came with it.
    pub(super) control: Option<u8>,
}

/// See the [module](self).
#[derive(Default)]
pub(super) struct TakenCompletions {
    pub(super) taken: Vec<Taken>,
    /// Control messages that came with their completions.
    pub(super) controls: Vec<[u64; CONTROL_SIZE / 8]>,
}

const _: () = assert!(POLL_BATCH <= 1 << u8::BITS);

impl TakenCompletions {
    pub(super) fn new() -> TakenCompletions {
        let (taken, controls) = (Vec::with_capacity(POLL_BATCH), Vec::with_capacity(POLL_BATCH));
        TakenCompletions { taken, controls }
    }

    pub(super) fn clear(&mut self) {
        self.taken.clear();
        self.controls.clear();
    }

    #[inline]
    pub(super) fn push(&mut self, completion: &Completion) {
        let &Completion { wr_id, byte_len, imm, status, opcode, .. } = completion;
        let mut control = None;
        if imm.and_then(control_piece).is_some()
            && let Some(&[a, b, c, d, ..]) = completion.inline_words(CONTROL_SIZE)
        {
            control = Some(self.controls.len() as u8);
            self.controls.push([a, b, c, d]);
        }
        self.taken.push(Taken { wr_id, byte_len, imm, status, opcode, control });
    }
}
