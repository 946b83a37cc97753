//! The payloads of operations: lists of blobs and lists of 64-bit words, little-endian.
//!
//! A list of blobs is one `u32` length per rank, followed by the blobs in rank order. The number of blobs follows from
//! the job's size and is not in the bytes.

use super::error::{Error, Violation};

/// Joins blobs, one per rank, into one payload.
pub(super) fn pack_blobs<B: AsRef<[u8]>>(blobs: &[B]) -> Vec<u8> {
    let total: usize = blobs.iter().map(|blob| blob.as_ref().len()).sum();
    let mut payload = Vec::with_capacity(total + 4 * blobs.len());
    for blob in blobs {
        let length = u32::try_from(blob.as_ref().len()).expect("limits are below 4 GiB");
        payload.extend(length.to_le_bytes());
    }
    blobs.iter().for_each(|blob| payload.extend_from_slice(blob.as_ref()));
    payload
}

/// Splits a payload into `count` blobs; the lengths must account for every byte.
pub(super) fn unpack_blobs(payload: &[u8], count: u32) -> Result<Vec<&[u8]>, Violation> {
    let (lengths, mut data) = payload.split_at_checked(4 * count as usize).ok_or(Violation::Layout)?;
    let mut blobs = Vec::with_capacity(count as usize);
    for length in lengths.as_chunks::<4>().0 {
        let (blob, rest) =
            data.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or(Violation::Layout)?;
        blobs.push(blob);
        data = rest;
    }
    if data.is_empty() { Ok(blobs) } else { Err(Violation::Layout) }
}

pub(super) fn pack_words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(super) fn unpack_words(payload: &[u8]) -> Result<Vec<u64>, Violation> {
    let (words, rest) = payload.as_chunks::<8>();
    if rest.is_empty() {
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    } else {
        Err(Violation::Layout)
    }
}

/// Adds `words` to `total`, element by element.
pub(super) fn add_words(total: &mut [u64], words: &[u64]) -> Result<(), Error> {
    for (index, (total, word)) in total.iter_mut().zip(words).enumerate() {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        *total = total.checked_add(*word).ok_or(Error::Overflow { index })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_payload_unpacks_exactly_or_is_rejected(payload in proptest::collection::vec(any::<u8>(), 0..64), count in 0_u32..20) {
            if let Ok(blobs) = unpack_blobs(&payload, count) {
                prop_assert_eq!(pack_blobs(&blobs), payload);
            }
        }

        #[test]
        fn packed_blobs_unpack_to_themselves(blobs in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..9)) {
            let packed = pack_blobs(&blobs);
            prop_assert_eq!(unpack_blobs(&packed, blobs.len() as u32).expect("unpacks"), blobs);
        }
    }
}
