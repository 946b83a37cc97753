//! Which job the environment says this process belongs to.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `CROSSTIE_RANK`, `CROSSTIE_SIZE` | who this is; each wins over what a launcher says |
//! | `OMPI_COMM_WORLD_RANK`, `_SIZE` | set by OpenMPI's mpirun |
//! | `PMI_RANK`, `PMI_SIZE` | set by MPICH's and other PMI launchers |
//! | `PMIX_RANK` | set by PMIx launchers, with no size: `CROSSTIE_SIZE`, or Slurm's |
//! | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | set by Slurm |
//! | `CROSSTIE_RENDEZVOUS` | `host:port` of rank 0 |
//! | `CROSSTIE_LISTEN` | `host:port` that rank 0 binds, when it differs |
//! | `CROSSTIE_SECRET_FILE` | file with the secret, private to its owner |
//! | `CROSSTIE_SECRET` | the secret itself; a file is better, programs pass their environment on |
//! | `CROSSTIE_JOIN_SECONDS`, `CROSSTIE_OPERATION_SECONDS` | [`Limits::join_timeout`], [`Limits::operation_timeout`] |
//!
//! Launchers are asked in this order: mpirun may run inside a Slurm step, whose variables then describe mpirun's
//! daemons and not the ranks.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use super::error::{Error, Result};
use super::limits::{Limits, check_rank};
use super::secret::Secret;
use super::{local, tcp};

const RANK: &str = "CROSSTIE_RANK";
const SIZE: &str = "CROSSTIE_SIZE";
const RENDEZVOUS: &str = "CROSSTIE_RENDEZVOUS";
const LISTEN: &str = "CROSSTIE_LISTEN";
const SECRET: &str = "CROSSTIE_SECRET";
const SECRET_FILE: &str = "CROSSTIE_SECRET_FILE";
const JOIN_SECONDS: &str = "CROSSTIE_JOIN_SECONDS";
const OPERATION_SECONDS: &str = "CROSSTIE_OPERATION_SECONDS";

/// Environment variables; empty ones count as absent.
pub(super) struct Variables(HashMap<OsString, OsString>);

impl Variables {
    pub(super) fn of_process() -> Self {
        Variables(std::env::vars_os().filter(|(_, value)| !value.is_empty()).collect())
    }

    pub(super) fn get(&self, name: &str) -> Option<&OsString> {
        self.0.get(name.as_ref() as &std::ffi::OsStr)
    }

    fn text(&self, name: &str) -> Result<Option<&str>> {
        self.get(name)
            .map(|value| value.to_str().ok_or_else(|| Error::Configuration(format!("{name} is not UTF-8"))))
            .transpose()
    }
}

/// A variable that must be there and be a number.
pub(super) fn number<N: FromStr>(variables: &Variables, name: &str) -> Result<N> {
    optional_number(variables, name)?.ok_or_else(|| Error::Configuration(format!("{name} is not set")))
}

fn optional_number<N: FromStr>(variables: &Variables, name: &str) -> Result<Option<N>> {
    let parse = |text: &str| {
        text.parse()
            .map_err(|_| Error::Configuration(format!("{name} is {text:?}, which is not a number in range")))
    };
    variables.text(name)?.map(parse).transpose()
}

/// What the environment asks for.
#[derive(Debug)]
pub(super) enum Job {
    /// A rank that this library spawned.
    Local,
    /// A rank that meets the others at an address.
    Tcp(tcp::Config),
    /// A rank of an MPI launcher, without an address: MPI itself must connect it.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code))]
    Mpi,
    /// Nothing: the program was simply started.
    SingleRank,
}

impl Job {
    pub(super) fn of(variables: &Variables, limits: Limits) -> Result<Self> {
        if variables.get(local::RANK).is_some() {
            return Ok(Job::Local);
        }
        let launcher = Launcher::of(variables)?;
        let explicit = variables.get(RANK).or(variables.get(SIZE)).is_some();
        let rank = optional_number(variables, RANK)?.or(launcher.as_ref().map(|launcher| launcher.rank));
        let size = optional_number(variables, SIZE)?.or(launcher.as_ref().and_then(|launcher| launcher.size));
        let Some(rendezvous) = variables.text(RENDEZVOUS)? else {
            return match launcher {
                _ if explicit => Err(Error::Configuration(format!(
                    "{RANK} or {SIZE} is set, but {RENDEZVOUS} is not: set it to host:port of rank 0"
                ))),
                Some(Launcher { size: Some(1), .. }) | None => Ok(Job::SingleRank),
                Some(launcher) if cfg!(feature = "mpi") && launcher.speaks_mpi => Ok(Job::Mpi),
                Some(launcher) if launcher.certain => Err(Error::Configuration(format!(
                    "{} started this as rank {} of several, but there is no way to reach the others: set {RENDEZVOUS} \
                     to host:port of rank 0 and {SECRET_FILE}, or build with the feature `mpi`",
                    launcher.name, launcher.rank
                ))),
                Some(_) => Ok(Job::SingleRank),
            };
        };
        let Some(rank) = rank else {
            return Err(Error::Configuration(format!(
                "{RENDEZVOUS} is set, but not this process's rank: set {RANK}, or start with mpirun or srun"
            )));
        };
        let Some(size) = size else {
            return Err(Error::Configuration(format!(
                "the rank is {rank}, but of how many is unknown: set {SIZE}"
            )));
        };
        check_rank(rank, size)?;
        Ok(Job::Tcp(tcp::Config {
            rank,
            size,
            rendezvous: rendezvous.to_owned(),
            listen: variables.text(LISTEN)?.map(str::to_owned),
            secret: secret(variables)?,
            limits,
        }))
    }
}

/// The limits that the environment asks for; the defaults where it is silent.
pub(super) fn limits(variables: &Variables) -> Result<Limits> {
    let seconds = |name, default: Duration| -> Result<Duration> {
        match optional_number::<u32>(variables, name)? {
            Some(0) => Err(Error::Configuration(format!("{name} is 0: give at least 1"))),
            given => Ok(given.map_or(default, |seconds| Duration::from_secs(seconds.into()))),
        }
    };
    let defaults = Limits::default();
    Ok(Limits {
        join_timeout: seconds(JOIN_SECONDS, defaults.join)?,
        operation_timeout: seconds(OPERATION_SECONDS, defaults.operation)?,
        ..defaults
    })
}

pub(super) fn secret(variables: &Variables) -> Result<Secret> {
    match (variables.get(SECRET_FILE), variables.get(SECRET)) {
        (Some(_), Some(_)) => Err(Error::Configuration(format!(
            "both {SECRET_FILE} and {SECRET} are set: keep the file, unset the other"
        ))),
        (Some(path), None) => Secret::from_file(Path::new(path)),
        (None, Some(secret)) => Secret::new(secret.as_encoded_bytes()),
        (None, None) => Err(Error::Configuration(format!(
            "the job has no secret: run `(umask 077; head -c 32 /dev/urandom | base64 > FILE)`, give FILE to every rank, and set \
             {SECRET_FILE}"
        ))),
    }
}

/// Who started this process, by its variables.
struct Launcher {
    name: &'static str,
    rank: u32,
    size: Option<u32>,
    speaks_mpi: bool,
    /// These variables are set for ranks only. (Slurm sets its own in a batch script, too, which is no rank.)
    certain: bool,
}

impl Launcher {
    fn of(variables: &Variables) -> Result<Option<Self>> {
        for (name, rank, size) in [
            ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("a PMI launcher", "PMI_RANK", "PMI_SIZE"),
        ] {
            if let Some(rank) = optional_number(variables, rank)? {
                let size = Some(number(variables, size)?);
                return Ok(Some(Launcher { name, rank, size, speaks_mpi: true, certain: true }));
            }
        }
        let slurm_rank: Option<u32> = optional_number(variables, "SLURM_PROCID")?;
        let step_size = optional_number(variables, "SLURM_STEP_NUM_TASKS")?;
        let slurm_size = step_size.or(optional_number(variables, "SLURM_NTASKS")?);
        if let Some(rank) = optional_number(variables, "PMIX_RANK")? {
            let size = slurm_size.filter(|_| slurm_rank == Some(rank));
            return Ok(Some(Launcher {
                name: "a PMIx launcher",
                rank,
                size,
                speaks_mpi: true,
                certain: true,
            }));
        }
        let certain = step_size.is_some();
        Ok(slurm_rank.map(|rank| Launcher {
            name: "Slurm",
            rank,
            size: slurm_size,
            speaks_mpi: false,
            certain,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(variables: &[(&str, &str)]) -> Result<Job> {
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        Job::of(&Variables(variables), Limits::default())
    }

    fn tcp(variables: &[(&str, &str)]) -> (u32, u32) {
        let met = [(RENDEZVOUS, "localhost:4000"), (SECRET, "0123456789abcdef")];
        match job(&[variables, &met].concat()) {
            Ok(Job::Tcp(config)) => (config.rank, config.size),
            other => panic!("expected TCP, got {other:?}"),
        }
    }

    fn complaint(variables: &[(&str, &str)]) -> String {
        match job(variables) {
            Err(Error::Configuration(text)) => text,
            other => panic!("expected a complaint, got {other:?}"),
        }
    }

    #[test]
    fn every_launcher_is_understood() {
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
    fn explicit_variables_and_inner_launchers_win() {
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
    fn nothing_set_is_a_job_of_one() {
        assert!(matches!(job(&[]), Ok(Job::SingleRank)));
        assert!(matches!(
            job(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")]),
            Ok(Job::SingleRank)
        ));
        // A batch script of Slurm: it has the variables but is nobody's rank.
        assert!(matches!(job(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]), Ok(Job::SingleRank)));
        assert!(matches!(job(&[(local::RANK, "1")]), Ok(Job::Local)));
    }

    #[test]
    fn an_mpi_launcher_without_a_rendezvous_needs_the_feature() {
        let launched = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")];
        if cfg!(feature = "mpi") {
            assert!(matches!(job(&launched), Ok(Job::Mpi)));
        } else {
            assert!(complaint(&launched).contains(RENDEZVOUS));
        }
        let step = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2")];
        assert!(complaint(&step).contains(RENDEZVOUS));
    }

    #[test]
    fn contradictions_and_gaps_are_named() {
        let met = [(RENDEZVOUS, "localhost:4000"), (SECRET, "0123456789abcdef")];
        let with = |more: &[(&str, &str)]| complaint(&[&met[..], more].concat());
        assert!(complaint(&[(RANK, "0"), (SIZE, "2")]).contains(RENDEZVOUS));
        assert!(with(&[]).contains(RANK));
        assert!(with(&[(RANK, "0")]).contains(SIZE));
        assert!(with(&[("PMIX_RANK", "0")]).contains(SIZE));
        assert!(with(&[("PMI_RANK", "0")]).contains("PMI_SIZE"));
        assert!(with(&[(RANK, "2"), (SIZE, "2")]).contains("does not exist"));
        assert!(with(&[(RANK, "0"), (SIZE, "0")]).contains("1 to"));
        assert!(with(&[(RANK, "-1"), (SIZE, "2")]).contains(RANK));
        assert!(with(&[(RANK, "0"), (SIZE, "2"), (SECRET_FILE, "/x")]).contains("both"));
        let no_secret = complaint(&[(RENDEZVOUS, "localhost:4000"), (RANK, "0"), (SIZE, "2")]);
        assert!(no_secret.contains(SECRET_FILE));
        let short = [(RENDEZVOUS, "localhost:4000"), (SECRET, "short"), (RANK, "0"), (SIZE, "2")];
        assert!(complaint(&short).contains("5 bytes") && !complaint(&short).contains("short"));
    }

    #[test]
    fn times_come_from_the_environment() {
        let given = |name: &str, value: &str| limits(&Variables([(name.into(), value.into())].into()));
        assert_eq!(given(JOIN_SECONDS, "7").map(|limits| limits.join_timeout), Ok(Duration::from_secs(7)));
        assert_eq!(given(OPERATION_SECONDS, "8").map(|limits| limits.operation_timeout), Ok(Duration::from_secs(8)));
        assert!(given(JOIN_SECONDS, "0").is_err());
        assert!(given(JOIN_SECONDS, "soon").is_err());
    }
}
