//! What can be lent to an operation.

use super::batch::Batch;
use super::buffer::{AnyBuffer, Buffer, PoolBuffer};

/// What an operation keeps until the device is done with it.
#[derive(Debug, Default)]
pub enum Stored {
    /// Nothing.
    #[default]
    None,
    /// A buffer.
    One(AnyBuffer),
    /// A batch with its buffers.
    Batch(Batch),
}

impl Stored {
    #[inline]
    pub(super) fn buffer(&self) -> Option<&Buffer> {
        match self {
            Stored::One(buffer) => Some(buffer.buffer()),
            _ => None,
        }
    }
}

/// What can be lent to an operation: a [`Buffer`], a [`PoolBuffer`], a [`Batch`], or nothing.
pub trait Lend: sealed::Lend {}

impl<B: sealed::Lend> Lend for B {}

/// A [`Buffer`] or a [`PoolBuffer`]: what single operations take. [`Batch`] is for many of them.
pub trait OneBuffer: Lend + AsRef<Buffer> {}

impl OneBuffer for Buffer {}
impl OneBuffer for PoolBuffer {}

pub(super) mod sealed {
    use super::Stored;

    pub trait Lend: Sized {
        fn store(self) -> Stored;
        /// What `store` made, which is always of the same kind.
        fn restore(stored: Stored) -> Option<Self>;
    }
}

macro_rules! lend {
    ($kind:ty, $value:ident => $stored:pat, $store:expr) => {
        impl sealed::Lend for $kind {
            #[inline]
            fn store(self) -> Stored {
                let $value = self;
                $store
            }

            #[inline]
            fn restore(stored: Stored) -> Option<Self> {
                match stored {
                    $stored => Some($value),
                    _ => None,
                }
            }
        }
    };
}
lend!(Buffer, buffer => Stored::One(AnyBuffer::Owned(buffer)), Stored::One(AnyBuffer::Owned(buffer)));
lend!(PoolBuffer, buffer => Stored::One(AnyBuffer::Pool(buffer)), Stored::One(AnyBuffer::Pool(buffer)));
lend!(Batch, batch => Stored::Batch(batch), Stored::Batch(batch));

impl sealed::Lend for () {
    fn store(self) -> Stored {
        Stored::None
    }

    fn restore(_: Stored) -> Option<Self> {
        Some(())
    }
}
