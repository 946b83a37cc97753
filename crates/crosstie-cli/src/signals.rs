//! SIGINT and SIGTERM: the first one asks the program to end, a later one ends it at once.
//!
//! The same request often arrives as two signals: `timeout` signals its child and the process group, and mpirun forwards what the
//! terminal has already sent. So signals within [`SAME_REQUEST`] of the first count as one request.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::exit;

/// Signals within this time of the first belong to the same request.
const SAME_REQUEST: Duration = Duration::from_millis(500);

/// Installs the handlers and returns the flag that the first signal sets. A later signal ends the program with status 128 + signal.
pub(crate) fn install() -> io::Result<Arc<AtomicBool>> {
    let requested = Arc::new(AtomicBool::new(false));
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let flag = requested.clone();
    let listen = move || {
        let mut first = None;
        for signal in signals.forever() {
            if first.get_or_insert_with(Instant::now).elapsed() > SAME_REQUEST {
                exit(128 + signal);
            }
            flag.store(true, Relaxed);
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(listen)?;
    Ok(requested)
}
