//! `crosstie kv put|get|del|cas`: one operation on the store.
//!
//! Keys and values are the bytes of the command-line arguments, or with `--word` 8-byte numbers.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{IsTerminal, Read, Write, stdin, stdout};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crosstie_kv::client::SwapOutcome;
use crosstie_kv::wire::MAX_VALUE;

use super::Target;
use crate::error::Error;

/// The node to use, and the keyspace.
#[derive(Debug, clap::Args)]
struct KeyArguments {
    #[command(flatten)]
    target: Target,
    /// Keys and values are 8-byte numbers, decimal or, with 0x, hexadecimal. Numeric keys live in a separate keyspace.
    #[arg(long)]
    word: bool,
}

/// Store a value under a key.
#[derive(Debug, clap::Args)]
pub(crate) struct Put {
    #[command(flatten)]
    common: KeyArguments,
    /// The key: bytes, at most 64 KiB.
    key: OsString,
    /// The value: bytes, at most 1 MiB.
    #[arg(required_unless_present = "value_file", conflicts_with = "value_file")]
    value: Option<OsString>,
    /// Read the value from a file, or with - from standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "word")]
    value_file: Option<PathBuf>,
}

/// Write a key's value to standard output; exit status 1 if there is no such key.
///
/// The value is written as it is; a line end follows it only on a terminal. With --word: the number and a line end.
#[derive(Debug, clap::Args)]
pub(crate) struct Get {
    #[command(flatten)]
    common: KeyArguments,
    /// The key.
    key: OsString,
}

/// Remove a key; exit status 1 if there is no such key.
#[derive(Debug, clap::Args)]
pub(crate) struct Del {
    #[command(flatten)]
    common: KeyArguments,
    /// The key.
    key: OsString,
}

/// Compare and swap: store a value under a key if its current value is the expected one; exit status 1 if not.
#[derive(Debug, clap::Args)]
pub(crate) struct Cas {
    #[command(flatten)]
    common: KeyArguments,
    /// The key.
    key: OsString,
    /// The value that the key must have.
    expected: OsString,
    /// The new value.
    value: OsString,
}

impl Put {
    pub(super) fn run(&self) -> Result<(), Error> {
        let given = self.value.as_deref().unwrap_or_default();
        if self.common.word {
            let (key, value) = (parse_number("KEY", &self.key)?, parse_number("VALUE", given)?);
            return Ok(self.common.target.attach()?.put(key, value)?);
        }
        let read;
        let value = match &self.value_file {
            Some(path) => {
                read = read_value(path)?;
                &read
            }
            None => given.as_bytes(),
        };
        Ok(self.common.target.attach()?.put_bytes(self.key.as_bytes(), value)?)
    }
}

impl Get {
    pub(super) fn run(&self) -> Result<(), Error> {
        if self.common.word {
            let key = parse_number("KEY", &self.key)?;
            let value = self.common.target.attach()?.get(key)?.ok_or(Error::NoSuchKey)?;
            return crate::print(&format!("{value}\n"));
        }
        let value = self.common.target.attach()?.get_bytes(self.key.as_bytes())?.ok_or(Error::NoSuchKey)?;
        let mut out = stdout().lock();
        let line_end: &[u8] = if out.is_terminal() { b"\n" } else { b"" };
        let written = out.write_all(&value).and_then(|()| out.write_all(line_end)).and_then(|()| out.flush());
        written.map_err(|source| Error::Os { what: "standard output", source })
    }
}

impl Del {
    pub(super) fn run(&self) -> Result<(), Error> {
        let existed = if self.common.word {
            let key = parse_number("KEY", &self.key)?;
            self.common.target.attach()?.delete(key)?
        } else {
            self.common.target.attach()?.delete_bytes(self.key.as_bytes())?
        };
        if existed { Ok(()) } else { Err(Error::NothingDeleted) }
    }
}

impl Cas {
    pub(super) fn run(&self) -> Result<(), Error> {
        if self.common.word {
            let key = parse_number("KEY", &self.key)?;
            let (expected, value) =
                (parse_number("EXPECTED", &self.expected)?, parse_number("VALUE", &self.value)?);
            return check_swap(&self.common.target.attach()?.compare_and_swap(key, expected, value)?);
        }
        let [key, expected, value] = [&self.key, &self.expected, &self.value].map(|text| text.as_bytes());
        check_swap(&self.common.target.attach()?.compare_and_swap_bytes(key, expected, value)?)
    }
}

fn check_swap<V>(outcome: &SwapOutcome<V>) -> Result<(), Error> {
    match outcome {
        SwapOutcome::Done => Ok(()),
        SwapOutcome::Mismatch(_) => Err(Error::OtherValue),
        SwapOutcome::NotFound => Err(Error::NoSuchKey),
    }
}

fn parse_number(what: &str, text: &OsStr) -> Result<u64, Error> {
    let parsed = text.to_str().and_then(|text| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    });
    parsed.ok_or_else(|| {
        Error::Usage(format!("{what} {text:?} with --word: give a number below 2^64, decimal or with 0x"))
    })
}

/// Reads the whole value, or one byte more than the limit, so that the store refuses it.
fn read_value(path: &Path) -> Result<Vec<u8>, Error> {
    let file_error = |source| Error::File { path: path.to_owned(), source };
    let from: Box<dyn Read> = match path.to_str() {
        Some("-") => Box::new(stdin()),
        _ => Box::new(File::open(path).map_err(file_error)?),
    };
    let mut value = Vec::new();
    from.take(MAX_VALUE as u64 + 1).read_to_end(&mut value).map_err(file_error)?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_decimal_or_hexadecimal() {
        let parse = |text: &str| parse_number("KEY", OsStr::new(text)).ok();
        assert_eq!(parse("0x1f"), Some(31));
        assert_eq!(parse("18446744073709551615"), Some(u64::MAX));
        for wrong in ["", "-1", "1.5", "0x", "18446744073709551616", "one"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
