//! Tables, properties, and arguments that must be refused.

use core::ffi::c_int;

use crate::cases;
use crate::net::{HANDLE_LEN, HOST, INVALID_ARGUMENT, INVALID_USAGE, NULL, Net, OPTIONAL, Ptr};
use crate::pair::{Buffer, Pair, finish, receive, send};

cases!(
    tables_have_the_layout_of_nccl,
    properties_have_the_layout_of_nccl,
    null_arguments_are_refused,
    old_and_wrong_comms_are_refused,
    old_requests_are_refused,
    buffers_outside_their_memory_are_refused,
    deregistered_memory_is_refused_by_every_comm,
    group_size_is_limited,
    gpu_memory_is_refused_on_the_software_device,
    invalid_handle_is_refused,
    traffic_class_is_checked,
);

pub(crate) const VERSIONS: [u32; 3] = [10, 11, 12];

fn tables_have_the_layout_of_nccl() {
    for version in VERSIONS {
        let net = Net::load(version);
        assert_eq!(net.name(), c"Crosstie");
        for at in 0..net.words() {
            assert_ne!(net.word(at), 0, "version {version}, word {at}");
        }
    }
}

fn properties_have_the_layout_of_nccl() {
    for (version, size, members) in [(10, 104, 4), (11, 112, 4), (12, 128, 8)] {
        let net = Net::open(version);
        assert_eq!(net.devices(), 1);
        let mut bytes = [0xaau64; 32];
        let to = bytes.as_mut_ptr().cast::<u8>();
        assert_eq!(net.properties(0, to), 0);
        // SAFETY: the array has 256 bytes.
        let bytes = unsafe { core::slice::from_raw_parts(to, 256) };
        let int = |at: usize| i32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        // SAFETY: the name is a string that lives as long as the library.
        let name = unsafe { core::ffi::CStr::from_ptr(core::ptr::with_exposed_provenance(word(0) as usize)) };
        assert_eq!((name, word(8)), (c"software", 0));
        assert_ne!(word(16), 0);
        assert_eq!((int(24), int(28), int(32)), (HOST, 0, 0), "software devices take host memory only");
        assert!(int(36) > 0 && int(40) == 1);
        assert_eq!(int(52), 8);
        assert_eq!((int(56), int(60)), (0, 0));
        assert_eq!((int(64), int(68)), (1, 0));
        let bytes_at = if members == 4 { 88 } else { 104 };
        assert_eq!((word(bytes_at), word(bytes_at + 8)), (1 << 30, 1 << 30));
        if version >= 11 {
            assert_eq!(int(bytes_at + 16), 1);
            assert_eq!(net.set_net_attr(), 0);
        }
        if version >= 12 {
            assert_eq!(int(124), -1, "neither rail nor plane");
        }
        assert!(bytes[size..].iter().step_by(8).all(|byte| *byte == 0xaa), "written behind the structure");
        for device in [-1, 1, c_int::MAX] {
            assert_eq!(net.properties(device, to), INVALID_ARGUMENT);
        }
    }
}

fn null_arguments_are_refused() {
    for version in VERSIONS {
        let net = Net::open(version);
        let pair = Pair::new(&net);
        let mut buffer = Buffer::new(&net, pair.send, 64);
        let none = core::ptr::null_mut::<Ptr>();
        let (mut to, mut handle) = (NULL, [0; HANDLE_LEN]);
        let mut done: c_int = 0;
        let refused = [
            net.devices_raw(core::ptr::null_mut()),
            net.properties(0, core::ptr::null_mut()),
            net.listen(0, core::ptr::null_mut(), &raw mut to),
            net.listen(0, handle.as_mut_ptr(), none),
            net.connect(0, core::ptr::null_mut(), &raw mut to),
            net.connect(0, handle.as_mut_ptr(), none),
            net.accept(NULL, &raw mut to),
            net.accept(pair.listen, none),
            net.reg_mr(NULL, buffer.at(0), 64, HOST, &raw mut to),
            net.reg_mr(pair.send, core::ptr::null_mut(), 64, HOST, &raw mut to),
            net.reg_mr(pair.send, buffer.at(0), 64, HOST, none),
            net.reg_mr(pair.send, buffer.at(0), 64, 99, &raw mut to),
            net.dereg_mr(pair.send, NULL),
            net.dereg_mr(NULL, buffer.key),
            net.isend(NULL, buffer.at(0), 8, 0, buffer.key, &raw mut to),
            net.isend(pair.send, buffer.at(0), 8, 0, NULL, &raw mut to),
            net.isend(pair.send, buffer.at(0), 8, 0, buffer.key, none),
            net.isend(pair.send, core::ptr::null_mut(), 8, 0, buffer.key, &raw mut to),
            net.irecv(
                pair.recv,
                1,
                core::ptr::null_mut(),
                core::ptr::null_mut(),
                core::ptr::null_mut(),
                none,
                &raw mut to,
            ),
            net.iflush(NULL, buffer.at(0), 8, buffer.key, &raw mut to),
            net.test(NULL, &raw mut done, core::ptr::null_mut()),
            net.test(OPTIONAL, &raw mut done, core::ptr::null_mut()),
        ];
        for (at, rc) in refused.iter().enumerate() {
            assert_eq!(*rc, INVALID_ARGUMENT, "version {version}, call {at}");
        }
        // Nothing to close.
        assert_eq!([net.close_send(NULL), net.close_recv(NULL), net.close_listen(NULL)], [0; 3]);
    }
}

fn old_and_wrong_comms_are_refused() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    let (send_comm, recv_comm) = (pair.send, pair.recv);
    let mut buffer = Buffer::new(&net, send_comm, 64);
    let mut to = NULL;
    // A comm of the other direction, and things that are no comms.
    for comm in [recv_comm, pair.listen, buffer.key, core::ptr::without_provenance_mut(0xdead_0000_beef)] {
        assert_eq!(net.isend(comm, buffer.at(0), 8, 0, buffer.key, &raw mut to), INVALID_ARGUMENT);
        assert_eq!(net.close_send(comm), INVALID_ARGUMENT);
    }
    let key = buffer.key;
    drop(buffer);
    assert_eq!(net.dereg_mr(send_comm, key), INVALID_ARGUMENT, "deregistered twice");
    drop(pair);
    assert_eq!(net.close_send(send_comm), INVALID_ARGUMENT, "closed twice");
    assert_eq!(net.close_recv(recv_comm), INVALID_ARGUMENT, "closed twice");
    // The next comms use the same slots of the plugin's tables; the old keys stay invalid.
    let next = Pair::new(&net);
    assert_ne!(next.send, send_comm);
    let mut byte = [0u8; 8];
    assert_eq!(net.reg_mr(send_comm, byte.as_mut_ptr(), 8, HOST, &raw mut to), INVALID_ARGUMENT);
}

fn old_requests_are_refused() {
    let net = Net::open(11);
    let mut old = Vec::new();
    let refuse = |old: &[Ptr]| {
        for request in old {
            let mut done = 0;
            assert_eq!(net.test(*request, &raw mut done, core::ptr::null_mut()), INVALID_ARGUMENT);
            assert_eq!(done, 0);
        }
    };
    for _ in 0..3 {
        let pair = Pair::new(&net);
        let (mut from, mut to) = (Buffer::new(&net, pair.send, 64), Buffer::new(&net, pair.recv, 64));
        for _ in 0..3 {
            let received = receive(&net, pair.recv, &mut to, &[(0, 64, 0)]);
            let sent = send(&net, pair.send, &mut from, 0, 64, 0);
            // Also while other requests have their slots.
            refuse(&old);
            assert_eq!((finish(&net, sent, 1), finish(&net, received, 1)), (vec![64], vec![64]));
            old.extend([sent, received]);
            refuse(&old);
        }
    }
}

fn buffers_outside_their_memory_are_refused() {
    let net = Net::open(10);
    let pair = Pair::new(&net);
    let (mut from, mut to) = (Buffer::new(&net, pair.send, 128), Buffer::new(&net, pair.recv, 128));
    let received = receive(&net, pair.recv, &mut to, &[(0, 128, 0)]);
    let mut request = NULL;
    for (offset, len) in [(0, 129), (1, 128), (128, 1), (usize::MAX, 2), (0, usize::MAX)] {
        let data = from.bytes.as_mut_ptr().wrapping_add(offset);
        assert_eq!(net.isend(pair.send, data, len, 0, from.key, &raw mut request), INVALID_ARGUMENT);
        assert!(request.is_null());
    }
    let sent = send(&net, pair.send, &mut from, 127, 1, 0);
    assert_eq!((finish(&net, sent, 1), finish(&net, received, 1)), (vec![1], vec![1]));
}

fn deregistered_memory_is_refused_by_every_comm() {
    let net = Net::open(10);
    let pairs = [Pair::new(&net), Pair::new(&net)];
    let (mut from, mut to) = (Buffer::new(&net, pairs[0].send, 64), Buffer::new(&net, pairs[0].recv, 64));
    // Both comms of each direction have used the memory that the first one registered.
    for pair in &pairs {
        pair.exchange(&mut from, 64, &mut to, 64);
    }
    let (old_from, old_to) = (from.key, to.key);
    let (mut from, mut to) = (from.free(), to.free());
    for pair in &pairs {
        let (mut request, mut data, mut size, mut tag) = (NULL, to.as_mut_ptr(), 64, 0);
        assert_eq!(
            net.isend(pair.send, from.as_mut_ptr(), 64, 0, old_from, &raw mut request),
            INVALID_ARGUMENT
        );
        let mut key = old_to;
        let rc = net.irecv(
            pair.recv,
            1,
            &raw mut data,
            &raw mut size,
            &raw mut tag,
            &raw mut key,
            &raw mut request,
        );
        assert_eq!(rc, INVALID_ARGUMENT);
        assert_eq!(net.dereg_mr(pair.send, old_from), INVALID_ARGUMENT);
    }
}

fn group_size_is_limited() {
    let net = Net::open(12);
    let pair = Pair::new(&net);
    let mut to = Buffer::new(&net, pair.recv, 64);
    let (mut data, mut sizes, mut tags, mut keys) = ([to.at(0); 16], [4; 16], [0; 16], [to.key; 16]);
    for count in [0, -1, 9, c_int::MAX, c_int::MIN] {
        let mut request = OPTIONAL;
        let rc = net.irecv(
            pair.recv,
            count,
            data.as_mut_ptr(),
            sizes.as_mut_ptr(),
            tags.as_mut_ptr(),
            keys.as_mut_ptr(),
            &raw mut request,
        );
        assert_eq!((rc, request), (INVALID_ARGUMENT, NULL), "{count} buffers");
    }
}

fn gpu_memory_is_refused_on_the_software_device() {
    let net = Net::open(11);
    let pair = Pair::new(&net);
    let mut bytes = [0u8; 64];
    let mut key = OPTIONAL;
    assert_eq!(net.reg_mr(pair.recv, bytes.as_mut_ptr(), 64, 2, &raw mut key), INVALID_USAGE);
    assert!(key.is_null());
    assert_eq!(net.reg_mr_dma_buf(pair.recv, bytes.as_mut_ptr(), 64, 0, &raw mut key), INVALID_USAGE);
    assert!(key.is_null());
    // Memory of the host needs no flush: there is no request to wait for.
    let mut to = Buffer::new(&net, pair.recv, 64);
    let mut request = OPTIONAL;
    assert_eq!(net.iflush(pair.recv, to.at(0), 64, to.key, &raw mut request), 0);
    assert!(request.is_null());
}

fn invalid_handle_is_refused() {
    let net = Net::open(11);
    for byte in [0u8, 1, 0xff] {
        let mut handle = [byte; HANDLE_LEN];
        let mut comm = OPTIONAL;
        assert_eq!(net.connect(0, handle.as_mut_ptr(), &raw mut comm), INVALID_ARGUMENT);
        assert!(comm.is_null());
    }
}

fn traffic_class_is_checked() {
    for version in [11, 12] {
        let mut net = Net::load(version);
        assert_eq!(net.init(256), INVALID_ARGUMENT);
        assert_eq!(net.init(106), 0);
        drop(Pair::new(&net));
    }
    let net = Net::open(10);
    let (listen, mut handle) = crate::pair::listen(&net, 0);
    let mut comm = NULL;
    let class = 999;
    assert_eq!(net.connect_v10(&raw const class, handle.as_mut_ptr(), &raw mut comm), INVALID_ARGUMENT);
    assert_eq!(net.connect_v10(core::ptr::null(), handle.as_mut_ptr(), &raw mut comm), 0);
    assert_eq!(net.close_listen(listen), 0);
}
