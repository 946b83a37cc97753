//! The program `crosstie`.

use std::process::ExitCode;

fn main() -> ExitCode {
    crosstie_cli::main()
}
