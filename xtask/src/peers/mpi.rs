//! OpenMPI and MPICH: barriers and messages over shared memory, between two processes on two cores.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::{Figures, python, run_program};
use crate::error::{Error, with_path};
use crate::packages::Packages;
use crate::process::{run_for_output, with_timeout};
use crate::workspace;

/// The longest time that one measurement may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a message.
const PAYLOAD: usize = 64;

/// An implementation of MPI: a package of PyPI and how its processes are started.
pub(super) struct Implementation {
    package: &'static str,
    version: &'static str,
    /// The arguments of its `mpirun` for two processes that use nothing but shared memory.
    start: &'static str,
}

pub(super) const OPENMPI: Implementation = Implementation {
    package: "openmpi",
    version: "5.0.11",
    start: "--allow-run-as-root --oversubscribe --bind-to none -n 2 --mca pml ob1 --mca btl self,sm",
};
pub(super) const MPICH: Implementation =
    Implementation { package: "mpich", version: "5.0.2", start: "-bind-to none -n 2" };

/// An installed MPI, and a program that uses it (`mpi_group.c`).
pub(super) struct Mpi {
    pub(super) version: String,
    mpirun: PathBuf,
    start: &'static str,
    program: PathBuf,
}

impl Mpi {
    /// Installs the implementation if it is missing and compiles the program.
    pub(super) fn prepare(implementation: &Implementation) -> Result<Mpi, Error> {
        ["gcc", "libc6-dev"].into_iter().collect::<Packages>().install()?;
        let Implementation { package, version, start } = *implementation;
        let installed = python::install(package, version)?;
        let directory = workspace::target().join("peers");
        fs::create_dir_all(&directory).map_err(with_path(&directory))?;
        let program = directory.join(format!("mpi_group_{package}"));
        let source = workspace::root().join("xtask/src/peers/mpi_group.c");
        let mut compiler = Command::new(installed.join("bin/mpicc"));
        compiler.args(["-O3", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg(source);
        run_for_output(&mut compiler)?;
        Ok(Mpi { version: version.into(), mpirun: installed.join("bin/mpirun"), start, program })
    }

    /// Measures barriers (the median time) and messages (the rate).
    pub(super) fn measure(&self, seconds: f64, cores: [u64; 2]) -> Result<Figures, Error> {
        let mut command = with_timeout(&self.mpirun, TIMEOUT);
        command.args(self.start.split(' ')).arg(&self.program);
        command.args([PAYLOAD.to_string(), seconds.to_string()]).args(cores.map(|core| core.to_string()));
        run_program(&mut command, "messages_per_s", "barrier_p50_ns").map(|(_, figures)| figures)
    }
}
