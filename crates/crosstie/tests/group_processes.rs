//! Groups of four processes, one of which is killed or stopped: while it holds a lock, while it waits for one, inside a barrier, in the
//! middle of messages, and at random instants. The last line is `N passed, N failed`.
//!
//! The test is rank 0 of each job; the other ranks are this same program. `CROSSTIE_SEED` chooses the random instants.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crosstie::bootstrap::{Bootstrap, Limits, local};
use crosstie::device::Device;
use crosstie::group::{Channel, Group, GroupConfig, GroupError, MemberId, TaggedOptions, Token};

const MEMBERS: u32 = 4;
const VICTIM: MemberId = MemberId::new(2);
/// A process that runs longer than this hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What one member of a scenario has.
struct Member {
    first_view: u64,
    group: Group,
    channel: Channel,
    seed: u64,
}

/// A scenario after which only member 0 is left.
const LAST_SURVIVOR: &str = "late_message_of_a_stopped_holder_is_refused_after_two_more_holders_died";

/// What one member does in a scenario.
type Scenario = fn(&Member);

const SCENARIOS: [(&str, Scenario); 12] = [
    ("holder_dies", holder_dies),
    ("queued_member_dies", queued_member_dies),
    ("member_dies_in_a_barrier", member_dies_in_a_barrier),
    ("sender_dies_in_the_middle_of_a_message", sender_dies_in_the_middle_of_a_message),
    ("receiver_dies_in_the_middle_of_a_message", receiver_dies_in_the_middle_of_a_message),
    ("partner_of_a_pull_dies", partner_of_a_pull_dies),
    ("stopped_member_is_named_and_waited_for", stopped_member_is_named),
    ("member_dies_at_a_random_instant", member_dies_at_a_random_instant),
    ("stopped_holder_is_expelled_and_its_late_message_refused", stopped_holder_is_expelled),
    ("member_1_expels_a_stopped_holder_and_all_go_on", |member| all_go_on_after_expulsion(member, 1)),
    ("member_3_expels_a_stopped_holder_and_all_go_on", |member| all_go_on_after_expulsion(member, 3)),
    (LAST_SURVIVOR, two_holders_die_after_a_stopped_one),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(mut job) = local::join_spawned(Limits::default()).unwrap() {
        let scenario = SCENARIOS.iter().find(|(name, _)| *name == arguments[0]).unwrap();
        run_member(&mut job, *scenario, arguments[1].parse().unwrap());
        return ExitCode::SUCCESS;
    }
    // Some test runners ask for a list.
    if arguments.iter().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let seed: u64 =
        std::env::var("CROSSTIE_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(20_261_116);
    println!("CROSSTIE_SEED={seed}");
    let (mut passed, mut failed) = (0, 0);
    for (name, scenario) in SCENARIOS {
        let repeats = if name.contains("random") { 5 } else { 1 };
        for repeat in 0..repeats {
            let seed = seed + repeat;
            let result = std::panic::catch_unwind(|| {
                let mut job =
                    local::JobBuilder::new(MEMBERS).arguments([name, &seed.to_string()]).start().unwrap();
                run_member(&mut job, (name, scenario), seed);
            });
            println!("{name} (seed {seed}): {}", if result.is_ok() { "ok" } else { "FAILED" });
            if result.is_ok() { passed += 1 } else { failed += 1 }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Joins the group and plays one member. At the end every survivor tells member 0 that it has succeeded.
fn run_member(job: &mut dyn Bootstrap, (name, scenario): (&'static str, Scenario), seed: u64) {
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        if is_done.recv_timeout(TIMEOUT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            println!("FAILED: a member hangs in {name}");
            std::process::abort();
        }
    });
    let device = Device::open(&"software".parse().unwrap()).unwrap();
    let group = Group::join(job, &device, &GroupConfig::new(42).one_sided(true)).unwrap();
    let channel = group.open_channel(0, &group.channel_options()).unwrap();
    group.barrier(0).wait().unwrap();
    let first_view = group.view().number;
    let member = Member { group, channel, seed, first_view };
    scenario(&member);
    let me = member.group.member();
    if me == MemberId::new(0) {
        let mut succeeded = Vec::new();
        while succeeded.len() < 2 && name != LAST_SURVIVOR {
            let message = member.channel.recv().unwrap();
            if message.bytes == b"succeeded" {
                succeeded.push(message.from);
            }
        }
        assert!(!succeeded.contains(&VICTIM));
    } else if me != VICTIM {
        member.channel.send(MemberId::new(0), b"succeeded").unwrap();
        member.channel.flush().unwrap();
        // Rank 0 ends the others.
        std::thread::sleep(TIMEOUT);
    }
    drop(done);
}

fn die() -> ! {
    // SAFETY: the process ends here.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!("killed")
}

/// Waits in the barrier until a round has failed because of the victim. All survivors see the same round fail.
fn wait_for_survivors(group: &Group) {
    loop {
        match group.barrier(0).wait() {
            Err(GroupError::MembersDied { dead, .. }) => {
                assert_eq!(*dead, [VICTIM].into_iter().collect());
                return;
            }
            Ok(_) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn holder_dies(member: &Member) {
    let lock = member.group.lock(0);
    if member.group.member() == VICTIM {
        let guard = lock.acquire().unwrap();
        assert_eq!(guard.fence(), Token { view: group_view(member), count: 1 });
        member.group.barrier(0).wait().unwrap();
        die();
    }
    member.group.barrier(0).wait().unwrap();
    let first = Token { view: group_view(member), count: 1 };
    for _ in 0..10 {
        let guard = lock.acquire().unwrap();
        assert!(guard.fence() > first, "the token of the dead holder is void");
    }
    wait_for_survivors(&member.group);
}

fn queued_member_dies(member: &Member) {
    let (group, lock) = (&member.group, member.group.lock(0));
    let first = (group.member() == MemberId::new(0)).then(|| lock.acquire().unwrap());
    group.barrier(0).wait().unwrap();
    if group.member() == VICTIM {
        let lock = lock.clone();
        std::thread::spawn(move || {
            let _guard = lock.acquire();
            panic!("member 0 has the lock");
        });
        std::thread::sleep(Duration::from_millis(100));
        die();
    }
    if let Some(first) = first {
        // Until the victim is dead, and the others wait behind it.
        let begin = Instant::now();
        while !group.dead().contains(VICTIM) {
            assert!(begin.elapsed() < TIMEOUT);
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(first);
    } else {
        std::thread::sleep(Duration::from_millis(50));
        drop(lock.acquire().unwrap());
    }
    drop(lock.acquire().unwrap());
    wait_for_survivors(group);
}

fn member_dies_in_a_barrier(member: &Member) {
    let group = &member.group;
    for _ in 0..20 {
        group.barrier(0).wait().unwrap();
    }
    if group.member() == VICTIM {
        // It waits for member 0, which waits for its death.
        let _entered = group.barrier(0).enter().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        die();
    }
    if group.member() == MemberId::new(0) {
        let begin = Instant::now();
        while !group.dead().contains(VICTIM) {
            assert!(begin.elapsed() < TIMEOUT);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    wait_for_survivors(group);
    for _ in 0..20 {
        group.barrier(0).wait().unwrap();
    }
}

/// Everybody takes locks and waits in barriers; member 0 kills the victim after a random time.
fn member_dies_at_a_random_instant(member: &Member) {
    let group = &member.group;
    let mut victim = None;
    if group.member() == VICTIM {
        member.channel.send(MemberId::new(0), &std::process::id().to_le_bytes()).unwrap();
    }
    if group.member() == MemberId::new(0) {
        let message = member.channel.recv().unwrap();
        victim = Some(u32::from_le_bytes(message.bytes.try_into().unwrap()));
    }
    let delay = Duration::from_micros(member.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 100_000);
    let begin = Instant::now();
    let mut fences = [Token::default(); 2];
    // All survivors see the same round fail, and leave together 30 rounds later.
    let (mut ended, mut last_round) = (0, u64::MAX);
    while ended < last_round {
        if begin.elapsed() >= delay
            && let Some(victim) = victim.take()
        {
            // SAFETY: plain system call.
            unsafe { libc::kill(victim as i32, libc::SIGKILL) };
        }
        for (lock, last) in fences.iter_mut().enumerate() {
            let guard = group.lock(lock as u32).acquire().unwrap();
            assert!(guard.fence() > *last, "tokens rise");
            *last = guard.fence();
        }
        ended = match group.barrier(0).wait() {
            Ok(round) => round,
            Err(GroupError::MembersDied { dead, round, .. }) => {
                assert_eq!(*dead, [VICTIM].into_iter().collect());
                assert_eq!(last_round, u64::MAX, "one round fails");
                last_round = round + 30;
                round
            }
            Err(error) => panic!("{error}"),
        };
    }
}

/// Members that live send again and again to member 0; the victim is killed while it sends long messages. Whole messages arrive, or none.
fn sender_dies_in_the_middle_of_a_message(member: &Member) {
    let group = &member.group;
    let channel = group.open_channel(2, &group.channel_options()).unwrap();
    group.barrier(0).wait().unwrap();
    let receiver = MemberId::new(0);
    if group.member() == VICTIM {
        channel.send(receiver, &std::process::id().to_le_bytes()).unwrap();
        loop {
            channel.send(receiver, &[7; 300_000]).unwrap();
        }
    }
    if group.member() != receiver {
        for _ in 0..50 {
            channel.send(receiver, &[group.member().index() as u8; 10_000]).unwrap();
        }
        wait_for_survivors(group);
        return;
    }
    let (mut victim, mut whole, mut others) = (None, 0, 0);
    while others < 100 || !group.dead().contains(VICTIM) {
        let mut bytes = Vec::new();
        let Ok(from) = channel.recv_timeout(Duration::from_millis(20), &mut bytes) else { continue };
        if from == VICTIM && victim.is_none() {
            victim = Some(u32::from_le_bytes(bytes.try_into().unwrap()));
        } else if from == VICTIM {
            assert!(bytes == [7; 300_000], "{} bytes", bytes.len());
            whole += 1;
            if whole == 3 {
                // SAFETY: plain system call.
                unsafe { libc::kill(victim.unwrap() as i32, libc::SIGKILL) };
            }
        } else {
            assert!(bytes == [from.index() as u8; 10_000], "{} bytes of {from}", bytes.len());
            others += 1;
        }
    }
    assert!(whole >= 3);
    wait_for_survivors(group);
}

fn receiver_dies_in_the_middle_of_a_message(member: &Member) {
    let (group, channel) = (&member.group, &member.channel);
    if group.member() == VICTIM {
        for _ in 0..5 {
            channel.recv().unwrap();
        }
        die();
    }
    // Until the window is full, and then until the death is noticed.
    let ended = loop {
        if let Err(error) = channel.send(VICTIM, &[1; 300_000]) {
            break error;
        }
    };
    assert_eq!(ended, GroupError::PeerDead(VICTIM));
    wait_for_survivors(group);
}

/// The victim dies with a long tagged message on offer, and with one that it has not received.
fn partner_of_a_pull_dies(member: &Member) {
    let group = &member.group;
    let options = TaggedOptions { eager_max: 0, ..group.tagged_options() };
    let tagged = group.open_tagged(1, &options).unwrap();
    group.barrier(0).wait().unwrap();
    if group.member() == VICTIM {
        for to in [0, 1, 3] {
            std::mem::forget(
                tagged.isend(MemberId::new(to), 5, group.allocate(100_000).unwrap(), ..).unwrap(),
            );
        }
        group.barrier(0).wait().unwrap();
        die();
    }
    let send = tagged.isend(VICTIM, 6, group.allocate(100_000).unwrap(), ..).unwrap();
    // The offer of a member is dropped if its death is noticed first, and then the receive below would wait for another one.
    let begin = Instant::now();
    while tagged.probe(Some(VICTIM), Some(5)).unwrap().is_none() {
        assert!(begin.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
    group.barrier(0).wait().unwrap();
    let failed = send.wait().unwrap_err();
    assert_eq!(
        (failed.error, failed.buffer.map(|buffer| buffer.len())),
        (GroupError::PeerDead(VICTIM), Some(100_000))
    );
    // Its offer came before it died; nobody can pull it any more.
    let recv = tagged.irecv(None, Some(5), group.allocate(100_000).unwrap());
    let failed = recv.and_then(|recv| recv.wait()).unwrap_err();
    assert!(matches!(failed.error, GroupError::PeerDead(VICTIM) | GroupError::Operation { .. }), "{failed}");
    wait_for_survivors(group);
}

fn stopped_member_is_named(member: &Member) {
    let (group, channel) = (&member.group, &member.channel);
    if group.member() == VICTIM {
        channel.send(MemberId::new(0), &std::process::id().to_le_bytes()).unwrap();
        channel.flush().unwrap();
        // SAFETY: stops this process until member 0 continues it.
        unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
        group.barrier(0).wait().unwrap();
        group.barrier(0).wait().unwrap();
        return;
    }
    if group.member() == MemberId::new(0) {
        let pid = u32::from_le_bytes(channel.recv().unwrap().bytes.try_into().unwrap());
        let begin = Instant::now();
        while !is_stopped(pid) {
            assert!(begin.elapsed() < TIMEOUT);
            std::thread::sleep(Duration::from_millis(1));
        }
        match group.barrier(0).wait_timeout(Duration::from_millis(50)) {
            Err(error @ GroupError::BarrierTimedOut { .. }) => {
                assert!(error.to_string().contains("member 2 does not answer"), "{error}");
            }
            other => panic!("{other:?}"),
        }
        // SAFETY: plain system call.
        unsafe { libc::kill(pid as i32, libc::SIGCONT) };
    }
    // It is not dead: the round and the next one complete.
    group.barrier(0).wait().unwrap();
    assert!(group.dead().is_empty());
    group.barrier(0).wait().unwrap();
}

fn stopped_holder_is_expelled(member: &Member) {
    let (group, lock, channel) = (&member.group, member.group.lock(0), &member.channel);
    let receiver = MemberId::new(1);
    match group.member().index() {
        2 => {
            let guard = lock.acquire().unwrap();
            channel.send(MemberId::new(0), &std::process::id().to_le_bytes()).unwrap();
            channel.send_fenced(receiver, &guard, b"first").unwrap();
            channel.flush().unwrap();
            // SAFETY: stops this process until member 0 continues it.
            unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
            // Whatever becomes of it here, nobody may see it.
            let sent = channel.send_fenced(receiver, &guard, b"late");
            let released = guard.release();
            assert!(sent.is_err() || released.is_err(), "it must learn that it has lost the lock");
        }
        0 => {
            let pid = u32::from_le_bytes(channel.recv().unwrap().bytes.try_into().unwrap());
            let begin = Instant::now();
            while !is_stopped(pid) {
                assert!(begin.elapsed() < TIMEOUT);
                std::thread::sleep(Duration::from_millis(1));
            }
            match lock.acquire_timeout(Duration::from_millis(50)) {
                Err(GroupError::LockTimedOut { members, .. }) => {
                    let text = members.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
                    assert!(text.contains("member 2 does not answer"), "{text}");
                }
                other => panic!("{other:?}"),
            }
            group.expel(VICTIM).unwrap();
            let guard = lock.acquire().unwrap();
            channel.send_fenced(receiver, &guard, b"new").unwrap();
            channel.flush().unwrap();
            // SAFETY: plain system call.
            unsafe { libc::kill(pid as i32, libc::SIGCONT) };
            std::thread::sleep(Duration::from_millis(300));
            channel.send_fenced(receiver, &guard, b"last").unwrap();
        }
        1 => {
            let mut received = Vec::new();
            while received.last().is_none_or(|last| last != "last") {
                received.push(String::from_utf8(channel.recv().unwrap().bytes).unwrap());
            }
            assert_eq!(received, ["first", "new", "last"]);
        }
        _ => {
            let begin = Instant::now();
            while !group.dead().contains(VICTIM) {
                assert!(begin.elapsed() < TIMEOUT);
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// The number of the first view of the group: the members agree on it when they join.
fn group_view(member: &Member) -> u64 {
    member.first_view
}

/// Member 2 has lock 0 and stops. Member `expels`, which is neither the lock's manager nor the coordinator, declares it dead.
fn all_go_on_after_expulsion(member: &Member, expels: usize) {
    let (group, lock, channel) = (&member.group, member.group.lock(0), &member.channel);
    if group.member() == VICTIM {
        let guard = lock.acquire().unwrap();
        channel.send(MemberId::new(expels), &std::process::id().to_le_bytes()).unwrap();
        channel.flush().unwrap();
        // SAFETY: stops this process until it is continued.
        unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
        assert!(guard.release().is_err(), "it must learn that it has lost the lock");
        let refused = [lock.acquire().map(drop), group.barrier(0).wait().map(drop)];
        for refused in refused {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("declared this member dead"), "{error}");
        }
        return;
    }
    let mut victim = None;
    if group.member() == MemberId::new(expels) {
        let pid = u32::from_le_bytes(channel.recv().unwrap().bytes.try_into().unwrap());
        wait_until(|| is_stopped(pid));
        assert!(lock.acquire_timeout(Duration::from_millis(50)).is_err(), "the stopped member has it");
        group.expel(VICTIM).unwrap();
        victim = Some(pid);
    }
    for _ in 0..10 {
        drop(lock.acquire().unwrap());
    }
    wait_for_survivors(group);
    assert!(group.dead().contains(VICTIM) && group.view().gone.contains(VICTIM));
    if let Some(pid) = victim {
        // SAFETY: plain system call.
        unsafe { libc::kill(pid as i32, libc::SIGCONT) };
    }
    group.barrier(0).wait().unwrap();
}

/// Member 2 has lock 0 and stops; member 1 expels it, takes the lock and dies; member 3 takes the lock and dies. Then member 2 runs again.
fn two_holders_die_after_a_stopped_one(member: &Member) {
    let (group, lock, channel) = (&member.group, member.group.lock(0), &member.channel);
    let receiver = MemberId::new(0);
    match group.member().index() {
        2 => {
            let guard = lock.acquire().unwrap();
            channel.send_fenced(receiver, &guard, &guard.fence().to_bytes()).unwrap();
            channel.send(MemberId::new(1), &std::process::id().to_le_bytes()).unwrap();
            channel.send(receiver, &std::process::id().to_le_bytes()).unwrap();
            channel.flush().unwrap();
            // SAFETY: stops this process until it is continued.
            unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
            let sent = channel.send_fenced(receiver, &guard, b"late");
            assert!(sent.is_err() || guard.release().is_err(), "it must learn that it has lost the lock");
        }
        1 => {
            let pid = u32::from_le_bytes(channel.recv().unwrap().bytes.try_into().unwrap());
            wait_until(|| is_stopped(pid));
            group.expel(VICTIM).unwrap();
            let guard = lock.acquire().unwrap();
            channel.send_fenced(receiver, &guard, &guard.fence().to_bytes()).unwrap();
            channel.flush().unwrap();
            die();
        }
        3 => {
            wait_until(|| group.dead().contains(MemberId::new(1)));
            let guard = lock.acquire().unwrap();
            channel.send_fenced(receiver, &guard, &guard.fence().to_bytes()).unwrap();
            channel.flush().unwrap();
            die();
        }
        _ => {
            let (mut pid, mut tokens) = (None, Vec::new());
            while tokens.len() < 3 {
                let bytes = channel.recv().unwrap().bytes;
                match bytes.as_slice().try_into() {
                    Ok(token) => tokens.push(Token::from_bytes(token)),
                    Err(_) => pid = Some(u32::from_le_bytes(bytes.try_into().unwrap())),
                }
            }
            let guard = lock.acquire().unwrap();
            tokens.push(guard.fence());
            assert!(tokens.is_sorted_by(|older, newer| older < newer), "{tokens:?}");
            assert_eq!(group.view().gone.len(), 3);
            // SAFETY: plain system call.
            unsafe { libc::kill(pid.unwrap() as i32, libc::SIGCONT) };
            let late = channel.recv_timeout(Duration::from_millis(300), &mut Vec::new());
            assert!(late.is_err(), "{late:?}");
        }
    }
}

fn wait_until(mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether a process is stopped: the third field of its `stat`.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
}
