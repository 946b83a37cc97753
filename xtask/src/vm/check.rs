//! Checks `cargo xtask vm` itself by booting guests.

use super::{NO_STATUS, Options, boot};
use crate::error::Error;

/// How to boot, what to run, the exit status to expect, and a line that the command must print on every host.
struct Case {
    shows: &'static str,
    hosts: u8,
    timeout: u64,
    script: &'static str,
    status: u8,
    line: &'static str,
}

const CASES: &[Case] = &[
    Case {
        shows: "one guest has two active rxe devices, and the command's exit status is returned",
        hosts: 1,
        timeout: 120,
        script: "rdma link; [ $(rdma link | grep -c 'state ACTIVE') = 2 ] && ping -c 1 -W 5 -I eth0 10.78.0.1 && exit 7",
        status: 7,
        line: "link r0/1 state ACTIVE physical_state LINK_UP netdev eth0",
    },
    Case {
        shows: "two guests reach each other, and the highest exit status is returned",
        hosts: 2,
        timeout: 180,
        script: "ping -c 1 -W 5 $PEER && ping -c 1 -W 5 10.78.0.$((2 - HOST)) && echo both links && exit $((3 + HOST))",
        status: 4,
        line: "both links",
    },
    Case {
        shows: "a guest whose kernel panics is reported",
        hosts: 1,
        timeout: 120,
        // The line leaves the guest through a queue that nobody empties after the panic: it gets time to leave before.
        script: "echo panic next; sleep 2; echo c >/proc/sysrq-trigger",
        status: NO_STATUS,
        line: "panic next",
    },
    Case {
        shows: "a guest that hangs is killed and reported",
        hosts: 1,
        timeout: 30,
        script: "echo hang next; sleep 1000",
        status: NO_STATUS,
        line: "hang next",
    },
];

/// Runs every case. Returns how many passed and how many failed.
pub(crate) fn check() -> Result<(u64, u64), Error> {
    let (mut passed, mut failed) = (0, 0);
    for case in CASES {
        println!("checking: {}", case.shows);
        let mut options = Options::new(["sh", "-c", case.script].map(str::to_owned));
        (options.hosts, options.timeout) = (case.hosts, case.timeout);
        let mut seen = 0;
        let status = boot(&options, &mut |line| seen += u8::from(line == case.line))?;
        if status == case.status && seen == case.hosts {
            passed += 1;
            println!("ok: {}", case.shows);
        } else {
            failed += 1;
            println!(
                "FAILED: {}: status {status}, expected {}; {seen} of {} hosts printed the line {:?}",
                case.shows, case.status, case.hosts, case.line
            );
        }
    }
    Ok((passed, failed))
}
