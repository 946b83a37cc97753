//! Lines in NCCL's log.

use core::ffi::{c_char, c_int, c_ulong, c_void};
use core::sync::atomic::{AtomicPtr, AtomicU8, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::ffi::CString;

/// NCCL's log function. It is variadic; the plugin calls it with the format `%s`.
pub(crate) type Logger = unsafe extern "C" fn(
    level: c_int,
    flags: c_ulong,
    file: *const c_char,
    line: c_int,
    format: *const c_char,
    ...
);

/// How much is written, in addition to `NCCL_DEBUG`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Off = 0,
    /// What stops or slows down a job.
    Warn = 2,
    /// Devices, connections and their counters.
    Info = 3,
    /// Also memory registrations.
    Trace = 5,
}

/// NCCL's subsystems INIT and NET: shown by `NCCL_DEBUG=INFO` alone, and with `NCCL_DEBUG_SUBSYS=NET`.
const FLAGS: c_ulong = 0x1 | 0x10;

static LOGGER: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
static LEVEL: AtomicU8 = AtomicU8::new(Level::Info as u8);

/// Sets where lines go. Without a logger, warnings go to standard error.
pub(crate) fn set_logger(logger: Option<Logger>) {
    if let Some(logger) = logger {
        // Release, partner: the Acquire load in `write`.
        LOGGER.store(logger as *mut c_void, Release);
    }
}

pub(crate) fn set_level(level: Level) {
    LEVEL.store(level as u8, Relaxed);
}

pub(crate) fn is_enabled(level: Level) -> bool {
    level as u8 <= LEVEL.load(Relaxed)
}

/// Writes a line.
#[cold]
pub(crate) fn write(level: Level, file: &'static core::ffi::CStr, line: u32, text: &str) {
    if !is_enabled(level) {
        return;
    }
    // Acquire, partner: the Release store in `set_logger`.
    let logger = LOGGER.load(Acquire);
    if logger.is_null() {
        if level == Level::Warn {
            eprintln!("NET/Crosstie : {text}");
        }
        return;
    }
    // A NUL inside the text would end it; a peer's text may contain one.
    let Ok(text) = CString::new(format!("NET/Crosstie : {}", text.replace('\0', " "))) else { return };
    // NCCL prints lines of its level TRACE only in special builds.
    let level = if level == Level::Trace { Level::Info } else { level };
    // SAFETY: the only non-NULL values come from `set_logger`, which got a function of this type.
    let logger: Logger = unsafe { core::mem::transmute::<*mut c_void, Logger>(logger) };
    // SAFETY: the format takes one string; all strings end with NUL and live until the call returns.
    unsafe { logger(level as c_int, FLAGS, file.as_ptr(), line as c_int, c"%s".as_ptr(), text.as_ptr()) };
}

/// `warning!("format {}", value)`: writes a line about something that stops or slows down a job.
macro_rules! warning {
    ($($text:tt)*) => { $crate::log::line!(Warn, $($text)*) };
}
/// As `warning!`, about what is going on.
macro_rules! info {
    ($($text:tt)*) => { $crate::log::line!(Info, $($text)*) };
}
/// As `warning!`, about details.
macro_rules! trace {
    ($($text:tt)*) => { $crate::log::line!(Trace, $($text)*) };
}
macro_rules! line {
    ($level:ident, $($text:tt)*) => {
        if $crate::log::is_enabled($crate::log::Level::$level) {
            const FILE: &core::ffi::CStr =
                match core::ffi::CStr::from_bytes_with_nul(concat!(file!(), "\0").as_bytes()) {
                    Ok(file) => file,
                    Err(_) => c"crosstie-nccl",
                };
            $crate::log::write($crate::log::Level::$level, FILE, line!(), &format!($($text)*));
        }
    };
}
pub(crate) use {info, line, trace, warning};
