//! Boots guests, prints their output, and returns how each one ended: with its command's exit status, by a crash, or by a
//! timeout.
//!
//! QEMU writes the guest's output to plain files in the run's directory, and one loop reads them while they grow. So a
//! guest never waits for a slow reader, and the whole log exists after a crash.
//!
//! ```text
//! hostN.console   messages of the kernel and of process 1
//! hostN.stdout    standard output of the command
//! hostN.stderr    standard error of the command
//! hostN.status    `ready UPTIME`, then `exit STATUS`
//! hostN.qemu      QEMU's own error messages
//! ```

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Options;
use crate::error::{Error, with_path};
use crate::process::killed_with_parent;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How a guest ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GuestExit {
    /// Its command ended with this exit status.
    Status(u8),
    /// QEMU ended before the command did: the kernel panicked, or the guest could not be set up.
    Crashed,
    /// There was no status within the timeout.
    TimedOut,
}

impl fmt::Display for GuestExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GuestExit::Status(status) => write!(f, "the command ended with status {status}"),
            GuestExit::Crashed => write!(f, "the guest crashed before its command ended"),
            GuestExit::TimedOut => write!(f, "the guest did not report a status in time"),
        }
    }
}

/// Boots one guest per host in `directory`, which contains `initramfs.cpio`, and waits for all of them, at most for the
/// timeout of the options. Returns how each guest ended, in the order of the hosts. No guest is left running.
pub(super) fn run(
    directory: &Path,
    kernel: &Path,
    options: &Options,
    line: &mut dyn FnMut(&str),
) -> Result<Vec<GuestExit>, Error> {
    let deadline = Instant::now() + Duration::from_secs(options.timeout);
    let mut guests = Vec::new();
    for host in 0..options.hosts {
        guests.push(Guest::boot(directory, kernel, options, host)?);
    }
    loop {
        let timed_out = Instant::now() >= deadline;
        for guest in &mut guests {
            guest.poll(timed_out, line)?;
        }
        // A guest whose command has ended keeps running for the other one, unless one of them has failed.
        let failed =
            guests.iter().any(|guest| matches!(guest.exit, Some(GuestExit::Crashed | GuestExit::TimedOut)));
        if failed || guests.iter().all(|guest| guest.exit.is_some()) {
            break;
        }
        thread::sleep(POLL_INTERVAL);
    }
    // A guest that waits for a failed one would time out, too.
    Ok(guests.iter().map(|guest| guest.exit.unwrap_or(GuestExit::TimedOut)).collect())
}

/// Returns the path of a guest's log and the last lines of all its outputs, for a report on its failure.
pub(super) fn log_tail(directory: &Path, host: u8, lines: usize) -> String {
    let mut report = format!("log: {}\n", directory.join(format!("host{host}.console")).display());
    for kind in ["qemu", "stdout", "stderr", "console"] {
        let bytes = fs::read(directory.join(format!("host{host}.{kind}"))).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).replace('\r', "");
        let all: Vec<_> = text.lines().collect();
        for line in &all[all.len().saturating_sub(lines)..] {
            report += &format!("  {kind}: {line}\n");
        }
    }
    report
}

struct Guest {
    host: u8,
    qemu: Child,
    booted: Instant,
    stdout: TailReader,
    stderr: TailReader,
    status: TailReader,
    /// Printed before each line of the command's output.
    prefix: String,
    exit: Option<GuestExit>,
}

impl Guest {
    fn boot(directory: &Path, kernel: &Path, options: &Options, host: u8) -> Result<Guest, Error> {
        let qemu_errors = directory.join(format!("host{host}.qemu"));
        let mut command = killed_with_parent("qemu-system-x86_64");
        // Paths relative to the run's directory contain no comma, at which QEMU would split, and are short enough for sockets.
        command.current_dir(directory).args(qemu_arguments(options, host)).arg("-kernel").arg(kernel);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(&qemu_errors).map_err(with_path(&qemu_errors))?);
        let qemu = command.spawn().map_err(|source| Error::Start { program: "setpriv".into(), source })?;
        let tail = |kind| TailReader::new(directory.join(format!("host{host}.{kind}")));
        let prefix = if options.hosts == 1 { String::new() } else { format!("[host {host}] ") };
        Ok(Guest {
            host,
            qemu,
            booted: Instant::now(),
            stdout: tail("stdout"),
            stderr: tail("stderr"),
            status: tail("status"),
            prefix,
            exit: None,
        })
    }

    /// Prints new output and finds out whether the guest has ended.
    fn poll(&mut self, timed_out: bool, line: &mut dyn FnMut(&str)) -> Result<(), Error> {
        if self.exit.is_some() {
            return Ok(());
        }
        // In this order: QEMU's exit and the status are read first, so that all output written before them is read below.
        let exited = self.qemu.try_wait().map_err(with_path("qemu-system-x86_64"))?.is_some();
        let mut status = None;
        self.status.read_lines(false, |words| {
            let words = String::from_utf8_lossy(words);
            match words.trim_end().split_once(' ') {
                Some(("exit", text)) => status = text.parse().ok(),
                Some(("ready", _)) => {
                    eprintln!(
                        "xtask: guest {} ready after {:.1} s",
                        self.host,
                        self.booted.elapsed().as_secs_f32()
                    );
                }
                _ => eprintln!("xtask: guest {}: unexpected status line: {}", self.host, words.trim_end()),
            }
            Ok(())
        })?;
        let ended = exited || timed_out || status.is_some();
        let stdout_name = "standard output";
        self.stdout.read_lines(ended, |words| {
            line(String::from_utf8_lossy(words).trim_end());
            write_line(&mut io::stdout(), &self.prefix, words).map_err(with_path(stdout_name))
        })?;
        self.stderr.read_lines(ended, |words| {
            write_line(&mut io::stderr(), &self.prefix, words).map_err(with_path(stdout_name))
        })?;
        self.exit = match status {
            Some(status) => Some(GuestExit::Status(status)),
            None if exited => Some(GuestExit::Crashed),
            None if timed_out => Some(GuestExit::TimedOut),
            None => None,
        };
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // An error means that QEMU has exited already.
        if self.qemu.kill().is_ok() {
            self.qemu.wait().ok();
        }
    }
}

fn qemu_arguments(options: &Options, host: u8) -> Vec<String> {
    let peer = 1 - host;
    let mut append = format!(
        "console=ttyS0 quiet panic=-1 oops=panic mitigations=off net.ifnames=0 HOST={host} HOSTS={}",
        options.hosts
    );
    if options.hosts == 2 {
        append += &format!(" PEER=10.77.0.{}", 1 + peer);
    }
    let mut arguments: Vec<String> =
        "-M q35 -cpu max -accel tcg,thread=multi -nodefaults -display none -no-reboot"
            .split(' ')
            .map(str::to_owned)
            .collect();
    let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
    add("-smp", options.cpus.to_string());
    add("-m", options.memory.to_string());
    add("-initrd", "initramfs.cpio".into());
    add("-append", append);
    add("-serial", format!("file:host{host}.console"));
    add("-device", "virtio-serial-pci".into());
    for (number, kind) in [(1, "stdout"), (2, "stderr"), (3, "status")] {
        add("-chardev", format!("file,id={kind},path=host{host}.{kind}"));
        add("-device", format!("virtserialport,chardev={kind},nr={number}"));
    }
    for rail in 0..2 {
        // With two hosts, a rail is connected to the same rail of the other host; with one, its two rails to each other.
        let other = if options.hosts == 2 {
            format!("host{peer}.rail{rail}")
        } else {
            format!("host0.rail{}", 1 - rail)
        };
        let netdev = format!(
            "dgram,id=rail{rail},local.type=unix,local.path=host{host}.rail{rail},\
             remote.type=unix,remote.path={other}"
        );
        let mac = format!("52:54:00:77:0{host}:0{rail}");
        add("-netdev", netdev);
        add("-device", format!("virtio-net-pci,netdev=rail{rail},host_mtu=4200,romfile=,mac={mac}"));
    }
    arguments
}

fn write_line(to: &mut impl Write, prefix: &str, words: &[u8]) -> io::Result<()> {
    to.write_all(prefix.as_bytes())?;
    to.write_all(words)?;
    if !prefix.is_empty() && !words.ends_with(b"\n") {
        to.write_all(b"\n")?;
    }
    to.flush()
}

/// Reads a file by lines while another process appends to it.
struct TailReader {
    path: PathBuf,
    file: Option<File>,
    /// Bytes after the last complete line.
    rest: Vec<u8>,
}

impl TailReader {
    fn new(path: PathBuf) -> Self {
        TailReader { path, file: None, rest: Vec::new() }
    }

    /// Passes each new complete line to `line`, and with `all` also the incomplete last one.
    fn read_lines(
        &mut self,
        all: bool,
        mut line: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok();
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        file.read_to_end(&mut self.rest).map_err(with_path(&self.path))?;
        while let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
            let rest = self.rest.split_off(end + 1);
            line(&std::mem::replace(&mut self.rest, rest))?;
        }
        if all && !self.rest.is_empty() {
            line(&std::mem::take(&mut self.rest))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_returned_when_they_are_complete() {
        let path = std::env::temp_dir().join(format!("xtask-tail-{}", std::process::id()));
        let mut reader = TailReader::new(path.clone());
        let mut seen = Vec::new();
        let mut read = |all, seen: &mut Vec<String>| {
            reader
                .read_lines(all, |line| {
                    seen.push(String::from_utf8_lossy(line).into_owned());
                    Ok(())
                })
                .unwrap();
        };
        read(false, &mut seen);
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one\ntwo\nth").unwrap();
        read(false, &mut seen);
        assert_eq!(seen, ["one\n", "two\n"]);
        file.write_all(b"ree").unwrap();
        read(true, &mut seen);
        assert_eq!(seen.last().unwrap(), "three");
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn rails_connect_two_hosts_or_the_two_interfaces_of_one() {
        let mut options = Options::new(["true".into()]);
        assert!(!qemu_arguments(&options, 0).iter().any(|word| word.contains("PEER")));
        assert!(
            qemu_arguments(&options, 0)
                .iter()
                .any(|word| word.contains("id=rail0") && word.ends_with("host0.rail1"))
        );
        options.hosts = 2;
        assert!(
            qemu_arguments(&options, 0)
                .iter()
                .any(|word| word.contains("id=rail0") && word.ends_with("host1.rail0"))
        );
        assert!(
            qemu_arguments(&options, 1).iter().any(|word| word.ends_with("HOST=1 HOSTS=2 PEER=10.77.0.1"))
        );
    }
}
