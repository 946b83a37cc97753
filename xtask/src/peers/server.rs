//! Starts another store to compare with: a server on a Unix socket, without persistence. It ends with this process at the
//! latest.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Cores;
use crate::error::{Error, with_path};
use crate::process::killed_with_parent;

/// The number of keys in every store that is compared, Crosstie included.
pub(super) const KEYS: u32 = 100_000;
/// The number of connections that load a store. For Crosstie it is the number of clients.
pub(super) const CONNECTIONS: usize = 4;
/// How long to wait for a server to start, and for a response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A running server. Dropping it kills the server and removes its directory.
pub(super) struct Server {
    child: Child,
    directory: PathBuf,
    socket: PathBuf,
    program: &'static str,
}

impl Server {
    /// Starts `program` on these cores and waits until it listens. `arguments` returns its arguments for the path of its
    /// socket.
    pub(super) fn start(
        program: &'static str,
        cores: Cores,
        arguments: impl FnOnce(&str) -> Vec<String>,
    ) -> Result<Server, Error> {
        let directory = std::env::temp_dir().join(format!("crosstie-{program}-{}", std::process::id()));
        fs::create_dir_all(&directory).map_err(with_path(&directory))?;
        let socket = directory.join("socket");
        let mut command = killed_with_parent("taskset");
        command.args(["-c", &cores.to_string(), program]).args(arguments(&socket.display().to_string()));
        command.current_dir(&directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|source| Error::Start { program: program.into(), source })?;
        let mut server = Server { child, directory, socket, program };
        let deadline = Instant::now() + RESPONSE_TIMEOUT;
        while UnixStream::connect(&server.socket).is_err() {
            let exited = server.child.try_wait().map_err(with_path(program))?;
            if let Some(status) = exited {
                return Err(server.error(&format!("it ended during its start: {status}")));
            }
            if Instant::now() > deadline {
                return Err(server.error("it does not listen on its socket"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    pub(super) fn socket(&self) -> &std::path::Path {
        &self.socket
    }

    fn error(&self, what: &str) -> Error {
        Error::UnexpectedOutput { command: self.program.into(), what: what.into() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let reaped = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = reaped {
            eprintln!("xtask: {}: {error}", self.program);
        }
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            eprintln!("xtask: {}: {error}", self.directory.display());
        }
    }
}

/// A connection on which the exact bytes of every response are known in advance.
pub(super) struct Connection {
    stream: UnixStream,
    program: &'static str,
    response: Vec<u8>,
}

impl Connection {
    pub(super) fn new(socket: &std::path::Path, program: &'static str) -> Result<Connection, Error> {
        let stream = UnixStream::connect(socket).map_err(with_path(socket))?;
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT)).map_err(with_path(socket))?;
        stream.set_write_timeout(Some(RESPONSE_TIMEOUT)).map_err(with_path(socket))?;
        Ok(Connection { stream, program, response: Vec::new() })
    }

    pub(super) fn send(&mut self, requests: &[u8]) -> Result<(), Error> {
        self.stream.write_all(requests).map_err(with_path(self.program))
    }

    /// Reads a response and compares it with `expected`. Other bytes are an error, and so is a timeout.
    pub(super) fn expect(&mut self, expected: &[u8]) -> Result<(), Error> {
        self.response.resize(expected.len(), 0);
        let mut len = 0;
        while len < expected.len() {
            let more = self.stream.read(&mut self.response[len..]);
            // Compared after every read: a shorter response than expected would otherwise only end in a timeout.
            let more = more.map_err(with_path(self.program))?;
            len += more;
            if more == 0 || self.response[..len] != expected[..len] {
                return Err(Error::UnexpectedOutput {
                    command: self.program.into(),
                    what: format!(
                        "expected {:?}, got {:?}",
                        String::from_utf8_lossy(expected),
                        String::from_utf8_lossy(&self.response[..len])
                    ),
                });
            }
        }
        Ok(())
    }
}

/// Returns the version of an installed Debian package.
pub(super) fn package_version(package: &str) -> Result<String, Error> {
    crate::process::run_for_output(Command::new("dpkg-query").args(["-W", "-f", "${Version}", package]))
}
