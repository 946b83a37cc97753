//! A small key-value service between two processes: typed methods, and a client that awaits its calls.
//!
//! Started without further settings, it starts its second process itself:
//!
//! ```text
//! cargo run --release --example copyrpc_service
//! ```
//!
//! In two terminals, or on two hosts, start it like `copyrpc_echo`: `copyrpc_service [DEVICE [KEYS]]`.

mod pair;

use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

use crosstie::copyrpc::service::{self, Client, Deferred, Driver, Method, Refused, Service};
use crosstie::copyrpc::{Config, ConnectionConfig, Context};
use crosstie::device::{ConnectConfig, DeviceSpec};
use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// Calls in flight at a time.
const DEPTH: usize = 64;

#[derive(Clone, Copy, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Pair {
    key: u64,
    value: u64,
}

/// Stores a value. Returns the number of keys.
struct Put;
impl Method for Put {
    const ID: u32 = 1;
    type Request = Pair;
    type Response = u64;
}

/// Returns the value of a key. Refused if the key does not exist.
struct Get;
impl Method for Get {
    const ID: u32 = 2;
    type Request = u64;
    type Response = u64;
}
const NO_SUCH_KEY: Refused = Refused(1);

/// Returns the next value that is stored under a key. The reply is sent when that happens.
struct Watch;
impl Method for Watch {
    const ID: u32 = 3;
    type Request = u64;
    type Response = u64;
}

/// Ends the server.
struct Stop;
impl Method for Stop {
    const ID: u32 = 4;
    type Request = ();
    type Response = ();
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let device: DeviceSpec = arguments.next().unwrap_or("software".into()).parse()?;
    let keys: u64 = arguments.next().unwrap_or("100000".into()).parse()?;

    let mut job = pair::join()?;
    if job.rank() == 0 {
        let context = Context::open(&device, &Config::default())?;
        let connection = context.create_connection(&ConnectionConfig::default())?;
        connection.connect(
            &pair::exchange_addresses(&mut job, &connection.address())?,
            &ConnectConfig::default(),
        )?;
        job.barrier()?;
        serve(&context, || connection.failure())?;
        // Neither process closes its connection before the other has its last response.
        job.barrier()?;
    } else {
        let driver = Driver::new(Context::open(&device, &Config::default())?);
        let client = driver.create_client(&ConnectionConfig::default())?;
        client.connect(&pair::exchange_addresses(&mut job, &client.address())?, &ConnectConfig::default())?;
        job.barrier()?;
        driver.run_until(call(client.clone(), keys))?;
        job.barrier()?;
    }
    job.finish()?;
    Ok(())
}

#[derive(Default)]
struct Store {
    values: HashMap<u64, u64>,
    watchers: HashMap<u64, Vec<Deferred<Watch, ()>>>,
    is_stopped: bool,
}

fn serve(
    context: &Context<()>,
    failure: impl Fn() -> Option<crosstie::copyrpc::Failure>,
) -> Result<(), Box<dyn Error>> {
    let mut service = Service::new(Store::default())
        .on::<Stop>(|store: &mut Store, ()| store.is_stopped = true)
        .defer::<Watch>(|store, key, reply| store.watchers.entry(key).or_default().push(reply))
        .try_on::<Get>(|store, key| store.values.get(&key).copied().ok_or(NO_SUCH_KEY))
        .on::<Put>(|store, Pair { key, value }| {
            store.values.insert(key, value);
            for watcher in store.watchers.remove(&key).into_iter().flatten() {
                // An error means that the watcher's connection has ended.
                watcher.send(value).ok();
            }
            store.values.len() as u64
        });
    while !service.state().is_stopped {
        if service.poll(context, |(), _| ()) == 0 {
            context.wait(Duration::from_millis(10));
        }
        if let Some(failure) = failure() {
            return Err(failure.into());
        }
    }
    context.flush();
    println!("server: {:?}", service.counters());
    Ok(())
}

async fn call(client: Client, keys: u64) -> Result<(), service::Error> {
    let watched = client.call::<Watch>(keys.saturating_sub(1));
    let begin = Instant::now();
    let keys: Vec<u64> = (0..keys).collect();
    for keys in keys.chunks(DEPTH) {
        // The calls are sent now, not only when they are awaited.
        let calls = keys.iter().map(|&key| client.call::<Put>(Pair { key, value: key * key }));
        for call in calls.collect::<Vec<_>>() {
            call.await?;
        }
        let calls = keys.iter().map(|&key| (key, client.call::<Get>(key)));
        for (key, call) in calls.collect::<Vec<_>>() {
            assert_eq!(call.await?, key * key);
        }
    }
    let rate = 2.0 * keys.len() as f64 / begin.elapsed().as_secs_f64();
    println!("client: {} keys stored and read, {rate:.0} calls per second", keys.len());
    println!("client: the watched key got the value {}", watched.await?);
    match client.call::<Get>(u64::MAX).await {
        Err(service::Error::Refused(NO_SUCH_KEY)) => println!("client: an unknown key is refused"),
        answer => println!("client: unexpected response for an unknown key: {answer:?}"),
    }
    client.call::<Stop>(()).await
}
