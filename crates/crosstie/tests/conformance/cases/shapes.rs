//! Messages of all sizes and pieces.

use crosstie::device::{Data, Opcode, QpConfig, RecvWr, RemoteMemory, SendOp, SendWr, Sge};

use super::cases;
use crate::side::{Shape, Side, get, is, pattern, put, quiet, whole};

cases!("shapes":
    sends_of_all_sizes, writes_of_all_sizes, reads_of_all_sizes, write_of_mebibytes, inline_up_to_the_limit,
    inline_bytes_are_copied_at_once, gather, scatter, read_scatters, unaligned, same_bytes_gathered_twice,
    receive_longer_than_the_message,
);

/// Around every size where a packet, a page or a copying strategy ends.
const SIZES: [usize; 18] =
    [1, 2, 3, 7, 8, 63, 64, 65, 255, 1024, 4095, 4096, 4097, 65_535, 65_536, 65_537, 1 << 20, (1 << 20) + 13];

const LARGEST: usize = (1 << 20) + 13;

/// SEND of each size into a receive of just that size.
fn sends_of_all_sizes(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(LARGEST);
    if side.is_left() {
        put(&region, 0, &pattern(LARGEST, 1));
    }
    for (id, len) in SIZES.into_iter().enumerate() {
        let id = id as u64;
        let sges = [region.sge(LARGEST - len..LARGEST).unwrap()];
        if side.is_left() {
            side.meet();
            end.qp.post(&SendWr::new(id, SendOp::Send, Data::Regions(&sges)).signaled()).unwrap();
            end.done(id);
        } else {
            put(&region, 0, &vec![0; LARGEST]);
            end.qp.post_recv(&RecvWr { wr_id: id, sges: &sges }).unwrap();
            side.meet();
            assert_eq!(end.done(id).byte_len as usize, len);
            assert!(get(&region, LARGEST - len, len) == pattern(LARGEST, 1)[LARGEST - len..], "{len} bytes");
            assert!(get(&region, 0, LARGEST - len).iter().all(|b| *b == 0), "before {len} bytes");
        }
    }
    side.meet();
}

/// WRITE+IMM of each size; nothing beside it changes.
fn writes_of_all_sizes(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(LARGEST + 128);
    let remote: RemoteMemory = side.swap(&region.remote());
    for (id, len) in SIZES.into_iter().enumerate() {
        let id = id as u64;
        let bytes = pattern(len, id);
        if side.is_left() {
            put(&region, 0, &bytes);
            side.meet();
            let sges = [region.sge(0..len).unwrap()];
            let op = SendOp::WriteImm(remote.at(64), len as u32);
            end.qp.post(&SendWr::new(id, op, Data::Regions(&sges)).signaled()).unwrap();
            end.done(id);
        } else {
            put(&region, 0, &vec![0x55; len + 128]);
            end.recv(id);
            side.meet();
            let received = end.done(id);
            assert_eq!((received.byte_len as usize, received.imm), (len, Some(len as u32)));
            assert!(get(&region, 64, len) == bytes, "{len} bytes");
            assert_eq!((get(&region, 0, 64), get(&region, 64 + len, 64)), (vec![0x55; 64], vec![0x55; 64]));
        }
    }
    side.meet();
}

/// READ of each size; nothing beside it changes.
fn reads_of_all_sizes(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(LARGEST + 128);
    put(&region, 0, &pattern(LARGEST, 9));
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        for (id, len) in SIZES.into_iter().enumerate() {
            put(&region, 0, &vec![0x55; len + 128]);
            let sges = [region.sge(64..64 + len).unwrap()];
            let offset = (LARGEST - len) as u64;
            let wr = SendWr::new(id as u64, SendOp::Read(remote.at(offset)), Data::Regions(&sges));
            end.qp.post(&wr.signaled()).unwrap();
            assert_eq!(end.done(id as u64).byte_len as usize, len);
            assert!(get(&region, 64, len) == pattern(LARGEST, 9)[LARGEST - len..], "{len} bytes");
            assert_eq!((get(&region, 0, 64), get(&region, 64 + len, 64)), (vec![0x55; 64], vec![0x55; 64]));
        }
    }
    side.meet();
}

/// One message of 16 MiB, or as long as the device carries.
fn write_of_mebibytes(side: &mut Side) {
    let len = side.device.attr().max_message.min(16 << 20) as usize;
    assert!(len > LARGEST);
    let mut end = side.end();
    let region = end.region(len);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        put(&region, 0, &pattern(len, 3));
        side.meet();
        end.post(1, SendOp::WriteImm(remote.at(0), 1), &region);
        end.done(1);
    } else {
        end.recv(1);
        side.meet();
        assert_eq!(end.done(1).byte_len as usize, len);
        assert!(get(&region, 0, len) == pattern(len, 3));
    }
    side.meet();
}

/// Inline data of every length that the device promises.
fn inline_up_to_the_limit(side: &mut Side) {
    assert!(side.device.attr().max_inline >= 220, "{}", side.device.attr().max_inline);
    let mut end = side.end();
    let region = end.region(512);
    let remote: RemoteMemory = side.swap(&region.remote());
    for len in 0..=220usize {
        let bytes = pattern(len, len as u64);
        if side.is_left() {
            side.meet();
            end.inline(0, SendOp::Send, &bytes);
            end.inline(1, SendOp::WriteImm(remote.at(256), 5), &bytes);
            end.done(0);
            end.done(1);
        } else {
            end.qp.post_recv(&RecvWr { wr_id: 0, sges: &[region.sge(0..256).unwrap()] }).unwrap();
            end.recv(1);
            side.meet();
            assert_eq!(end.done(0).byte_len as usize, len);
            assert_eq!(end.done(1).byte_len as usize, len);
            assert_eq!(get(&region, 0, len), bytes);
            assert_eq!(get(&region, 256, len), bytes);
        }
    }
    side.meet();
}

/// Inline bytes are the caller's again when the post returns, even if the request waits for a receive.
fn inline_bytes_are_copied_at_once(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    if side.is_left() {
        let mut bytes = pattern(64, 1);
        end.inline(1, SendOp::Send, &bytes);
        bytes.fill(0xee);
        side.meet();
        end.done(1);
    } else {
        side.meet();
        end.recv_into(1, &region);
        end.done(1);
        assert_eq!(get(&region, 0, 64), pattern(64, 1));
    }
    side.meet();
}

/// A message of pieces from two regions, some empty, some touching.
fn gather(side: &mut Side) {
    let mut end = side.end();
    let (one, two) = (end.region(5000), end.region(5000));
    let remote: RemoteMemory = side.swap(&one.remote());
    let (bytes, more) = (pattern(5000, 1), pattern(5000, 2));
    let message = [&bytes[4000..4999], &more[1..2], &bytes[0..0], &more[100..3100]].concat();
    if side.is_left() {
        put(&one, 0, &bytes);
        put(&two, 0, &more);
        side.meet();
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
        end.done(1);
        end.done(2);
    } else {
        end.recv_into(1, &two);
        end.recv(2);
        side.meet();
        assert_eq!(end.done(1).byte_len as usize, message.len());
        assert_eq!(end.done(2).byte_len as usize, message.len());
        assert!(get(&two, 0, message.len()) == message);
        assert!(get(&one, 9, message.len()) == message);
    }
    side.meet();
}

/// A message into a receive of pieces: filled in order, the last one only as far as needed.
fn scatter(side: &mut Side) {
    let mut end = side.end();
    let (one, two) = (end.region(5000), end.region(5000));
    let message = pattern(4500, 3);
    if side.is_left() {
        put(&one, 0, &message);
        side.meet();
        let sge = one.sge(0..4500).unwrap();
        end.qp.post(&SendWr::new(1, SendOp::Send, Data::Regions(&[sge])).signaled()).unwrap();
        end.done(1);
    } else {
        let sges = [
            two.sge(4999..5000).unwrap(),
            one.sge(10..10).unwrap(),
            one.sge(1000..4000).unwrap(),
            two.sge(0..4000).unwrap(),
        ];
        end.qp.post_recv(&RecvWr { wr_id: 1, sges: &sges }).unwrap();
        side.meet();
        assert_eq!(end.done(1).byte_len, 4500);
        assert_eq!(get(&two, 4999, 1), message[..1]);
        assert!(get(&one, 1000, 3000) == message[1..3001]);
        assert!(get(&two, 0, 1499) == message[3001..]);
        assert_eq!(get(&two, 1499, 100), [0; 100]);
    }
    side.meet();
}

/// READ into several pieces.
fn read_scatters(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(9000);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        side.meet();
        let sges: Vec<Sge<'_>> =
            [3000..3001, 0..2000, 8999..9000, 4000..8000].map(|r| region.sge(r).unwrap()).to_vec();
        let wr = SendWr::new(1, SendOp::Read(remote.at(3)), Data::Regions(&sges)).signaled();
        end.qp.post(&wr).unwrap();
        let done = end.done(1);
        is(&done, Opcode::Read);
        assert_eq!(done.byte_len, 6002);
        let bytes = &pattern(9000, 4)[3..6005];
        assert_eq!(get(&region, 3000, 1), bytes[..1]);
        assert!(get(&region, 0, 2000) == bytes[1..2001]);
        assert_eq!(get(&region, 8999, 1), bytes[2001..2002]);
        assert!(get(&region, 4000, 4000) == bytes[2002..]);
    } else {
        put(&region, 0, &pattern(9000, 4));
        side.meet();
    }
    side.meet();
}

/// No alignment is asked of plain operations, at either end.
fn unaligned(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(1024);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        put(&region, 0, &pattern(512, 6));
        for (id, (from, to, len)) in
            [(1, 3, 5), (7, 64, 65), (63, 129, 127), (2, 301, 201)].into_iter().enumerate()
        {
            let id = 2 * id as u64;
            let sges = [region.sge(from..from + len).unwrap()];
            let op = SendOp::Write(remote.at(to));
            end.qp.post(&SendWr::new(id, op, Data::Regions(&sges)).signaled()).unwrap();
            end.done(id);
            let back = [region.sge(601..601 + len).unwrap()];
            let op = SendOp::Read(remote.at(to));
            end.qp.post(&SendWr::new(id + 1, op, Data::Regions(&back)).signaled()).unwrap();
            end.done(id + 1);
            assert_eq!(get(&region, 601, len), pattern(512, 6)[from..from + len]);
        }
    }
    side.meet();
}

/// A request may name the same bytes more than once.
fn same_bytes_gathered_twice(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(300);
    if side.is_left() {
        put(&region, 0, &pattern(100, 7));
        side.meet();
        let sge = region.sge(0..100).unwrap();
        end.qp.post(&SendWr::new(1, SendOp::Send, Data::Regions(&[sge, sge, sge])).signaled()).unwrap();
        end.done(1);
    } else {
        end.recv_into(1, &region);
        side.meet();
        assert_eq!(end.done(1).byte_len, 300);
        assert!(get(&region, 0, 300) == pattern(100, 7).repeat(3));
    }
    side.meet();
}

/// A message shorter than its receive leaves the rest alone, and the next message has the next receive.
fn receive_longer_than_the_message(side: &mut Side) {
    let shape = Shape {
        qp: QpConfig { max_send_sge: 1, max_recv_sge: 1, ..QpConfig::default() },
        ..Shape::default()
    };
    let mut end = side.end_with(&shape);
    let (one, two) = (end.region(1000), end.region(1000));
    if side.is_left() {
        side.meet();
        end.inline(1, SendOp::Send, &[1; 10]);
        end.inline(2, SendOp::Send, &[2; 20]);
        end.done(1);
        end.done(2);
    } else {
        put(&one, 0, &[9; 1000]);
        end.recv_into(1, &one);
        end.qp.post_recv(&RecvWr { wr_id: 2, sges: &[whole(&two)] }).unwrap();
        side.meet();
        assert_eq!(end.done(1).byte_len, 10);
        assert_eq!(end.done(2).byte_len, 20);
        assert_eq!(
            (get(&one, 0, 11), get(&two, 0, 21)),
            ([&[1; 10][..], &[9]].concat(), [&[2; 20][..], &[0]].concat())
        );
    }
    side.meet();
    quiet(&mut end.cq);
}
