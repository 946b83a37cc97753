//! `crosstie doctor`: what this machine offers, what is missing, and the command that mends it.
//!
//! Every finding comes from trying or looking, not from guessing. Only a software device that does not work is a failure:
//! everything else has something to fall back on, or is needed for one purpose.

mod libraries;
mod process_vm;
mod rdma;
mod software;
mod system;

use serde::Serialize;

use crate::error::Error;
use crosstie_bench::table;

pub(crate) use process_vm::read_parent;

/// How good a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// Nothing to do.
    Ok,
    /// Works, but not as well as it could.
    Limited,
    /// Not there.
    Missing,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
pub(crate) struct Finding {
    name: &'static str,
    state: State,
    /// What there is.
    found: String,
    /// What it is needed for, where it is not there.
    #[serde(skip_serializing_if = "Option::is_none")]
    needed_for: Option<&'static str>,
    /// The command that mends it.
    #[serde(skip_serializing_if = "Option::is_none")]
    mend: Option<String>,
}

impl Finding {
    fn ok(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { name, state: State::Ok, found: found.into(), needed_for: None, mend: None }
    }

    fn limited(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { state: State::Limited, ..Finding::ok(name, found) }
    }

    fn missing(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { state: State::Missing, ..Finding::ok(name, found) }
    }

    fn needed_for(self, purpose: &'static str) -> Finding {
        Finding { needed_for: Some(purpose), ..self }
    }

    fn mend(self, command: impl Into<String>) -> Finding {
        Finding { mend: Some(command.into()), ..self }
    }
}

/// The JSON object.
#[derive(Debug, Serialize)]
struct Findings {
    version: &'static str,
    usable: bool,
    findings: Vec<Finding>,
}

/// Looks, prints, and fails where nothing would work.
pub(crate) fn run(json: bool) -> Result<(), Error> {
    let software = software::device();
    let usable = software.state != State::Missing;
    let mut findings = vec![software, process_vm::access()];
    findings.extend(system::findings());
    findings.extend(rdma::findings());
    findings.extend(libraries::findings());
    let findings = Findings { version: env!("CARGO_PKG_VERSION"), usable, findings };
    let text = if json { crate::json(&findings)? } else { findings.table() };
    crate::print(&text)?;
    if usable { Ok(()) } else { Err(Error::NoSoftwareDevice) }
}

impl Findings {
    fn table(&self) -> String {
        let rows: Vec<[&str; 3]> = self.findings.iter().map(|finding| finding.row()).collect();
        let mut text = table::left(&rows);
        let mends: Vec<&Finding> = self.findings.iter().filter(|finding| finding.mend.is_some()).collect();
        if !mends.is_empty() {
            text.push_str("\nTo mend:\n");
        }
        for Finding { name, needed_for, mend, .. } in mends {
            let purpose = needed_for.map(|purpose| format!(" (for {purpose})")).unwrap_or_default();
            text.push_str(&format!("  {name}{purpose}:\n    {}\n", mend.as_deref().unwrap_or_default()));
        }
        text
    }
}

impl Finding {
    fn row(&self) -> [&str; 3] {
        let state = match self.state {
            State::Ok => "ok",
            State::Limited => "limited",
            State::Missing => "missing",
        };
        [self.name, state, &self.found]
    }
}
