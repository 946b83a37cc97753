//! `crosstie doctor`: what this machine offers, what is missing, and the command that fixes it.
//!
//! Each check tries the feature or reads the system's state. Only a software device that does not work is a failure: every other
//! finding has a fallback, or matters for one purpose only.

mod libraries;
mod process_vm;
mod rdma;
mod software;
mod system;

use crosstie_bench::table;
use serde::Serialize;

use crate::error::Error;

pub(crate) use process_vm::read_parent;

/// The result of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// Works.
    Ok,
    /// Works, but not as well as it could.
    Limited,
    /// Not available.
    Missing,
}

/// One check and its result.
#[derive(Debug, Serialize)]
pub(crate) struct Finding {
    name: &'static str,
    state: State,
    /// What was found.
    found: String,
    /// What it is needed for; set if it is missing or limited.
    #[serde(skip_serializing_if = "Option::is_none")]
    needed_for: Option<&'static str>,
    /// The command that fixes it. The JSON keeps the field's first name.
    #[serde(rename = "mend", skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

impl Finding {
    fn ok(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { name, state: State::Ok, found: found.into(), needed_for: None, fix: None }
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

    fn fix(self, command: impl Into<String>) -> Finding {
        Finding { fix: Some(command.into()), ..self }
    }
}

/// The JSON object that `--json` prints.
#[derive(Debug, Serialize)]
struct Findings {
    version: &'static str,
    usable: bool,
    findings: Vec<Finding>,
}

/// Runs all checks and prints them. Fails if not even the software device works.
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
        let fixable: Vec<&Finding> = self.findings.iter().filter(|finding| finding.fix.is_some()).collect();
        if !fixable.is_empty() {
            text.push_str("\nTo fix:\n");
        }
        for Finding { name, needed_for, fix, .. } in fixable {
            let purpose = needed_for.map(|purpose| format!(" (for {purpose})")).unwrap_or_default();
            text.push_str(&format!("  {name}{purpose}:\n    {}\n", fix.as_deref().unwrap_or_default()));
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
