//! The control channel between the two participants of a case, independent of the device under test: length-prefixed
//! frames over a stream, the same between threads, processes and hosts.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Longer frames are rejected.
const MAX_FRAME: u32 = 1 << 20;

/// One end of the stream to the other participant.
pub(crate) struct Channel {
    stream: Box<dyn Stream>,
}

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

impl Channel {
    /// Both ends; the second one as a socket that can become another process's standard input.
    pub(crate) fn pair(timeout: Duration) -> io::Result<(Channel, UnixStream)> {
        let (near, far) = UnixStream::pair()?;
        Ok((Channel::over_unix(near, timeout)?, far))
    }

    pub(crate) fn over_unix(stream: UnixStream, timeout: Duration) -> io::Result<Channel> {
        stream.set_read_timeout(Some(timeout))?;
        Ok(Channel { stream: Box::new(stream) })
    }

    pub(crate) fn over_descriptor(descriptor: OwnedFd, timeout: Duration) -> io::Result<Channel> {
        Channel::over_unix(UnixStream::from(descriptor), timeout)
    }

    pub(crate) fn over_tcp(stream: TcpStream, timeout: Duration) -> io::Result<Channel> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(timeout))?;
        Ok(Channel { stream: Box::new(stream) })
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let len = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        self.stream.write_all(&len.to_le_bytes())?;
        self.stream.write_all(bytes)
    }

    pub(crate) fn recv(&mut self) -> io::Result<Vec<u8>> {
        let mut len = [0; 4];
        self.stream.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len);
        if len > MAX_FRAME {
            return Err(io::Error::other(format!("a frame of {len} bytes is longer than {MAX_FRAME}")));
        }
        let mut bytes = vec![0; len as usize];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// Waits for the other host to connect.
pub(crate) fn accept(listener: &TcpListener, timeout: Duration) -> io::Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + timeout;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::Error::other("the other host did not connect in time"));
            }
            Err(e) => return Err(e),
        }
    }
}

/// Connects to the other host; retries until `timeout`, because that host may start later.
pub(crate) fn connect(address: &str, timeout: Duration) -> io::Result<TcpStream> {
    let deadline = Instant::now() + timeout;
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return Ok(stream),
            Err(e) if Instant::now() >= deadline => return Err(e),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
