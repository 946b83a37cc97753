//! Memory in place that a peer maps because it is anonymous shared memory (software device): every byte arrives where it belongs, other memory
//! is never mapped, memory that was given back is not written, and neither a truncated file nor the death of the owner harms the writer.
//!
//! Mapping takes a capability (`CAP_CHECKPOINT_RESTORE` or `CAP_SYS_ADMIN`). Without it the tests check that the bytes arrive all the same,
//! and say that they checked no more.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crosstie::device::*;
use crosstie_testkit::child::{self, Child};
use crosstie_testkit::rng;
use crosstie_testkit::wait::{TIMEOUT, until};
use zerocopy::{FromBytes, IntoBytes};

use super::ends::next_completion;

/// More messages to a region than a connection sends before it maps the region.
const MANY: usize = 100;
const BUFFER: usize = 300 << 10;
const PAGE: usize = 4096;

// ---------------------------------------------------------------------------------------------------- memory to register

/// Memory that the process mapped by itself. Accessed through volatile reads and writes: a peer writes it.
struct Memory {
    at: *mut u8,
    len: usize,
}

impl Memory {
    /// `at` null: anywhere. `file` none: anonymous.
    fn map(at: *mut u8, len: usize, flags: i32, file: Option<&OwnedFd>) -> Memory {
        let anonymous = if file.is_none() { libc::MAP_ANONYMOUS } else { 0 };
        let fixed = if at.is_null() { 0 } else { libc::MAP_FIXED_NOREPLACE };
        let descriptor = file.map_or(-1, AsRawFd::as_raw_fd);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping that replaces no other one.
        let base = unsafe { libc::mmap(at.cast(), len, access, flags | anonymous | fixed, descriptor, 0) };
        assert_ne!(base, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        assert!(at.is_null() || base == at.cast(), "the address is in use");
        Memory { at: base.cast(), len }
    }

    fn shared(len: usize) -> Memory {
        Memory::map(std::ptr::null_mut(), len, libc::MAP_SHARED, None)
    }

    fn read(&self) -> Vec<u8> {
        // SAFETY: inside the mapping.
        (0..self.len).map(|at| unsafe { self.at.add(at).read_volatile() }).collect()
    }

    fn register(&self, pd: &Pd, from: usize, len: usize) -> Mr {
        assert!(from + len <= self.len);
        // SAFETY: inside the mapping, which outlives the region, and to which there are no references.
        unsafe { pd.register(self.at.add(from), len, Access::ALL) }.unwrap()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

fn memfd(len: usize) -> OwnedFd {
    // SAFETY: plain system calls; the descriptor is new.
    unsafe {
        let descriptor = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC);
        assert!(descriptor >= 0);
        assert_eq!(libc::ftruncate(descriptor, len as i64), 0);
        OwnedFd::from_raw_fd(descriptor)
    }
}

/// Mappings of anonymous shared memory that this process has.
fn shared_mappings() -> usize {
    let list = std::fs::read_to_string("/proc/self/maps").unwrap();
    list.lines().filter(|line| line.contains(" rw-s ") && line.ends_with("/dev/zero (deleted)")).count()
}

/// Whether this process may open such memory of another one.
fn may_map() -> bool {
    let memory = Memory::shared(1 << 16);
    let start = memory.at.addr();
    let allowed =
        std::fs::File::open(format!("/proc/self/map_files/{start:x}-{:x}", start + memory.len)).is_ok();
    if !allowed {
        eprintln!("NOT CHECKED: that memory is mapped. This needs root, or CAP_CHECKPOINT_RESTORE");
    }
    allowed
}

// ------------------------------------------------------------------------------------------------------------ both ends

/// A device with one queue pair.
struct End {
    // Dropped in this order.
    qp: RcQp,
    cq: Cq,
    buffer: Mr,
    pd: Pd,
    _device: Device,
}

impl End {
    fn new() -> End {
        let device = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(&CqConfig::default()).unwrap();
        let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
        qp.init(Access::ALL).unwrap();
        let buffer = pd.allocate(BUFFER, Access::ALL).unwrap();
        End { qp, cq, buffer, pd, _device: device }
    }

    /// Writes `len` bytes with the value `byte`, in one message; waits for its status.
    fn write(&mut self, to: RemoteAddr, len: usize, byte: u8) -> Status {
        self.buffer.write(0, &vec![byte; len]).unwrap();
        let sges = [self.buffer.sge(0..len).unwrap()];
        self.qp.post(&SendWr::new(1, SendOp::Write(to), Data::Regions(&sges)).signaled()).unwrap();
        next_completion(&mut self.cq).status
    }
}

/// The other process. It runs when a test below starts it; does nothing in an ordinary run.
#[test]
fn other_process() {
    let Some(role) = child::task() else { return };
    if role == "writer without capabilities" {
        drop_capabilities();
    }
    let mut end = End::new();
    let memory = Memory::shared(4 * PAGE);
    let region = memory.register(&end.pd, 0, memory.len);
    child::write(end.qp.address().as_bytes());
    child::write(region.remote().as_bytes());
    let theirs = QpAddress::read_from_bytes(&child::read()).unwrap();
    end.qp.connect(&theirs, &ConnectConfig::default()).unwrap();
    let own = shared_mappings();
    loop {
        let numbers = <[u64; 5]>::read_from_bytes(&child::read()).unwrap();
        let [addr, rkey, len, byte, count] = numbers;
        let to = RemoteAddr { addr, rkey: rkey as u32 };
        let statuses: Vec<Status> = (0..count).map(|_| end.write(to, len as usize, byte as u8)).collect();
        let status = statuses.into_iter().find(|status| *status != Status::Success);
        let mapped = shared_mappings() - own;
        child::write(format!("{:?} {mapped}", status.unwrap_or(Status::Success)).as_bytes());
    }
}

fn drop_capabilities() {
    #[repr(C)]
    struct Header(u32, i32);
    let (header, none) = (Header(0x2008_0522, 0), [0u32; 6]);
    // SAFETY: version 3 of the call reads a header of 8 bytes and 24 bytes of capabilities.
    assert_eq!(unsafe { libc::syscall(libc::SYS_capset, &header, &none) }, 0);
}

/// The other process, connected to `end`.
struct Other {
    child: Child,
    memory: RemoteMemory,
}

impl Other {
    fn start(role: &str, end: &mut End) -> Other {
        let mut child = Child::spawn(
            child::command(other_process, role)
                .env("CROSSTIE_MAP_MEMORY", if role.ends_with("not to map") { "0" } else { "1" })
                .env("CROSSTIE_COPY_HELPERS", if role.ends_with("helpers") { "2" } else { "0" }),
        );
        child.write(end.qp.address().as_bytes());
        let theirs = QpAddress::read_from_bytes(&child.read()).unwrap();
        end.qp.connect(&theirs, &ConnectConfig::default()).unwrap();
        let memory = RemoteMemory::read_from_bytes(&child.read()).unwrap();
        Other { child, memory }
    }

    /// Has it write `count` times; returns the first status that is no success, and how many regions it has mapped then.
    fn write(&mut self, to: RemoteAddr, len: usize, byte: u8, count: usize) -> (String, usize) {
        let RemoteAddr { addr, rkey } = to;
        let numbers = [addr, rkey.into(), len as u64, byte.into(), count as u64];
        self.child.write(numbers.as_bytes());
        let line = self.child.read_text();
        let (status, mapped) = line.split_once(' ').unwrap();
        (status.into(), mapped.parse().unwrap())
    }

    #[track_caller]
    fn expect_success(&mut self, to: RemoteAddr, len: usize, byte: u8, count: usize) -> usize {
        let (status, mapped) = self.write(to, len, byte, count);
        assert_eq!(status, "Success");
        mapped
    }
}

// ------------------------------------------------------------------------------------------------------------- the tests
// They count the mappings of their process.

#[test]
fn every_byte_arrives_where_it_belongs_whether_or_not_the_memory_is_mapped() {
    if child::run_alone(every_byte_arrives_where_it_belongs_whether_or_not_the_memory_is_mapped) {
        return;
    }
    let mut random = rng::Random(rng::seed());
    let expected = usize::from(may_map());
    let roles = [
        ("writer", expected),
        ("writer with helpers", expected),
        ("writer without capabilities", 0),
        ("writer that is told not to map", 0),
    ];
    for (role, expected) in roles {
        let mut end = End::new();
        let mut other = Other::start(role, &mut end);
        let memory = Memory::shared(150 * PAGE);
        // Not a whole number of pages, from the middle of one to the middle of another; not at the beginning of the mapping.
        let (from, len) = (37 * PAGE + 100, 100 * PAGE + 77);
        let region = memory.register(&end.pd, from, len);
        let remote = region.remote();
        let mut wanted = vec![0; memory.len];
        let mut mapped = 0;
        for message in 0..3 * MANY {
            let count = [1, 8, 300, PAGE, 20_000, 200_000, BUFFER][random.index(7)];
            let at = random.index(len - count + 1);
            let at = if message % 10 == 9 { len - count } else { at };
            let byte = message as u8 | 1;
            mapped = other.expect_success(remote.at(at as u64), count, byte, 1);
            wanted[from + at..from + at + count].fill(byte);
            assert!(memory.read() == wanted, "{role}: message {message}, {count} bytes at {at}");
        }
        assert_eq!(mapped, expected, "{role}: regions that are mapped");
        // What is mapped has the bounds of the region, not of its pages.
        let beyond = other.write(remote.at(len as u64 - 7), 8, 1, 1);
        assert_eq!(beyond.0, "RemoteAccess", "{role}");
        assert!(memory.read() == wanted, "{role}: bytes behind the region");
    }
}

#[test]
fn memory_that_its_owner_can_truncate_is_not_mapped() {
    if child::run_alone(memory_that_its_owner_can_truncate_is_not_mapped) {
        return;
    }
    let len = 16 * PAGE;
    let file = memfd(len);
    let kinds = [
        ("private", Memory::map(std::ptr::null_mut(), len, libc::MAP_PRIVATE, None)),
        ("memfd", Memory::map(std::ptr::null_mut(), len, libc::MAP_SHARED, Some(&file))),
    ];
    let mut end = End::new();
    let mut other = Other::start("writer", &mut end);
    for (kind, memory) in &kinds {
        let region = memory.register(&end.pd, 0, len);
        assert_eq!(other.expect_success(region.remote().at(5), PAGE, 7, MANY), 0, "{kind}");
        assert!(memory.read()[5..5 + PAGE].iter().all(|byte| *byte == 7), "{kind}");
        if *kind == "memfd" {
            // SAFETY: a plain system call. Nothing here reads the memory after it.
            assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), 0) }, 0);
            assert_eq!(other.write(region.remote().at(5), PAGE, 8, 1).0, "RemoteOperation");
        }
    }
    assert_eq!(other.child.try_wait(), None, "the writer has ended");
}

#[test]
fn region_at_the_address_of_one_that_was_given_back_is_written_and_the_old_memory_is_not() {
    if child::run_alone(region_at_the_address_of_one_that_was_given_back_is_written_and_the_old_memory_is_not)
    {
        return;
    }
    let expected = usize::from(may_map());
    let mut end = End::new();
    let mut other = Other::start("writer", &mut end);
    let len = 16 * PAGE;
    let mut memory = Memory::shared(len);
    for round in 1..=10u8 {
        let region = memory.register(&end.pd, 0, len);
        // Before and after it is mapped, and beside a second region in the same memory.
        let second = memory.register(&end.pd, 0, len);
        for part in 0..4u8 {
            let byte = round * 16 + part;
            let mapped = other.expect_success(region.remote().at(3), 2 * PAGE, byte, MANY / 2);
            assert!(memory.read()[3..3 + 2 * PAGE].iter().all(|at| *at == byte), "round {round}");
            assert_eq!(mapped, if part == 0 { 0 } else { expected }, "round {round}, part {part}");
        }
        assert_eq!(other.expect_success(second.remote().at(0), 1, round, 1), expected, "round {round}");
        assert_eq!(memory.read()[0], round);
        // The same memory, which is mapped a second time here, sees no later message.
        // SAFETY: a second mapping of memory that is ours.
        let old = unsafe { libc::mremap(memory.at.cast(), 0, len, libc::MREMAP_MAYMOVE) };
        assert_ne!(old, libc::MAP_FAILED);
        let old = Memory { at: old.cast(), len };
        let before = old.read();
        let at = memory.at;
        region.deregister(TIMEOUT).unwrap();
        second.deregister(TIMEOUT).unwrap();
        drop(memory);
        memory = Memory::map(at, len, libc::MAP_SHARED, None);
        let region = memory.register(&end.pd, 0, len);
        let mapped = other.expect_success(region.remote().at(3), 2 * PAGE, 0xFF, 1);
        assert_eq!(mapped, 0, "round {round}: mappings of regions that were given back");
        assert!(memory.read()[3..3 + 2 * PAGE].iter().all(|at| *at == 0xFF), "round {round}");
        assert!(old.read() == before, "round {round}: memory that was given back was written");
    }
}

#[test]
fn writer_of_mapped_memory_survives_the_death_of_its_owner() {
    if child::run_alone(writer_of_mapped_memory_survives_the_death_of_its_owner) {
        return;
    }
    let expected = usize::from(may_map());
    let mut end = End::new();
    let mut owner = Other::start("owner", &mut end);
    let before = shared_mappings();
    let to = owner.memory.at(0);
    for _ in 0..MANY {
        assert_eq!(end.write(to, PAGE, 1), Status::Success);
    }
    assert!(shared_mappings() >= before + expected);
    owner.child.kill();
    until("the queue pair learns of the death", || {
        end.write(to, PAGE, 2);
        end.qp.state() == QpState::Error
    });
    assert_eq!(end.write(to, PAGE, 3), Status::Flushed);
}
