//! Requests cause no allocation, on any thread of any node.

use crosstie_kv::client::{BeginBytesError, Client};
use crosstie_kv::wire::{BytesOp, Op, Status, WordRequest};
use crosstie_testkit::{allocations, child};

use super::cluster::{BACKENDS, Random, start};

const OPERATIONS: u64 = 50_000;

fn work(client: &mut Client<u64>, numbers: &mut Random) {
    let (mut begun, mut ended) = (0, 0);
    while ended < OPERATIONS {
        while begun < OPERATIONS && begun - ended < 16 {
            let key = numbers.below(500);
            let request = match key % 2 {
                0 => WordRequest::new(Op::Get, 0, key),
                _ => WordRequest { value: begun, ..WordRequest::new(Op::Put, 0, key) },
            };
            client.begin(request, begun).unwrap();
            begun += 1;
        }
        let polled = client.poll(|_, response| assert_ne!(response.status, Status::NodeGone));
        ended += polled as u64;
        if polled == 0 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn word_requests_do_not_allocate() {
    if child::run_alone(word_requests_do_not_allocate) {
        return;
    }
    for backend in BACKENDS {
        for nodes in [1, 3] {
            let cluster = start(nodes, |config| (config.daemons, config.backend) = (2, backend));
            let mut client = Client::attach_pipelined(cluster[0].name()).unwrap();
            let mut numbers = Random(1);
            // Tables and lists grow to their size.
            work(&mut client, &mut numbers);
            let made = allocations::of_process(|| work(&mut client, &mut numbers));
            println!("{backend:?}, {nodes} nodes: {made} calls to the allocator in {OPERATIONS} operations");
            // The control plane makes a few, with the time and not with the operations; so does a list that grows late.
            assert!(made < OPERATIONS / 100, "{made} calls to the allocator in {OPERATIONS} operations");
        }
    }
}

/// The same with byte strings.
fn work_with_bytes(client: &mut Client<u64>, numbers: &mut Random, write: bool) {
    let value = [7; 3000];
    let (mut begun, mut ended) = (0, 0);
    while ended < OPERATIONS {
        while begun < OPERATIONS {
            let key = numbers.below(100).to_le_bytes();
            let call = match write {
                true => BytesOp::Put { key: &key, value: &value },
                false => BytesOp::Get { key: &key },
            };
            match client.begin_bytes(call, begun) {
                Ok(()) => begun += 1,
                Err(BeginBytesError::Full(_)) => break,
                Err(error) => panic!("{error}"),
            }
        }
        let polled = client.poll_bytes(|_, response| assert_ne!(response.status, Status::NodeGone));
        ended += polled as u64;
        if polled == 0 {
            client.wait(None);
        }
    }
}

/// Neither a client nor a node allocates for byte strings, also not for new values of the same length.
#[test]
fn pipelined_byte_string_requests_do_not_allocate() {
    if child::run_alone(pipelined_byte_string_requests_do_not_allocate) {
        return;
    }
    for nodes in [1, 2] {
        let cluster = start(nodes, |config| config.daemons = 2);
        let mut client = Client::attach_pipelined(cluster[0].name()).unwrap();
        let mut numbers = Random(1);
        // Warm-up: connects the lanes and lets queues grow to their size.
        for write in [true, false] {
            work_with_bytes(&mut client, &mut numbers, write);
        }
        for write in [true, false] {
            let made = allocations::of_process(|| {
                allocations::assert_none(format_args!("{nodes} nodes, write {write}, the client"), || {
                    work_with_bytes(&mut client, &mut numbers, write);
                });
            });
            println!(
                "{nodes} nodes, write {write}: {made} calls to the allocator in {OPERATIONS} operations"
            );
            assert!(made < OPERATIONS / 100, "{made} calls to the allocator in {OPERATIONS} operations");
        }
    }
}
