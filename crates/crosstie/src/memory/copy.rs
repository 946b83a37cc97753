//! Copies in and out of memory that another process, or a NIC, may access at the same time.
//!
//! A plain `memcpy` on such memory is a data race. On x86-64 the copies here are instructions inside `asm!`, about which the
//! compiler can assume nothing; elsewhere they are relaxed atomic accesses. With a concurrent writer the bytes are an
//! arbitrary mixture of old and new, but there is no undefined behaviour.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Copies `len` bytes. Source and destination may both be shared memory.
///
/// # Safety
///
/// `from..from + len` is valid for reads and `to..to + len` for writes; they do not overlap.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the requirements are the same as those of this function.
    unsafe { arch::copy(from, to, len) }
}

/// Copies `len` bytes, and writes them past the caches where the processor can: for copies that do not fit into a cache, or that
/// nobody reads soon. Afterwards the bytes are ordered before later stores, as those of [`copy`] are.
///
/// # Safety
///
/// As for [`copy`].
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the requirements are the same as those of this function.
    unsafe { arch::copy_streaming(from, to, len) }
}

/// Copies at most [`SHORT`] bytes to two places.
///
/// # Safety
///
/// As for [`copy`], with each of the places. `len` is not more than [`SHORT`].
#[inline]
pub(crate) unsafe fn copy_short_twice(from: *const u8, to: [*mut u8; 2], len: usize) {
    // SAFETY: the requirements are the same as those of this function. Code for longer copies is left out.
    unsafe {
        core::hint::assert_unchecked(len <= SHORT);
        arch::copy_short_twice(from, to, len);
    }
}

/// Longest copy of [`copy_short_twice`].
pub(crate) const SHORT: usize = 64;

/// Loads 8 bytes.
///
/// # Safety
///
/// They are valid for reads.
#[inline]
pub(crate) unsafe fn load_word(from: *const u8) -> u64 {
    // SAFETY: the requirements are the same as those of this function.
    unsafe { arch::load_word(from) }
}

/// Writes the 16 bytes of `head`, and `bytes` behind them, to two places. The bytes are read once, in words: the program has often just stored
/// them.
///
/// # Safety
///
/// Both places are valid for writes of `16 + bytes.len()` bytes. No Rust reference to those bytes exists.
#[inline]
pub(crate) unsafe fn store_twice(head: [u64; 2], bytes: &[u8], to: [*mut u8; 2]) {
    // SAFETY: the requirements are the same as those of this function.
    unsafe { arch::store_twice(head, bytes, to) }
}

/// Longer copies use [`copy`], whose setup then pays off.
const SMALL: usize = 128;

/// Copies private bytes into shared words. Small copies go word by word, because the program often has the words in
/// registers or has just stored them: a wider load that spans several recent stores would have to wait for all of them.
///
/// # Safety
///
/// `to` is aligned to 8, and valid for writes of `from.len()` bytes rounded up to a multiple of 8. No Rust reference to
/// those bytes exists.
#[inline(always)]
pub(crate) unsafe fn copy_in(from: &[u8], to: *mut u8) {
    if from.len() > SMALL {
        // SAFETY: the caller guarantees it.
        unsafe { copy(from.as_ptr(), to, from.len()) };
        return;
    }
    let (words, rest) = from.as_chunks::<8>();
    for (i, word) in words.iter().enumerate() {
        // SAFETY: inside the range that the caller guarantees, and aligned.
        unsafe { AtomicU64::from_ptr(to.add(8 * i).cast()) }.store(u64::from_ne_bytes(*word), Relaxed);
    }
    if !rest.is_empty() {
        let mut word = [0; 8];
        word[..rest.len()].copy_from_slice(rest);
        // SAFETY: as above; the last word is inside the length rounded up.
        unsafe { AtomicU64::from_ptr(to.add(8 * words.len()).cast()) }
            .store(u64::from_ne_bytes(word), Relaxed);
    }
}

/// Copies shared words into private bytes, as [`copy_in`] does.
///
/// # Safety
///
/// `from` is aligned to 8, and valid for reads of `to.len()` bytes rounded up to a multiple of 8. No Rust reference to
/// those bytes exists.
#[inline(always)]
pub(crate) unsafe fn copy_out(from: *const u8, to: &mut [u8]) {
    if to.len() > SMALL {
        // SAFETY: the caller guarantees it.
        unsafe { copy(from, to.as_mut_ptr(), to.len()) };
        return;
    }
    let from = from.cast_mut();
    let (words, rest) = to.as_chunks_mut::<8>();
    let whole = words.len();
    for (i, word) in words.iter_mut().enumerate() {
        // SAFETY: inside the range that the caller guarantees, and aligned.
        *word = unsafe { AtomicU64::from_ptr(from.add(8 * i).cast()) }.load(Relaxed).to_ne_bytes();
    }
    if !rest.is_empty() {
        // SAFETY: as above; the last word is inside the length rounded up.
        let word = unsafe { AtomicU64::from_ptr(from.add(8 * whole).cast()) }.load(Relaxed).to_ne_bytes();
        rest.copy_from_slice(&word[..rest.len()]);
    }
}

/// Stores `N` bytes into shared memory, with as few stores of 8, 4 and 1 bytes as possible.
///
/// # Safety
///
/// `to` is aligned to 8 and valid for writes of `N` bytes. No Rust reference to those bytes exists.
#[inline(always)]
pub(crate) unsafe fn store<const N: usize>(bytes: &[u8; N], to: *mut u8) {
    let (words, rest) = bytes.as_chunks::<8>();
    let (halves, singles) = rest.as_chunks::<4>();
    // SAFETY: every access is inside the `N` bytes that the caller guarantees, and aligned.
    unsafe {
        for (i, word) in words.iter().enumerate() {
            AtomicU64::from_ptr(to.add(8 * i).cast()).store(u64::from_ne_bytes(*word), Relaxed);
        }
        let to = to.add(8 * words.len());
        for (i, half) in halves.iter().enumerate() {
            AtomicU32::from_ptr(to.add(4 * i).cast()).store(u32::from_ne_bytes(*half), Relaxed);
        }
        let to = to.add(4 * halves.len());
        for (i, single) in singles.iter().enumerate() {
            AtomicU8::from_ptr(to.add(i)).store(*single, Relaxed);
        }
    }
}

/// Loads `N` bytes from shared memory, in the same pieces as [`store`].
///
/// # Safety
///
/// `from` is aligned to 8 and valid for reads of `N` bytes. No Rust reference to those bytes exists.
#[inline(always)]
pub(crate) unsafe fn load<const N: usize>(from: *const u8) -> [u8; N] {
    let mut bytes = [0; N];
    let from = from.cast_mut();
    let (words, rest) = bytes.as_chunks_mut::<8>();
    let (whole, (halves, singles)) = (words.len(), rest.as_chunks_mut::<4>());
    // SAFETY: as in `store`.
    unsafe {
        for (i, word) in words.iter_mut().enumerate() {
            *word = AtomicU64::from_ptr(from.add(8 * i).cast()).load(Relaxed).to_ne_bytes();
        }
        let from = from.add(8 * whole);
        for (i, half) in halves.iter_mut().enumerate() {
            *half = AtomicU32::from_ptr(from.add(4 * i).cast()).load(Relaxed).to_ne_bytes();
        }
        let from = from.add(4 * halves.len());
        for (i, single) in singles.iter_mut().enumerate() {
            *single = AtomicU8::from_ptr(from.add(i)).load(Relaxed);
        }
    }
    bytes
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use core::arch::asm;
    use core::arch::x86_64::__cpuid_count;
    use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    /// Shorter copies never use the string instruction.
    const LONG: usize = 2048;

    /// From this length on the string instruction is as fast as a loop of moves; zero if that is not known yet. Where the processor begins it
    /// without delay (FSRM), from [`LONG`] on.
    static STRING_FROM: AtomicUsize = AtomicUsize::new(0);

    #[inline(always)]
    fn string_from() -> usize {
        // Relaxed: it orders no other data, and every thread finds the same length.
        match STRING_FROM.load(Relaxed) {
            0 => find_string_from(),
            len => len,
        }
    }

    #[cold]
    #[inline(never)]
    fn find_string_from() -> usize {
        const FEATURES: u32 = 7;
        const FSRM: u32 = 1 << 4;
        let has_fsrm = __cpuid_count(0, 0).eax >= FEATURES && __cpuid_count(FEATURES, 0).edx & FSRM != 0;
        let len = if has_fsrm { LONG } else { 4 * LONG };
        STRING_FROM.store(len, Relaxed);
        len
    }

    /// Defines a function that copies one piece through a register.
    macro_rules! piece {
        ($name:ident, $class:ident, $load:literal, $store:literal) => {
            /// # Safety
            ///
            /// The piece at `offset` is inside both ranges.
            #[inline(always)]
            unsafe fn $name(from: *const u8, to: *mut u8, offset: usize) {
                // SAFETY: reads and writes one piece that the caller guarantees; flags and stack are not touched.
                unsafe {
                    asm!($load, $store, f = in(reg) from.add(offset), t = in(reg) to.add(offset), v = out($class) _,
                         options(nostack, preserves_flags));
                }
            }
        };
    }
    piece!(move16, xmm_reg, "movups {v}, [{f}]", "movups [{t}], {v}");
    piece!(move8, reg, "mov {v}, [{f}]", "mov [{t}], {v}");
    piece!(move4, reg, "mov {v:e}, [{f}]", "mov [{t}], {v:e}");
    piece!(move2, reg, "mov {v:x}, [{f}]", "mov [{t}], {v:x}");
    piece!(move1, reg_byte, "mov {v}, [{f}]", "mov [{t}], {v}");

    /// # Safety
    ///
    /// As for [`super::load_word`].
    #[inline(always)]
    pub(super) unsafe fn load_word(from: *const u8) -> u64 {
        let word;
        // SAFETY: reads 8 bytes that the caller guarantees; flags and stack are not touched.
        unsafe {
            asm!("mov {v}, [{f}]", f = in(reg) from, v = out(reg) word, options(nostack, preserves_flags, readonly));
        }
        word
    }

    /// Instructions that copy the 16 bytes at an offset as two words. Messages with a head are put together from words a moment before, and
    /// a load that is wider than the stores before it waits until these have left the core.
    macro_rules! words {
        ($at:literal) => {
            concat!(
                "mov {a}, [{f} + ",
                $at,
                "]; mov {b}, [{f} + ",
                $at,
                " + 8];",
                "mov [{t} + ",
                $at,
                "], {a}; mov [{t} + ",
                $at,
                " + 8], {b}"
            )
        };
    }

    /// # Safety
    ///
    /// As for [`super::store_twice`].
    #[inline(always)]
    pub(super) unsafe fn store_twice(head: [u64; 2], bytes: &[u8], to: [*mut u8; 2]) {
        let (from, len) = (bytes.as_ptr(), bytes.len());
        let [first, second] = to;
        // SAFETY: writes the first 16 bytes of both places; with 16 to 32 bytes behind them, reads the first and the last 16 of these and
        // writes them to both places. Flags and stack are not touched.
        unsafe {
            asm!("mov [{t}], {a}", "mov [{t} + 8], {b}", "mov [{u}], {a}", "mov [{u} + 8], {b}",
                 t = in(reg) first, u = in(reg) second, a = in(reg) head[0], b = in(reg) head[1],
                 options(nostack, preserves_flags));
            if (16..=32).contains(&len) {
                asm!("mov {a}, [{f}]", "mov {b}, [{f} + 8]",
                     "mov [{t} + 16], {a}", "mov [{t} + 24], {b}", "mov [{u} + 16], {a}", "mov [{u} + 24], {b}",
                     "mov {a}, [{f} + {l} - 16]", "mov {b}, [{f} + {l} - 8]",
                     "mov [{t} + {l}], {a}", "mov [{t} + {l} + 8], {b}", "mov [{u} + {l}], {a}", "mov [{u} + {l} + 8], {b}",
                     f = in(reg) from, l = in(reg) len, t = in(reg) first, u = in(reg) second,
                     a = out(reg) _, b = out(reg) _, options(nostack, preserves_flags));
            } else {
                copy(from, first.add(16), len);
                copy(from, second.add(16), len);
            }
        }
    }

    /// Defines a function that copies pieces from both ends of a range. They overlap if there are more of them than the range needs.
    macro_rules! both_ends {
        ($name:ident, $class:ident, $($code:expr),+) => {
            /// # Safety
            ///
            /// As for [`super::copy`]. Every piece must fit into `len` bytes.
            #[inline(always)]
            unsafe fn $name(from: *const u8, to: *mut u8, len: usize) {
                // SAFETY: reads and writes pieces inside the ranges that the caller guarantees; flags and stack are not touched.
                unsafe {
                    asm!($($code),+, f = in(reg) from, t = in(reg) to, l = in(reg) len, a = out($class) _, b = out($class) _,
                         options(nostack, preserves_flags));
                }
            }
        };
    }
    #[rustfmt::skip]
    both_ends!(copy8to16, reg, "mov {a}, [{f}]; mov {b}, [{f} + {l} - 8]", "mov [{t}], {a}; mov [{t} + {l} - 8], {b}");
    #[rustfmt::skip]
    both_ends!(copy16to32, xmm_reg, "movups {a}, [{f}]; movups {b}, [{f} + {l} - 16]", "movups [{t}], {a}; movups [{t} + {l} - 16], {b}");
    both_ends!(copy32to48, reg, words!("0"), words!("16"), words!("{l} - 16"));
    both_ends!(copy32to64, reg, words!("0"), words!("16"), words!("{l} - 32"), words!("{l} - 16"));

    /// # Safety
    ///
    /// As for [`super::copy_short_twice`].
    #[inline(always)]
    pub(super) unsafe fn copy_short_twice(from: *const u8, [first, second]: [*mut u8; 2], len: usize) {
        // SAFETY: with 16 to 32 bytes, reads the first and the last 16 of them and writes them to both places. Flags and stack are not
        // touched.
        unsafe {
            if (16..=32).contains(&len) {
                asm!("movups {a}, [{f}]", "movups {b}, [{f} + {l} - 16]",
                     "movups [{t}], {a}", "movups [{t} + {l} - 16], {b}", "movups [{u}], {a}", "movups [{u} + {l} - 16], {b}",
                     f = in(reg) from, l = in(reg) len, t = in(reg) first, u = in(reg) second,
                     a = out(xmm_reg) _, b = out(xmm_reg) _, options(nostack, preserves_flags));
            } else {
                copy(from, first, len);
                copy(from, second, len);
            }
        }
    }

    /// Copies one cache line.
    ///
    /// # Safety
    ///
    /// `from` is valid for reads of a line and `to` for writes of one.
    #[inline(always)]
    unsafe fn move_line(from: *const u8, to: *mut u8) {
        // SAFETY: reads and writes the line that the caller guarantees; flags and stack are not touched.
        unsafe {
            asm!("movups {a}, [{f}]", "movups {b}, [{f} + 16]", "movups {c}, [{f} + 32]", "movups {d}, [{f} + 48]",
                 "movups [{t}], {a}", "movups [{t} + 16], {b}", "movups [{t} + 32], {c}", "movups [{t} + 48], {d}",
                 f = in(reg) from, t = in(reg) to,
                 a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
                 options(nostack, preserves_flags));
        }
    }

    /// Copies 16 bytes or more.
    ///
    /// # Safety
    ///
    /// As for [`super::copy`].
    unsafe fn copy_long(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: every piece is inside the ranges that the caller guarantees: it ends at or before `len`.
        unsafe {
            if len >= LONG && len >= string_from() {
                asm!("rep movsb", inout("rcx") len => _, inout("rsi") from => _, inout("rdi") to => _,
                     options(nostack, preserves_flags));
                return;
            }
            let mut offset = 0;
            while offset + LINE <= len {
                move_line(from.add(offset), to.add(offset));
                offset += LINE;
            }
            while offset + 16 <= len {
                move16(from, to, offset);
                offset += 16;
            }
            if offset < len {
                move16(from, to, len - 16);
            }
        }
    }

    const LINE: usize = 64;

    /// A streaming copy takes a line of each of this many pages in turn. The processor prefetches within a page, so that more memory
    /// requests are under way than with one page after the other.
    const PAGES: usize = 4;
    const PAGE: usize = 4096;

    /// Copies one cache line past the caches.
    ///
    /// # Safety
    ///
    /// `from` is valid for reads of a line and `to` for writes of one; `to` is aligned to 16.
    #[inline(always)]
    unsafe fn stream_line(from: *const u8, to: *mut u8) {
        // SAFETY: reads and writes the line that the caller guarantees; flags and stack are not touched.
        unsafe {
            asm!("movups {a}, [{f}]", "movups {b}, [{f} + 16]", "movups {c}, [{f} + 32]", "movups {d}, [{f} + 48]",
                 "movntdq [{t}], {a}", "movntdq [{t} + 16], {b}", "movntdq [{t} + 32], {c}", "movntdq [{t} + 48], {d}",
                 f = in(reg) from, t = in(reg) to,
                 a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
                 options(nostack, preserves_flags));
        }
    }

    /// # Safety
    ///
    /// As for [`super::copy`].
    pub(super) unsafe fn copy_streaming(from: *const u8, to: *mut u8, len: usize) {
        let head = to.addr().wrapping_neg() % LINE;
        if len < head + PAGES * PAGE {
            // SAFETY: the caller's promise.
            unsafe { copy(from, to, len) };
            return;
        }
        let end = len - (len - head) % (PAGES * PAGE);
        // SAFETY: every piece is below `len`. Behind the head, `to` is aligned to a line, and all steps are multiples of one. The
        // fence orders the streamed stores before later ones; it touches no memory of ours.
        unsafe {
            copy(from, to, head);
            for chunk in (head..end).step_by(PAGES * PAGE) {
                for line in (chunk..chunk + PAGE).step_by(LINE) {
                    for page in 0..PAGES {
                        let offset = line + page * PAGE;
                        stream_line(from.add(offset), to.add(offset));
                    }
                }
            }
            asm!("sfence", options(nostack, preserves_flags));
            copy(from.add(end), to.add(end), len - end);
        }
    }

    /// # Safety
    ///
    /// As for [`super::copy`].
    #[inline(always)]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        // If the length is not a multiple of the piece, the last piece overlaps the one before, and writes the same bytes
        // again. Every offset below is at most `len` minus the size of its piece.
        // SAFETY: so every piece is inside the ranges that the caller guarantees.
        unsafe {
            if len >= 16 {
                match len {
                    0..=32 => copy16to32(from, to, len),
                    33..=48 => copy32to48(from, to, len),
                    49..=64 => copy32to64(from, to, len),
                    _ => copy_long(from, to, len),
                }
            } else if len == 8 {
                move8(from, to, 0);
            } else if len > 8 {
                copy8to16(from, to, len);
            } else if len >= 4 {
                move4(from, to, 0);
                move4(from, to, len - 4);
            } else if len >= 2 {
                move2(from, to, 0);
                move2(from, to, len - 2);
            } else if len == 1 {
                move1(from, to, 0);
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

    /// # Safety
    ///
    /// As for [`super::store_twice`].
    pub(super) unsafe fn store_twice(head: [u64; 2], bytes: &[u8], to: [*mut u8; 2]) {
        for to in to {
            // SAFETY: the caller's promise.
            unsafe {
                copy(head.as_ptr().cast(), to, 16);
                copy(bytes.as_ptr(), to.add(16), bytes.len());
            }
        }
    }

    /// # Safety
    ///
    /// As for [`super::copy_short_twice`].
    pub(super) unsafe fn copy_short_twice(from: *const u8, to: [*mut u8; 2], len: usize) {
        for to in to {
            // SAFETY: the caller's promise.
            unsafe { copy(from, to, len) };
        }
    }

    /// # Safety
    ///
    /// As for [`super::load_word`].
    pub(super) unsafe fn load_word(from: *const u8) -> u64 {
        let mut bytes = [0; 8];
        // SAFETY: the caller's promise.
        unsafe { copy(from, bytes.as_mut_ptr(), bytes.len()) };
        u64::from_ne_bytes(bytes)
    }

    /// # Safety
    ///
    /// As for [`super::copy`].
    pub(super) unsafe fn copy_streaming(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { copy(from, to, len) };
    }

    /// # Safety
    ///
    /// As for [`super::copy`].
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        let mut offset = 0;
        // SAFETY: every access is below `len` and aligned for its width.
        unsafe {
            if (from as usize ^ to as usize) & 7 == 0 {
                while offset < len && (from as usize + offset) & 7 != 0 {
                    byte(from, to, offset);
                    offset += 1;
                }
                while offset + 8 <= len {
                    let word = AtomicU64::from_ptr(from.add(offset).cast_mut().cast()).load(Relaxed);
                    AtomicU64::from_ptr(to.add(offset).cast()).store(word, Relaxed);
                    offset += 8;
                }
            }
            while offset < len {
                byte(from, to, offset);
                offset += 1;
            }
        }
    }

    /// # Safety
    ///
    /// `offset` is inside both ranges.
    unsafe fn byte(from: *const u8, to: *mut u8, offset: usize) {
        // SAFETY: the caller guarantees it; bytes are always aligned.
        unsafe {
            let value = AtomicU8::from_ptr(from.add(offset).cast_mut()).load(Relaxed);
            AtomicU8::from_ptr(to.add(offset)).store(value, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_and_load_keep_the_bytes() {
        fn check<const N: usize>() {
            let mut shared = [0xAAAA_AAAA_AAAA_AAAAu64; 6];
            let bytes: [u8; N] = core::array::from_fn(|i| i as u8 + 1);
            let at = shared.as_mut_ptr().cast::<u8>();
            // SAFETY: `shared` is aligned, longer than `N`, and reached through this pointer only.
            unsafe {
                store(&bytes, at);
                assert_eq!(load::<N>(at), bytes);
                assert_eq!(*at.add(N), 0xAA, "{N}");
            }
        }
        check::<1>();
        check::<4>();
        check::<7>();
        check::<8>();
        check::<12>();
        check::<15>();
        check::<32>();
    }

    #[test]
    fn store_twice_writes_the_same_to_both_places_and_nothing_else() {
        let head = [0x0102_0304_0506_0708, 0x1112_1314_1516_1718];
        let bytes: Vec<u8> = (0..40).map(|i| i * 5 + 1).collect();
        for len in 0..40 {
            for shift in 0..9 {
                let (mut first, mut second) = (vec![0xAA; 80], vec![0xAA; 80]);
                // SAFETY: both vectors are longer than `shift + 16 + len`.
                unsafe {
                    let to = [first.as_mut_ptr(), second.as_mut_ptr().add(shift)];
                    store_twice(head, &bytes[..len], to);
                }
                for (place, shift) in [(&first, 0), (&second, shift)] {
                    let (message, rest) = place[shift..].split_at(16 + len);
                    assert_eq!(&message[..16], head.map(u64::to_ne_bytes).as_flattened());
                    assert_eq!(&message[16..], &bytes[..len]);
                    assert!(place[..shift].iter().chain(rest).all(|byte| *byte == 0xAA), "{len} {shift}");
                }
            }
        }
    }

    #[test]
    fn copy_in_and_copy_out_keep_the_bytes() {
        let from: Vec<u8> = (0..300u32).map(|i| (i * 7 + 3) as u8).collect();
        for len in 0..300 {
            let mut shared = [0xAAAA_AAAA_AAAA_AAAAu64; 40];
            let mut back = vec![0; len];
            // SAFETY: `shared` is aligned, longer than `len` rounded up, and reached through this pointer only.
            unsafe {
                let at = shared.as_mut_ptr().cast::<u8>();
                copy_in(&from[..len], at);
                copy_out(at, &mut back);
            }
            assert_eq!(back, from[..len]);
            assert_eq!(shared[len.div_ceil(8)], 0xAAAA_AAAA_AAAA_AAAA, "{len}");
        }
    }

    #[test]
    fn copy_works_for_every_length_and_alignment() {
        let from: Vec<u8> = (0..8300u32).map(|i| (i * 7 + 3) as u8).collect();
        for len in (0..70).chain([127, 128, 511, 1000, 1024, 1087, 1088, 2047, 2048, 2111, 8191, 8192, 8200])
        {
            for shift in 0..9 {
                let mut to = vec![0xAA; len + 32];
                // SAFETY: both vectors are longer than `shift + len`.
                unsafe { copy(from.as_ptr().add(shift), to.as_mut_ptr().add(shift + 1), len) };
                assert_eq!(&to[shift + 1..shift + 1 + len], &from[shift..shift + len]);
                assert!(
                    to[..shift + 1].iter().chain(&to[shift + 1 + len..]).all(|b| *b == 0xAA),
                    "{len} {shift}"
                );
            }
        }
    }

    #[test]
    fn a_streaming_copy_keeps_the_bytes() {
        let from: Vec<u8> = (0..70_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        for len in [0, 1, 4096, 16_383, 16_384, 16_385, 16_447, 16_448, 32_768, 40_001, 65_536] {
            for shift in [0, 1, 15, 16, 63, 64] {
                let mut to = vec![0xAA; len + 256];
                let start = to.as_ptr().addr().wrapping_neg() % 64 + shift;
                // SAFETY: both vectors are longer than the ranges.
                unsafe { copy_streaming(from.as_ptr().add(3), to.as_mut_ptr().add(start), len) };
                assert_eq!(&to[start..start + len], &from[3..3 + len], "{len} {shift}");
                assert!(to[..start].iter().chain(&to[start + len..]).all(|b| *b == 0xAA), "{len} {shift}");
            }
        }
    }
}
