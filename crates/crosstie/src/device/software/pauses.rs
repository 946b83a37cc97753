//! Places at which a test lets another thread, or a reset by the same one, come between two steps.

use std::cell::RefCell;

/// Between which steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    /// The poller has found that an entry of a lane belongs to the present connection, and has not completed its receive.
    EntryBelongsToConnection,
    /// The poller has read the record of a receive of a shared queue, and has not completed it.
    RecordRead,
    /// A queue pair has changed its state, and its connection is not open to the peer yet.
    StateChanged,
    /// A reset has dropped the requests that wait, and has not begun the new epoch.
    Resetting,
}

type Action = Box<dyn FnOnce()>;

thread_local! {
    static NEXT: RefCell<Option<(Pause, Action)>> = const { RefCell::new(None) };
}

/// Has this thread do something at the next such place.
pub(super) fn once_at(pause: Pause, action: impl FnOnce() + 'static) {
    NEXT.set(Some((pause, Box::new(action))));
}

pub(super) fn at(pause: Pause) {
    let action = NEXT.with_borrow_mut(|next| next.take_if(|(wanted, _)| *wanted == pause));
    if let Some((_, action)) = action {
        action();
    }
}
