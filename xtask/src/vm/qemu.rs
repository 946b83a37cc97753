//! Booting guests and watching them: their output passes through, and each ends with its command's status, or
//! with the reason why there is none.
//!
//! QEMU writes what the guest says to plain files in the run's directory, and one loop reads them as they grow.
//! So a guest never waits for a slow reader, and after a crash the whole log is there.
//!
//! ```text
//! hostN.console   the kernel's messages and those of process 1
//! hostN.stdout    what the command wrote
//! hostN.stderr
//! hostN.status    `ready UPTIME`, then `exit STATUS`
//! hostN.qemu      QEMU's own complaints
//! ```

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Options;
use crate::error::{Error, at};
use crate::process::dies_with_us;

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How a guest ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// Its command ended with this status.
    Exit(u8),
    /// QEMU ended before the command did: the kernel panicked, or the guest could not be set up.
    Crashed,
    /// There was no status within the time allowed.
    Hung,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Exit(status) => write!(f, "the command ended with status {status}"),
            Ending::Crashed => write!(f, "the guest crashed before its command ended"),
            Ending::Hung => write!(f, "the guest gave no status in time"),
        }
    }
}

/// Boots one guest per host in `directory`, which has `initramfs.cpio`, and waits for all of them, no longer than the
/// options allow. Returns how each ended, in order; no guest is left running.
pub(super) fn run(
    directory: &Path,
    kernel: &Path,
    options: &Options,
    line: &mut dyn FnMut(&str),
) -> Result<Vec<Ending>, Error> {
    let deadline = Instant::now() + Duration::from_secs(options.timeout);
    let mut guests = Vec::new();
    for host in 0..options.hosts {
        guests.push(Guest::boot(directory, kernel, options, host)?);
    }
    loop {
        let late = Instant::now() >= deadline;
        for guest in &mut guests {
            guest.look(late, line)?;
        }
        // A guest that has ended stays up for the sake of the others, unless one of them is lost.
        let lost = guests.iter().any(|guest| matches!(guest.ending, Some(Ending::Crashed | Ending::Hung)));
        if lost || guests.iter().all(|guest| guest.ending.is_some()) {
            break;
        }
        thread::sleep(LOOK_EVERY);
    }
    // The guest that waited for a lost one hangs too.
    Ok(guests.iter().map(|guest| guest.ending.unwrap_or(Ending::Hung)).collect())
}

/// The path of a guest's log and its last lines, to be shown to whoever must find out why it was lost.
pub(super) fn last_words(directory: &Path, host: u8, lines: usize) -> String {
    let mut words = format!("log: {}\n", directory.join(format!("host{host}.console")).display());
    for kind in ["qemu", "stdout", "stderr", "console"] {
        let bytes = fs::read(directory.join(format!("host{host}.{kind}"))).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).replace('\r', "");
        let all: Vec<_> = text.lines().collect();
        for line in &all[all.len().saturating_sub(lines)..] {
            words += &format!("  {kind}: {line}\n");
        }
    }
    words
}

struct Guest {
    host: u8,
    qemu: Child,
    booted: Instant,
    stdout: Growing,
    stderr: Growing,
    status: Growing,
    /// What the two streams say before each line.
    prefix: String,
    ending: Option<Ending>,
}

impl Guest {
    fn boot(directory: &Path, kernel: &Path, options: &Options, host: u8) -> Result<Guest, Error> {
        let complaints = directory.join(format!("host{host}.qemu"));
        let mut command = dies_with_us("qemu-system-x86_64");
        // Names relative to the run's directory: no comma for QEMU to split at, and short enough for sockets.
        command.current_dir(directory).args(arguments(options, host)).arg("-kernel").arg(kernel);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(&complaints).map_err(at(&complaints))?);
        let qemu = command.spawn().map_err(|source| Error::Start { program: "setpriv".into(), source })?;
        let growing = |kind| Growing::new(directory.join(format!("host{host}.{kind}")));
        let prefix = if options.hosts == 1 { String::new() } else { format!("[host {host}] ") };
        Ok(Guest {
            host,
            qemu,
            booted: Instant::now(),
            stdout: growing("stdout"),
            stderr: growing("stderr"),
            status: growing("status"),
            prefix,
            ending: None,
        })
    }

    /// Passes on what is new and finds out whether the guest has ended.
    fn look(&mut self, late: bool, line: &mut dyn FnMut(&str)) -> Result<(), Error> {
        if self.ending.is_some() {
            return Ok(());
        }
        // In this order: a status, and QEMU's end, come after everything that was written before them.
        let gone = self.qemu.try_wait().map_err(at("qemu-system-x86_64"))?.is_some();
        let mut exit = None;
        self.status.lines(false, |words| {
            let words = String::from_utf8_lossy(words);
            match words.trim_end().split_once(' ') {
                Some(("exit", status)) => exit = status.parse().ok(),
                Some(("ready", _)) => {
                    eprintln!(
                        "xtask: guest {} ready after {:.1} s",
                        self.host,
                        self.booted.elapsed().as_secs_f32()
                    );
                }
                _ => eprintln!("xtask: guest {} says {}", self.host, words.trim_end()),
            }
            Ok(())
        })?;
        let ended = gone || late || exit.is_some();
        // One guest's output passes as it comes; of two, whole lines.
        let broken = "standard output";
        self.stdout.lines(ended, |words| {
            line(String::from_utf8_lossy(words).trim_end());
            write_line(&mut io::stdout(), &self.prefix, words).map_err(at(broken))
        })?;
        self.stderr
            .lines(ended, |words| write_line(&mut io::stderr(), &self.prefix, words).map_err(at(broken)))?;
        self.ending = match exit {
            Some(status) => Some(Ending::Exit(status)),
            None if gone => Some(Ending::Crashed),
            None if late => Some(Ending::Hung),
            None => None,
        };
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // A failure means that it is gone already, which is what we want.
        if self.qemu.kill().is_ok() {
            self.qemu.wait().ok();
        }
    }
}

fn arguments(options: &Options, host: u8) -> Vec<String> {
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
        // Rail to rail between two hosts; with one, its two interfaces are joined to each other.
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

/// A file that someone else appends to.
struct Growing {
    path: PathBuf,
    file: Option<File>,
    rest: Vec<u8>,
}

impl Growing {
    fn new(path: PathBuf) -> Self {
        Growing { path, file: None, rest: Vec::new() }
    }

    /// Shows each line that is complete, and with `all` the unfinished one as well.
    fn lines(&mut self, all: bool, mut line: impl FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok();
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        file.read_to_end(&mut self.rest).map_err(at(&self.path))?;
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
    fn lines_are_shown_when_they_are_whole() {
        let path = std::env::temp_dir().join(format!("xtask-growing-{}", std::process::id()));
        let mut growing = Growing::new(path.clone());
        let mut seen = Vec::new();
        let mut look = |all, seen: &mut Vec<String>| {
            growing
                .lines(all, |line| {
                    seen.push(String::from_utf8_lossy(line).into_owned());
                    Ok(())
                })
                .unwrap();
        };
        look(false, &mut seen);
        let mut file = File::create(&path).unwrap();
        file.write_all(b"one\ntwo\nth").unwrap();
        look(false, &mut seen);
        assert_eq!(seen, ["one\n", "two\n"]);
        file.write_all(b"ree").unwrap();
        look(true, &mut seen);
        assert_eq!(seen.last().unwrap(), "three");
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn rails_join_two_hosts_or_the_two_interfaces_of_one() {
        let mut options = Options::new(["true".into()]);
        assert!(!arguments(&options, 0).iter().any(|word| word.contains("PEER")));
        assert!(
            arguments(&options, 0)
                .iter()
                .any(|word| word.contains("id=rail0") && word.ends_with("host0.rail1"))
        );
        options.hosts = 2;
        assert!(
            arguments(&options, 0)
                .iter()
                .any(|word| word.contains("id=rail0") && word.ends_with("host1.rail0"))
        );
        assert!(arguments(&options, 1).iter().any(|word| word.ends_with("HOST=1 HOSTS=2 PEER=10.77.0.1")));
    }
}
