//! A store to compare with: a server on a Unix socket, without persistence, that ends with this process at the latest.

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

/// Keys in every store that is compared, ours among them.
pub(super) const KEYS: u32 = 100_000;
/// Connections that load a store, clients being those of ours.
pub(super) const CONNECTIONS: usize = 4;
/// A server that says nothing for so long is stuck.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A server that is running. It is killed, and its directory goes, when this is dropped.
pub(super) struct Server {
    child: Child,
    directory: PathBuf,
    socket: PathBuf,
    program: &'static str,
}

impl Server {
    /// Starts `program` on these cores, with the arguments that `arguments` makes of the path of its socket, and waits
    /// until it listens.
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
            let ended = server.child.try_wait().map_err(with_path(program))?;
            if let Some(status) = ended {
                return Err(server.answer(&format!("it ended at once: {status}")));
            }
            if Instant::now() > deadline {
                return Err(server.answer("it does not listen on its socket"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    pub(super) fn socket(&self) -> &std::path::Path {
        &self.socket
    }

    fn answer(&self, what: &str) -> Error {
        Error::UnexpectedOutput { command: self.program.into(), what: what.into() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let ended = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = ended {
            eprintln!("xtask: {}: {error}", self.program);
        }
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            eprintln!("xtask: {}: {error}", self.directory.display());
        }
    }
}

/// A connection on which every answer is known beforehand, to the byte.
pub(super) struct Connection {
    stream: UnixStream,
    program: &'static str,
    answer: Vec<u8>,
}

impl Connection {
    pub(super) fn new(socket: &std::path::Path, program: &'static str) -> Result<Connection, Error> {
        let stream = UnixStream::connect(socket).map_err(with_path(socket))?;
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT)).map_err(with_path(socket))?;
        stream.set_write_timeout(Some(RESPONSE_TIMEOUT)).map_err(with_path(socket))?;
        Ok(Connection { stream, program, answer: Vec::new() })
    }

    pub(super) fn send(&mut self, requests: &[u8]) -> Result<(), Error> {
        self.stream.write_all(requests).map_err(with_path(self.program))
    }

    /// Takes as many bytes as are expected; others are an error, and so is silence.
    pub(super) fn expect(&mut self, expected: &[u8]) -> Result<(), Error> {
        self.answer.resize(expected.len(), 0);
        let mut len = 0;
        while len < expected.len() {
            let more = self.stream.read(&mut self.answer[len..]);
            // Looked at after every read: an answer of another length would be waited for in vain.
            let more = more.map_err(with_path(self.program))?;
            len += more;
            if more == 0 || self.answer[..len] != expected[..len] {
                return Err(Error::UnexpectedOutput {
                    command: self.program.into(),
                    what: format!(
                        "wanted {:?}, got {:?}",
                        String::from_utf8_lossy(expected),
                        String::from_utf8_lossy(&self.answer[..len])
                    ),
                });
            }
        }
        Ok(())
    }
}

/// The version of a Debian package.
pub(super) fn version(package: &str) -> Result<String, Error> {
    crate::process::run_for_output(Command::new("dpkg-query").args(["-W", "-f", "${Version}", package]))
}
