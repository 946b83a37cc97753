//! An atomic 64-bit word: the real one, or loom's.

use core::sync::atomic::{AtomicU64, Ordering};

/// The operations on a word that this module uses. Implemented by the real atomic and, in tests under `cfg(loom)`, by
/// loom's.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn compare_exchange_weak(
        &self,
        old: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64>;
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64;
    fn swap(&self, value: u64, order: Ordering) -> u64;
}

macro_rules! implement {
    ($atomic:ty) => {
        impl Word for $atomic {
            #[inline]
            fn load(&self, order: Ordering) -> u64 {
                self.load(order)
            }
            #[inline]
            fn store(&self, value: u64, order: Ordering) {
                self.store(value, order);
            }
            #[inline]
            fn compare_exchange_weak(
                &self,
                old: u64,
                new: u64,
                ok: Ordering,
                err: Ordering,
            ) -> Result<u64, u64> {
                self.compare_exchange_weak(old, new, ok, err)
            }
            fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
                self.fetch_or(bits, order)
            }
            fn swap(&self, value: u64, order: Ordering) -> u64 {
                self.swap(value, order)
            }
        }
    };
}
implement!(AtomicU64);
#[cfg(all(test, loom))]
implement!(loom::sync::atomic::AtomicU64);
