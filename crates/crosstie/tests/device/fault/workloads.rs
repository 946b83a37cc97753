//! Workloads under faults: whatever fails, every request completes once.

use super::*;

/// What one run of [`ping_pong`] did.
#[derive(Debug, Default, PartialEq)]
struct PingPongResult {
    /// Immediates that arrived, per end.
    arrived: [Vec<u32>; 2],
    /// How each request ended, by its number.
    ended: BTreeMap<u64, Vec<Status>>,
    broken: bool,
}

/// Runs a WRITE+IMM ping-pong of `rounds` between two queue pairs of one wrapped device. Every other request is unsignaled.
/// Whatever happens, the run ends, and every accepted request completes.
fn ping_pong(plan: Plan, rounds: u32) -> (PingPongResult, Control) {
    let device = Device::open(&DeviceSpec::Software).unwrap().with_faults(plan);
    let control = device.faults().unwrap();
    let pd = device.alloc_pd().unwrap();
    let memory = pd.allocate(64, Access::ALL).unwrap();
    let mut cqs = [(); 2].map(|()| device.create_cq(&CqConfig::default()).unwrap());
    let [mut a, mut b] = [0, 1].map(|i| pd.create_rc(&QpConfig::default(), &cqs[i], &cqs[i], None).unwrap());
    connect(&mut a, &mut b);
    let mut qps = [a, b];

    let mut outcome = PingPongResult::default();
    // Requests accepted, by number: which end, and whether a success must show.
    let mut accepted: BTreeMap<u64, bool> = BTreeMap::new();
    let mut next_id = 0;
    let mut turn = 0;
    let mut due = vec![(0, None), (1, None), (0, Some(0))];
    let deadline = Instant::now() + TIMEOUT;
    // A post that returns Full is tried again; any other error ends the connection, as it would for a careful caller.
    while !outcome.broken && (turn < rounds || !due.is_empty()) {
        assert!(Instant::now() < deadline, "stuck at {turn} of {rounds}: {outcome:?}");
        due.retain(|(end, ping)| {
            next_id += 1;
            let (posted, shows) = match ping {
                None => (qps[*end].post_recv(&RecvWr { wr_id: next_id, sges: &[] }), true),
                Some(imm) => {
                    let op = SendOp::WriteImm(memory.remote().at(8), *imm);
                    let mut wr = SendWr::new(next_id, op, Data::Inline(&[1; 8]));
                    wr.signal = (imm % 2 == 0).into();
                    (qps[*end].post(&wr).map(drop), imm % 2 == 0)
                }
            };
            match posted {
                Ok(()) => drop(accepted.insert(next_id, shows)),
                Err(PostError::Full) => return true,
                Err(_) => outcome.broken = true,
            }
            false
        });
        for (end, cq) in cqs.iter_mut().enumerate() {
            cq.poll(16, |c| {
                outcome.ended.entry(c.wr_id).or_default().push(c.status);
                outcome.broken |= c.status != Success;
                if c.opcode == Opcode::RecvWriteImm {
                    outcome.arrived[end].push(c.imm.unwrap());
                    turn += 1;
                    due.push((end, None));
                    if turn < rounds {
                        due.push((end, Some(turn)));
                    }
                }
            })
            .unwrap();
        }
    }
    qps.iter_mut().for_each(|qp| qp.fail().unwrap());
    // Every request that must have a completion gets it now; some more polls detect requests that complete twice.
    let missing = |outcome: &PingPongResult| {
        accepted.iter().filter(|(id, shows)| **shows && !outcome.ended.contains_key(id)).count()
    };
    let mut spare = 200;
    while missing(&outcome) > 0 || spare > 0 {
        assert!(Instant::now() < deadline, "{} never ended: {accepted:?} {outcome:?}", missing(&outcome));
        spare -= i32::from(missing(&outcome) == 0);
        for (end, cq) in cqs.iter_mut().enumerate() {
            cq.poll(16, |c| {
                outcome.ended.entry(c.wr_id).or_default().push(c.status);
                if c.opcode == Opcode::RecvWriteImm {
                    outcome.arrived[end].push(c.imm.unwrap());
                }
            })
            .unwrap();
        }
    }
    for (id, statuses) in &outcome.ended {
        assert!(accepted.contains_key(id), "{id} was refused, yet it ended: {statuses:?}");
        assert_eq!(statuses.len(), 1, "{id} ended more than once: {statuses:?}");
    }
    for arrived in &outcome.arrived {
        assert!(arrived.windows(2).all(|w| w[0] < w[1]), "twice or out of order: {arrived:?}");
    }
    (outcome, control)
}

const ROUNDS: u32 = 12;

#[test]
fn whichever_post_fails_every_request_ends_once() {
    let (whole, control) = ping_pong(Plan::none(), ROUNDS);
    assert!(!whole.broken);
    assert_eq!(whole.arrived.iter().map(Vec::len).sum::<usize>(), ROUNDS as usize);
    let posts = control.posts();
    assert!(posts >= 2 * u64::from(ROUNDS), "{posts}");
    for k in 0..posts {
        let (outcome, _) = ping_pong(Plan::none().fail_post(k, PostError::Full), ROUNDS);
        assert!(!outcome.broken, "post {k}: what was full once is not full for ever");
        assert_eq!(outcome.arrived, whole.arrived, "post {k}");
        ping_pong(Plan::none().fail_post(k, PostError::Device(libc::EIO)), ROUNDS);
        ping_pong(Plan::none().lose_post(k, RetryExceeded), ROUNDS);
        ping_pong(Plan::none().kill_peer(k), ROUNDS);
    }
}

#[test]
fn whichever_completion_fails_every_request_ends_once() {
    let (whole, control) = ping_pong(Plan::none(), ROUNDS);
    let completions = control.completions();
    assert!(completions >= u64::from(ROUNDS), "{completions}");
    for k in 0..completions {
        for status in [RetryExceeded, Fatal] {
            ping_pong(Plan::none().fail_completion(k, status), ROUNDS);
        }
        let (outcome, _) = ping_pong(Plan::none().delay_completion(k, 7), ROUNDS);
        assert_eq!(outcome.arrived, whole.arrived, "completion {k} came late");
    }
}

#[test]
fn whenever_the_port_goes_down_every_request_ends_once() {
    let (whole, control) = ping_pong(Plan::none(), ROUNDS);
    for k in 0..control.posts() {
        let (outcome, _) = ping_pong(Plan::none().port_down(k, 20), ROUNDS);
        assert_eq!((outcome.broken, outcome.arrived), (false, whole.arrived.clone()), "post {k}");
        ping_pong(Plan::none().port_down(k, 1000).give_up_after(100), ROUNDS);
    }
}

/// The seed in CROSSTIE_SEED, or a few that are always the same.
fn seeds() -> Vec<u64> {
    match std::env::var("CROSSTIE_SEED") {
        Ok(seed) => vec![seed.parse().expect("CROSSTIE_SEED is a number")],
        Err(_) => (1..=8).collect(),
    }
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    for seed in seeds() {
        println!("seed {seed}");
        assert_eq!(trace(seed), trace(seed), "seed {seed}");
    }
    assert_ne!(trace(1), trace(2));
}

/// Everything that a caller sees of a fixed sequence of calls, until something breaks.
fn trace(seed: u64) -> Vec<String> {
    let mut pair = Pair::new(Plan::from_seed(seed));
    let mut other = pair.pd.create_rc(&QpConfig::default(), &pair.cq, &pair.cq, None).unwrap();
    let peer = Peer::of(&mut other);
    let mut seen = vec![];
    for n in 1..3000u64 {
        let posted = pair.write(n % 500, n % 3 == 0);
        let more = other.post(&write(&peer.memory, n % 500, &[0; 8], n % 2 == 0));
        seen.push(format!("{n}: {posted:?} {more:?}"));
        let mut broken = false;
        let polled = pair.cq.poll(4, |c| {
            broken |= c.status != Success;
            seen.push(format!("  {} {:?} {}", c.wr_id, c.status, c.qp_num == other.qp_num()));
        });
        polled.unwrap();
        if broken {
            break;
        }
    }
    seen
}

#[test]
fn workloads_make_progress_under_random_faults() {
    for seed in seeds() {
        println!("seed {seed}");
        // A new connection continues where the broken one stopped.
        let mut arrived = 0;
        let mut attempts = 0;
        while arrived < 2000 {
            attempts += 1;
            assert!(attempts < 200, "seed {seed}: only {arrived} arrived");
            let (outcome, _) = ping_pong(Plan::from_seed(seed.wrapping_add(attempts << 32)), 2000 - arrived);
            arrived += outcome.arrived.iter().map(Vec::len).sum::<usize>() as u32;
        }
    }
}
