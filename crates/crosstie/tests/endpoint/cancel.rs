//! Cancelled and dropped operations: they end at once, and their memory comes back when the device is done with it.

use std::sync::Arc;
use std::time::Duration;

use crosstie::device::Access;
use crosstie::endpoint::{Buffer, Cause, EndpointConfig, NotStarted, Progress};

use super::pair::{HANG, Pair, config, configs, filled, pattern};

#[test]
fn cancel_all_ends_what_is_outstanding_and_flips_nothing() {
    for config in configs() {
        let pair = Pair::new(&EndpointConfig { imm_window: 1, ..config.clone() });
        let target = pair.there.allocate(64).unwrap();
        let done = pair.here.write_imm(filled(&pair.here, 8, 0), .., &target.remote(), 0, 5).unwrap();
        pair.run_until(|| done.is_ended() && pair.here.counters().leased_slots == 0);
        let send = pair.here.send(filled(&pair.here, 10, 0), ..).unwrap();
        let recv = pair.here.recv(pair.here.allocate(20).unwrap(), ..).unwrap();
        let imm_recv = pair.here.imm_recv().unwrap();
        let imm = pair.here.write_imm(filled(&pair.here, 30, 0), .., &target.remote(), 0, 1).unwrap();
        // With a progress thread it may be that one which announces the buffer of the receive, a moment later.
        pair.run_until(|| pair.here.counters().held_operations == 4);
        assert_eq!(pair.here.cancel_all(), 4);
        assert!(send.is_ended() && recv.is_ended() && imm_recv.is_ended() && imm.is_ended(), "at once");
        assert_eq!(pair.here.cancel_all(), 0, "what has ended is not cancelled again");
        assert_eq!(done.wait().unwrap().buffer.to_vec(), pattern(8, 0), "a success stays one");
        assert_eq!(imm_recv.wait().unwrap_err().cause, Cause::Cancelled);
        for (future, len) in [(send, 10), (imm, 30)] {
            let failed = future.wait().unwrap_err();
            assert_eq!(failed.cause, Cause::Cancelled);
            assert_eq!(failed.buffer.wait_for(HANG).unwrap().len(), len);
        }
        // The peer knows of this buffer: its slot stays leased until the peer has withdrawn it.
        let mut failed = recv.wait().unwrap_err();
        assert_eq!(failed.cause, Cause::Cancelled);
        if config.progress == Progress::Caller {
            assert_eq!((failed.buffer.try_take().is_none(), pair.here.counters().leased_slots), (true, 1));
        }
        pair.run_until(|| failed.buffer.try_take().is_some());
        // A send that was cancelled counts as never called: this one is the first.
        let recv = pair.there.recv(pair.there.allocate(10).unwrap(), ..).unwrap();
        let send = pair.here.send(filled(&pair.here, 10, 9), ..).unwrap();
        pair.run_until(|| recv.is_ended() && send.is_ended());
        assert_eq!(recv.wait().unwrap().buffer.to_vec(), pattern(10, 9));
        pair.assert_empty();
    }
}

/// I4: when neither a future nor the device needs an operation, nothing keeps its memory.
#[test]
fn dropped_futures_give_their_buffers_back_to_nobody_and_leak_nothing() {
    for config in configs() {
        let pair = Pair::new(&EndpointConfig { imm_window: 1, ..config.clone() });
        let target = pair.there.allocate(64).unwrap();
        let region = Arc::new(pair.here.pd().allocate(4096, Access::ALL).unwrap());
        let buffer = || Buffer::of_shared_region(region.clone());
        let keep = pair.here.write_imm(buffer(), ..8, &target.remote(), 0, 1).unwrap();
        pair.run_until(|| keep.is_ended());
        drop(keep);
        drop(pair.here.write(buffer(), ..64, &target.remote(), 0).unwrap());
        drop(pair.here.write_imm(buffer(), ..8, &target.remote(), 0, 2).unwrap());
        drop(pair.here.send(buffer(), ..).unwrap());
        drop(pair.here.imm_recv().unwrap());
        pair.run_until(|| Arc::strong_count(&region) == 1);
        // The peer may write into this one until it has withdrawn it.
        let recv = pair.here.recv(buffer(), ..).unwrap();
        assert!(pair.is_announced(&recv));
        drop(recv);
        if config.progress == Progress::Caller {
            assert_eq!(Arc::strong_count(&region), 2, "the memory stays");
        }
        pair.run_until(|| Arc::strong_count(&region) == 1);
        pair.assert_empty();
        // A detached operation goes on.
        let before = filled(&pair.here, 64, 77);
        pair.here.write(before, .., &target.remote(), 0).unwrap().detach();
        pair.run_until(|| target.to_vec() == pattern(64, 77));
        pair.assert_empty();
    }
}

#[test]
fn close_ends_every_operation_and_gives_all_buffers_back() {
    for config in configs() {
        let pair = Pair::new(&EndpointConfig { imm_window: 1, slots: 1, ..config });
        let target = pair.there.allocate(64).unwrap();
        pair.here.write_imm(filled(&pair.here, 8, 0), .., &target.remote(), 0, 5).unwrap().wait().unwrap();
        // The slot is leased by an immediate without credit, and these wait for it: they were never posted.
        let mut futures = Vec::new();
        for _ in 0..5 {
            futures.push(pair.here.write_imm(filled(&pair.here, 8, 0), .., &target.remote(), 0, 1).unwrap());
            futures.push(pair.here.write(filled(&pair.here, 8, 0), .., &target.remote(), 0).unwrap());
            futures.push(pair.here.send(filled(&pair.here, 8, 0), ..).unwrap());
            futures.push(pair.here.recv(filled(&pair.here, 8, 0), ..).unwrap());
        }
        let recv = pair.there.recv(pair.there.allocate(64).unwrap(), ..).unwrap();
        pair.here.close();
        for future in futures {
            assert!(future.is_ended());
            let failed = future.wait().unwrap_err();
            assert_eq!(failed.cause, Cause::Closed);
            assert_eq!(failed.buffer.wait_for(HANG).unwrap().len(), 8);
        }
        let refused = pair.here.send(filled(&pair.here, 8, 0), ..).unwrap_err();
        assert_eq!(refused.cause, NotStarted::Ended(Cause::Closed));
        // The peer learns of it, and gets its buffer back as well.
        pair.run_until(|| recv.is_ended());
        let failed = recv.wait().unwrap_err();
        assert_eq!(failed.cause, Cause::PeerClosed);
        assert_eq!(failed.buffer.wait_for(HANG).unwrap().len(), 64);
        assert_eq!(pair.there.ended(), Some(Cause::PeerClosed));
        pair.assert_empty();
    }
}

#[test]
fn futures_end_when_their_endpoint_is_dropped() {
    for config in configs() {
        let Pair { here, there } = Pair::new(&config);
        let send = here.send(filled(&here, 8, 0), ..).unwrap();
        let recv = here.recv(here.allocate(8).unwrap(), ..).unwrap();
        drop(here.clone());
        assert!(!send.is_ended());
        drop(here);
        for future in [send, recv] {
            let failed = future.wait().unwrap_err();
            assert_eq!(failed.cause, Cause::Closed);
            assert_eq!(failed.buffer.wait_for(HANG).unwrap().len(), 8);
        }
        drop(there);
    }
}

#[test]
fn cancel_while_another_thread_waits_wakes_it() {
    for progress in [Progress::Caller, Progress::Thread] {
        let pair = Pair::new(&config(1, progress));
        let recv = pair.here.imm_recv().unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| recv.wait().unwrap_err().cause);
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(pair.here.cancel_all(), 1);
            assert_eq!(waiter.join().unwrap(), Cause::Cancelled);
        });
    }
}
