//! The frames of the control connection, which is a [`Channel`]: it authenticates both ends and every frame.
//!
//! ```text
//!  kind of the channel's frame, and its payload:
//!  0      1                len
//! +------+----------------+
//! | rail | body           |
//! +------+----------------+
//! ```
//!
//! All integers are little-endian.

use crosstie_protocol::rails::{FenceEntry, MAX_GROUP, MAX_RAILS, MAX_SLOTS};
use zerocopy::{FromBytes, IntoBytes};

use super::agreement::{Agreement, EndpointAddress};
use super::config::MAX_DATA_QPS;
use crate::bootstrap::channel::{Channel, ChannelError};
use crate::device::{QpAddress, RemoteMemory};

/// The longest payload of a frame.
pub(super) const MAX_PAYLOAD: usize = 16 << 10;

/// What a frame says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// Connector: what it proposes, the mask of the rails that it will use at first, and its endpoints.
    Hello(Agreement, u8, Vec<EndpointAddress>),
    /// Acceptor: what is agreed, and its endpoints.
    Welcome(Agreement, Vec<EndpointAddress>),
    /// Acceptor: why it does not accept, or either end: why it ends the connection.
    Error(String),
    /// Connector: its endpoints are connected.
    Ready,
    /// Receiver: the rail does not work.
    RailError { rail: usize, epoch: u32 },
    /// Sender: it has stopped using the rail. It has sent the messages before `next`; `entries` are those that are not done.
    Fence { rail: usize, epoch: u32, next: u64, entries: Vec<FenceEntry> },
    /// Receiver: the rail is closed; which of the parts have arrived.
    Answer { rail: usize, epoch: u32, entries: Vec<FenceEntry> },
    /// Sender: a new endpoint of a rail.
    Offer { rail: usize, epoch: u32, endpoint: EndpointAddress },
    /// Receiver: its new endpoint of the rail, connected; or nothing, if that failed.
    Accept { rail: usize, epoch: u32, endpoint: Option<EndpointAddress> },
    /// Sender: the new endpoint works.
    Return { rail: usize, epoch: u32 },
    /// The connection is closed. This end is done with the messages before `next` that are not in `open`: their sends are
    /// acknowledged, or they have arrived completely.
    Close { next: u64, open: Vec<u64> },
}

impl Frame {
    /// Queues the frame, and writes what the socket takes.
    pub(super) fn send(&self, channel: &mut Channel) -> Result<(), ChannelError> {
        let (kind, payload) = self.encode();
        channel.send(kind, &payload)
    }

    /// The kind and the payload.
    pub(super) fn encode(&self) -> (u8, Vec<u8>) {
        let mut out = vec![0];
        let (kind, rail) = match self {
            Frame::Hello(agreed, mask, endpoints) => {
                put_agreement(&mut out, agreed);
                out.push(*mask);
                endpoints.iter().for_each(|endpoint| put_endpoint(&mut out, endpoint));
                (1, 0)
            }
            Frame::Welcome(agreed, endpoints) => {
                put_agreement(&mut out, agreed);
                endpoints.iter().for_each(|endpoint| put_endpoint(&mut out, endpoint));
                (2, 0)
            }
            Frame::Error(text) => {
                out.extend_from_slice(&text.as_bytes()[..text.len().min(1024)]);
                (3, 0)
            }
            Frame::Ready => (4, 0),
            Frame::RailError { rail, epoch } => {
                out.extend_from_slice(&epoch.to_le_bytes());
                (5, *rail)
            }
            Frame::Fence { rail, epoch, next, entries } => {
                out.extend_from_slice(&epoch.to_le_bytes());
                out.extend_from_slice(&next.to_le_bytes());
                entries.iter().for_each(|entry| out.extend_from_slice(&entry.encode()));
                (6, *rail)
            }
            Frame::Answer { rail, epoch, entries } => {
                out.extend_from_slice(&epoch.to_le_bytes());
                entries.iter().for_each(|entry| out.extend_from_slice(&entry.encode()));
                (7, *rail)
            }
            Frame::Offer { rail, epoch, endpoint } => {
                out.extend_from_slice(&epoch.to_le_bytes());
                put_endpoint(&mut out, endpoint);
                (8, *rail)
            }
            Frame::Accept { rail, epoch, endpoint } => {
                out.extend_from_slice(&epoch.to_le_bytes());
                endpoint.iter().for_each(|endpoint| put_endpoint(&mut out, endpoint));
                (9, *rail)
            }
            Frame::Return { rail, epoch } => {
                out.extend_from_slice(&epoch.to_le_bytes());
                (10, *rail)
            }
            Frame::Close { next, open } => {
                out.extend_from_slice(&next.to_le_bytes());
                open.iter().for_each(|message| out.extend_from_slice(&message.to_le_bytes()));
                (11, 0)
            }
        };
        out[0] = rail as u8;
        (kind, out)
    }

    /// The frame of this kind and payload. `None` if a peer sent something else than a frame.
    pub(super) fn decode(kind: u8, payload: &[u8]) -> Option<Frame> {
        let (rail, mut body) = payload.split_first()?;
        let rail = usize::from(*rail);
        if rail >= MAX_RAILS {
            return None;
        }
        let frame = match kind {
            1 => {
                let agreed = take_agreement(&mut body)?;
                let mask = take::<1>(&mut body)?[0];
                Frame::Hello(agreed, mask, take_endpoints(&mut body, &agreed)?)
            }
            2 => {
                let agreed = take_agreement(&mut body)?;
                Frame::Welcome(agreed, take_endpoints(&mut body, &agreed)?)
            }
            3 => Frame::Error(String::from_utf8_lossy(core::mem::take(&mut body)).into_owned()),
            4 => Frame::Ready,
            kind @ (6 | 7) => {
                let epoch = u32::from_le_bytes(take(&mut body)?);
                let next = if kind == 6 { u64::from_le_bytes(take(&mut body)?) } else { 0 };
                let (chunks, rest) = body.as_chunks::<{ FenceEntry::LEN }>();
                if !rest.is_empty() || chunks.len() > MAX_SLOTS {
                    return None;
                }
                let entries = chunks.iter().map(FenceEntry::decode).collect();
                body = &[];
                if kind == 6 {
                    Frame::Fence { rail, epoch, next, entries }
                } else {
                    Frame::Answer { rail, epoch, entries }
                }
            }
            5 => Frame::RailError { rail, epoch: u32::from_le_bytes(take(&mut body)?) },
            8 => {
                let epoch = u32::from_le_bytes(take(&mut body)?);
                Frame::Offer { rail, epoch, endpoint: take_endpoint(&mut body)? }
            }
            9 => {
                let epoch = u32::from_le_bytes(take(&mut body)?);
                let endpoint = if body.is_empty() { None } else { Some(take_endpoint(&mut body)?) };
                Frame::Accept { rail, epoch, endpoint }
            }
            10 => Frame::Return { rail, epoch: u32::from_le_bytes(take(&mut body)?) },
            11 => {
                let next = u64::from_le_bytes(take(&mut body)?);
                let (chunks, rest) = core::mem::take(&mut body).as_chunks::<8>();
                if !rest.is_empty() || chunks.len() > MAX_SLOTS {
                    return None;
                }
                Frame::Close { next, open: chunks.iter().map(|chunk| u64::from_le_bytes(*chunk)).collect() }
            }
            _ => return None,
        };
        body.is_empty().then_some(frame)
    }
}

fn take<const N: usize>(body: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = body.split_first_chunk::<N>()?;
    *body = rest;
    Some(*first)
}

fn put_agreement(out: &mut Vec<u8>, agreed: &Agreement) {
    out.extend_from_slice(&[agreed.rails as u8, agreed.max_group as u8, agreed.data_qps as u8, 0]);
    out.extend_from_slice(&(agreed.slots as u32).to_le_bytes());
    out.extend_from_slice(&agreed.staging.to_le_bytes());
}

fn take_agreement(body: &mut &[u8]) -> Option<Agreement> {
    let [rails, max_group, data_qps, _] = take(body)?;
    let slots = u32::from_le_bytes(take(body)?) as usize;
    let staging = u32::from_le_bytes(take(body)?);
    let agreed = Agreement {
        rails: rails.into(),
        slots,
        max_group: max_group.into(),
        data_qps: data_qps.into(),
        staging,
    };
    let fits = (1..=MAX_RAILS).contains(&agreed.rails)
        && (1..=MAX_GROUP).contains(&agreed.max_group)
        && (1..=MAX_DATA_QPS).contains(&agreed.data_qps)
        && slots.is_power_of_two()
        && slots <= MAX_SLOTS
        && staging <= 64 << 10;
    fits.then_some(agreed)
}

fn put_endpoint(out: &mut Vec<u8>, endpoint: &EndpointAddress) {
    out.extend_from_slice(endpoint.memory.as_bytes());
    out.extend_from_slice(endpoint.staging.as_bytes());
    out.push(endpoint.qps.len() as u8);
    endpoint.qps.iter().for_each(|qp| out.extend_from_slice(qp.as_bytes()));
}

fn take_endpoint(body: &mut &[u8]) -> Option<EndpointAddress> {
    let memory = RemoteMemory::read_from_bytes(&take::<{ size_of::<RemoteMemory>() }>(body)?).ok()?;
    let staging = RemoteMemory::read_from_bytes(&take::<{ size_of::<RemoteMemory>() }>(body)?).ok()?;
    let [count] = take(body)?;
    if !(1..=MAX_DATA_QPS).contains(&usize::from(count)) {
        return None;
    }
    let qps = (0..count)
        .map(|_| QpAddress::read_from_bytes(&take::<{ size_of::<QpAddress>() }>(body)?).ok())
        .collect::<Option<Vec<_>>>()?;
    Some(EndpointAddress { memory, staging, qps })
}

fn take_endpoints(body: &mut &[u8], agreed: &Agreement) -> Option<Vec<EndpointAddress>> {
    let endpoints = (0..agreed.rails).map(|_| take_endpoint(body)).collect::<Option<Vec<_>>>()?;
    endpoints.iter().all(|endpoint| endpoint.qps.len() == agreed.data_qps).then_some(endpoints)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> Vec<Frame> {
        let agreed = Agreement { rails: 2, slots: 256, max_group: 8, data_qps: 2, staging: 8192 };
        let qp = QpAddress::read_from_bytes(&[7; size_of::<QpAddress>()]).unwrap();
        let memory = RemoteMemory { addr: 1, len: 2, rkey: 3, reserved: 0 };
        let endpoint = EndpointAddress { memory, staging: memory, qps: vec![qp; 2] };
        let entries = vec![FenceEntry { slot: 9, generation: 3, attempts: 5, masks: 0x33 }; 256];
        vec![
            Frame::Hello(agreed, 3, vec![endpoint.clone(); 2]),
            Frame::Welcome(agreed, vec![endpoint.clone(); 2]),
            Frame::Error("no".into()),
            Frame::Ready,
            Frame::RailError { rail: 1, epoch: 7 },
            Frame::Fence { rail: 3, epoch: u32::MAX, next: 1 << 40, entries: entries.clone() },
            Frame::Answer { rail: 3, epoch: 1, entries },
            Frame::Offer { rail: 0, epoch: 2, endpoint: endpoint.clone() },
            Frame::Accept { rail: 0, epoch: 2, endpoint: Some(endpoint) },
            Frame::Accept { rail: 0, epoch: 2, endpoint: None },
            Frame::Return { rail: 2, epoch: 9 },
            Frame::Close { next: 77, open: vec![70; MAX_SLOTS] },
        ]
    }

    #[test]
    fn frames_survive_encoding_and_no_part_of_a_frame_is_one() {
        for frame in sample() {
            let (kind, payload) = frame.encode();
            assert!(payload.len() <= MAX_PAYLOAD);
            assert_eq!(Frame::decode(kind, &payload), Some(frame.clone()));
            if !matches!(
                frame,
                Frame::Error(_)
                    | Frame::Fence { .. }
                    | Frame::Answer { .. }
                    | Frame::Accept { .. }
                    | Frame::Close { .. }
            ) {
                for len in 0..payload.len() {
                    assert_eq!(Frame::decode(kind, &payload[..len]), None, "{frame:?} cut to {len}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_a_frame_or_not(
            kind in 0..13u8, rail in 0..5u8, body in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            let payload = [&[rail][..], &body].concat();
            if let Some(frame) = Frame::decode(kind, &payload) {
                let (kind, again) = frame.encode();
                let decoded = Frame::decode(kind, &again).unwrap();
                if !matches!(frame, Frame::Error(_)) {
                    prop_assert_eq!(decoded, frame);
                }
            }
        }
    }
}
