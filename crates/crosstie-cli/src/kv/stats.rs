//! `crosstie kv stats`: the statistics of each daemon of each node.

use crosstie_kv::client::{self, Client};
use crosstie_kv::store::ShardStats;
use serde::Serialize;

use super::Target;
use crate::error::Error;
use crosstie_bench::table;
use crosstie_bench::units::bytes;

/// Show keys, memory and requests of every daemon of every node.
///
/// A node that cannot be reached is shown as gone, and one that does not respond in time as silent; neither is an error.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    target: Target,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Cluster {
    name: String,
    /// That of the node that the command attached to.
    rank: u32,
    backend: &'static str,
    nodes: Vec<Node>,
}

#[derive(Serialize)]
struct Node {
    rank: u32,
    /// "up", "gone" or "silent".
    state: &'static str,
    /// Empty if the node is not up.
    daemons: Vec<Shard>,
}

/// The fields of [`ShardStats`].
#[derive(Serialize)]
struct Shard {
    daemon: u32,
    words: u64,
    strings: u64,
    bytes: u64,
    limit: u64,
    gets: u64,
    hits: u64,
    puts: u64,
    deletes: u64,
    inserts: u64,
    swaps: u64,
    mismatches: u64,
    out_of_memory: u64,
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Error> {
    let mut client = arguments.target.attach()?;
    let info = *client.info();
    let nodes = (0..info.nodes).map(|rank| node_stats(&mut client, rank)).collect::<Result<_, _>>()?;
    let backend = info.backend.as_str();
    let cluster = Cluster { name: arguments.target.name.clone(), rank: info.rank, backend, nodes };
    crate::print(&if arguments.json { crate::json(&cluster)? } else { cluster.table() })
}

fn node_stats(client: &mut Client, rank: u32) -> Result<Node, Error> {
    let mut daemons = Vec::new();
    for daemon in 0..client.info().daemons {
        match client.stats(rank, daemon) {
            Ok(stats) => daemons.push(Shard::new(daemon, &stats)),
            // Its daemons may have responded before, but the node is gone now.
            Err(client::Error::NodeGone { .. }) => return Ok(Node { rank, state: "gone", daemons: vec![] }),
            // The node that the command attached to must respond.
            Err(client::Error::TimedOut { .. }) if rank != client.info().rank => {
                return Ok(Node { rank, state: "silent", daemons: vec![] });
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Node { rank, state: "up", daemons })
}

impl Shard {
    fn new(daemon: u32, stats: &ShardStats) -> Shard {
        let &ShardStats { words, strings, bytes, limit, gets, hits, puts, deletes, inserts, swaps, .. } =
            stats;
        let &ShardStats { mismatches, out_of_memory, .. } = stats;
        Shard {
            daemon,
            words,
            strings,
            bytes,
            limit,
            gets,
            hits,
            puts,
            deletes,
            inserts,
            swaps,
            mismatches,
            out_of_memory,
        }
    }
}

impl Cluster {
    fn table(&self) -> String {
        let heads = ["rank", "daemon", "words", "strings", "memory", "limit", "gets", "hits", "puts"];
        let mut rows = vec![heads.map(str::to_owned)];
        for node in &self.nodes {
            if node.daemons.is_empty() {
                let mut row = heads.map(|_| "-".to_owned());
                (row[0], row[1]) = (node.rank.to_string(), node.state.to_owned());
                rows.push(row);
            }
            for shard in &node.daemons {
                rows.push([
                    node.rank.to_string(),
                    shard.daemon.to_string(),
                    shard.words.to_string(),
                    shard.strings.to_string(),
                    bytes(shard.bytes),
                    bytes(shard.limit),
                    shard.gets.to_string(),
                    shard.hits.to_string(),
                    shard.puts.to_string(),
                ]);
            }
        }
        table::figures(&rows)
    }
}
