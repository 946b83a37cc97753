//! UCX: active messages over shared memory, between two processes on two cores.

use std::collections::HashMap;
use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::{Figures, python, run_program};
use crate::error::{Error, with_path};
use crate::packages::Packages;
use crate::process::{self, killed_with_parent, run_for_output, with_timeout};
use crate::workspace;

/// The longest time that one measurement may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// UCX's transports between processes of one machine.
const TRANSPORTS: (&str, &str) = ("UCX_TLS", "posix,sysv,cma,self");

/// The release that is measured, a package of PyPI.
const PACKAGE: (&str, &str) = ("libucx-cu12", "1.22.0");

/// The installed UCX, and a request/reply program that uses it (`ucx_am.c`).
pub(super) struct Ucx {
    pub(super) version: String,
    request_program: PathBuf,
    /// `ucx_perftest`, and where its libraries are.
    perftest: PathBuf,
    libraries: PathBuf,
}

impl Ucx {
    /// Installs UCX if it is missing and compiles the request/reply program.
    pub(super) fn prepare() -> Result<Ucx, Error> {
        ["gcc", "libc6-dev"].into_iter().collect::<Packages>().install()?;
        let ucx = python::modules(&python::install(PACKAGE.0, PACKAGE.1)?)?.join("libucx");
        let libraries = ucx.join("lib");
        let directory = workspace::target().join("peers");
        fs::create_dir_all(&directory).map_err(with_path(&directory))?;
        let request_program = directory.join("ucx_am");
        let source = workspace::root().join("xtask/src/peers/ucx_am.c");
        let mut gcc = Command::new("gcc");
        gcc.args(["-O3", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&request_program)
            .arg(source)
            .arg("-isystem")
            .arg(ucx.join("include"))
            .arg("-L")
            .arg(&libraries)
            .arg(format!("-Wl,-rpath,{}", libraries.display()))
            .args(["-lucp", "-lucs"]);
        run_for_output(&mut gcc)?;
        let perftest = ucx.join("bin/ucx_perftest");
        Ok(Ucx { version: PACKAGE.1.into(), request_program, perftest, libraries })
    }

    /// Measures requests and replies of `payload` bytes each, `depth` of them in flight.
    pub(super) fn measure_requests(
        &self,
        payload: usize,
        depth: usize,
        seconds: f64,
        cores: [u64; 2],
    ) -> Result<Figures, Error> {
        let mut command = with_timeout(&self.request_program, TIMEOUT);
        command.args([payload.to_string(), depth.to_string(), seconds.to_string()]);
        command.args(cores.map(|core| core.to_string())).env(TRANSPORTS.0, TRANSPORTS.1);
        run_program(&mut command, "ops_per_s", "p50_ns").map(|(_, figures)| figures)
    }

    /// Runs one test of `ucx_perftest`. It reports the latency of one direction.
    pub(super) fn run_perftest(
        &self,
        test: &str,
        size: usize,
        count: u64,
        cores: [u64; 2],
    ) -> Result<Figures, Error> {
        let port = free_port()?;
        let start = |source| Error::Start { program: "ucx_perftest".into(), source };
        let mut server = killed_with_parent(&self.perftest)
            .env("LD_LIBRARY_PATH", &self.libraries)
            .args(["-p", &port.to_string(), "-c", &cores[1].to_string()])
            .env(TRANSPORTS.0, TRANSPORTS.1)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(start)?;
        let mut client = with_timeout(&self.perftest, TIMEOUT);
        client.env("LD_LIBRARY_PATH", &self.libraries);
        client.args(["127.0.0.1", "-f", "-v", "-t", test]).env(TRANSPORTS.0, TRANSPORTS.1);
        client.args(["-p", &port.to_string(), "-c", &cores[0].to_string()]);
        client.args(["-s", &size.to_string(), "-n", &count.to_string()]);
        let text = wait_until_listening(port).and_then(|()| run_for_output(&mut client));
        // After a successful run the server exits by itself.
        if text.is_err() {
            server.kill().map_err(start)?;
        }
        server.wait().map_err(start)?;
        let text = text?;
        parse_figures(&text)
            .ok_or_else(|| Error::UnexpectedOutput { command: process::command_line(&client), what: text })
    }
}

/// Parses CSV output: names in one line, figures in the next.
fn parse_figures(text: &str) -> Option<Figures> {
    let mut lines = text.lines().skip_while(|line| !line.starts_with("iterations,"));
    let (names, values) = (lines.next()?.split(','), lines.next()?.split(','));
    let found: HashMap<&str, &str> = names.zip(values).collect();
    let number = |name: &str| found.get(name)?.trim().parse::<f64>().ok();
    Some(Figures::new(number("overall_mr")?, 1e3 * number("50.0_percentile_lat")?))
}

fn free_port() -> Result<u16, Error> {
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    port.map(|address| address.port()).map_err(with_path("a port of 127.0.0.1"))
}

/// Waits until a server listens. It does not connect, because the server accepts only one connection.
fn wait_until_listening(port: u16) -> Result<(), Error> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let suffix = format!(":{port:04X} ");
    while Instant::now() < deadline {
        for path in ["/proc/net/tcp", "/proc/net/tcp6"] {
            // Without IPv6 the second file does not exist.
            let table = fs::read_to_string(path).unwrap_or_default();
            let mut rows =
                table.lines().map(|line| line.split_whitespace().skip(1).take(3).collect::<Vec<_>>());
            if rows.any(
                |row| matches!(row.as_slice(), [local, _, "0A"] if format!("{local} ").ends_with(&suffix)),
            ) {
                return Ok(());
            }
        }
        thread::sleep(Duration::from_millis(10));
    }
    Err(Error::UnexpectedOutput {
        command: "ucx_perftest".into(),
        what: format!("it does not listen on port {port}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_perftest_output() {
        let text = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n\
                    200000,0.582,0.577,0.577,52.90,52.90,1733321,1733320\n";
        let found = parse_figures(text).expect("figures");
        assert_eq!((found.p50_ns.round(), found.per_second), (582.0, 1_733_320.0));
        assert!(parse_figures("iterations,avg_lat\n1,2\n").is_none());
        assert!(parse_figures("").is_none());
    }
}
