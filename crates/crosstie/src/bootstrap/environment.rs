//! Determines from environment variables which job this process belongs to.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `CROSSTIE_RANK`, `CROSSTIE_SIZE` | this process's rank and the number of ranks; each overrides the launcher's value |
//! | `OMPI_COMM_WORLD_RANK`, `_SIZE` | set by OpenMPI's mpirun |
//! | `PMI_RANK`, `PMI_SIZE` | set by MPICH's and other PMI launchers |
//! | `PMIX_RANK` | set by PMIx launchers, which set no size: it comes from `CROSSTIE_SIZE` or Slurm |
//! | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | set by Slurm |
//! | `CROSSTIE_RENDEZVOUS` | `host:port` of rank 0 |
//! | `CROSSTIE_LISTEN` | `host:port` that rank 0 binds, when it differs |
//! | `CROSSTIE_SECRET_FILE` | a file with the secret, accessible to its owner only |
//! | `CROSSTIE_SECRET` | the secret itself; prefer a file, because child processes inherit the environment |
//! | `CROSSTIE_JOIN_SECONDS`, `CROSSTIE_OPERATION_SECONDS` | [`Limits::join_timeout`], [`Limits::operation_timeout`] |
//!
//! Launchers are tried in the order of this table. mpirun may run inside a Slurm step; Slurm's variables then describe
//! mpirun's daemons and not the ranks.

use std::time::Duration;

use super::error::{Error, Result};
use super::limits::{Limits, check_rank};
use super::secret::{SECRET_FILE, Secret};
use super::variables::Variables;
use super::{local, tcp};

const RANK: &str = "CROSSTIE_RANK";
const SIZE: &str = "CROSSTIE_SIZE";
const RENDEZVOUS: &str = "CROSSTIE_RENDEZVOUS";
const LISTEN: &str = "CROSSTIE_LISTEN";
const JOIN_SECONDS: &str = "CROSSTIE_JOIN_SECONDS";
const OPERATION_SECONDS: &str = "CROSSTIE_OPERATION_SECONDS";

/// The job that the environment describes.
#[derive(Debug)]
pub(super) enum Job {
    /// This process is a rank that [`local`] spawned.
    Local,
    /// This process is a rank that connects to a rendezvous address.
    Tcp(tcp::Config),
    /// An MPI launcher started this process and no rendezvous address is set: MPI connects the ranks.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code))]
    Mpi,
    /// The environment describes no job.
    Standalone,
}

impl Job {
    pub(super) fn detect(variables: &Variables, limits: Limits) -> Result<Self> {
        if variables.get(local::RANK).is_some() {
            return Ok(Job::Local);
        }
        let launcher = Launcher::detect(variables)?;
        let explicit = variables.get(RANK).or(variables.get(SIZE)).is_some();
        let rank = variables.optional_number(RANK)?.or(launcher.as_ref().map(|launcher| launcher.rank));
        let size = variables.optional_number(SIZE)?.or(launcher.as_ref().and_then(|launcher| launcher.size));
        let Some(rendezvous) = variables.text(RENDEZVOUS)? else {
            return match launcher {
                _ if explicit => Err(Error::Configuration(format!(
                    "{RANK} or {SIZE} is set, but {RENDEZVOUS} is not: set {RENDEZVOUS} to host:port of rank 0"
                ))),
                Some(Launcher { size: Some(1), .. }) | None => Ok(Job::Standalone),
                Some(launcher) if cfg!(feature = "mpi") && launcher.provides_mpi => Ok(Job::Mpi),
                Some(launcher) if launcher.certain => Err(Error::Configuration(format!(
                    "{} started this process as rank {} of several, but this process does not know how to reach the others: \
                     set {RENDEZVOUS} to host:port of rank 0 and {SECRET_FILE}, or build with the feature `mpi`",
                    launcher.name, launcher.rank
                ))),
                Some(_) => Ok(Job::Standalone),
            };
        };
        let Some(rank) = rank else {
            return Err(Error::Configuration(format!(
                "{RENDEZVOUS} is set, but this process has no rank: set {RANK}, or start it with mpirun or srun"
            )));
        };
        let Some(size) = size else {
            return Err(Error::Configuration(format!(
                "this process is rank {rank}, but the number of ranks is not set: set {SIZE}"
            )));
        };
        check_rank(rank, size)?;
        Ok(Job::Tcp(tcp::Config {
            rank,
            size,
            rendezvous: rendezvous.to_owned(),
            listen: variables.text(LISTEN)?.map(str::to_owned),
            secret: Secret::from_variables(variables)?,
            limits,
        }))
    }
}

/// The limits that the environment sets; the defaults for those that it does not.
pub(super) fn limits(variables: &Variables) -> Result<Limits> {
    let seconds = |name, default: Duration| -> Result<Duration> {
        match variables.optional_number::<u32>(name)? {
            Some(0) => Err(Error::Configuration(format!("{name} is 0: set it to at least 1"))),
            given => Ok(given.map_or(default, |seconds| Duration::from_secs(seconds.into()))),
        }
    };
    let defaults = Limits::default();
    Ok(Limits {
        join_timeout: seconds(JOIN_SECONDS, defaults.join_timeout)?,
        operation_timeout: seconds(OPERATION_SECONDS, defaults.operation_timeout)?,
        ..defaults
    })
}

/// The launcher that started this process, as its variables show.
struct Launcher {
    name: &'static str,
    rank: u32,
    size: Option<u32>,
    provides_mpi: bool,
    /// The variables prove that this process is a rank. Slurm also sets its variables for a batch script, which is not.
    certain: bool,
}

impl Launcher {
    fn detect(variables: &Variables) -> Result<Option<Self>> {
        for (name, rank, size) in [
            ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("a PMI launcher", "PMI_RANK", "PMI_SIZE"),
        ] {
            if let Some(rank) = variables.optional_number(rank)? {
                let size = Some(variables.number(size)?);
                return Ok(Some(Launcher { name, rank, size, provides_mpi: true, certain: true }));
            }
        }
        let slurm_rank: Option<u32> = variables.optional_number("SLURM_PROCID")?;
        let step_size = variables.optional_number("SLURM_STEP_NUM_TASKS")?;
        let slurm_size = step_size.or(variables.optional_number("SLURM_NTASKS")?);
        if let Some(rank) = variables.optional_number("PMIX_RANK")? {
            let size = slurm_size.filter(|_| slurm_rank == Some(rank));
            return Ok(Some(Launcher {
                name: "a PMIx launcher",
                rank,
                size,
                provides_mpi: true,
                certain: true,
            }));
        }
        let certain = step_size.is_some();
        Ok(slurm_rank.map(|rank| Launcher {
            name: "Slurm",
            rank,
            size: slurm_size,
            provides_mpi: false,
            certain,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "CROSSTIE_SECRET";

    fn job(variables: &[(&str, &str)]) -> Result<Job> {
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        Job::detect(&variables, Limits::default())
    }

    fn tcp(variables: &[(&str, &str)]) -> (u32, u32) {
        let rendezvous = [(RENDEZVOUS, "localhost:4000"), (SECRET, "0123456789abcdef")];
        match job(&[variables, &rendezvous].concat()) {
            Ok(Job::Tcp(config)) => (config.rank, config.size),
            other => panic!("expected TCP, got {other:?}"),
        }
    }

    fn configuration_error(variables: &[(&str, &str)]) -> String {
        match job(variables) {
            Err(Error::Configuration(text)) => text,
            other => panic!("expected a configuration error, got {other:?}"),
        }
    }

    #[test]
    fn rank_and_size_are_read_from_every_launcher() {
        assert_eq!(tcp(&[(RANK, "1"), (SIZE, "2")]), (1, 2));
        assert_eq!(tcp(&[("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4")]), (3, 4));
        assert_eq!(tcp(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]), (0, 2));
        assert_eq!(tcp(&[("PMIX_RANK", "5"), (SIZE, "6")]), (5, 6));
        assert_eq!(tcp(&[("PMIX_RANK", "5"), ("SLURM_PROCID", "5"), ("SLURM_NTASKS", "6")]), (5, 6));
        assert_eq!(tcp(&[("SLURM_PROCID", "1"), ("SLURM_NTASKS", "8")]), (1, 8));
        assert_eq!(
            tcp(&[("SLURM_PROCID", "1"), ("SLURM_NTASKS", "8"), ("SLURM_STEP_NUM_TASKS", "2")]),
            (1, 2)
        );
    }

    #[test]
    fn explicit_variables_and_the_inner_launcher_take_precedence() {
        let both = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "2"),
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
        ];
        assert_eq!(tcp(&both), (3, 4));
        assert_eq!(tcp(&[&both[..], &[(RANK, "7"), (SIZE, "9")]].concat()), (7, 9));
    }

    #[test]
    fn without_variables_there_is_no_job() {
        assert!(matches!(job(&[]), Ok(Job::Standalone)));
        assert!(matches!(
            job(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")]),
            Ok(Job::Standalone)
        ));
        // A batch script of Slurm has the variables but is not a rank.
        assert!(matches!(job(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]), Ok(Job::Standalone)));
        assert!(matches!(job(&[(local::RANK, "1")]), Ok(Job::Local)));
    }

    #[test]
    fn mpi_launcher_without_a_rendezvous_needs_the_feature() {
        let launched = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")];
        if cfg!(feature = "mpi") {
            assert!(matches!(job(&launched), Ok(Job::Mpi)));
        } else {
            assert!(configuration_error(&launched).contains(RENDEZVOUS));
        }
        let step = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2")];
        assert!(configuration_error(&step).contains(RENDEZVOUS));
    }

    #[test]
    fn missing_and_contradictory_variables_are_named() {
        let rendezvous = [(RENDEZVOUS, "localhost:4000"), (SECRET, "0123456789abcdef")];
        let with = |more: &[(&str, &str)]| configuration_error(&[&rendezvous[..], more].concat());
        assert!(configuration_error(&[(RANK, "0"), (SIZE, "2")]).contains(RENDEZVOUS));
        assert!(with(&[]).contains(RANK));
        assert!(with(&[(RANK, "0")]).contains(SIZE));
        assert!(with(&[("PMIX_RANK", "0")]).contains(SIZE));
        assert!(with(&[("PMI_RANK", "0")]).contains("PMI_SIZE"));
        assert!(with(&[(RANK, "2"), (SIZE, "2")]).contains("does not exist"));
        assert!(with(&[(RANK, "0"), (SIZE, "0")]).contains("1 to"));
        assert!(with(&[(RANK, "-1"), (SIZE, "2")]).contains(RANK));
        assert!(with(&[(RANK, "0"), (SIZE, "2"), (SECRET_FILE, "/x")]).contains("both"));
        let no_secret = configuration_error(&[(RENDEZVOUS, "localhost:4000"), (RANK, "0"), (SIZE, "2")]);
        assert!(no_secret.contains(SECRET_FILE));
        let short = [(RENDEZVOUS, "localhost:4000"), (SECRET, "short"), (RANK, "0"), (SIZE, "2")];
        assert!(
            configuration_error(&short).contains("5 bytes") && !configuration_error(&short).contains("short")
        );
    }

    #[test]
    fn timeouts_are_read_from_the_environment() {
        let given = |name: &str, value: &str| limits(&Variables::from_iter([(name.into(), value.into())]));
        assert_eq!(given(JOIN_SECONDS, "7").map(|limits| limits.join_timeout), Ok(Duration::from_secs(7)));
        assert_eq!(
            given(OPERATION_SECONDS, "8").map(|limits| limits.operation_timeout),
            Ok(Duration::from_secs(8))
        );
        assert!(given(JOIN_SECONDS, "0").is_err());
        assert!(given(JOIN_SECONDS, "soon").is_err());
    }
}
