//! The processes that rank 0 spawned: waits for them, or kills them.

use std::process::Child;
use std::time::{Duration, Instant};

use super::error::{Error, Result};
use crate::process::Creator;

/// Spawned ranks with their processes. Dropping it kills and reaps those that are still running; not in a forked child, whose they are not.
#[derive(Debug)]
pub(super) struct Children(Vec<(u32, Child)>, Creator);

impl Default for Children {
    fn default() -> Self {
        Children(Vec::new(), Creator::this_process())
    }
}

impl Children {
    pub(super) fn add(&mut self, rank: u32, child: Child) {
        self.0.push((rank, child));
    }

    /// Waits until all processes have ended and returns the first failure. Kills those that are left at the deadline.
    pub(super) fn wait(&mut self, deadline: Instant) -> Result<()> {
        let mut pause = Duration::from_micros(100);
        let mut failure = None;
        while let Some((rank, child)) = self.0.first_mut() {
            let rank = *rank;
            match child.try_wait() {
                Ok(Some(status)) => {
                    self.0.remove(0);
                    if !status.success() {
                        failure.get_or_insert(Error::ChildFailed { rank, status: status.to_string() });
                    }
                }
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(20));
                }
                Ok(None) => {
                    self.kill_all();
                    let status = "SIGKILL, because it did not exit in time".into();
                    failure.get_or_insert(Error::ChildFailed { rank, status });
                }
                Err(error) => return Err(Error::io(format!("waiting for rank {rank}"), &error)),
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Kills and reaps all processes that are left.
    pub(super) fn kill_all(&mut self) {
        if !self.1.is_this_process() {
            return;
        }
        for (_, child) in &mut self.0 {
            // An error means that the process has ended already.
            drop(child.kill());
        }
        for (_, mut child) in self.0.drain(..) {
            drop(child.wait());
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.kill_all();
    }
}
