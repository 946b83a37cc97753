//! The counters of a context as Prometheus text, and a small HTTP server for it.

use core::fmt::Write as _;
use core::time::Duration;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, PoisonError};

use super::Violation;
use super::agreement::Role;
use super::context::{Context, Rails};
use super::counters::{Counters, RailCounters};
use super::error::SetupError;
use crate::process::{Creator, OwnThread};

/// How long a client of the endpoint may take for its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest request.
const MAX_REQUEST: usize = 8 << 10;

/// A counter of a rail: name, help and value.
type RailMetric = (&'static str, &'static str, &'static str, fn(&RailCounters) -> u64);

const RAIL_METRICS: [RailMetric; 15] = [
    ("bytes_total", "counter", "Payload bytes sent or received.", |r| r.bytes),
    ("work_requests_total", "counter", "Work requests posted to send queues.", |r| r.work_requests),
    ("payload_requests_total", "counter", "Work requests with payload or the end of a message.", |r| {
        r.payload_requests
    }),
    ("completions_total", "counter", "Completions polled.", |r| r.completions),
    ("receives_total", "counter", "Parts of messages received.", |r| r.receives),
    ("retries_total", "counter", "Posts that found a queue full.", |r| r.retries),
    ("replays_total", "counter", "Parts lost with the rail and sent again.", |r| r.replays),
    ("replayed_bytes_total", "counter", "Bytes lost with the rail and sent again.", |r| r.replayed_bytes),
    ("probes_total", "counter", "Empty WRITEs posted to test the rail.", |r| r.probes),
    ("failures_total", "counter", "How often the rail failed.", |r| r.failures),
    ("returns_total", "counter", "How often the rail came back.", |r| r.returns),
    ("up", "gauge", "Whether the rail is in use.", |r| r.is_up.into()),
    ("rate_bytes_per_second", "gauge", "Average rate.", |r| r.rate * 1_000_000),
    ("p50_nanoseconds", "gauge", "Median time of a part.", |r| r.p50_ns),
    ("p99_nanoseconds", "gauge", "99th percentile of the time of a part.", |r| r.p99_ns),
];

impl Rails {
    /// The counters of all open connections in the text format of Prometheus.
    pub fn metrics(&self) -> String {
        metrics(&self.context)
    }

    /// Serves [`Rails::metrics`] over HTTP at `address`, until the result is dropped. There is no authentication: use a loopback
    /// address, or one that only the monitoring reaches.
    pub fn serve_metrics(&self, address: impl ToSocketAddrs) -> Result<MetricsServer, SetupError> {
        let os = |source| SetupError::Os { what: "serving the metrics of rails", source };
        let socket = TcpListener::bind(address).map_err(os)?;
        let at = socket.local_addr().map_err(os)?;
        let (context, stop) = (self.context.clone(), Arc::new(AtomicBool::new(false)));
        let thread = std::thread::Builder::new()
            .name("crosstie-metrics".into())
            .spawn({
                let stop = stop.clone();
                move || {
                    while let Ok((stream, _)) = socket.accept() {
                        if stop.load(Relaxed) {
                            return;
                        }
                        // A client that does not read its answer is its own problem.
                        answer(stream, &context).ok();
                    }
                }
            })
            .map_err(os)?;
        Ok(MetricsServer { address: at, stop, thread: Some(thread.into()), creator: Creator::this_process() })
    }
}

/// Serves metrics until it is dropped, see [`Rails::serve_metrics`].
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<OwnThread>,
    creator: Creator,
}

impl MetricsServer {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        // In a forked child the thread is still its parent's.
        if !self.creator.is_this_process() {
            return;
        }
        self.stop.store(true, Relaxed);
        // Wakes the thread, which blocks in `accept`. It is left alone if that does not work.
        if TcpStream::connect_timeout(&self.address, REQUEST_TIMEOUT).is_ok()
            && let Some(thread) = self.thread.take()
        {
            thread.join();
        }
    }
}

fn answer(mut stream: TcpStream, context: &Context) -> io::Result<()> {
    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let count = stream.read(&mut buffer)?;
        if count == 0 || request.len() + count > MAX_REQUEST {
            return Ok(());
        }
        request.extend_from_slice(&buffer[..count]);
    }
    let (status, body) = if request.starts_with(b"GET /metrics ") || request.starts_with(b"GET / ") {
        ("200 OK", metrics(context))
    } else {
        ("404 Not Found", "The metrics are at /metrics.\n".to_owned())
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

fn metrics(context: &Context) -> String {
    let connections: Vec<(&'static str, u64, Counters)> = {
        let weak = context.connections.lock().unwrap_or_else(PoisonError::into_inner);
        weak.iter()
            .filter_map(|weak| weak.upgrade())
            .map(|counters| {
                let role = if counters.role == Role::Sender { "send" } else { "recv" };
                (role, counters.id, counters.snapshot())
            })
            .collect()
    };
    let mut out = String::new();
    // Writing to a string does not fail.
    write_metrics(&mut out, &connections).ok();
    out
}

fn write_metrics(out: &mut String, connections: &[(&str, u64, Counters)]) -> core::fmt::Result {
    for (name, kind, help, value) in RAIL_METRICS {
        writeln!(out, "# HELP crosstie_rail_{name} {help}\n# TYPE crosstie_rail_{name} {kind}")?;
        for (role, id, counters) in connections {
            for (rail, cells) in counters.rails.iter().enumerate() {
                let value = value(cells);
                writeln!(
                    out,
                    "crosstie_rail_{name}{{connection=\"{id}\",role=\"{role}\",rail=\"{rail}\"}} {value}"
                )?;
            }
        }
    }
    writeln!(out, "# HELP crosstie_rails_messages_total Messages by the rails that they used.")?;
    writeln!(out, "# TYPE crosstie_rails_messages_total counter")?;
    for (role, id, counters) in connections {
        for (mask, count) in counters.masks.iter().enumerate().filter(|(mask, _)| *mask > 0) {
            if mask < 1 << counters.rails.len() {
                writeln!(
                    out,
                    "crosstie_rails_messages_total{{connection=\"{id}\",role=\"{role}\",mask=\"{mask:#x}\"}} {count}"
                )?;
            }
        }
    }
    writeln!(out, "# HELP crosstie_rails_violations_total Violations of the protocol by the peer.")?;
    writeln!(out, "# TYPE crosstie_rails_violations_total counter")?;
    for (role, id, counters) in connections {
        for (kind, count) in Violation::NAMES.iter().zip(counters.violations) {
            writeln!(
                out,
                "crosstie_rails_violations_total{{connection=\"{id}\",role=\"{role}\",kind=\"{kind}\"}} {count}"
            )?;
        }
    }
    Ok(())
}
