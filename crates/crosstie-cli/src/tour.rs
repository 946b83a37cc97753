//! `crosstie` without a command: a short tour of the benchmarks.

use crosstie::device::DeviceSpec;

use crate::bench::device::{self, Op, Plan};
use crate::bench::plan::{Devices, Span};
use crate::bench::report::Report;
use crate::error::Error;
use crate::table;

/// At each stop.
const SECONDS: f64 = 0.7;
/// Operation, payload, queue depth.
const STOPS: [(Op, usize, usize); 7] = [
    (Op::WriteImm, 32, 1),
    (Op::WriteImm, 32, 64),
    (Op::Write, 64 << 10, 1),
    (Op::Read, 32, 1),
    (Op::Send, 32, 1),
    (Op::Cas, 8, 1),
    (Op::Faa, 8, 1),
];

pub(crate) fn run() -> Result<(), Error> {
    crate::print("Two processes, the software device, one queue pair; about ten seconds.\n\n")?;
    let mut rows = vec![Report::HEADER.map(str::to_owned)];
    let (mut lines, mut errors) = (Vec::new(), 0);
    for (op, payload, depth) in STOPS {
        let plan = Plan {
            op,
            payload,
            depth,
            processes: true,
            in_place: false,
            devices: Devices::new(&[DeviceSpec::Software])?,
            span: Span::new(SECONDS)?,
        };
        let Some(report) = device::run(&plan)? else {
            return Err(Error::Usage("the tour makes its own processes: start it outside of a job".into()));
        };
        rows.push(report.row());
        lines.extend(report.line());
        errors += report.errors;
    }
    let line = crate::bench::report::median(lines.into_iter()).unwrap_or(0.0);
    crate::print(&format!(
        "{}\nOne cache line there and back between these cores: {line:.0} ns. 'of limit': operations/s as a share of what the \
         plainest code reaches.\nAt depth 1, write-imm and send are round trips. More: crosstie bench device --help, crosstie doctor\n",
        table::figures(&rows)
    ))?;
    if errors > 0 { Err(Error::WrongData(errors)) } else { Ok(()) }
}
