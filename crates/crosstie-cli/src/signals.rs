//! What SIGINT and SIGTERM do: the first asks for an end, one that comes later ends the program at once.
//!
//! Whoever sends one often sends it twice, without meaning it: `timeout` to its child and to the group, mpirun what the terminal
//! has sent already. So what follows within [`ECHO`] is the same wish.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::exit;

/// How long after a signal another one says nothing new.
const ECHO: Duration = Duration::from_millis(500);

/// A flag that the first signal sets. Later ones end the program, with the usual status of a program that a signal ended.
pub(crate) fn ask_to_end() -> io::Result<Arc<AtomicBool>> {
    let wanted = Arc::new(AtomicBool::new(false));
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let flag = wanted.clone();
    let listen = move || {
        let mut first = None;
        for signal in signals.forever() {
            if first.get_or_insert_with(Instant::now).elapsed() > ECHO {
                exit(128 + signal);
            }
            flag.store(true, Relaxed);
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(listen)?;
    Ok(wanted)
}
