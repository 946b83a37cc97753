//! What a method is, and what stands in front of its messages.
//!
//! ```text
//! request  | method  u32 | size of the answer u32 | the request, as it is in memory |
//! response | status  u32 | code               u32 | the answer, if the status is 0   |
//! ```
//!
//! Both words are little-endian, so that messages begin at a multiple of 8. The sizes of both messages are checked before a
//! handler runs: two programs that were built with different ideas of a method notice.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use super::error::{Error, Refused};

/// A method: a number, what goes in and what comes out. Both are of fixed size; bytes that make no value of their type
/// (an enum's tag that is none) are caught on arrival.
///
/// ```
/// use crosstie::copyrpc::service::Method;
///
/// /// Adds to the counter, and says what it was before.
/// struct Add;
/// impl Method for Add {
///     const ID: u32 = 1;
///     type Request = u64;
///     type Response = u64;
/// }
/// ```
pub trait Method {
    /// Its number, one of a kind among the methods of a service.
    const ID: u32;
    /// What the caller sends.
    type Request: TryFromBytes + IntoBytes + Immutable + KnownLayout;
    /// What it gets.
    type Response: TryFromBytes + IntoBytes + Immutable + KnownLayout;
}

/// A message and what stands in front of it, as they travel.
#[derive(IntoBytes, Immutable)]
#[repr(C, packed)]
pub(super) struct Frame<T> {
    pub(super) prefix: Prefix,
    pub(super) body: T,
}

/// Two words in front of every message.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Prefix {
    /// The method; or the status.
    pub(super) head: U32,
    /// The size of the answer; or the code of a refusal.
    pub(super) detail: U32,
}

pub(super) const PREFIX: usize = size_of::<Prefix>();

impl Prefix {
    pub(super) fn request<M: Method>() -> Prefix {
        // A size that does not fit is longer than any message, and refused as such.
        Prefix { head: U32::new(M::ID), detail: U32::new(size_of::<M::Response>() as u32) }
    }

    pub(super) fn response(status: Status, code: u32) -> Prefix {
        Prefix { head: U32::new(status as u32), detail: U32::new(code) }
    }
}

/// What the answer to `M` takes, with what stands in front of it.
pub(super) const fn answer_size<M: Method>() -> usize {
    PREFIX + size_of::<M::Response>()
}

/// How a request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Status {
    Done = 0,
    UnknownMethod = 1,
    Malformed = 2,
    Refused = 3,
    Unanswered = 4,
}

/// An answer to `M`, from whatever the peer sent.
#[inline]
pub(super) fn decode<M: Method>(bytes: &[u8]) -> Result<M::Response, Error> {
    let Ok((prefix, body)) = Prefix::read_from_prefix(bytes) else { return Err(Error::MalformedResponse) };
    let (status, code) = (prefix.head.get(), prefix.detail.get());
    if status == Status::Done as u32 {
        return M::Response::try_read_from_bytes(body).map_err(|_| Error::MalformedResponse);
    }
    Err(match status {
        _ if !body.is_empty() => Error::MalformedResponse,
        status if status == Status::UnknownMethod as u32 => Error::UnknownMethod(M::ID),
        status if status == Status::Malformed as u32 => Error::MalformedRequest,
        status if status == Status::Refused as u32 => Error::Refused(Refused(code)),
        status if status == Status::Unanswered as u32 => Error::Unanswered,
        _ => Error::MalformedResponse,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Flip;
    impl Method for Flip {
        const ID: u32 = 7;
        type Request = bool;
        type Response = bool;
    }

    #[test]
    fn frames_have_the_layout_that_is_drawn() {
        let frame = Frame { prefix: Prefix::request::<Flip>(), body: true };
        assert_eq!(frame.as_bytes(), [7, 0, 0, 0, 1, 0, 0, 0, 1]);
        let frame = Frame { prefix: Prefix::response(Status::Refused, 0x0201), body: () };
        assert_eq!(frame.as_bytes(), [3, 0, 0, 0, 1, 2, 0, 0]);
    }

    #[test]
    fn any_bytes_decode_to_something() {
        let of = |head: u32, body: &[u8]| {
            let mut bytes = Prefix { head: U32::new(head), detail: U32::new(9) }.as_bytes().to_vec();
            bytes.extend(body);
            decode::<Flip>(&bytes)
        };
        assert_eq!(of(0, &[1]), Ok(true));
        assert_eq!(of(1, &[]), Err(Error::UnknownMethod(7)));
        assert_eq!(of(2, &[]), Err(Error::MalformedRequest));
        assert_eq!(of(3, &[]), Err(Error::Refused(Refused(9))));
        assert_eq!(of(4, &[]), Err(Error::Unanswered));
        for (head, body) in [(0, &[][..]), (0, &[2]), (0, &[1, 1]), (1, &[1]), (5, &[]), (u32::MAX, &[0])] {
            assert_eq!(of(head, body), Err(Error::MalformedResponse), "{head} {body:?}");
        }
        for len in 0..PREFIX {
            assert_eq!(decode::<Flip>(&[0; PREFIX][..len]), Err(Error::MalformedResponse), "{len}");
        }
    }
}
