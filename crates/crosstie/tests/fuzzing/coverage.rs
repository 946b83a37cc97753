//! Which code an input reached, and which numbers the program compared.
//!
//! With `--cfg crosstie_fuzz` the program is built by `cargo xtask fuzz` with LLVM's `sancov` pass (`-C passes=sancov-module`, which
//! stable Rust accepts). LLVM then calls the functions below: one at the start, with the 8-bit counters of all blocks of the program,
//! and one at each comparison. Without that flag every function here does nothing, and mutation is blind.
//!
//! The counters belong to the process: fuzz targets must run one at a time (`--test-threads=1`).

/// Two operands of one comparison that differed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comparison {
    /// Bytes of each operand.
    pub(super) width: usize,
    pub(super) from: u64,
    pub(super) to: u64,
}

/// Counters that are compared at once.
#[cfg(crosstie_fuzz)]
const ZEROS: [u8; 256] = [0; 256];

/// The code that the inputs so far have reached.
pub(super) struct Coverage {
    /// For each counter, a bit for each range of counts that was seen: 1, 2, 3, 4-7, 8-15, 16-31, 32-63, 64 and more.
    seen: Vec<u8>,
    features: usize,
    comparisons: Vec<Comparison>,
}

impl Coverage {
    pub(super) fn new() -> Coverage {
        Coverage { seen: Vec::new(), features: 0, comparisons: Vec::new() }
    }

    /// Call it before an input runs.
    pub(super) fn clear(&mut self) {
        #[cfg(crosstie_fuzz)]
        {
            counters::for_each(|_, counters| counters.fill(0));
            comparisons::start();
        }
    }

    /// Call it after an input has run. Returns whether it reached something new.
    pub(super) fn collect(&mut self) -> bool {
        #[allow(unused_mut, reason = "it is changed in fuzzing builds")]
        let mut new = 0;
        #[cfg(crosstie_fuzz)]
        {
            // First: what follows is traced, too.
            comparisons::take(&mut self.comparisons);
            let (seen, total) = (&mut self.seen, counters::total());
            seen.resize(total, 0);
            counters::for_each(|start, counters| {
                // Nearly all counters are zero, and comparing slices is a call of libc, which is not traced.
                for (index, chunk) in counters.chunks(ZEROS.len()).enumerate() {
                    if *chunk == ZEROS[..chunk.len()] {
                        continue;
                    }
                    for (counter, seen) in chunk.iter().zip(&mut seen[start + ZEROS.len() * index..]) {
                        let bit = match *counter {
                            0 => 0,
                            1 => 1,
                            2 => 2,
                            3 => 4,
                            more => 1 << (8 - more.leading_zeros()).min(7),
                        };
                        new += usize::from(*seen & bit != bit);
                        *seen |= bit;
                    }
                }
            });
            self.features += new;
        }
        new > 0
    }

    /// The number of different things that were reached.
    pub(super) fn features(&self) -> usize {
        self.features
    }

    pub(super) fn comparisons(&self) -> &[Comparison] {
        &self.comparisons
    }
}

#[cfg(crosstie_fuzz)]
#[allow(unsafe_code, reason = "LLVM calls these functions, and the counters belong to it")]
mod counters {
    use std::sync::Mutex;

    /// Start and length of each array of counters, as LLVM announced it.
    static ARRAYS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

    /// LLVM calls it at the start of the program, once for each object file with counters, and possibly again with the same array.
    #[unsafe(no_mangle)]
    extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, stop: *mut u8) {
        let mut arrays = ARRAYS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let array = (start as usize, stop as usize - start as usize);
        if array.1 > 0 && !arrays.contains(&array) {
            arrays.push(array);
        }
    }

    pub(super) fn total() -> usize {
        ARRAYS.lock().unwrap_or_else(std::sync::PoisonError::into_inner).iter().map(|(_, len)| len).sum()
    }

    /// Passes each array of counters, and the number of counters before it.
    pub(super) fn for_each(mut visit: impl FnMut(usize, &mut [u8])) {
        let arrays = ARRAYS.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let mut before = 0;
        for (start, len) in arrays {
            // SAFETY: an array of counters of this program, which lives as long as the process. The program's own increments are
            // not atomic either; another thread can disturb a count, and nothing else depends on it.
            visit(before, unsafe { std::slice::from_raw_parts_mut(start as *mut u8, len) });
            before += len;
        }
    }
}

#[cfg(crosstie_fuzz)]
#[allow(unsafe_code, reason = "LLVM calls these functions")]
mod comparisons {
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

    use super::Comparison;

    /// A power of two.
    const KEPT: usize = 256;

    /// Width and operands of the latest comparisons, and room for those of the fuzzer itself. Several threads may mix them up: then a
    /// mutation is less useful.
    static SEEN: [[AtomicU64; 3]; 2 * KEPT] = [const { [const { AtomicU64::new(0) }; 3] }; 2 * KEPT];
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    /// Where comparisons are noted: at the start, or in the second half while the fuzzer itself runs.
    static OFFSET: AtomicUsize = AtomicUsize::new(KEPT);

    /// Inlined into functions that LLVM does not instrument.
    #[inline(always)]
    fn note(width: u64, from: u64, to: u64) {
        let at = (NEXT.fetch_add(1, Relaxed) & (KEPT - 1)) + (OFFSET.load(Relaxed) & KEPT);
        let [kept_width, kept_from, kept_to] = &SEEN[at];
        kept_width.store(width, Relaxed);
        kept_from.store(from, Relaxed);
        kept_to.store(to, Relaxed);
    }

    /// Notes comparisons from here on.
    pub(super) fn start() {
        NEXT.store(0, Relaxed);
        OFFSET.store(0, Relaxed);
    }

    /// Replaces the contents of `comparisons` with those since [`start`].
    pub(super) fn take(comparisons: &mut Vec<Comparison>) {
        OFFSET.store(KEPT, Relaxed);
        let count = NEXT.load(Relaxed).min(KEPT);
        comparisons.clear();
        for seen in &SEEN[..count] {
            let [width, from, to] = [0, 1, 2].map(|field: usize| seen[field].load(Relaxed));
            if from != to && width > 0 {
                comparisons.push(Comparison { width: width as usize, from, to });
            }
        }
    }

    macro_rules! traced {
        ($($name:ident $constant:ident $number:ty, $width:literal;)*) => {$(
            #[unsafe(no_mangle)]
            extern "C" fn $name(a: $number, b: $number) {
                note($width, u64::from(a), u64::from(b));
            }
            #[unsafe(no_mangle)]
            extern "C" fn $constant(a: $number, b: $number) {
                note($width, u64::from(b), u64::from(a));
            }
        )*};
    }

    traced! {
        __sanitizer_cov_trace_cmp1 __sanitizer_cov_trace_const_cmp1 u8, 1;
        __sanitizer_cov_trace_cmp2 __sanitizer_cov_trace_const_cmp2 u16, 2;
        __sanitizer_cov_trace_cmp4 __sanitizer_cov_trace_const_cmp4 u32, 4;
        __sanitizer_cov_trace_cmp8 __sanitizer_cov_trace_const_cmp8 u64, 8;
    }

    /// A `match` on a number: `cases` is the number of cases, the bits of the number, and the cases.
    ///
    /// # Safety
    ///
    /// LLVM calls it, with such an array.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn __sanitizer_cov_trace_switch(value: u64, cases: *const u64) {
        // SAFETY: the array begins with two words.
        let (count, bits) = unsafe { (*cases as usize, *cases.add(1)) };
        for case in 0..count.min(8) {
            // SAFETY: `count` words follow.
            note(bits / 8, value, unsafe { *cases.add(2 + case) });
        }
    }
}
