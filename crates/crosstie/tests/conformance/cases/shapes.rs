//! Messages of all sizes, with one or several scatter/gather entries.

use crosstie::device::{Data, Opcode, QpConfig, RecvWr, RemoteMemory, SendOp, SendWr, Sge};

use super::cases;
use crate::participant::{
    Participant, TestConfig, assert_no_completion, assert_opcode, pattern, read_bytes, whole_region,
    write_bytes,
};

cases!("shapes":
    sends_of_all_sizes, writes_of_all_sizes, reads_of_all_sizes, write_of_mebibytes, inline_up_to_the_limit,
    inline_bytes_are_copied_at_once, gather, scatter, read_scatters, unaligned, same_bytes_gathered_twice,
    receive_longer_than_the_message, data_of_a_completion_is_that_of_the_message, streaming_requests,
);

/// Sizes around the limits of packets, pages and copying strategies.
const SIZES: [usize; 18] =
    [1, 2, 3, 7, 8, 63, 64, 65, 255, 1024, 4095, 4096, 4097, 65_535, 65_536, 65_537, 1 << 20, (1 << 20) + 13];

const LARGEST: usize = (1 << 20) + 13;

/// A SEND of each size into a receive of exactly that size.
fn sends_of_all_sizes(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(LARGEST);
    if side.is_left() {
        write_bytes(&region, 0, &pattern(LARGEST, 1));
    }
    for (id, len) in SIZES.into_iter().enumerate() {
        let id = id as u64;
        let sges = [region.sge(LARGEST - len..LARGEST).unwrap()];
        if side.is_left() {
            side.wait_for_other();
            end.qp.post(&SendWr::new(id, SendOp::Send, Data::Regions(&sges)).signaled()).unwrap();
            end.expect_success(id);
        } else {
            write_bytes(&region, 0, &vec![0; LARGEST]);
            end.qp.post_recv(&RecvWr { wr_id: id, sges: &sges }).unwrap();
            side.wait_for_other();
            assert_eq!(end.expect_success(id).byte_len as usize, len);
            assert!(
                read_bytes(&region, LARGEST - len, len) == pattern(LARGEST, 1)[LARGEST - len..],
                "{len} bytes"
            );
            assert!(read_bytes(&region, 0, LARGEST - len).iter().all(|b| *b == 0), "before {len} bytes");
        }
    }
    side.wait_for_other();
}

/// A WRITE+IMM of each size does not change the bytes next to it.
fn writes_of_all_sizes(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(LARGEST + 128);
    let remote: RemoteMemory = side.exchange(&region.remote());
    for (id, len) in SIZES.into_iter().enumerate() {
        let id = id as u64;
        let bytes = pattern(len, id);
        if side.is_left() {
            write_bytes(&region, 0, &bytes);
            side.wait_for_other();
            let sges = [region.sge(0..len).unwrap()];
            let op = SendOp::WriteImm(remote.at(64), len as u32);
            end.qp.post(&SendWr::new(id, op, Data::Regions(&sges)).signaled()).unwrap();
            end.expect_success(id);
        } else {
            write_bytes(&region, 0, &vec![0x55; len + 128]);
            end.recv(id);
            side.wait_for_other();
            let received = end.expect_success(id);
            assert_eq!((received.byte_len as usize, received.imm), (len, Some(len as u32)));
            assert!(read_bytes(&region, 64, len) == bytes, "{len} bytes");
            assert_eq!(
                (read_bytes(&region, 0, 64), read_bytes(&region, 64 + len, 64)),
                (vec![0x55; 64], vec![0x55; 64])
            );
        }
    }
    side.wait_for_other();
}

/// A READ of each size does not change the bytes next to it.
fn reads_of_all_sizes(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(LARGEST + 128);
    write_bytes(&region, 0, &pattern(LARGEST, 9));
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        for (id, len) in SIZES.into_iter().enumerate() {
            write_bytes(&region, 0, &vec![0x55; len + 128]);
            let sges = [region.sge(64..64 + len).unwrap()];
            let offset = (LARGEST - len) as u64;
            let wr = SendWr::new(id as u64, SendOp::Read(remote.at(offset)), Data::Regions(&sges));
            end.qp.post(&wr.signaled()).unwrap();
            assert_eq!(end.expect_success(id as u64).byte_len as usize, len);
            assert!(read_bytes(&region, 64, len) == pattern(LARGEST, 9)[LARGEST - len..], "{len} bytes");
            assert_eq!(
                (read_bytes(&region, 0, 64), read_bytes(&region, 64 + len, 64)),
                (vec![0x55; 64], vec![0x55; 64])
            );
        }
    }
    side.wait_for_other();
}

/// One message of 16 MiB, or of the longest size that the device supports.
fn write_of_mebibytes(side: &mut Participant) {
    let len = side.device.attr().max_message.min(16 << 20) as usize;
    assert!(len > LARGEST);
    let mut end = side.connected_qp();
    let region = end.region(len);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        write_bytes(&region, 0, &pattern(len, 3));
        side.wait_for_other();
        end.post(1, SendOp::WriteImm(remote.at(0), 1), &region);
        end.expect_success(1);
    } else {
        end.recv(1);
        side.wait_for_other();
        assert_eq!(end.expect_success(1).byte_len as usize, len);
        assert!(read_bytes(&region, 0, len) == pattern(len, 3));
    }
    side.wait_for_other();
}

/// Inline data of every length up to the device's limit.
fn inline_up_to_the_limit(side: &mut Participant) {
    assert!(side.device.attr().max_inline >= 220, "{}", side.device.attr().max_inline);
    let mut end = side.connected_qp();
    let region = end.region(512);
    let remote: RemoteMemory = side.exchange(&region.remote());
    for len in 0..=220usize {
        let bytes = pattern(len, len as u64);
        if side.is_left() {
            side.wait_for_other();
            end.inline(0, SendOp::Send, &bytes);
            end.inline(1, SendOp::WriteImm(remote.at(256), 5), &bytes);
            end.expect_success(0);
            end.expect_success(1);
        } else {
            end.qp.post_recv(&RecvWr { wr_id: 0, sges: &[region.sge(0..256).unwrap()] }).unwrap();
            end.recv(1);
            side.wait_for_other();
            assert_eq!(end.expect_success(0).byte_len as usize, len);
            assert_eq!(end.expect_success(1).byte_len as usize, len);
            assert_eq!(read_bytes(&region, 0, len), bytes);
            assert_eq!(read_bytes(&region, 256, len), bytes);
        }
    }
    side.wait_for_other();
}

/// The caller can reuse inline bytes when the post returns, even if the request waits for a receive.
fn inline_bytes_are_copied_at_once(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    if side.is_left() {
        let mut bytes = pattern(64, 1);
        end.inline(1, SendOp::Send, &bytes);
        bytes.fill(0xee);
        side.wait_for_other();
        end.expect_success(1);
    } else {
        side.wait_for_other();
        end.recv_into(1, &region);
        end.expect_success(1);
        assert_eq!(read_bytes(&region, 0, 64), pattern(64, 1));
    }
    side.wait_for_other();
}

/// A message gathered from two regions; some entries are empty, some are adjacent.
fn gather(side: &mut Participant) {
    let mut end = side.connected_qp();
    let (one, two) = (end.region(5000), end.region(5000));
    let remote: RemoteMemory = side.exchange(&one.remote());
    let (bytes, more) = (pattern(5000, 1), pattern(5000, 2));
    let message = [&bytes[4000..4999], &more[1..2], &bytes[0..0], &more[100..3100]].concat();
    if side.is_left() {
        write_bytes(&one, 0, &bytes);
        write_bytes(&two, 0, &more);
        side.wait_for_other();
        let sges = [
            one.sge(4000..4999).unwrap(),
            two.sge(1..2).unwrap(),
            one.sge(0..0).unwrap(),
            two.sge(100..3100).unwrap(),
        ];
        end.qp.post(&SendWr::new(1, SendOp::Send, Data::Regions(&sges)).signaled()).unwrap();
        end.qp
            .post(&SendWr::new(2, SendOp::WriteImm(remote.at(9), 0), Data::Regions(&sges)).signaled())
            .unwrap();
        end.expect_success(1);
        end.expect_success(2);
    } else {
        end.recv_into(1, &two);
        end.recv(2);
        side.wait_for_other();
        assert_eq!(end.expect_success(1).byte_len as usize, message.len());
        assert_eq!(end.expect_success(2).byte_len as usize, message.len());
        assert!(read_bytes(&two, 0, message.len()) == message);
        assert!(read_bytes(&one, 9, message.len()) == message);
    }
    side.wait_for_other();
}

/// A message is scattered over the entries of a receive in order; the last entry is filled only as far as needed.
fn scatter(side: &mut Participant) {
    let mut end = side.connected_qp();
    let (one, two) = (end.region(5000), end.region(5000));
    let message = pattern(4500, 3);
    if side.is_left() {
        write_bytes(&one, 0, &message);
        side.wait_for_other();
        let sge = one.sge(0..4500).unwrap();
        end.qp.post(&SendWr::new(1, SendOp::Send, Data::Regions(&[sge])).signaled()).unwrap();
        end.expect_success(1);
    } else {
        let sges = [
            two.sge(4999..5000).unwrap(),
            one.sge(10..10).unwrap(),
            one.sge(1000..4000).unwrap(),
            two.sge(0..4000).unwrap(),
        ];
        end.qp.post_recv(&RecvWr { wr_id: 1, sges: &sges }).unwrap();
        side.wait_for_other();
        assert_eq!(end.expect_success(1).byte_len, 4500);
        assert_eq!(read_bytes(&two, 4999, 1), message[..1]);
        assert!(read_bytes(&one, 1000, 3000) == message[1..3001]);
        assert!(read_bytes(&two, 0, 1499) == message[3001..]);
        assert_eq!(read_bytes(&two, 1499, 100), [0; 100]);
    }
    side.wait_for_other();
}

/// A READ into several scatter/gather entries.
fn read_scatters(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(9000);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        side.wait_for_other();
        let sges: Vec<Sge<'_>> =
            [3000..3001, 0..2000, 8999..9000, 4000..8000].map(|r| region.sge(r).unwrap()).to_vec();
        let wr = SendWr::new(1, SendOp::Read(remote.at(3)), Data::Regions(&sges)).signaled();
        end.qp.post(&wr).unwrap();
        let done = end.expect_success(1);
        assert_opcode(&done, Opcode::Read);
        assert_eq!(done.byte_len, 6002);
        let bytes = &pattern(9000, 4)[3..6005];
        assert_eq!(read_bytes(&region, 3000, 1), bytes[..1]);
        assert!(read_bytes(&region, 0, 2000) == bytes[1..2001]);
        assert_eq!(read_bytes(&region, 8999, 1), bytes[2001..2002]);
        assert!(read_bytes(&region, 4000, 4000) == bytes[2002..]);
    } else {
        write_bytes(&region, 0, &pattern(9000, 4));
        side.wait_for_other();
    }
    side.wait_for_other();
}

/// Operations other than atomics need no alignment, at either end.
fn unaligned(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(1024);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        write_bytes(&region, 0, &pattern(512, 6));
        for (id, (from, to, len)) in
            [(1, 3, 5), (7, 64, 65), (63, 129, 127), (2, 301, 201)].into_iter().enumerate()
        {
            let id = 2 * id as u64;
            let sges = [region.sge(from..from + len).unwrap()];
            let op = SendOp::Write(remote.at(to));
            end.qp.post(&SendWr::new(id, op, Data::Regions(&sges)).signaled()).unwrap();
            end.expect_success(id);
            let back = [region.sge(601..601 + len).unwrap()];
            let op = SendOp::Read(remote.at(to));
            end.qp.post(&SendWr::new(id + 1, op, Data::Regions(&back)).signaled()).unwrap();
            end.expect_success(id + 1);
            assert_eq!(read_bytes(&region, 601, len), pattern(512, 6)[from..from + len]);
        }
    }
    side.wait_for_other();
}

/// A request may name the same bytes more than once.
fn same_bytes_gathered_twice(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(300);
    if side.is_left() {
        write_bytes(&region, 0, &pattern(100, 7));
        side.wait_for_other();
        let sge = region.sge(0..100).unwrap();
        end.qp.post(&SendWr::new(1, SendOp::Send, Data::Regions(&[sge, sge, sge])).signaled()).unwrap();
        end.expect_success(1);
    } else {
        end.recv_into(1, &region);
        side.wait_for_other();
        assert_eq!(end.expect_success(1).byte_len, 300);
        assert!(read_bytes(&region, 0, 300) == pattern(100, 7).repeat(3));
    }
    side.wait_for_other();
}

/// A message shorter than its receive does not change the remaining bytes, and the next message takes the next receive.
fn receive_longer_than_the_message(side: &mut Participant) {
    let shape = TestConfig {
        qp: QpConfig { max_send_sge: 1, max_recv_sge: 1, ..QpConfig::default() },
        ..TestConfig::default()
    };
    let mut end = side.connected_qp_with(&shape);
    let (one, two) = (end.region(1000), end.region(1000));
    if side.is_left() {
        side.wait_for_other();
        end.inline(1, SendOp::Send, &[1; 10]);
        end.inline(2, SendOp::Send, &[2; 20]);
        end.expect_success(1);
        end.expect_success(2);
    } else {
        write_bytes(&one, 0, &[9; 1000]);
        end.recv_into(1, &one);
        end.qp.post_recv(&RecvWr { wr_id: 2, sges: &[whole_region(&two)] }).unwrap();
        side.wait_for_other();
        assert_eq!(end.expect_success(1).byte_len, 10);
        assert_eq!(end.expect_success(2).byte_len, 20);
        assert_eq!(
            (read_bytes(&one, 0, 11), read_bytes(&two, 0, 21)),
            ([&[1; 10][..], &[9]].concat(), [&[2; 20][..], &[0]].concat())
        );
    }
    side.wait_for_other();
    assert_no_completion(&mut end.cq);
}

/// A device may hand out a short message with its completion. If it does, the bytes are those of the message, and they are in memory as
/// well, where a SEND or WRITE+IMM puts them; a failed request and a completed send have none.
fn data_of_a_completion_is_that_of_the_message(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(512);
    let remote: RemoteMemory = side.exchange(&region.remote());
    for len in (0..=70).chain([127, 200]) {
        let (id, bytes) = (len as u64, pattern(len, len as u64));
        let (first, third) = (len / 3, len - len / 4);
        if side.is_left() {
            // Gathered in an order that is not that of the memory, so that a copy of the memory is not the message.
            let parts = [(0, 0..first), (300, first..third), (100, third..len)];
            let sges: Vec<_> = parts
                .into_iter()
                .filter(|(_, part)| !part.is_empty())
                .map(|(at, part)| {
                    write_bytes(&region, at, &bytes[part.clone()]);
                    region.sge(at..at + part.len()).unwrap()
                })
                .collect();
            side.wait_for_other();
            let ops = [SendOp::Send, SendOp::WriteImm(remote.at(256), 7)];
            for (op, data) in
                ops.into_iter().flat_map(|op| [(op, Data::Inline(&bytes)), (op, Data::Regions(&sges))])
            {
                end.qp.post(&SendWr::new(id, op, data).signaled()).unwrap();
                assert_eq!(end.expect_success(id).inline_data(), None, "a send has no data");
                side.wait_for_other();
            }
        } else {
            for _ in 0..4 {
                let sges = [region.sge(0..100).unwrap(), region.sge(120..220).unwrap()];
                end.qp.post_recv(&RecvWr { wr_id: id, sges: &sges }).unwrap();
            }
            side.wait_for_other();
            for i in 0..4 {
                let received = end.expect_success(id);
                assert_eq!(received.byte_len as usize, len);
                if let Some(data) = received.inline_data() {
                    assert_eq!(data, bytes, "{len} bytes, message {i}");
                }
                let held = if i < 2 {
                    [read_bytes(&region, 0, len.min(100)), read_bytes(&region, 120, len.saturating_sub(100))]
                        .concat()
                } else {
                    read_bytes(&region, 256, len)
                };
                assert_eq!(held, bytes, "{len} bytes in memory, message {i}");
                write_bytes(&region, 0, &[0; 512]);
                side.wait_for_other();
            }
        }
    }
    end.qp.fail().unwrap();
    if !side.is_left() {
        end.qp.post_recv(&RecvWr { wr_id: 9, sges: &[] }).unwrap();
        assert_eq!(end.expect_status(9, &[crosstie::device::Status::Flushed]).inline_data(), None);
    }
    side.wait_for_other();
}

/// The hint that bytes need not be in a cache changes nothing else: neither the bytes, nor those next to them, nor that they are there when
/// the immediate is.
fn streaming_requests(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(LARGEST + 256);
    let remote: RemoteMemory = side.exchange(&region.remote());
    for (id, len) in [16_384, 16_447, 65_537, 1 << 20, LARGEST].into_iter().enumerate() {
        let (id, at) = (id as u64, 64 + 3 * id);
        let bytes = pattern(len, id);
        let sges = [region.sge(at..at + len).unwrap()];
        if side.is_left() {
            write_bytes(&region, at, &bytes);
            side.wait_for_other();
            let op = SendOp::WriteImm(remote.at(at as u64), 7);
            end.qp.post(&SendWr::new(id, op, Data::Regions(&sges)).signaled().streaming()).unwrap();
            end.expect_success(id);
            write_bytes(&region, at, &vec![0; len]);
            let op = SendOp::Read(remote.at(at as u64));
            end.qp.post(&SendWr::new(id, op, Data::Regions(&sges)).signaled().streaming()).unwrap();
            end.expect_success(id);
            assert!(read_bytes(&region, at, len) == bytes, "{len} bytes read");
        } else {
            write_bytes(&region, 0, &vec![0x55; at + len + 64]);
            end.recv(id);
            side.wait_for_other();
            assert_eq!(end.expect_success(id).byte_len as usize, len);
            assert!(read_bytes(&region, at, len) == bytes, "{len} bytes written");
            let beside = [read_bytes(&region, 0, at), read_bytes(&region, at + len, 64)].concat();
            assert!(beside.iter().all(|byte| *byte == 0x55), "beside {len} bytes");
        }
        side.wait_for_other();
    }
}
