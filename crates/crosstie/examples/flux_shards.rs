//! Daemons that share a keyspace: each owns the keys of its shard, and calls the others for theirs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use crosstie::flux::{Config, Node, network};

enum Request {
    Put(u64, String),
    Get(u64),
}
/// The value of the key, or its previous value. The token of each call is the expected response.
type Response = Option<String>;

const KEYS_EACH: u64 = 1000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let nodes = network::<Request, Response, Response>(3, &Config::default())?;
    let finished = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for node in nodes {
            scope.spawn(|| daemon(node, &finished));
        }
    });
    Ok(())
}

fn daemon(mut node: Node<Request, Response, Response>, finished: &AtomicUsize) {
    let (me, nodes) = (node.id() as u64, node.nodes() as u64);
    let mut shard = HashMap::new();
    let value = |key: u64| format!("value {key} of daemon {me}");
    // Keys that no other daemon writes, spread over all shards; each is put, then read back.
    let keys = || (0..KEYS_EACH).map(|i| (i * nodes + me) * nodes + i % nodes);
    let puts = keys().map(|key| (key, Request::Put(key, value(key)), None));
    let mut work = puts.chain(keys().map(|key| (key, Request::Get(key), Some(value(key))))).peekable();
    let (mut correct, mut served) = (0, 0);
    while finished.load(SeqCst) < node.nodes() {
        while let Some((key, request, expected)) = work.next_if(|_| node.in_flight() < 32) {
            node.call((key % nodes) as usize, request, expected)
                .expect("there is room for 32 calls, and no daemon ends early");
        }
        served += node.serve(|request| {
            let replied = request.reply_with(|request| match request {
                Request::Put(key, value) => shard.insert(key, value),
                Request::Get(key) => shard.get(&key).cloned(),
            });
            replied.expect("no daemon ends before all have their responses");
        });
        if node.poll(|expected, response| correct += u64::from(response == expected)) > 0
            && correct == 2 * KEYS_EACH
        {
            println!("daemon {me}: {} keys in the shard, {served} requests served so far", shard.len());
            finished.fetch_add(1, SeqCst);
        }
        node.wait(Some(Duration::from_millis(1)));
    }
}
