//! What both sides do.

use crosstie::copyrpc::EndpointConfig;

use crate::bulk::*;
use crate::failed_calls::*;
use crate::harness::Case;
use crate::load::{Answering, Line, Load, drive};
use crate::side::Side;

macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        pub(crate) const CASES: &[Case<Side>] = &[$(Case { name: stringify!($name), run: $name }),*];
    };
}

cases![
    echo_at_every_depth,
    all_sizes,
    the_smallest_rings,
    unequal_rings,
    a_tiny_ring_wraps_often,
    answers_out_of_order,
    requests_kept_for_long,
    requests_detached,
    both_sides_call_at_full_credit,
    several_endpoints,
    sixty_four_endpoints,
    requests_dropped_without_an_answer,
    calls_and_polls_from_within_a_poll,
    refusals_hand_back_what_was_attached,
    an_answer_that_is_too_long,
    closing_ends_what_is_pending,
    a_call_that_times_out,
    waiting_does_not_delay_room,
    closing_loses_no_receives,
    a_dropped_context_is_seen,
    batches_at_depth_64,
    bulk_sizes_around_every_limit,
    bulk_of_64_mib,
    bulk_of_256_mib,
    bulk_among_small_calls,
    bulk_of_several_endpoints,
    bulk_back_pressure,
    bulk_calls_that_time_out,
    bulk_is_refused_where_it_is_off,
    closing_with_bulk_under_way,
    raw_reads_and_writes,
    raw_operations_that_fail_come_back,
];

pub(crate) fn ring(bytes: usize) -> EndpointConfig {
    EndpointConfig { ring: bytes, credit: bytes / 4, pending_calls: 512, bulk: 0 }
}

/// One endpoint; side 0 calls, or both.
fn run(side: &mut Side, config: EndpointConfig, load: Load, both: bool, answering: Answering) {
    let context = side.context();
    let endpoint = side.connect(&context, &config);
    let load = if both || side.index == 0 { load } else { Load { calls: 0, ..load } };
    let mut lines = [Line::new(endpoint, load, side.seed + side.index as u64)];
    drive(&context, &mut lines, answering, side.seed);
    // The last answer is on its way when this side is done.
    side.meet();
}

fn echo_at_every_depth(side: &mut Side) {
    for depth in [1, 2, 3, 8, 31, 64, 65, 256, 300] {
        let load = Load { calls: side.scaled(3000), depth, ..Load::default() };
        run(side, ring(1 << 16), load, false, Answering::default());
    }
}

fn all_sizes(side: &mut Side) {
    for bytes in [512, 4096, 1 << 16, 1 << 20] {
        let calls = side.scaled(1000).min((1 << 28) / bytes as u64);
        let load = Load { calls, request: usize::MAX, response: usize::MAX, ..Load::default() };
        run(side, ring(bytes), load, true, Answering::default());
    }
}

fn the_smallest_rings(side: &mut Side) {
    let load =
        Load { calls: side.scaled(4000), request: usize::MAX, response: usize::MAX, ..Load::default() };
    run(side, ring(256), load, false, Answering::default());
    run(side, ring(256), load, true, Answering::default());
    // Less credit than the ring allows.
    run(
        side,
        EndpointConfig { credit: 64, ..ring(1024) },
        load,
        true,
        Answering { keep: 2, ..Answering::default() },
    );
}

fn unequal_rings(side: &mut Side) {
    for (left, right) in [(256, 1 << 16), (512, 256), (1 << 20, 1024)] {
        let bytes = if side.index == 0 { left } else { right };
        let load =
            Load { calls: side.scaled(1000), request: usize::MAX, response: usize::MAX, ..Load::default() };
        run(side, ring(bytes), load, true, Answering { keep: 3, shuffled: true, ..Answering::default() });
    }
}

fn a_tiny_ring_wraps_often(side: &mut Side) {
    let context = side.context();
    let endpoint = side.connect(&context, &ring(256));
    let calls = if side.index == 0 { side.scaled(50_000) } else { 0 };
    let load = Load { calls, depth: usize::MAX, request: 20, response: 20, ..Load::default() };
    let mut lines = [Line::new(endpoint, load, side.seed)];
    drive(&context, &mut lines, Answering::default(), side.seed);
    let bytes = context.counters().bytes;
    assert!(bytes / 256 >= side.scaled(10_000) / 2, "{} rounds", bytes / 256);
    side.meet();
}

fn answers_out_of_order(side: &mut Side) {
    let load = Load { calls: side.scaled(10_000), depth: 200, ..Load::default() };
    for keep in [1, 7, 100] {
        run(side, ring(1 << 16), load, true, Answering { keep, shuffled: true, ..Answering::default() });
    }
}

fn requests_kept_for_long(side: &mut Side) {
    // More than the ring holds: the caller is refused until the oldest is released.
    let load = Load { calls: side.scaled(3000), depth: 300, ..Load::default() };
    for bytes in [256, 1024, 4096] {
        run(side, ring(bytes), load, true, Answering { keep: 1000, ..Answering::default() });
    }
}

fn requests_detached(side: &mut Side) {
    let load = Load { calls: side.scaled(3000), depth: 100, ..Load::default() };
    run(side, ring(1024), load, true, Answering { detached: true, ..Answering::default() });
}

fn both_sides_call_at_full_credit(side: &mut Side) {
    for bytes in [256, 1024, 1 << 14] {
        let load = Load {
            calls: side.scaled(10_000),
            depth: usize::MAX,
            request: 40,
            response: 200,
            drops: 50,
            long: None,
        };
        run(side, ring(bytes), load, true, Answering::default());
    }
}

fn several_endpoints(side: &mut Side) {
    let context = side.context();
    let sizes = [256, 1024, 1 << 14, 1 << 16, 512];
    let mut lines = Vec::new();
    for (i, bytes) in sizes.into_iter().enumerate() {
        let endpoint = side.connect(&context, &ring(bytes));
        let load = Load { calls: side.scaled(5000), depth: 1 + 20 * i, ..Load::default() };
        lines.push(Line::new(endpoint, load, side.seed + i as u64));
    }
    drive(&context, &mut lines, Answering { keep: 5, shuffled: true, ..Answering::default() }, side.seed);
    side.meet();
}

fn sixty_four_endpoints(side: &mut Side) {
    let context = side.context();
    let mut lines = Vec::new();
    for i in 0..64 {
        let endpoint = side.connect(&context, &ring(4096));
        let load = Load { calls: side.scaled(1000).max(20) / 10, depth: 8, ..Load::default() };
        lines.push(Line::new(endpoint, load, side.seed + i));
    }
    drive(&context, &mut lines, Answering::default(), side.seed);
    side.meet();
}

fn requests_dropped_without_an_answer(side: &mut Side) {
    let load = Load { calls: side.scaled(5000), depth: 50, drops: 2, ..Load::default() };
    run(side, ring(2048), load, true, Answering { keep: 3, shuffled: true, ..Answering::default() });
}

fn batches_at_depth_64(side: &mut Side) {
    let context = side.context();
    let endpoint = side.connect(&context, &EndpointConfig::default());
    let calls = if side.index == 0 { side.scaled(200_000) } else { 0 };
    let load = Load { calls, depth: 64, request: 32, response: 32, ..Load::default() };
    let mut lines = [Line::new(endpoint, load, side.seed)];
    drive(&context, &mut lines, Answering::default(), side.seed);
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
