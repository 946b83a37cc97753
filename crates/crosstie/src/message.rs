//! Messages through shared memory: plain data, which the receiver copies out and validates.

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// A message of [`ipc`](crate::ipc) or [`delegation`](crate::delegation).
///
/// Implemented for every type of fixed size that derives zerocopy's [`TryFromBytes`], [`IntoBytes`], [`Immutable`] and
/// [`KnownLayout`]. This includes enums: an invalid tag is detected. Also implemented for `[u8]`: byte strings up to the
/// limit that the server was created with.
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

    /// How a message is copied out of a slot and validated.
    pub trait Message {
        /// The buffer that a message is copied into.
        type Inbox: Send;
        /// The size in bytes, if it is fixed.
        const SIZE: Option<usize>;

        /// Creates a buffer for messages of at most `limit` bytes.
        fn inbox(limit: usize) -> Self::Inbox;
        /// Receives a message of `len` bytes: `read` copies it into the slice that it is given. False if the length or the
        /// bytes are invalid.
        fn receive(inbox: &mut Self::Inbox, len: usize, read: impl FnOnce(&mut [u8])) -> bool;
        /// The message of `len` bytes that was received last.
        fn received(inbox: &Self::Inbox, len: usize) -> Option<&Self>;
        fn bytes(&self) -> &[u8];
    }

    /// The last message that arrived.
    ///
    /// A small message stays in the words that it was copied into, and each access validates it again. To keep it as a `T` would be slower:
    /// a `T` is stored field by field, and a later load that spans several fields waits until all of these stores have left the
    /// core.
    #[derive(Debug)]
    pub struct Typed<T> {
        words: [u64; SMALL / 8],
        /// A message that does not fit into the words, and the buffer for its bytes.
        large: Option<T>,
        bytes: Box<[u8]>,
    }

    /// Largest message that stays in words: one cache line.
    const SMALL: usize = 64;

    const fn is_small<T>() -> bool {
        size_of::<T>() <= SMALL && align_of::<T>() <= align_of::<u64>()
    }

    impl<T: TryFromBytes + IntoBytes + Immutable + KnownLayout + Send> Message for T {
        type Inbox = Typed<T>;
        const SIZE: Option<usize> = Some(size_of::<T>());

        fn inbox(_: usize) -> Typed<T> {
            let large = if is_small::<T>() { 0 } else { size_of::<T>() };
            Typed { words: [0; SMALL / 8], large: None, bytes: vec![0; large].into() }
        }

        #[inline]
        fn receive(inbox: &mut Typed<T>, len: usize, read: impl FnOnce(&mut [u8])) -> bool {
            if len != size_of::<T>() {
                return false;
            }
            if !is_small::<T>() {
                read(&mut inbox.bytes);
                inbox.large = T::try_read_from_bytes(&inbox.bytes).ok();
                return inbox.large.is_some();
            }
            let Some(bytes) = inbox.words.as_mut_bytes().get_mut(..size_of::<T>()) else { return false };
            read(bytes);
            T::try_ref_from_bytes(bytes).is_ok()
        }

        #[inline]
        fn received(inbox: &Typed<T>, _: usize) -> Option<&T> {
            if !is_small::<T>() {
                return inbox.large.as_ref();
            }
            T::try_ref_from_bytes(inbox.words.as_bytes().get(..size_of::<T>())?).ok()
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
        fn receive(inbox: &mut Box<[u8]>, len: usize, read: impl FnOnce(&mut [u8])) -> bool {
            inbox.get_mut(..len).map(read).is_some()
        }

        #[inline]
        fn received(inbox: &Box<[u8]>, len: usize) -> Option<&[u8]> {
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
        let good = M::receive(inbox, bytes.len(), |buffer| buffer.copy_from_slice(bytes));
        M::received(inbox, bytes.len()).filter(|_| good).map(|message| message.bytes().to_vec())
    }

    #[test]
    fn large_types_are_received_completely() {
        let large: [u64; 40] = core::array::from_fn(|i| i as u64 * 3);
        let mut inbox = <[u64; 40]>::inbox(0);
        assert_eq!(deliver::<[u64; 40]>(&mut inbox, large.as_bytes()), Some(large.as_bytes().to_vec()));
        assert_eq!(deliver::<[u64; 40]>(&mut inbox, &[0; 319]), None);
    }

    #[test]
    fn types_with_a_large_alignment_are_received() {
        #[derive(Clone, Copy, Debug, PartialEq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C, align(32))]
        struct Aligned([u8; 32]);
        let mut inbox = Aligned::inbox(0);
        assert_eq!(deliver::<Aligned>(&mut inbox, &[7; 32]), Some(vec![7; 32]));
        assert_eq!(deliver::<Aligned>(&mut inbox, &[7; 31]), None);
        let mut inbox = <()>::inbox(0);
        assert_eq!(deliver::<()>(&mut inbox, &[]), Some(vec![]));
    }

    #[test]
    fn wrong_lengths_and_tags_are_rejected() {
        let mut inbox = Verb::inbox(0);
        assert_eq!(deliver::<Verb>(&mut inbox, &[Verb::Put as u8]), Some(vec![2]));
        assert_eq!(deliver::<Verb>(&mut inbox, &[3]), None);
        assert_eq!(deliver::<Verb>(&mut inbox, &[1, 1]), None);
        assert_eq!(deliver::<Verb>(&mut inbox, &[]), None);
        assert_eq!(deliver::<Verb>(&mut inbox, &[Verb::Get as u8]), Some(vec![1]));
    }

    #[test]
    fn byte_strings_above_the_limit_are_rejected() {
        let mut inbox = <[u8]>::inbox(4);
        assert_eq!(deliver::<[u8]>(&mut inbox, b"four"), Some(b"four".to_vec()));
        assert_eq!(deliver::<[u8]>(&mut inbox, b""), Some(vec![]));
        assert_eq!(deliver::<[u8]>(&mut inbox, b"five!"), None);
    }
}
