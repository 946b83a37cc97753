//! Standard output, and JSON as scripts read it.

use std::io::{Write, stdout};

use crate::error::Error;

/// One JSON object on one line.
pub fn json(value: &impl serde::Serialize) -> Result<String, Error> {
    let text = serde_json::to_string(value);
    text.map(|text| text + "\n").map_err(|source| Error::Os { what: "JSON", source: source.into() })
}

/// Writes to standard output. A reader that has closed it is an error, not a panic.
pub fn print(text: &str) -> Result<(), Error> {
    let written = stdout().write_all(text.as_bytes()).and_then(|()| stdout().flush());
    written.map_err(|source| Error::Os { what: "standard output", source })
}
