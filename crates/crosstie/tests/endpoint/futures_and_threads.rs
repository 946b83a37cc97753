//! Futures with several executors, and endpoints that many threads use at once.

use std::pin::Pin;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crosstie::endpoint::{Completed, Endpoint, Failed, OperationFuture, Progress, join_all};
use crosstie_testkit::rng::{Random, seed};

use super::pair::{HANG, Pair, config, configs, filled, pattern};

async fn ping_pong(pair: &Pair) -> Result<(), Failed<crosstie::endpoint::Buffer>> {
    for round in 0..20u8 {
        let recv = pair.there.recv(pair.there.allocate(500).unwrap(), ..).unwrap();
        let send = pair.here.send(filled(&pair.here, 500, round), ..).unwrap();
        let Completed { buffer, bytes, .. } = recv.await?;
        assert_eq!((bytes, buffer.to_vec()), (500, pattern(500, round)));
        send.await?;
        let target = pair.there.allocate(64).unwrap();
        let write = pair.here.write_imm(filled(&pair.here, 64, round), .., &target.remote(), 0, 9).unwrap();
        assert_eq!(pair.there.imm_recv().unwrap().await.unwrap().imm, Some(9));
        write.await?;
    }
    Ok(())
}

#[test]
fn any_executor_can_await() {
    for config in [config(1, Progress::Thread), config(3, Progress::Thread)] {
        let pair = Pair::new(&config);
        futures::executor::block_on(ping_pong(&pair)).unwrap();
        let tokio = tokio::runtime::Builder::new_current_thread().build().unwrap();
        tokio.block_on(ping_pong(&pair)).unwrap();
        let targets: Vec<_> = (0..8).map(|_| pair.there.allocate(64).unwrap()).collect();
        let writes = targets.iter().zip(0..).map(|(target, seed)| {
            pair.here.write(filled(&pair.here, 64, seed), .., &target.remote(), 0).unwrap()
        });
        let all = futures::executor::block_on(join_all(writes));
        assert_eq!(all.into_iter().filter(|result| result.is_ok()).count(), 8);
        pair.assert_empty();
    }
}

/// Without a progress thread and without an executor: polls do the work.
#[test]
fn polls_alone_complete_operations() {
    let pair = Pair::new(&config(1, Progress::Caller));
    let mut context = Context::from_waker(Waker::noop());
    let mut recv = std::pin::pin!(pair.there.recv(pair.there.allocate(100).unwrap(), ..).unwrap());
    assert!(recv.as_mut().poll(&mut context).is_pending());
    let mut send = std::pin::pin!(pair.here.send(filled(&pair.here, 100, 3), ..).unwrap());
    let mut ended = 0;
    for _ in 0..1000 {
        if ended & 1 == 0 && send.as_mut().poll(&mut context).is_ready() {
            ended |= 1;
        }
        if ended & 2 == 0
            && let Poll::Ready(done) = recv.as_mut().poll(&mut context)
        {
            assert_eq!(done.unwrap().buffer.to_vec(), pattern(100, 3));
            ended |= 2;
        }
    }
    assert_eq!(ended, 3);
}

use std::future::Future;

#[test]
fn wait_for_hands_the_future_back() {
    for config in configs() {
        let pair = Pair::new(&config);
        let recv = pair.there.recv(pair.there.allocate(8).unwrap(), ..).unwrap();
        let recv = recv.wait_for(Duration::from_millis(3)).unwrap_err();
        let mut recv = recv.wait_for(Duration::ZERO).unwrap_err();
        assert!(recv.try_take().is_none());
        let send = pair.here.send(filled(&pair.here, 8, 1), ..).unwrap();
        pair.run_until(|| send.is_ended());
        assert_eq!(recv.wait_for(HANG).unwrap().unwrap().buffer.to_vec(), pattern(8, 1));
    }
}

/// A future that is dropped with its immediate, or before it came, loses none: the next call gets it.
#[test]
fn dropped_imm_recv_loses_no_immediate() {
    for config in configs() {
        let pair = Pair::new(&crosstie::endpoint::EndpointConfig { qps: 1, ..config });
        let target = pair.there.allocate(8).unwrap();
        let recv = pair.there.imm_recv().unwrap();
        drop(pair.there.imm_recv().unwrap());
        for imm in 0..3 {
            pair.here
                .write_imm(filled(&pair.here, 8, 0), .., &target.remote(), 0, imm)
                .unwrap()
                .wait()
                .unwrap();
        }
        pair.run_until(|| recv.is_ended());
        drop(recv);
        for imm in 0..3 {
            assert_eq!(pair.there.imm_recv().unwrap().wait().unwrap().imm, Some(imm));
        }
    }
}

/// An immediate that is there before the call, so that the call has its result at once, and is dropped with it: the next call gets it.
#[test]
fn imm_recv_that_is_dropped_with_an_immediate_that_came_before_loses_none() {
    for config in configs() {
        let pair = Pair::new(&crosstie::endpoint::EndpointConfig { qps: 1, ..config });
        let target = pair.there.allocate(8).unwrap();
        for imm in 0..3 {
            pair.here
                .write_imm(filled(&pair.here, 8, 0), .., &target.remote(), 0, imm)
                .unwrap()
                .wait()
                .unwrap();
        }
        for _ in 0..2 {
            let recv = pair.there.imm_recv().unwrap();
            pair.run_until(|| recv.is_ended());
            drop(recv);
        }
        for imm in 0..3 {
            assert_eq!(pair.there.imm_recv().unwrap().wait().unwrap().imm, Some(imm));
        }
    }
}

/// A task whose waker polls it at once, as executors do that run inline, and calls the endpoint.
struct Inline {
    endpoint: Endpoint,
    future: Mutex<Option<OperationFuture<()>>>,
    ended: mpsc::Sender<Option<u32>>,
}

impl Inline {
    fn poll(self: &Arc<Self>) {
        self.endpoint.counters();
        let mut future = self.future.lock().unwrap();
        let waker = Waker::from(self.clone());
        if let Some(running) = &mut *future
            && let Poll::Ready(done) = Pin::new(running).poll(&mut Context::from_waker(&waker))
        {
            *future = None;
            self.ended.send(done.ok().and_then(|done| done.imm)).unwrap();
        }
    }
}

impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        self.poll();
    }
}

/// Wakers run when the endpoint is unlocked: one that polls, or calls the endpoint for something rare, does not wait for itself.
#[test]
fn waker_may_call_the_endpoint() {
    for config in configs() {
        let pair = Pair::new(&config);
        let target = pair.there.allocate(8).unwrap();
        let (ended, results) = mpsc::channel();
        let start = || {
            let future = Mutex::new(Some(pair.there.imm_recv().unwrap()));
            Arc::new(Inline { endpoint: pair.there.clone(), future, ended: ended.clone() }).poll();
        };
        (0..3).for_each(|_| start());
        let mut imms = Vec::new();
        for imm in 0..2 {
            pair.here.write_imm(filled(&pair.here, 8, 0), .., &target.remote(), 0, imm).unwrap().detach();
        }
        pair.run_until(|| {
            imms.extend(results.try_recv().ok());
            imms.len() == 2
        });
        imms.sort();
        assert_eq!(imms, [Some(0), Some(1)]);
        // The same when the end comes from another call.
        pair.there.cancel_all();
        assert_eq!(results.recv_timeout(HANG), Ok(None));
        start();
        pair.there.close();
        assert_eq!(results.recv_timeout(HANG), Ok(None));
    }
}

/// Several threads use one endpoint: every write and read has the right bytes, every message arrives once.
#[test]
fn threads_share_an_endpoint() {
    let seed = seed();
    for config in configs() {
        let pair = Pair::new(&config);
        std::thread::scope(|scope| {
            for thread in 0..3u8 {
                let pair = &pair;
                scope.spawn(move || {
                    let mut random = Random(seed ^ u64::from(thread));
                    let target = pair.there.allocate(1 << 16).unwrap();
                    for round in 0..60u8 {
                        let len = 1 + random.index(20_000);
                        let at = random.index((1 << 16) - len);
                        let buffer = filled(&pair.here, len, round ^ thread);
                        let done =
                            pair.here.write(buffer, .., &target.remote(), at as u64).unwrap().wait().unwrap();
                        done.buffer.write(0, &vec![0; len]).unwrap();
                        let done = pair
                            .here
                            .read(done.buffer, .., &target.remote(), at as u64)
                            .unwrap()
                            .wait()
                            .unwrap();
                        assert!(done.buffer.to_vec() == pattern(len, round ^ thread));
                    }
                });
                scope.spawn(move || {
                    for round in 0..60u8 {
                        let recv = pair.there.recv(pair.there.allocate(64).unwrap(), ..).unwrap();
                        let send = pair.here.send(filled(&pair.here, 64, round ^ thread), ..).unwrap();
                        // The messages of the threads mix, but each is whole.
                        let bytes = recv.wait().unwrap().buffer.to_vec();
                        assert_eq!(bytes, pattern(64, bytes[0]));
                        send.wait().unwrap();
                    }
                });
            }
            // With `Progress::Caller` the two endpoints need somebody who runs both while a thread waits at one.
            scope.spawn(|| {
                for _ in 0..200 {
                    pair.here.progress();
                    pair.there.progress();
                    std::thread::sleep(Duration::from_micros(100));
                }
            });
        });
        pair.assert_empty();
        assert_eq!(pair.there.counters().empty_receive_queues, 0);
    }
}
