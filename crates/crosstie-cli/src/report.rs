//! `crosstie report`: results of `crosstie bench kv` as one HTML page.

use std::path::PathBuf;

use crosstie_bench::{figures, report};

use crate::error::Error;

/// Draw results of `bench kv --json` as one HTML page.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Files with one result of `crosstie bench kv --json`, or with an array of results.
    #[arg(required = true, value_name = "FILE.json")]
    files: Vec<PathBuf>,
    /// The page to write. It contains everything it needs.
    #[arg(short, long, value_name = "FILE.html")]
    output: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let mut results = Vec::new();
    let output = arguments.output.canonicalize().ok();
    for path in &arguments.files {
        if output.is_some() && output == path.canonicalize().ok() {
            let path = path.display();
            return Err(Error::Usage(format!(
                "--output {path} would overwrite the results in it: give another name"
            )));
        }
        results.extend(figures::read(path).map_err(crosstie_bench::Error::from)?);
    }
    report::write(&results, &arguments.output)?;
    crate::print(&format!("{}\nreport: {}\n", report::table(&results), arguments.output.display()))
}
