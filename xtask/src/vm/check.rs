//! The guests' own check: what `cargo xtask vm` promises, tried for real.

use super::{NO_STATUS, Options, boot};
use crate::error::Error;

/// One thing promised: how to boot, what to run, the status to come, and a line that the command prints.
struct Promise {
    what: &'static str,
    hosts: u8,
    timeout: u64,
    script: &'static str,
    status: u8,
    line: &'static str,
}

const PROMISES: &[Promise] = &[
    Promise {
        what: "one guest has two active rxe devices, and the command's status comes out",
        hosts: 1,
        timeout: 120,
        script: "rdma link; [ $(rdma link | grep -c 'state ACTIVE') = 2 ] && ping -c 1 -W 5 -I eth0 10.78.0.1 && exit 7",
        status: 7,
        line: "link r0/1 state ACTIVE physical_state LINK_UP netdev eth0",
    },
    Promise {
        what: "two guests reach each other, and the worst status comes out",
        hosts: 2,
        timeout: 180,
        script: "ping -c 1 -W 5 $PEER && ping -c 1 -W 5 10.78.0.$((2 - HOST)) && echo both links && exit $((3 + HOST))",
        status: 4,
        line: "both links",
    },
    Promise {
        what: "a guest whose kernel panics is reported",
        hosts: 1,
        timeout: 120,
        script: "echo panic next; echo c >/proc/sysrq-trigger",
        status: NO_STATUS,
        line: "panic next",
    },
    Promise {
        what: "a guest that hangs is reported and not waited for",
        hosts: 1,
        timeout: 30,
        script: "echo hang next; sleep 1000",
        status: NO_STATUS,
        line: "hang next",
    },
];

/// Tries every promise; returns how many held and how many did not.
pub(crate) fn check() -> Result<(u64, u64), Error> {
    let (mut passed, mut failed) = (0, 0);
    for promise in PROMISES {
        println!("trying: {}", promise.what);
        let mut options = Options::new(["sh", "-c", promise.script].map(str::to_owned));
        (options.hosts, options.timeout) = (promise.hosts, promise.timeout);
        let mut seen = 0;
        let status = boot(&options, &mut |line| seen += u8::from(line == promise.line))?;
        if status == promise.status && seen == promise.hosts {
            passed += 1;
            println!("ok: {}", promise.what);
        } else {
            failed += 1;
            println!(
                "FAILED: {}: status {status}, expected {}; the line {:?} from {seen} of {} hosts",
                promise.what, promise.status, promise.line, promise.hosts
            );
        }
    }
    Ok((passed, failed))
}
