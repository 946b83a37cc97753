//! Requests of other nodes that another daemon of this node is working on.

use crosstie::copyrpc::RecvHandle;

use super::super::origin::CallOrigin;

/// A table of requests, by number. The number travels with the forwarded request and comes back with the response.
#[derive(Default)]
pub(super) struct PendingRequests {
    slots: Vec<Option<(RecvHandle<CallOrigin>, usize)>>,
    free: Vec<u32>,
    /// Bytes of byte-string requests that were copied to other daemons.
    pub(super) bytes: usize,
}

impl PendingRequests {
    /// Stores a request, `bytes` of which were copied to another daemon. Returns its number.
    #[inline]
    pub(super) fn insert(&mut self, mut request: RecvHandle<CallOrigin>, bytes: usize) -> u32 {
        // The message has been copied, so its space in the receive ring is released now.
        request.detach();
        self.bytes += bytes;
        match self.free.pop() {
            Some(number) => {
                self.slots[number as usize] = Some((request, bytes));
                number
            }
            None => {
                self.slots.push(Some((request, bytes)));
                self.slots.len() as u32 - 1
            }
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, number: u32) -> Option<RecvHandle<CallOrigin>> {
        let (request, bytes) = self.slots.get_mut(number as usize)?.take()?;
        self.bytes -= bytes;
        self.free.push(number);
        Some(request)
    }
}
