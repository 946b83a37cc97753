//! What may travel through shared memory: plain data, checked on arrival.

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// A message of [`ipc`](crate::ipc) or [`delegation`](crate::delegation).
///
/// Implemented for every type of fixed size that derives zerocopy's [`TryFromBytes`], [`IntoBytes`], [`Immutable`] and
/// [`KnownLayout`] (enums included: a tag that is none is caught), and for `[u8]`: any bytes, up to the limit that the
/// server was created with.
///
/// ```
/// use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};
///
/// #[derive(Clone, Copy, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
/// #[repr(C)]
/// struct Put {
///     key: u64,
///     value: u64,
/// }
/// fn is_message<M: crosstie::Message + ?Sized>() {}
/// is_message::<Put>();
/// is_message::<[u8]>();
/// ```
pub trait Message: sealed::Message {}

impl<M: sealed::Message + ?Sized> Message for M {}

pub(crate) mod sealed {
    use super::*;

    /// What is in a slot, copied out and checked.
    pub trait Message {
        /// Where messages arrive.
        type Inbox: Send;
        /// The size, if it is fixed.
        const SIZE: Option<usize>;

        fn inbox(limit: usize) -> Self::Inbox;
        /// Room for the bytes of a message of `len` bytes; `None` if there is no message of this length.
        fn room(inbox: &mut Self::Inbox, len: usize) -> Option<&mut [u8]>;
        /// Whether the `len` bytes that were copied into the room are a message.
        fn accept(inbox: &mut Self::Inbox, len: usize) -> bool;
        /// The message of `len` bytes that was accepted last.
        fn accepted(inbox: &Self::Inbox, len: usize) -> Option<&Self>;
        fn bytes(&self) -> &[u8];
    }

    /// Bytes first, then the value.
    #[derive(Debug)]
    pub struct Typed<T> {
        bytes: Box<[u8]>,
        value: Option<T>,
    }

    impl<T: TryFromBytes + IntoBytes + Immutable + KnownLayout + Send> Message for T {
        type Inbox = Typed<T>;
        const SIZE: Option<usize> = Some(size_of::<T>());

        fn inbox(_: usize) -> Typed<T> {
            Typed { bytes: vec![0; size_of::<T>()].into(), value: None }
        }

        #[inline]
        fn room(inbox: &mut Typed<T>, len: usize) -> Option<&mut [u8]> {
            // Cut to a length that the compiler knows, so that the copy is a few moves.
            inbox.bytes.get_mut(..size_of::<T>()).filter(|_| len == size_of::<T>())
        }

        #[inline]
        fn accept(inbox: &mut Typed<T>, _: usize) -> bool {
            inbox.value =
                inbox.bytes.get(..size_of::<T>()).and_then(|bytes| T::try_read_from_bytes(bytes).ok());
            inbox.value.is_some()
        }

        #[inline]
        fn accepted(inbox: &Typed<T>, _: usize) -> Option<&T> {
            inbox.value.as_ref()
        }

        #[inline]
        fn bytes(&self) -> &[u8] {
            self.as_bytes()
        }
    }

    impl Message for [u8] {
        type Inbox = Box<[u8]>;
        const SIZE: Option<usize> = None;

        fn inbox(limit: usize) -> Box<[u8]> {
            vec![0; limit].into()
        }

        #[inline]
        fn room(inbox: &mut Box<[u8]>, len: usize) -> Option<&mut [u8]> {
            inbox.get_mut(..len)
        }

        #[inline]
        fn accept(inbox: &mut Box<[u8]>, len: usize) -> bool {
            len <= inbox.len()
        }

        #[inline]
        fn accepted(inbox: &Box<[u8]>, len: usize) -> Option<&[u8]> {
            inbox.get(..len)
        }

        #[inline]
        fn bytes(&self) -> &[u8] {
            self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::sealed::Message;
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
    #[repr(u8)]
    enum Verb {
        Get = 1,
        Put = 2,
    }

    fn deliver<M: Message + ?Sized>(inbox: &mut M::Inbox, bytes: &[u8]) -> Option<Vec<u8>> {
        M::room(inbox, bytes.len())?.copy_from_slice(bytes);
        let good = M::accept(inbox, bytes.len());
        M::accepted(inbox, bytes.len()).filter(|_| good).map(|message| message.bytes().to_vec())
    }

    #[test]
    fn wrong_lengths_and_tags_are_no_messages() {
        let mut inbox = Verb::inbox(0);
        assert_eq!(deliver::<Verb>(&mut inbox, &[Verb::Put as u8]), Some(vec![2]));
        assert_eq!(deliver::<Verb>(&mut inbox, &[3]), None);
        assert_eq!(deliver::<Verb>(&mut inbox, &[1, 1]), None);
        assert_eq!(deliver::<Verb>(&mut inbox, &[]), None);
        assert_eq!(deliver::<Verb>(&mut inbox, &[Verb::Get as u8]), Some(vec![1]));
    }

    #[test]
    fn bytes_end_at_the_limit() {
        let mut inbox = <[u8]>::inbox(4);
        assert_eq!(deliver::<[u8]>(&mut inbox, b"four"), Some(b"four".to_vec()));
        assert_eq!(deliver::<[u8]>(&mut inbox, b""), Some(vec![]));
        assert_eq!(deliver::<[u8]>(&mut inbox, b"five!"), None);
    }
}
