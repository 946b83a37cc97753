//! Calls between two processes, on one machine or two.
//!
//! Started without further settings, it starts its second process itself:
//!
//! ```text
//! cargo run --release --example copyrpc_echo
//! ```
//!
//! In two terminals, or on two hosts with an RDMA device each (`--features verbs`, device for example `verbs:r0`):
//!
//! ```text
//! (umask 077; head -c 32 /dev/urandom | base64 > secret); export CROSSTIE_SECRET_FILE=secret  # the same for both
//! CROSSTIE_RENDEZVOUS=127.0.0.1:7099 CROSSTIE_SIZE=2 CROSSTIE_RANK=0 copyrpc_echo [DEVICE [CALLS]]
//! CROSSTIE_RENDEZVOUS=127.0.0.1:7099 CROSSTIE_SIZE=2 CROSSTIE_RANK=1 copyrpc_echo [DEVICE [CALLS]]
//! ```

mod pair;

use std::error::Error;
use std::time::{Duration, Instant};

use crosstie::copyrpc::{Config, Connection, ConnectionConfig, Context, NotReplied, Request};
use crosstie::device::{ConnectConfig, DeviceSpec};

/// Calls in flight at a time.
const DEPTH: u64 = 64;
/// The request that ends the server.
const STOP: &[u8] = b"stop";

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let device: DeviceSpec = arguments.next().unwrap_or("software".into()).parse()?;
    let calls: u64 = arguments.next().unwrap_or("100000".into()).parse()?;

    let mut job = pair::join()?;
    let context = Context::open(&device, &Config::default())?;
    let connection = context.create_connection(&ConnectionConfig::default())?;
    let peer = pair::exchange_addresses(&mut job, &connection.address())?;
    connection.connect(&peer, &ConnectConfig::default())?;
    job.barrier()?;
    match job.rank() {
        0 => serve(&context, &connection)?,
        _ => call(&context, &connection, calls)?,
    }
    // Neither process closes its connection before the other has its last response.
    job.barrier()?;
    job.finish()?;
    Ok(())
}

fn serve(context: &Context<u64>, connection: &Connection<u64>) -> Result<(), Box<dyn Error>> {
    let mut server = Server { bytes: [0; 64], served: 0, is_stopped: false, failed: None };
    loop {
        if context.serve(&mut server, Server::echo, |_, _, _| ()) == 0 && server.served == 0 {
            context.wait(Duration::from_millis(10));
        }
        if let Some(cause) = server.failed {
            return Err(cause.into());
        }
        if server.is_stopped {
            context.flush();
            println!("server: {} calls answered", server.served);
            return Ok(());
        }
        if let Some(failure) = connection.failure() {
            return Err(failure.into());
        }
    }
}

struct Server {
    bytes: [u8; 64],
    served: u64,
    is_stopped: bool,
    failed: Option<NotReplied>,
}

impl Server {
    /// Answers a request where it has arrived.
    fn echo(&mut self, request: Request<'_, u64>) {
        let len = request.data().copy_to(&mut self.bytes);
        let bytes = &self.bytes[..len];
        match request.reply(bytes) {
            Ok(()) if bytes == STOP => self.is_stopped = true,
            Ok(()) => self.served += 1,
            Err(error) => self.failed = Some(error.cause),
        }
    }
}

fn call(context: &Context<u64>, connection: &Connection<u64>, calls: u64) -> Result<(), Box<dyn Error>> {
    let begin = Instant::now();
    let (mut made, mut answered, mut wrong) = (0, 0, None);
    while answered < calls {
        while made < calls && made - answered < DEPTH {
            match connection.call(&made.to_le_bytes(), 8, made) {
                Ok(()) => made += 1,
                Err(error) if error.cause.is_back_pressure() => break,
                Err(error) => return Err(error.cause.into()),
            }
        }
        answered += context.poll(|number, answer| match answer {
            Ok(echo) if echo.read::<u64>() == Some(number.to_le()) => {}
            Ok(_) => wrong = Some(format!("call {number}: wrong echo")),
            Err(cause) => wrong = Some(format!("call {number}: {cause}")),
        }) as u64;
        if let Some(wrong) = wrong {
            return Err(wrong.into());
        }
    }
    let took = begin.elapsed();
    let counters = context.counters();
    println!(
        "client: {calls} calls answered, {:.0} per second, {:.1} messages per WRITE",
        calls as f64 / took.as_secs_f64(),
        counters.batched as f64 / counters.batches.max(1) as f64,
    );
    connection.call(STOP, STOP.len(), calls)?;
    while context.poll(|_, _| ()) == 0 {}
    Ok(())
}
