//! `crosstie kv put|get|del|cas`: one operation.
//!
//! Keys and values are the bytes of the command line as they are, or with `--word` numbers of 8 bytes.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{IsTerminal, Read, Write, stdin, stdout};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crosstie_kv::client::SwapOutcome;
use crosstie_kv::wire::MAX_VALUE;

use super::Target;
use crate::error::Error;

/// Whom to ask, and for what kind of key.
#[derive(Debug, clap::Args)]
struct Question {
    #[command(flatten)]
    target: Target,
    /// Keys and values are numbers of 8 bytes, decimal or, with 0x, hexadecimal. They are a space of keys of their own.
    #[arg(long)]
    word: bool,
}

/// Give a key a value.
#[derive(Debug, clap::Args)]
pub(crate) struct Put {
    #[command(flatten)]
    question: Question,
    /// The key: bytes, at most 64 KiB.
    key: OsString,
    /// The value: bytes, at most 1 MiB.
    #[arg(required_unless_present = "value_file", conflicts_with = "value_file")]
    value: Option<OsString>,
    /// Take the value from a file, or with - from standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "word")]
    value_file: Option<PathBuf>,
}

/// Write a key's value to standard output; exit status 1 if there is no such key.
///
/// The bytes are written as they are, with a line end after them on a terminal only. With --word: the number and a line end.
#[derive(Debug, clap::Args)]
pub(crate) struct Get {
    #[command(flatten)]
    question: Question,
    /// The key.
    key: OsString,
}

/// Remove a key; exit status 1 if there is no such key.
#[derive(Debug, clap::Args)]
pub(crate) struct Del {
    #[command(flatten)]
    question: Question,
    /// The key.
    key: OsString,
}

/// Give a key a value if it has the expected one; exit status 1 if it has not.
#[derive(Debug, clap::Args)]
pub(crate) struct Cas {
    #[command(flatten)]
    question: Question,
    /// The key.
    key: OsString,
    /// The value that it must have.
    expected: OsString,
    /// Its new value.
    value: OsString,
}

impl Put {
    pub(super) fn run(&self) -> Result<(), Error> {
        let given = self.value.as_deref().unwrap_or_default();
        if self.question.word {
            let (key, value) = (number("KEY", &self.key)?, number("VALUE", given)?);
            return Ok(self.question.target.attach()?.put(key, value)?);
        }
        let read;
        let value = match &self.value_file {
            Some(path) => {
                read = read_value(path)?;
                &read
            }
            None => given.as_bytes(),
        };
        Ok(self.question.target.attach()?.put_bytes(self.key.as_bytes(), value)?)
    }
}

impl Get {
    pub(super) fn run(&self) -> Result<(), Error> {
        if self.question.word {
            let key = number("KEY", &self.key)?;
            let value = self.question.target.attach()?.get(key)?.ok_or(Error::NoSuchKey)?;
            return crate::print(&format!("{value}\n"));
        }
        let value = self.question.target.attach()?.get_bytes(self.key.as_bytes())?.ok_or(Error::NoSuchKey)?;
        let mut out = stdout().lock();
        let line_end: &[u8] = if out.is_terminal() { b"\n" } else { b"" };
        let written = out.write_all(&value).and_then(|()| out.write_all(line_end)).and_then(|()| out.flush());
        written.map_err(|source| Error::Os { what: "standard output", source })
    }
}

impl Del {
    pub(super) fn run(&self) -> Result<(), Error> {
        let was_there = if self.question.word {
            let key = number("KEY", &self.key)?;
            self.question.target.attach()?.delete(key)?
        } else {
            self.question.target.attach()?.delete_bytes(self.key.as_bytes())?
        };
        if was_there { Ok(()) } else { Err(Error::NoSuchKey) }
    }
}

impl Cas {
    pub(super) fn run(&self) -> Result<(), Error> {
        if self.question.word {
            let key = number("KEY", &self.key)?;
            let (expected, value) = (number("EXPECTED", &self.expected)?, number("VALUE", &self.value)?);
            return swapped(&self.question.target.attach()?.compare_and_swap(key, expected, value)?);
        }
        let [key, expected, value] = [&self.key, &self.expected, &self.value].map(|text| text.as_bytes());
        swapped(&self.question.target.attach()?.compare_and_swap_bytes(key, expected, value)?)
    }
}

fn swapped<V>(swap: &SwapOutcome<V>) -> Result<(), Error> {
    match swap {
        SwapOutcome::Done => Ok(()),
        SwapOutcome::Mismatch(_) => Err(Error::OtherValue),
        SwapOutcome::NotFound => Err(Error::NoSuchKey),
    }
}

fn number(what: &str, text: &OsStr) -> Result<u64, Error> {
    let parsed = text.to_str().and_then(|text| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    });
    parsed.ok_or_else(|| {
        Error::Usage(format!("{what} {text:?} with --word: give a number below 2^64, decimal or with 0x"))
    })
}

/// All of it, or enough to be too long.
fn read_value(path: &Path) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::File { path: path.to_owned(), source };
    let from: Box<dyn Read> = match path.to_str() {
        Some("-") => Box::new(stdin()),
        _ => Box::new(File::open(path).map_err(failed)?),
    };
    let mut value = Vec::new();
    from.take(MAX_VALUE as u64 + 1).read_to_end(&mut value).map_err(failed)?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_decimal_or_hexadecimal() {
        let parse = |text: &str| number("KEY", OsStr::new(text)).ok();
        assert_eq!(parse("0x1f"), Some(31));
        assert_eq!(parse("18446744073709551615"), Some(u64::MAX));
        for wrong in ["", "-1", "1.5", "0x", "18446744073709551616", "one"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
