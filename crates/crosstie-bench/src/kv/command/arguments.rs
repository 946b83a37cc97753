//! The options of `bench kv`.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Error;
use crate::kv::{Cores, Plan};
use crate::workload;
use crosstie::device::DeviceSpec;
use crosstie_kv::Backend;

/// The key-value store on a cluster of nodes and their clients.
///
/// By default it starts all nodes as processes on this machine. Under mpirun, or with a rendezvous, each rank is one node; for a
/// rendezvous start the same command on each machine with CROSSTIE_RENDEZVOUS, CROSSTIE_RANK, CROSSTIE_SIZE and
/// CROSSTIE_SECRET_FILE set. Ctrl-C ends the benchmark and prints what was measured so far.
#[derive(Clone, Debug, clap::Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[command(allow_negative_numbers = true)]
pub struct Arguments {
    /// How requests reach other nodes. With two backends, separated by a comma, their runs alternate and the JSON is an array.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "delegation")]
    pub(crate) backend: Vec<Backend>,
    /// Nodes of the cluster; by default 1, or the number of ranks of the launcher.
    #[arg(long, value_name = "N")]
    pub(crate) nodes: Option<u32>,
    /// Daemon threads of each node; each owns one shard.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) daemons: u32,
    /// Clients of each node. One thread runs several clients if there are not enough cores for a thread each.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) clients: u32,
    /// Operations that each client has in flight, at most.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) queue_depth: u32,
    /// Share of gets, 0 to 1; the others are puts.
    #[arg(long, value_name = "F", default_value_t = 0.5)]
    pub(crate) read_ratio: f64,
    /// Keys in the cluster. A client repeats a list of at most 1048576 requests; with more keys than all lists have, some are never used, and a warning says how many.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub(crate) keys: u64,
    /// Exponent of the Zipf distribution of keys; 0 is uniform.
    #[arg(long, value_name = "THETA", default_value_t = 0.0)]
    pub(crate) zipf: f64,
    /// Number of runs; the result is their median. On one machine each run starts its own cluster, except with --check.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) runs: u32,
    /// Measured seconds, all runs together.
    #[arg(long, value_name = "S", default_value_t = 3.0)]
    pub(crate) duration: f64,
    /// Bytes of a value. With 8, keys and values are integers; otherwise they are byte strings, with at most 16 operations in flight per client, and take the same way with both backends.
    // Scripts may use the former name.
    #[arg(long, alias = "value-size", value_name = "BYTES", default_value_t = 8)]
    pub(crate) payload: usize,
    /// Share of operations on keys of the client's own node, 0 to 1; by default as the keys are distributed.
    #[arg(long, value_name = "F")]
    pub(crate) local_share: Option<f64>,
    /// Open loop: start operations at this rate per second, all clients together, without waiting for responses.
    #[arg(long, value_name = "RATE")]
    pub(crate) open: Option<f64>,
    /// Run each client as a separate process, not on a thread of its node.
    #[arg(long)]
    pub(crate) processes: bool,
    /// Seed of the workload.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Device that connects the nodes: software, verbs:NAME[/PORT[/GID]] or fault:SEED[/KIND=N]...:DEVICE.
    #[arg(long, value_name = "SPEC", default_value = "software")]
    #[serde(with = "text")]
    pub(crate) device: DeviceSpec,
    /// Record all operations, a million at most, and check that the history is linearizable.
    #[arg(long)]
    pub(crate) check: bool,
    /// Cores to pin to, first the daemons and then the client threads of each node: auto, none, or a list such as 0,1,4.
    #[arg(long, value_name = "LIST", default_value = "auto")]
    #[serde(with = "text")]
    pub(crate) cores: Cores,
    /// Measure all combinations of options in a TOML file, see docs/method.md; options given here apply to what it leaves out.
    #[arg(long, value_name = "FILE.toml")]
    #[serde(skip)]
    pub(crate) plan: Option<PathBuf>,
    /// Write the results to NAME.json and a report to NAME.html; with --plan, the default is the plan's name unless --json is given.
    #[arg(short, long, value_name = "NAME")]
    #[serde(skip)]
    pub(crate) output: Option<PathBuf>,
    /// Print JSON to standard output instead of a table.
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

/// A value is the text that the command line takes.
mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(super) fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<T, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

impl Arguments {
    /// Two nodes with both backends.
    #[cfg(test)]
    pub(crate) fn example() -> Arguments {
        Arguments {
            backend: vec![Backend::Meta, Backend::Delegation],
            nodes: Some(2),
            daemons: 2,
            clients: 4,
            queue_depth: 4,
            read_ratio: 0.5,
            keys: 100_000,
            zipf: 0.0,
            runs: 5,
            duration: 5.0,
            payload: 8,
            local_share: None,
            open: None,
            processes: false,
            seed: 1,
            device: DeviceSpec::Software,
            check: false,
            cores: Cores::Auto,
            plan: None,
            output: None,
            json: false,
        }
    }

    /// The plan of the benchmark that these options describe.
    pub(crate) fn plan(&self, launcher: &str) -> Result<Plan, Error> {
        let mut backends = self.backend.clone();
        backends.dedup();
        let duration = Duration::try_from_secs_f64(self.duration)
            .map_err(|_| Error::Usage(format!("--duration {}: give seconds above 0", self.duration)))?;
        Ok(Plan {
            backends,
            daemons: self.daemons,
            clients: self.clients,
            queue_depth: self.queue_depth,
            workload: workload::Plan {
                keys: self.keys,
                read_ratio: self.read_ratio,
                zipf: (self.zipf != 0.0).then_some(self.zipf),
                value_size: self.payload,
                local_share: self.local_share,
                seed: self.seed,
                ..workload::Plan::default()
            }
            .with_entries_for(u64::from(self.clients) * u64::from(self.nodes.unwrap_or(1))),
            rate: self.open,
            runs: self.runs,
            duration,
            processes: self.processes.then(|| vec!["bench".into(), "kv-client".into()]),
            check: self.check,
            device: self.device.clone(),
            cores: self.cores.clone(),
            launcher: launcher.to_owned(),
        })
    }

    /// The same options with another value of one of them.
    pub(super) fn with(&self, name: &str, value: &Value) -> Result<Arguments, String> {
        let mut options = serde_json::to_value(self).map_err(|error| error.to_string())?;
        let Some(option) = options.get_mut(name) else {
            return Err(format!("there is no option {name}: see `crosstie bench kv --help`"));
        };
        *option = value.clone();
        // NaN and infinity become null in JSON, which stands for an option that was not given.
        let changed = serde_json::from_value(options).ok().filter(|_| !value.is_null());
        changed.ok_or_else(|| {
            format!(
                "{name}: this is neither a value of this option nor a list of values: see `crosstie bench kv --help`"
            )
        })
    }

    /// The same options as a command line, for the other ranks.
    pub(super) fn to_args(&self) -> Result<Vec<String>, Error> {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let mut words = vec!["bench".to_owned(), "kv".to_owned()];
        for (name, value) in serde_json::to_value(self)?.as_object().into_iter().flatten() {
            match value {
                Value::Null | Value::Bool(false) => {}
                Value::Bool(true) => words.push(format!("--{name}")),
                Value::Array(all) => {
                    words.push(format!("--{name}={}", all.iter().map(text).collect::<Vec<_>>().join(",")));
                }
                value => words.push(format!("--{name}={}", text(value))),
            }
        }
        Ok(words)
    }
}
