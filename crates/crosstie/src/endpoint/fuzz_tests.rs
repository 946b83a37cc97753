//! Fuzz targets: addresses, control messages, layouts of batches, and descriptions of regions that a peer sends.

use crosstie_protocol::endpoint::batch::{Blocks, Run};
use crosstie_protocol::endpoint::layout;
use crosstie_protocol::endpoint::message::{AnnouncedBuffer, CONTROL_SIZE, Control, MAX_MESSAGE, WireSlot};
use crosstie_protocol::region::{DESCRIPTOR_SIZE, RemoteRegion, Rights};

use super::EndpointAddress;
use crate::fuzzing::{Steps, fuzz};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// The address of an endpoint.
#[test]
fn fuzz_endpoint_address() {
    // Addresses with two and four queue pairs of one device.
    let example = |pairs: u8| {
        let header = [&b"ctendp\0\x03"[..], &[pairs, 0, 16, 0, 64, 0, 0, 0], &[7; 12]].concat();
        [header, vec![5; EndpointAddress::MAX_BYTES]].concat()
    };
    let mut examples = Vec::new();
    for pairs in [2, 4] {
        let bytes = example(pairs);
        examples.extend((28..200).map(|len| bytes[..len].to_vec()));
    }
    fuzz(CRATE, "endpoint_address", examples, |input| {
        if let Ok(address) = EndpointAddress::from_bytes(input) {
            assert_eq!(address.to_bytes(), input, "one encoding");
            assert!(input.len() <= EndpointAddress::MAX_BYTES);
            let _ = address.device();
        }
    });
}

/// Control messages. Input: `length that the device reported`, then the bytes.
#[test]
fn fuzz_endpoint_control() {
    let buffer =
        AnnouncedBuffer { slot: WireSlot::from_bits(9), addr: 1 << 40, len: 4096, rkey: 5, sequence: 3 };
    let examples = [Control::Buffer(buffer), Control::ImmCredit(7), Control::Close]
        .map(|control| [&[CONTROL_SIZE as u8][..], &control.encode()].concat());
    fuzz(CRATE, "endpoint_control", examples, |input| {
        let mut steps = Steps(input);
        let len = u32::from(steps.byte());
        let Ok(bytes) = <&[u8; CONTROL_SIZE]>::try_from(steps.0) else { return };
        let Ok(control) = Control::decode(bytes, len) else { return };
        assert_eq!(control.encode(), *bytes, "one encoding");
        if let Control::Buffer(buffer) = control {
            assert!(buffer.len <= MAX_MESSAGE && buffer.addr.checked_add(buffer.len).is_some());
        }
    });
}

/// The layout of a batch.
#[test]
fn fuzz_endpoint_layouts() {
    let mut blocks = Blocks::default();
    for i in 0..4 {
        blocks.add(Run::block(0, 128 * i, 1, 64 * i, 64)).unwrap();
    }
    blocks.add(Run { count: 3, local_stride: 100, ..Run::block(1, 0, 0, 5, 50) }).unwrap();
    fuzz(CRATE, "endpoint_layouts", [layout::encode(&blocks)], |input| {
        let mut blocks = Blocks::default();
        if layout::decode(input, |run| blocks.add(run)).is_ok() {
            let mut again = Blocks::default();
            layout::decode(&layout::encode(&blocks), |run| again.add(run)).unwrap();
            // Adjacent blocks are joined, so only the runs are the same.
            assert!(again.runs().eq(blocks.runs()));
        }
    });
}

/// The description of a region, and a slice of it. Input: `offset, length of the slice`, then the descriptor.
#[test]
fn fuzz_region_descriptors() {
    let region = RemoteRegion::new(1 << 40, 4096, 9, Rights::ALL, [3; 16]).unwrap();
    let example = [&[1, 2][..], &region.encode()].concat();
    fuzz(CRATE, "region_descriptors", [example], |input| {
        let mut steps = Steps(input);
        let (offset, len) = (u64::from(steps.byte()) << 5, u64::from(steps.byte()) << 5);
        let Ok(bytes) = <&[u8; DESCRIPTOR_SIZE]>::try_from(steps.0) else { return };
        let Ok(region) = RemoteRegion::decode(bytes) else { return };
        assert_eq!(region.encode(), *bytes, "one encoding");
        match region.slice(offset, len) {
            Ok(slice) => assert!(slice.len() == len && offset + len <= region.len()),
            Err(_) => assert!(offset + len > region.len()),
        }
    });
}
