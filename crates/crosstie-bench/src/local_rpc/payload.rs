//! The payload of a message: bytes that begin with a number.

use crosstie::Message;

/// The bytes of a message: of any length (`[u8]`), or of a length known at compile time (`[u8; N]`).
pub(crate) trait Payload: Message + 'static {
    /// A payload of `len` bytes.
    fn filled(len: usize) -> Box<Self>;
    /// The number in the first 8 bytes.
    fn number(&self) -> u64;
    fn set_number(&mut self, number: u64);
}

impl<const N: usize> Payload for [u8; N] {
    fn filled(_: usize) -> Box<Self> {
        Box::new([1; N])
    }
    #[inline(always)]
    fn number(&self) -> u64 {
        self.as_slice().number()
    }
    #[inline(always)]
    fn set_number(&mut self, number: u64) {
        self.as_mut_slice().set_number(number);
    }
}

impl Payload for [u8] {
    fn filled(len: usize) -> Box<Self> {
        vec![1; len].into_boxed_slice()
    }
    #[inline(always)]
    fn number(&self) -> u64 {
        self.first_chunk().map_or(0, |number| u64::from_ne_bytes(*number))
    }
    #[inline(always)]
    fn set_number(&mut self, number: u64) {
        if let Some(bytes) = self.first_chunk_mut() {
            *bytes = number.to_ne_bytes();
        }
    }
}
