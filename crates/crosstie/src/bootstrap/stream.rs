//! A TCP or Unix stream socket whose reads and writes have deadlines.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A connected stream socket.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    pub(super) fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.set_nonblocking(nonblocking),
            Stream::Unix(stream) => stream.set_nonblocking(nonblocking),
        }
    }

    /// Reads at least one byte into `buffer` before the deadline; returns 0 when the peer has closed the stream.
    pub(super) fn read_some(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            let left = time_left(deadline)?;
            match self {
                Stream::Tcp(stream) => stream.set_read_timeout(Some(left))?,
                Stream::Unix(stream) => stream.set_read_timeout(Some(left))?,
            }
            match self.read(buffer) {
                Err(error) if is_transient(&error) => {}
                other => return other,
            }
        }
    }

    /// Fills `buffer` before the deadline.
    pub(super) fn read_full(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.read_some(&mut buffer[filled..], deadline)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => filled += count,
            }
        }
        Ok(())
    }

    /// Writes all of `bytes` before the deadline.
    pub(super) fn write_full(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            let left = time_left(deadline)?;
            match self {
                Stream::Tcp(stream) => stream.set_write_timeout(Some(left))?,
                Stream::Unix(stream) => stream.set_write_timeout(Some(left))?,
            }
            match self.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => bytes = &bytes[count..],
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(buffer),
            Stream::Unix(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }
}

/// Whether the same call may succeed later: the socket is not ready, or a signal interrupted the call.
pub(super) fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Whether the peer has closed the connection, as far as this call can tell. A peer that closes it without reading all that was sent
/// resets it.
pub(crate) fn is_closed_by_peer(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
    )
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    match deadline.checked_duration_since(Instant::now()) {
        // Socket timeouts have microsecond resolution, and zero means "no timeout".
        Some(left) if left >= Duration::from_micros(1) => Ok(left),
        _ => Err(io::ErrorKind::TimedOut.into()),
    }
}
