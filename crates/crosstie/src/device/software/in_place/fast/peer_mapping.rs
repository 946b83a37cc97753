//! Memory that a peer registered in place, mapped into this process.
//!
//! `process_vm_writev` needs a microsecond before it copies the first byte, and then copies half as fast as a program copies into memory
//! that it has mapped. So memory that a connection writes again and again is mapped here, if two conditions hold:
//!
//! - It is anonymous shared memory (`mmap` with `MAP_SHARED | MAP_ANONYMOUS`), as the pinned host memory of CUDA is. The kernel keeps it in a
//!   file without a name, which another process can open as `/proc/PID/map_files/START-END`.
//! - The kernel lets this process open it: that takes `CAP_CHECKPOINT_RESTORE` or `CAP_SYS_ADMIN` in the first user namespace, as root has
//!   outside of containers.
//!
//! Otherwise, and with `CROSSTIE_MAP_MEMORY=0`, everything stays as it is, see `Link::copy_in_place`.
//!
//! **No peer can make our stores fault.** A store into a mapping raises SIGBUS if the file behind it was truncated. A process with a descriptor of
//! the file can truncate it. So files that a peer created, for example with `memfd_create`, are not mapped. No process has a descriptor of the
//! file behind anonymous shared memory, except one that opened it through `map_files`. That takes the capability above, with which a process can
//! harm us in other ways. The check does not rely on the peer: the kernel must show the same device and name for the file as for anonymous
//! shared memory of this process.
//!
//! **The memory is that of the peer.** Process ids are reused. So the directory in `/proc` is taken from the peer's pidfd (its entry in
//! `/proc/self/fdinfo`), once before the file is looked up and once after.
//!
//! **A region that was given back is not written.** An operation looks up the key in the peer's table before it comes here, and the peer waits for it
//! (`OperationGuard` in `quiescence.rs`). Key and address of a region are never used again (`region_keys.rs`), so a mapping is not taken for that of a
//! later region. A mapping that is no longer used keeps its pages until the connection ends or writes to another region for the first time.
//!
//! **Limits.** What the peer says about its regions decides only which part of its own memory is mapped. The kernel allocates a page that the
//! peer never touched when we write to it: as much as we write, as for any message.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::device::software::layout::{RegionEntry, RegionKey};
use crate::device::software::region_keys::pointer;
use crate::memory::segment::SharedSlice;
use crate::process::Creator;

/// With the value 0, no memory is mapped.
const VARIABLE: &str = "CROSSTIE_MAP_MEMORY";
/// Messages to a region before it is mapped. Mapping takes up to a millisecond, most of it to read the list of the peer's mappings. One
/// message saves a microsecond or two.
const MESSAGES_BEFORE: u32 = 64;
/// Regions that a connection remembers.
const MAX_REGIONS: usize = 8;
/// How often a connection tries to map a region.
const MAX_ATTEMPTS: u32 = 64;
/// Mappings of this process in all. The kernel allows 65,530 by default.
const MAX_MAPPINGS: usize = 4096;
/// The longest mapping. It takes address space, and memory only for page tables.
const MAX_LEN: u64 = 1 << 30;
/// A multiple of the length of a page, whatever that is.
const MAX_PAGE: u64 = 64 << 10;
/// Lines of the list of a peer's mappings that are read at most.
const MAX_LINES: usize = 1 << 14;

static MAPPINGS: AtomicUsize = AtomicUsize::new(0);

/// The regions of a peer that one connection writes, and their mappings.
#[derive(Debug)]
pub(crate) struct PeerMappings {
    /// The mapped region that was written last.
    last: Target,
    regions: Vec<WrittenRegion>,
    attempts_left: u32,
}

/// A location in memory of a peer that is mapped here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MappedPtr(NonNull<u8>);

impl MappedPtr {
    pub(super) fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// The location `offset` bytes further on. It must be inside what was looked up.
    pub(crate) fn at(self, offset: usize) -> MappedPtr {
        NonNull::new(self.as_ptr().wrapping_add(offset)).map_or(self, MappedPtr)
    }
}

/// A mapped region, or [`Target::NONE`].
#[derive(Clone, Copy, Debug)]
struct Target {
    key: u32,
    /// With the tag, as in the peer's table.
    addr: u64,
    len: u64,
    at: *mut u8,
}

impl Target {
    /// No region: no region has the key 0.
    const NONE: Target = Target { key: 0, addr: 0, len: 0, at: core::ptr::null_mut() };

    /// Where `len` bytes at `addr` are mapped, if they are inside the region with this key.
    #[inline(always)]
    fn find(&self, key: u32, addr: u64, len: u32) -> Option<*mut u8> {
        let offset = addr.wrapping_sub(self.addr);
        (key == self.key && offset < self.len && u64::from(len) <= self.len - offset)
            .then(|| self.at.wrapping_add(offset as usize))
    }
}

#[derive(Debug)]
struct WrittenRegion {
    /// `at` is null while the region is not mapped.
    target: Target,
    messages: u32,
    mapping: Option<Mapping>,
}

// SAFETY: a mapping is not bound to a thread; `at` points into one that is kept beside it.
unsafe impl Send for PeerMappings {}
// SAFETY: as above; nothing changes behind a shared reference.
unsafe impl Sync for PeerMappings {}

impl PeerMappings {
    pub(crate) fn new() -> PeerMappings {
        PeerMappings { last: Target::NONE, regions: Vec::new(), attempts_left: MAX_ATTEMPTS }
    }

    /// Where `len` bytes at `addr`, which were checked for the region with this key, are mapped, if they are. Valid until the next call. `regions`
    /// is the peer's table, and `process` its process.
    #[inline(always)]
    pub(crate) fn find(
        &mut self,
        regions: &SharedSlice<RegionEntry>,
        process: Option<&OwnedFd>,
        key: u32,
        addr: u64,
        len: u32,
    ) -> Option<MappedPtr> {
        let at = match self.last.find(key, addr, len) {
            Some(at) => Some(at),
            None => self.find_other(regions, process, key, addr, len),
        };
        at.and_then(NonNull::new).map(MappedPtr)
    }

    /// Finds or maps a region that was not written last or is not mapped.
    #[cold]
    fn find_other(
        &mut self,
        regions: &SharedSlice<RegionEntry>,
        process: Option<&OwnedFd>,
        key: u32,
        addr: u64,
        len: u32,
    ) -> Option<*mut u8> {
        anonymous_memory()?;
        let known = self.regions.iter().position(|region| region.target.find(key, addr, len).is_some());
        let index = match known {
            Some(index) => index,
            None if self.attempts_left == 0 => return None,
            None => self.add(regions, key),
        };
        let region = &mut self.regions[index];
        if region.mapping.is_none() {
            region.messages = region.messages.saturating_add(1);
            if region.messages != MESSAGES_BEFORE || self.attempts_left == 0 {
                return None;
            }
            self.attempts_left -= 1;
            let Target { addr, len, .. } = region.target;
            match Mapping::new(process, pointer(addr).addr() as u64, len) {
                Ok((mapping, at)) => {
                    region.mapping = Some(mapping);
                    region.target.at = at;
                }
                Err(e) => {
                    if e.kind() == io::ErrorKind::PermissionDenied {
                        self.attempts_left = 0;
                    }
                    return None;
                }
            }
        }
        self.last = region.target;
        self.last.find(key, addr, len)
    }

    /// Adds the region with this key, and forgets those that the peer has given back, or the oldest.
    fn add(&mut self, regions: &SharedSlice<RegionEntry>, key: u32) -> usize {
        self.last = Target::NONE;
        let entry = |key| &regions[RegionKey::from_bits(key).index() as usize];
        self.regions.retain(|region| {
            let Target { key, addr, .. } = region.target;
            entry(key).key.load(Relaxed) == key && entry(key).addr.load(Relaxed) == addr
        });
        if self.regions.len() == MAX_REGIONS {
            self.regions.remove(0);
        }
        // A copy. What is used of it is checked.
        let target = Target {
            key,
            addr: entry(key).addr.load(Relaxed),
            len: entry(key).len.load(Relaxed),
            at: core::ptr::null_mut(),
        };
        self.regions.push(WrittenRegion { target, messages: 0, mapping: None });
        self.regions.len() - 1
    }
}

/// A part of a peer's anonymous shared memory, mapped into this process.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    size: usize,
    creator: Creator,
}

impl Mapping {
    /// Maps `start..start + len` of the address space of the peer's process; returns the mapping and where `start` is in it.
    fn new(process: Option<&OwnedFd>, start: u64, len: u64) -> io::Result<(Mapping, *mut u8)> {
        let refused = |why: &'static str| io::Error::new(io::ErrorKind::InvalidInput, why);
        let anonymous = anonymous_memory().ok_or(io::ErrorKind::PermissionDenied)?;
        let process = process.ok_or(io::ErrorKind::PermissionDenied)?;
        let end = start.checked_add(len).ok_or(refused("no such memory"))?;
        let directory = directory_of(process)?;
        let list = BufReader::with_capacity(64 << 10, File::open(directory.join("maps"))?);
        let area = Area::find(list, start, end)?.ok_or(refused("not one mapping"))?;
        // From the page in which the region begins.
        let first = (start - area.start) / MAX_PAGE * MAX_PAGE;
        let size = end - area.start - first;
        if !area.is_shared || size > MAX_LEN {
            return Err(refused("private memory, or too long"));
        }
        let name = format!("map_files/{:x}-{:x}", area.start, area.end);
        // This opens nothing yet: no driver learns of it, whatever file it is.
        let path = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(directory.join(name))?;
        let found = rustix::fs::fstat(&path)?;
        if file_identity(&path)? != *anonymous || found.st_ino != area.inode {
            return Err(refused("not anonymous shared memory"));
        }
        // The process of the pidfd had this directory before and has it now.
        if directory_of(process)? != directory {
            return Err(refused("the peer has ended"));
        }
        let file = OpenOptions::new().read(true).write(true).open(path_of(&path))?;
        let file_len = rustix::fs::fstat(&file)?.st_size as u64;
        let offset = area.offset.saturating_add(first);
        if offset.saturating_add(size) > file_len {
            return Err(refused("beyond the end of the file"));
        }
        let mapping = Mapping::map(&file, offset, size as usize)?;
        let at = mapping.base.as_ptr().wrapping_add((start - area.start - first) as usize);
        Ok((mapping, at))
    }

    fn map(file: &File, offset: u64, size: usize) -> io::Result<Mapping> {
        if MAPPINGS.fetch_add(1, Relaxed) >= MAX_MAPPINGS {
            MAPPINGS.fetch_sub(1, Relaxed);
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no existing object.
        let base = unsafe { rustix::mm::mmap(core::ptr::null_mut(), size, access, flags, file, offset) };
        let Some(base) = base.ok().and_then(|base| NonNull::new(base.cast())) else {
            MAPPINGS.fetch_sub(1, Relaxed);
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        let mapping = Mapping { base, size, creator: Creator::this_process() };
        // A forked child must not access the memory of its parent's peers.
        // SAFETY: advice on our own mapping; it affects only what a fork copies.
        unsafe { rustix::mm::madvise(base.as_ptr().cast(), size, Advice::LinuxDontFork)? };
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A forked child does not have the mapping.
        if !self.creator.is_this_process() {
            return;
        }
        // SAFETY: the mapping is ours. Pointers into it are used only by the operation that got them from `PeerMappings::find`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.size) };
        debug_assert!(unmapped.is_ok());
        MAPPINGS.fetch_sub(1, Relaxed);
    }
}

/// An entry of the list of a process's mappings.
#[derive(Debug, PartialEq, Eq)]
struct Area {
    start: u64,
    end: u64,
    /// Whether it is mapped for reading and writing, and stores go to the file.
    is_shared: bool,
    offset: u64,
    inode: u64,
}

impl Area {
    /// The mapping that contains `start..end`, from a list in the format of `/proc/PID/maps`.
    fn find(mut list: impl BufRead, start: u64, end: u64) -> io::Result<Option<Area>> {
        let mut line = Vec::new();
        for _ in 0..MAX_LINES {
            line.clear();
            if list.read_until(b'\n', &mut line)? == 0 {
                break;
            }
            // The list is in the order of addresses.
            match Area::parse(&line) {
                Some(area) if area.end <= start => {}
                Some(area) => return Ok((area.start <= start && end <= area.end).then_some(area)),
                None => break,
            }
        }
        Ok(None)
    }

    fn parse(line: &[u8]) -> Option<Area> {
        // The name at the end may have bytes that are no characters.
        let line = String::from_utf8_lossy(line);
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let access = fields.next()?;
        let offset = fields.next()?;
        let inode = fields.nth(1)?;
        let hex = |digits| u64::from_str_radix(digits, 16).ok();
        Some(Area {
            start: hex(start)?,
            end: hex(end)?,
            is_shared: access.starts_with("rw") && access.ends_with('s'),
            offset: hex(offset)?,
            inode: inode.parse().ok()?,
        })
    }
}

/// The directory of a process in `/proc`. Fails if the process has ended.
fn directory_of(process: &OwnedFd) -> io::Result<PathBuf> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd()))?;
    let pid = text.lines().find_map(|line| line.strip_prefix("Pid:"));
    // The kernel writes 0 for a process that is not visible here, and -1 for one that has ended.
    match pid.map(|pid| pid.trim().parse::<i32>()) {
        Some(Ok(pid @ 1..)) => Ok(Path::new("/proc").join(pid.to_string())),
        _ => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

/// Device and name by which the kernel shows a file.
#[derive(Debug, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    name: PathBuf,
}

fn file_identity(file: &File) -> io::Result<FileIdentity> {
    let name = std::fs::read_link(path_of(file))?;
    Ok(FileIdentity { device: rustix::fs::fstat(file)?.st_dev, name })
}

fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// What the kernel shows for the files of anonymous shared memory, if this process may open them and shall map them.
fn anonymous_memory() -> Option<&'static FileIdentity> {
    static IDENTITY: OnceLock<Option<FileIdentity>> = OnceLock::new();
    let is_wanted = || std::env::var_os(VARIABLE).is_none_or(|value| value != "0");
    IDENTITY.get_or_init(|| is_wanted().then(|| probe_anonymous_memory().ok())?).as_ref()
}

/// Makes anonymous shared memory and opens its file.
fn probe_anonymous_memory() -> io::Result<FileIdentity> {
    let size = MAX_PAGE as usize;
    let (access, flags) = (ProtFlags::READ, MapFlags::SHARED | MapFlags::NORESERVE);
    // SAFETY: a new mapping at an address that the kernel chooses overlaps no existing object.
    let base = unsafe { rustix::mm::mmap_anonymous(core::ptr::null_mut(), size, access, flags)? };
    let start = base.addr();
    let name = format!("/proc/self/map_files/{start:x}-{:x}", start + size);
    let identity = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(name);
    let identity = identity.and_then(|file| file_identity(&file));
    // SAFETY: the mapping was made above, and nothing refers to it.
    unsafe { rustix::mm::munmap(base, size)? };
    identity
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &[u8] = b"1000-3000 r--p 00000000 fe:00 17 /lib/a b\n\
        3000-5000 rw-s 00002000 00:01 4294967296                 /dev/zero (deleted)\n\
        5000-6000 rw-p 00000000 00:00 0 \xff\xfe\n\
        8000-9000 r--s 00000000 00:01 5 /dev/zero (deleted)\n";

    /// The peer may claim a longer region at any time: what is mapped has the bounds that it had when it was mapped.
    #[test]
    fn a_message_outside_of_what_is_mapped_is_not_found() {
        let mut bytes = [0u8; 100];
        let target = Target { key: 7, addr: 1 << 48 | 5000, len: 100, at: bytes.as_mut_ptr() };
        let find = |key, addr, len| target.find(key, addr, len).map(|at| at.addr() - target.at.addr());
        for (offset, len) in [(0, 100), (99, 1), (40, 60), (0, 0)] {
            assert_eq!(find(7, target.addr + offset, len), Some(offset as usize), "{len} bytes at {offset}");
        }
        for (offset, len) in
            [(0, 101), (99, 2), (100, 0), (100, 1), (u64::MAX, 1), (u64::MAX, 2), (0, u32::MAX)]
        {
            assert_eq!(find(7, target.addr.wrapping_add(offset), len), None, "{len} bytes at {offset}");
        }
        assert_eq!(find(8, target.addr, 1), None, "another key");
        assert_eq!(find(7, 5000, 1), None, "another tag");
        assert_eq!(Target::NONE.find(7, 0, 1), None);
        assert_eq!(Target::NONE.find(0, 0, 0), None);
    }

    #[test]
    fn the_area_of_a_region_is_found_in_a_list_of_mappings() {
        let find = |start, end| Area::find(LIST, start, end).unwrap();
        let area = Area { start: 0x3000, end: 0x5000, is_shared: true, offset: 0x2000, inode: 4_294_967_296 };
        for (start, end) in [(0x3000, 0x5000), (0x3000, 0x3001), (0x4fff, 0x5000)] {
            assert_eq!(find(start, end).as_ref(), Some(&area), "{start:x}-{end:x}");
        }
        assert!(!find(0x1000, 0x3000).unwrap().is_shared);
        assert!(!find(0x5000, 0x6000).unwrap().is_shared);
        assert!(!find(0x8000, 0x9000).unwrap().is_shared, "only for reading");
    }

    #[test]
    fn a_region_that_is_not_inside_one_mapping_has_no_area() {
        for (start, end) in
            [(0, 0x1000), (0xfff, 0x1001), (0x2fff, 0x3001), (0x6000, 0x7000), (0x9000, 0x9001)]
        {
            assert_eq!(Area::find(LIST, start, end).unwrap(), None, "{start:x}-{end:x}");
        }
        for list in [&b""[..], b"\n", b"1000 rw-s", b"x-y rw-s 0 00:01 1", b"1000-2000 rw-s 0 00:01"] {
            assert_eq!(Area::find(list, 0x1000, 0x1001).unwrap(), None);
        }
        let first = LIST.split_inclusive(|byte| *byte == b'\n').next().unwrap();
        let long = [&first.repeat(MAX_LINES), LIST].concat();
        assert_eq!(Area::find(&long[..], 0x3000, 0x3001).unwrap(), None, "too many mappings");
    }
}
