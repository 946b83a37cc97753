//! iceoryx2: requests and responses of 32 bytes between two processes on two cores that poll.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::{Figures, run_program};
use crate::error::Error;
use crate::packages::Packages;
use crate::process::{self, with_timeout};
use crate::workspace;

/// The longest time that one measurement may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The release that is measured; `iceoryx2/Cargo.toml` names it.
const VERSION: &str = "0.10.0";

/// A request/response program that uses iceoryx2 (the package in `iceoryx2/`).
pub(super) struct Iceoryx2 {
    pub(super) version: String,
    program: PathBuf,
}

impl Iceoryx2 {
    /// Compiles the program.
    pub(super) fn prepare() -> Result<Iceoryx2, Error> {
        // It generates its bindings of libc while it is compiled.
        ["libclang-dev", "gcc", "libc6-dev"].into_iter().collect::<Packages>().install()?;
        let target = workspace::target().join("peers/iceoryx2");
        let mut build = Command::new(workspace::cargo());
        build.args(["build", "--release", "--quiet", "--target-dir"]).arg(&target);
        build.current_dir(workspace::root().join("xtask/src/peers/iceoryx2"));
        process::run_inheriting_output(&mut build)?;
        Ok(Iceoryx2 { version: VERSION.into(), program: target.join("release/iceoryx2-requests") })
    }

    /// Measures requests and responses, `depth` of them in flight.
    pub(super) fn measure(&self, depth: usize, seconds: f64, cores: [u64; 2]) -> Result<Figures, Error> {
        let mut command = with_timeout(&self.program, TIMEOUT);
        command.args([depth.to_string(), seconds.to_string()]).args(cores.map(|core| core.to_string()));
        run_program(&mut command, "ops_per_s", "p50_ns").map(|(_, figures)| figures)
    }
}
