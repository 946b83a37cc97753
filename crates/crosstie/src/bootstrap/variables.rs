//! Reading environment variables as text and numbers, with errors that name the variable.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::str::FromStr;

use super::error::{Error, Result};

/// A set of environment variables. An empty variable counts as not set.
pub(super) struct Variables(HashMap<OsString, OsString>);

impl Variables {
    /// The variables of this process.
    pub(super) fn of_process() -> Self {
        std::env::vars_os().collect()
    }

    pub(super) fn get(&self, name: &str) -> Option<&OsString> {
        self.0.get(OsStr::new(name))
    }

    /// Returns the value of a variable that must be UTF-8.
    pub(super) fn text(&self, name: &str) -> Result<Option<&str>> {
        self.get(name)
            .map(|value| {
                value
                    .to_str()
                    .ok_or_else(|| Error::Configuration(format!("{name} is not UTF-8: set it to plain text")))
            })
            .transpose()
    }

    /// Returns the value of a variable that must be a number if it is set.
    pub(super) fn optional_number<N: FromStr>(&self, name: &str) -> Result<Option<N>> {
        let parse = |text: &str| {
            text.parse().map_err(|_| {
                Error::Configuration(format!("{name} is {text:?}: set it to a whole number from 0"))
            })
        };
        self.text(name)?.map(parse).transpose()
    }

    /// Returns the value of a variable that must be set and be a number.
    pub(super) fn number<N: FromStr>(&self, name: &str) -> Result<N> {
        let missing = || Error::Configuration(format!("{name} is not set: set it to a number"));
        self.optional_number(name)?.ok_or_else(missing)
    }
}

impl FromIterator<(OsString, OsString)> for Variables {
    fn from_iter<I: IntoIterator<Item = (OsString, OsString)>>(variables: I) -> Self {
        Variables(variables.into_iter().filter(|(_, value)| !value.is_empty()).collect())
    }
}
