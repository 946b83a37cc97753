//! What requests cost: no allocation, on any thread of any node.

mod cluster;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use cluster::{BACKENDS, Numbers, start};
use crosstie_kv::client::Client;
use crosstie_kv::message::{Op, Request, Status};

struct Counting;

/// Of all threads: daemons have theirs.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, len) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const OPERATIONS: u64 = 50_000;

fn work(client: &mut Client<u64>, numbers: &mut Numbers) {
    let (mut begun, mut ended) = (0, 0);
    while ended < OPERATIONS {
        while begun < OPERATIONS && begun - ended < 16 {
            let key = numbers.below(500);
            let request = match key % 2 {
                0 => Request::new(Op::Get, 0, key),
                _ => Request { value: begun, ..Request::new(Op::Put, 0, key) },
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
fn requests_allocate_nothing() {
    for backend in BACKENDS {
        for nodes in [1, 3] {
            let cluster = start(nodes, |config| (config.daemons, config.backend) = (2, backend));
            let mut client = Client::pipelined(cluster[0].name()).unwrap();
            let mut numbers = Numbers(1);
            // Tables and lists grow to their size.
            work(&mut client, &mut numbers);
            let before = ALLOCATIONS.load(Relaxed);
            work(&mut client, &mut numbers);
            let made = ALLOCATIONS.load(Relaxed) - before;
            println!("{backend:?}, {nodes} nodes: {made} allocations in {OPERATIONS} operations");
            // The control plane makes a few, with the time and not with the operations; so does a list that grows late.
            assert!(made < OPERATIONS / 100, "{made} allocations in {OPERATIONS} operations");
        }
    }
}
