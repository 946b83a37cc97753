//! The test cases: what each of the two sides does.

use crosstie::copyrpc::ConnectionConfig;

use crate::bulk::*;
use crate::failed_calls::*;
use crate::harness::Case;
use crate::load::{Caller, Load, ReplyMode, drive};
use crate::test_peer::TestPeer;

macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        pub(crate) const CASES: &[Case<TestPeer>] = &[$(Case { name: stringify!($name), run: $name }),*];
    };
}

cases![
    echo_works_at_every_depth,
    payloads_of_all_sizes_arrive,
    smallest_rings_work,
    unequal_rings_work,
    tiny_ring_wraps_often,
    replies_may_be_out_of_order,
    requests_may_be_held_for_long,
    requests_may_be_detached,
    both_sides_may_call_at_full_credit,
    several_connections_work,
    sixty_four_connections_work,
    dropped_requests_get_an_empty_response,
    callbacks_may_call_and_nested_polls_do_nothing,
    refused_calls_return_what_was_attached,
    too_long_reply_returns_the_request,
    close_ends_pending_calls,
    call_without_response_times_out,
    wait_ends_when_the_ring_has_room,
    close_loses_no_receives,
    peer_notices_a_dropped_context,
    depth_64_fills_batches,
    bulk_payloads_around_every_limit_arrive,
    bulk_payload_of_64_mib_arrives,
    bulk_payload_of_256_mib_arrives,
    bulk_calls_mix_with_small_calls,
    bulk_calls_of_several_connections_work,
    bulk_calls_wait_for_memory_in_order,
    timed_out_bulk_calls_keep_their_memory,
    bulk_calls_are_refused_where_bulk_is_off,
    close_works_with_bulk_payloads_under_way,
    raw_reads_and_writes_complete,
    failed_raw_operations_return_their_regions,
];

pub(crate) fn ring(bytes: usize) -> ConnectionConfig {
    ConnectionConfig {
        ring: bytes,
        credit: bytes / 4,
        pending_calls: 512,
        bulk: 0,
        ..ConnectionConfig::default()
    }
}

/// One connection; side 0 calls, or both.
fn run(side: &mut TestPeer, config: ConnectionConfig, load: Load, both: bool, reply_mode: ReplyMode) {
    let context = side.context();
    let connection = side.connect(&context, &config);
    let load = if both || side.index == 0 { load } else { Load { calls: 0, ..load } };
    let mut callers = [Caller::new(connection, load, side.seed + side.index as u64)];
    drive(&context, &mut callers, reply_mode, side.seed);
    // The last response of this side may still be under way.
    side.meet();
}

fn echo_works_at_every_depth(side: &mut TestPeer) {
    for depth in [1, 2, 3, 8, 31, 64, 65, 256, 300] {
        let load = Load { calls: side.scaled(3000), depth, ..Load::default() };
        run(side, ring(1 << 16), load, false, ReplyMode::default());
    }
}

fn payloads_of_all_sizes_arrive(side: &mut TestPeer) {
    for bytes in [512, 4096, 1 << 16, 1 << 20] {
        let calls = side.scaled(1000).min((1 << 28) / bytes as u64);
        let load = Load { calls, request: usize::MAX, response: usize::MAX, ..Load::default() };
        run(side, ring(bytes), load, true, ReplyMode::default());
    }
}

fn smallest_rings_work(side: &mut TestPeer) {
    let load =
        Load { calls: side.scaled(4000), request: usize::MAX, response: usize::MAX, ..Load::default() };
    run(side, ring(256), load, false, ReplyMode::default());
    run(side, ring(256), load, true, ReplyMode::default());
    // Less credit than the ring would allow.
    run(
        side,
        ConnectionConfig { credit: 64, ..ring(1024) },
        load,
        true,
        ReplyMode { keep: 2, ..ReplyMode::default() },
    );
}

fn unequal_rings_work(side: &mut TestPeer) {
    for (left, right) in [(256, 1 << 16), (512, 256), (1 << 20, 1024)] {
        let bytes = if side.index == 0 { left } else { right };
        let load =
            Load { calls: side.scaled(1000), request: usize::MAX, response: usize::MAX, ..Load::default() };
        run(side, ring(bytes), load, true, ReplyMode { keep: 3, shuffled: true, ..ReplyMode::default() });
    }
}

fn tiny_ring_wraps_often(side: &mut TestPeer) {
    let context = side.context();
    let connection = side.connect(&context, &ring(256));
    let calls = if side.index == 0 { side.scaled(50_000) } else { 0 };
    let load = Load { calls, depth: usize::MAX, request: 20, response: 20, ..Load::default() };
    let mut callers = [Caller::new(connection, load, side.seed)];
    drive(&context, &mut callers, ReplyMode::default(), side.seed);
    let bytes = context.counters().bytes;
    assert!(bytes / 256 >= side.scaled(10_000) / 2, "{} rounds", bytes / 256);
    side.meet();
}

fn replies_may_be_out_of_order(side: &mut TestPeer) {
    let load = Load { calls: side.scaled(10_000), depth: 200, ..Load::default() };
    for keep in [1, 7, 100] {
        run(side, ring(1 << 16), load, true, ReplyMode { keep, shuffled: true, ..ReplyMode::default() });
    }
}

fn requests_may_be_held_for_long(side: &mut TestPeer) {
    // More requests are held than fit into the ring: calls are refused until the oldest request is released.
    let load = Load { calls: side.scaled(3000), depth: 300, ..Load::default() };
    for bytes in [256, 1024, 4096] {
        run(side, ring(bytes), load, true, ReplyMode { keep: 1000, ..ReplyMode::default() });
    }
}

fn requests_may_be_detached(side: &mut TestPeer) {
    let load = Load { calls: side.scaled(3000), depth: 100, ..Load::default() };
    run(side, ring(1024), load, true, ReplyMode { detached: true, ..ReplyMode::default() });
}

fn both_sides_may_call_at_full_credit(side: &mut TestPeer) {
    for bytes in [256, 1024, 1 << 14] {
        let load = Load {
            calls: side.scaled(10_000),
            depth: usize::MAX,
            request: 40,
            response: 200,
            drops: 50,
            long: None,
        };
        run(side, ring(bytes), load, true, ReplyMode::default());
    }
}

fn several_connections_work(side: &mut TestPeer) {
    let context = side.context();
    let sizes = [256, 1024, 1 << 14, 1 << 16, 512];
    let mut callers = Vec::new();
    for (i, bytes) in sizes.into_iter().enumerate() {
        let connection = side.connect(&context, &ring(bytes));
        let load = Load { calls: side.scaled(5000), depth: 1 + 20 * i, ..Load::default() };
        callers.push(Caller::new(connection, load, side.seed + i as u64));
    }
    drive(&context, &mut callers, ReplyMode { keep: 5, shuffled: true, ..ReplyMode::default() }, side.seed);
    side.meet();
}

fn sixty_four_connections_work(side: &mut TestPeer) {
    let context = side.context();
    let mut callers = Vec::new();
    for i in 0..64 {
        let connection = side.connect(&context, &ring(4096));
        let load = Load { calls: side.scaled(1000).max(20) / 10, depth: 8, ..Load::default() };
        callers.push(Caller::new(connection, load, side.seed + i));
    }
    drive(&context, &mut callers, ReplyMode::default(), side.seed);
    side.meet();
}

fn dropped_requests_get_an_empty_response(side: &mut TestPeer) {
    let load = Load { calls: side.scaled(5000), depth: 50, drops: 2, ..Load::default() };
    run(side, ring(2048), load, true, ReplyMode { keep: 3, shuffled: true, ..ReplyMode::default() });
}

fn depth_64_fills_batches(side: &mut TestPeer) {
    let context = side.context();
    let connection = side.connect(&context, &ConnectionConfig::default());
    let calls = if side.index == 0 { side.scaled(200_000) } else { 0 };
    let load = Load { calls, depth: 64, request: 32, response: 32, ..Load::default() };
    let mut callers = [Caller::new(connection, load, side.seed)];
    drive(&context, &mut callers, ReplyMode::default(), side.seed);
    let counters = context.counters();
    let each = counters.batched as f64 / counters.batches as f64;
    println!("          side {}: {each:.1} messages per batch, {counters:?}", side.index);
    assert!(each >= 16.0 || side.is_slow(), "{each} messages per batch: {counters:?}");
    assert!(
        counters.signaled <= counters.work_requests / 64 + counters.reads + 1,
        "more than one in 64 is signaled: {counters:?}"
    );
    side.meet();
}
