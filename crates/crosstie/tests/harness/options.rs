//! The command line of a suite.

use crosstie::device::DeviceSpec;

use super::TestSetup;

/// The parsed arguments.
#[derive(Debug, Default)]
pub(super) struct Options {
    pub(super) specs: Vec<DeviceSpec>,
    across: bool,
    wrapped: bool,
    pub(super) mode: Option<String>,
    pub(super) role: usize,
    pub(super) rendezvous: Option<String>,
    pub(super) child: Option<String>,
    pub(super) filters: Vec<String>,
    pub(super) list: bool,
    pub(super) quiet: bool,
}

impl Options {
    pub(super) fn parse(mut args: impl Iterator<Item = String>, port: u16) -> Result<Options, String> {
        let mut options = Options::default();
        let mut role = None;
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match arg.as_str() {
                "--device" => {
                    for spec in value()?.split(',') {
                        let spec = spec.parse().map_err(|e| format!("{e}"))?;
                        check_faults(&spec)?;
                        options.specs.push(spec);
                    }
                }
                "--mode" => options.mode = Some(value()?),
                "--role" => role = Some(value()?),
                "--rendezvous" => options.rendezvous = Some(value()?),
                "--child" => options.child = Some(value()?),
                "--filter" => options.filters.push(value()?),
                "--across" => options.across = true,
                "--wrapped" => options.wrapped = true,
                "--list" => options.list = true,
                "-q" | "--quiet" => options.quiet = true,
                // Options of libtest, which `cargo test` passes to every test program.
                "--nocapture" | "--no-capture" | "--show-output" | "--exact" | "--include-ignored" => {}
                "--test-threads" | "--color" | "--format" => drop(value()?),
                flag if flag.starts_with("--test-threads=") || flag.starts_with("--color=") => {}
                flag if flag.starts_with('-') => return Err(format!("unknown option {flag}")),
                filter => options.filters.push(filter.to_owned()),
            }
        }
        match options.mode.as_deref() {
            None | Some("threads" | "processes") => {}
            Some("hosts") => options.find_other_host(role, port)?,
            Some(mode) => return Err(format!("unknown mode {mode}: use threads, processes or hosts")),
        }
        Ok(options)
    }

    fn find_other_host(&mut self, role: Option<String>, port: u16) -> Result<(), String> {
        let role = role.or_else(|| std::env::var("HOST").ok()).ok_or("--mode hosts needs --role 0 or 1")?;
        self.role = role.parse().ok().filter(|r| *r < 2).ok_or(format!("--role is 0 or 1, not {role}"))?;
        if self.rendezvous.is_none() {
            let host = match self.role {
                0 => "0.0.0.0".to_owned(),
                _ => std::env::var("PEER").map_err(|_| "--mode hosts needs --rendezvous HOST:PORT")?,
            };
            self.rendezvous = Some(format!("{host}:{port}"));
        }
        Ok(())
    }

    pub(super) fn setup(&self, seed: u64) -> TestSetup {
        let specs = if self.specs.is_empty() { vec![DeviceSpec::Software] } else { self.specs.clone() };
        TestSetup { specs, across: self.across, wrapped: self.wrapped, seed }
    }
}

/// The cases expect that what is asked for succeeds. A device may be slow, but must not fail at random.
fn check_faults(spec: &DeviceSpec) -> Result<(), String> {
    match spec {
        DeviceSpec::Fault { seed, odds, inner } if !odds.only_delays() => Err(format!(
            "{spec} fails at random, but the cases expect a device that works: \
             use fault:{seed}/:{inner} (no faults) or fault:{seed}/hold=8:{inner} (late completions)"
        )),
        _ => Ok(()),
    }
}
