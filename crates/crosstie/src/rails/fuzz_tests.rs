//! Fuzz targets: what a peer of a rails connection sends over TCP, and what it writes into our memory.

use crosstie_protocol::rails::{CTS_LEN, ClearToSend, FenceEntry, MAX_GROUP, MAX_RAILS, RECORD_LEN, Record};

use zerocopy::FromBytes;

use super::Handle;
use super::agreement::{Agreement, EndpointAddress};
use super::frames::Frame;
use crate::device::{QpAddress, RemoteMemory};
use crate::fuzzing::{Steps, fuzz};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// Frames one after the other, as they arrive. Input: for each, its kind, the length of its payload (2 bytes), and the payload.
#[test]
fn fuzz_rails_frames() {
    let entry = FenceEntry { slot: 3, generation: 9, attempts: 3, masks: 0x33 };
    let entries = vec![entry, FenceEntry { slot: 4, ..entry }];
    let agreed = Agreement { rails: 2, slots: 256, max_group: 8, data_qps: 2, staging: 8192 };
    let qp = QpAddress::read_from_bytes(&[7; size_of::<QpAddress>()]).unwrap();
    let memory = RemoteMemory { addr: 1, len: 2, rkey: 3, reserved: 0 };
    let endpoint = EndpointAddress { memory, staging: memory, qps: vec![qp; 2] };
    let mut examples: Vec<Vec<u8>> = [
        Frame::Hello(agreed, 3, vec![endpoint.clone(); 2]),
        Frame::Welcome(agreed, vec![endpoint.clone(); 2]),
        Frame::Error("no memory".into()),
        Frame::Ready,
        Frame::RailError { rail: 1, epoch: 2 },
        Frame::Fence { rail: 0, epoch: 2, next: 70, entries: entries.clone() },
        Frame::Answer { rail: 0, epoch: 2, entries },
        Frame::Offer { rail: 0, epoch: 2, endpoint: endpoint.clone() },
        Frame::Accept { rail: 1, epoch: 2, endpoint: Some(endpoint) },
        Frame::Accept { rail: 1, epoch: 2, endpoint: None },
        Frame::Return { rail: 1, epoch: 3 },
        Frame::Close { next: 9, open: vec![7, 8] },
    ]
    .iter()
    .map(Frame::encode)
    .map(|(kind, payload)| [&[kind][..], &(payload.len() as u16).to_le_bytes(), &payload].concat())
    .collect();
    examples.push(examples.concat());
    fuzz(CRATE, "rails_frames", examples, |input| {
        let mut rest = input;
        while let Some(([kind, len @ ..], after)) = rest.split_first_chunk::<3>() {
            let Some((payload, after)) = after.split_at_checked(u16::from_le_bytes(*len).into()) else {
                return;
            };
            rest = after;
            let Some(frame) = Frame::decode(*kind, payload) else { return };
            if let Frame::Error(_) = frame {
                // Shortened, and invalid UTF-8 is replaced.
                continue;
            }
            let (kind, again) = frame.encode();
            assert_eq!(Frame::decode(kind, &again).as_ref(), Some(&frame));
            if let Frame::Hello(agreed, _, endpoints) | Frame::Welcome(agreed, endpoints) = &frame {
                assert!(endpoints.len() == agreed.rails && agreed.rails <= MAX_RAILS);
            }
        }
    });
}

/// A handle, and the clear-to-sends and records that a peer writes. Input: `kind, message`, then the bytes.
#[test]
fn fuzz_rails_messages() {
    let cts =
        ClearToSend { addrs: [1 << 40; 4], rkeys: [1, 2, 3, 4], size: 4096, tag: 7, index: 0, count: 2 };
    let example = |kind: u8, bytes: &[u8]| [&[kind, 5][..], bytes].concat();
    let handle = [&b"CTR\x01\x39\x30"[..], &[1; Handle::LEN - 6]].concat();
    let examples = [
        example(0, &handle),
        example(1, &cts.encode(5)),
        example(2, &Record { sizes: [9; MAX_GROUP] }.encode(5)),
    ];
    fuzz(CRATE, "rails_messages", examples, |input| {
        let mut steps = Steps(input);
        let (kind, message) = (steps.byte(), u64::from(steps.byte()));
        match kind % 3 {
            0 => {
                if let Ok(bytes) = <&[u8; Handle::LEN]>::try_from(steps.0)
                    && let Ok(handle) = Handle::from_bytes(bytes)
                {
                    assert_eq!(handle.to_bytes(), *bytes);
                    assert!(!format!("{handle:?}").is_empty(), "its address is printed");
                }
            }
            1 => {
                let Ok(bytes) = <&[u8; CTS_LEN]>::try_from(steps.0) else { return };
                if let Some(cts) = ClearToSend::decode(bytes, message)
                    && cts.check(message, cts.index.into()).is_ok()
                {
                    assert!((1..=MAX_GROUP).contains(&usize::from(cts.count)));
                    assert_eq!(ClearToSend::decode(&cts.encode(message), message), Some(cts));
                }
            }
            _ => {
                let Ok(bytes) = <&[u8; RECORD_LEN]>::try_from(steps.0) else { return };
                if let Some(record) = Record::decode(bytes, message) {
                    assert_eq!(record.encode(message), *bytes);
                }
            }
        }
    });
}
