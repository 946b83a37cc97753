//! Checks locks: mutual exclusion at the resource, fencing tokens that rise, first come first served.

/// View and count: compared in this order.
type Token = (u64, u64);

/// What the checker knows about one lock.
#[derive(Clone, Debug, Default)]
struct Lock {
    /// Holders that have not released: member and token.
    holders: Vec<(usize, Token)>,
    newest_token: Token,
    /// Requests in the order in which they reached the manager. `None`: the manager died, and the order with it.
    order: Option<Vec<usize>>,
    /// The resource that the lock protects: the newest token that it has seen.
    resource_token: Token,
}

/// Checks all locks of a run.
#[derive(Debug)]
pub(crate) struct LockChecker {
    locks: Vec<Lock>,
    pub(crate) failures: Vec<String>,
}

impl LockChecker {
    pub(crate) fn new(locks: usize) -> Self {
        let lock = Lock { order: Some(Vec::new()), ..Lock::default() };
        LockChecker { locks: vec![lock; locks], failures: Vec::new() }
    }

    /// A request reached the manager.
    pub(crate) fn requested(&mut self, lock: u32, member: usize) {
        if let Some(order) = &mut self.locks[lock as usize].order
            && !order.contains(&member)
        {
            order.push(member);
        }
    }

    /// A member no longer waits: it gave up, or died.
    pub(crate) fn gave_up(&mut self, lock: u32, member: usize) {
        if let Some(order) = &mut self.locks[lock as usize].order {
            order.retain(|waiting| *waiting != member);
        }
    }

    /// The manager died.
    pub(crate) fn order_is_lost(&mut self, lock: u32) {
        self.locks[lock as usize].order = None;
    }

    /// A member has the lock. `excused`: whether a member may be a holder that does not know that it is declared dead.
    pub(crate) fn acquired(
        &mut self,
        time: u64,
        lock: u32,
        member: usize,
        token: Token,
        excused: impl Fn(usize) -> bool,
    ) {
        let state = &mut self.locks[lock as usize];
        for (other, _) in &state.holders {
            if !excused(*other) && !excused(member) {
                self.failures.push(format!("{time} ns: members {other} and {member} both have lock {lock}"));
            }
        }
        if token <= state.newest_token && !excused(member) {
            self.failures.push(format!(
                "{time} ns: lock {lock}: token {token:?} of member {member} is not above {:?}",
                state.newest_token
            ));
        }
        state.newest_token = state.newest_token.max(token);
        if let Some(order) = &mut state.order
            && let Some(index) = order.iter().position(|waiting| *waiting == member)
        {
            if index > 0 {
                self.failures.push(format!(
                    "{time} ns: lock {lock}: member {member} was served before member {}",
                    order[0]
                ));
            }
            order.remove(index);
        }
        state.holders.push((member, token));
        if !self.write(lock, token) && !excused(member) {
            self.failures
                .push(format!("{time} ns: the resource of lock {lock} refuses its holder, member {member}"));
        }
    }

    /// A holder writes once more, and releases the lock. Only a member that is declared dead finds its token too old.
    pub(crate) fn released(&mut self, time: u64, lock: u32, member: usize, excused: impl Fn(usize) -> bool) {
        let state = &mut self.locks[lock as usize];
        let Some(index) = state.holders.iter().position(|(holder, _)| *holder == member) else {
            self.failures
                .push(format!("{time} ns: member {member} releases lock {lock}, which it does not have"));
            return;
        };
        let (_, token) = state.holders.remove(index);
        if !self.write(lock, token) && !excused(member) {
            self.failures
                .push(format!("{time} ns: the resource of lock {lock} refuses its holder, member {member}"));
        }
    }

    /// A member died, or was declared dead. A late write of it must be refused once somebody else has the lock.
    pub(crate) fn lost(&mut self, lock: u32, member: usize) {
        let state = &mut self.locks[lock as usize];
        state.holders.retain(|(holder, _)| *holder != member);
        self.gave_up(lock, member);
    }

    /// The resource takes writes with tokens that are not older than the newest.
    fn write(&mut self, lock: u32, token: Token) -> bool {
        let state = &mut self.locks[lock as usize];
        let accepted = token >= state.resource_token;
        state.resource_token = state.resource_token.max(token);
        accepted
    }
}
