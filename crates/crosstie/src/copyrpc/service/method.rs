//! Methods, and the prefix of their messages.
//!
//! ```text
//! request  | method  u32 | size of the response u32 | the request, as it is in memory    |
//! response | status  u32 | code                 u32 | the response, if the status is 0   |
//! ```
//!
//! Both words of the prefix are little-endian. The prefix has 8 bytes, so that messages start at a multiple of 8. The sizes of
//! both messages are checked before a handler runs: this detects two programs whose types of a method differ.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use super::error::{Error, Refused};

/// A method: a number, a request type and a response type. Both types have a fixed size. Bytes that are not a valid value of
/// their type (such as an unknown tag of an enum) are detected on arrival.
///
/// ```
/// use crosstie::copyrpc::service::Method;
///
/// /// Adds to the counter and returns its former value.
/// struct Add;
/// impl Method for Add {
///     const ID: u32 = 1;
///     type Request = u64;
///     type Response = u64;
/// }
/// ```
pub trait Method {
    /// The number of the method, unique in its service.
    const ID: u32;
    /// What the caller sends.
    type Request: TryFromBytes + IntoBytes + Immutable + KnownLayout;
    /// What the caller receives.
    type Response: TryFromBytes + IntoBytes + Immutable + KnownLayout;
}

/// A message with its prefix, as it is sent.
#[derive(IntoBytes, Immutable)]
#[repr(C, packed)]
pub(super) struct Frame<T> {
    pub(super) prefix: Prefix,
    pub(super) body: T,
}

/// The two words in front of every message.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Prefix {
    /// The method of a request, or the status of a response.
    pub(super) head: U32,
    /// The size of the response that a request expects, or the code of a refusal.
    pub(super) detail: U32,
}

pub(super) const PREFIX_SIZE: usize = size_of::<Prefix>();

impl Prefix {
    pub(super) fn request<M: Method>() -> Prefix {
        // A size that does not fit into 32 bits is longer than any message; the call is refused for that.
        Prefix { head: U32::new(M::ID), detail: U32::new(size_of::<M::Response>() as u32) }
    }

    pub(super) fn response(status: Status, code: u32) -> Prefix {
        Prefix { head: U32::new(status as u32), detail: U32::new(code) }
    }
}

/// Bytes of a response to `M`, with its prefix.
pub(super) const fn response_size<M: Method>() -> usize {
    PREFIX_SIZE + size_of::<M::Response>()
}

/// The status of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Status {
    Done = 0,
    UnknownMethod = 1,
    Malformed = 2,
    Refused = 3,
    Unanswered = 4,
}

/// Decodes the response to `M` that is in the first `len` bytes of a buffer. `None`: they are something else, see [`decode_error`].
#[inline]
pub(super) fn decode_done<M: Method>(buffer: &[u8], len: usize) -> Option<M::Response> {
    // Compared with a constant: what follows needs no length.
    if len != response_size::<M>() {
        return None;
    }
    let (prefix, body) = buffer.get(..response_size::<M>())?.split_first_chunk::<PREFIX_SIZE>()?;
    let prefix: Prefix = zerocopy::transmute!(*prefix);
    if prefix.head.get() != Status::Done as u32 {
        return None;
    }
    M::Response::try_read_from_bytes(body).ok()
}

/// Decodes bytes that the peer sent, and that are not a response to `M`.
pub(super) fn decode_error<M: Method>(bytes: &[u8]) -> Error {
    let Ok((prefix, [])) = Prefix::read_from_prefix(bytes) else { return Error::MalformedResponse };
    match prefix.head.get() {
        status if status == Status::UnknownMethod as u32 => Error::UnknownMethod(M::ID),
        status if status == Status::Malformed as u32 => Error::MalformedRequest,
        status if status == Status::Refused as u32 => Error::Refused(Refused(prefix.detail.get())),
        status if status == Status::Unanswered as u32 => Error::Unanswered,
        _ => Error::MalformedResponse,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode_response<M: Method>(bytes: &[u8]) -> Result<M::Response, Error> {
        decode_done::<M>(bytes, bytes.len()).ok_or_else(|| decode_error::<M>(bytes))
    }

    struct Flip;
    impl Method for Flip {
        const ID: u32 = 7;
        type Request = bool;
        type Response = bool;
    }

    #[test]
    fn frames_have_the_documented_layout() {
        let frame = Frame { prefix: Prefix::request::<Flip>(), body: true };
        assert_eq!(frame.as_bytes(), [7, 0, 0, 0, 1, 0, 0, 0, 1]);
        let frame = Frame { prefix: Prefix::response(Status::Refused, 0x0201), body: () };
        assert_eq!(frame.as_bytes(), [3, 0, 0, 0, 1, 2, 0, 0]);
    }

    #[test]
    fn any_bytes_decode_to_a_response_or_an_error() {
        let of = |head: u32, body: &[u8]| {
            let mut bytes = Prefix { head: U32::new(head), detail: U32::new(9) }.as_bytes().to_vec();
            bytes.extend(body);
            decode_response::<Flip>(&bytes)
        };
        assert_eq!(of(0, &[1]), Ok(true));
        assert_eq!(of(1, &[]), Err(Error::UnknownMethod(7)));
        assert_eq!(of(2, &[]), Err(Error::MalformedRequest));
        assert_eq!(of(3, &[]), Err(Error::Refused(Refused(9))));
        assert_eq!(of(4, &[]), Err(Error::Unanswered));
        for (head, body) in [(0, &[][..]), (0, &[2]), (0, &[1, 1]), (1, &[1]), (5, &[]), (u32::MAX, &[0])] {
            assert_eq!(of(head, body), Err(Error::MalformedResponse), "{head} {body:?}");
        }
        for len in 0..PREFIX_SIZE {
            assert_eq!(
                decode_response::<Flip>(&[0; PREFIX_SIZE][..len]),
                Err(Error::MalformedResponse),
                "{len}"
            );
        }
    }

    /// Any bytes of a peer are a response or an error.
    #[cfg(not(loom))]
    #[test]
    fn fuzz_copyrpc_typed_responses() {
        let examples = (0u8..5).map(|status| vec![status, 0, 0, 0, 9, 0, 0, 0, 1]);
        crate::fuzzing::fuzz(env!("CARGO_MANIFEST_DIR"), "copyrpc_typed_responses", examples, |input| {
            if let Ok(value) = decode_response::<Flip>(input) {
                assert_eq!((input.len(), input[PREFIX_SIZE]), (PREFIX_SIZE + 1, u8::from(value)));
            }
        });
    }
}
