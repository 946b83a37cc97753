//! What runs the futures: the driver itself, tokio, or a local pool.

use super::*;

/// Runs `client` with a driver whose peer serves in another thread.
fn with_server(client: impl FnOnce(Driver, Client)) {
    let stop = Arc::new(AtomicBool::new(false));
    let (to_server, at_server) = mpsc::channel::<ConnectionAddress>();
    let (to_client, at_client) = mpsc::channel::<ConnectionAddress>();
    let server = std::thread::spawn({
        let stop = stop.clone();
        move || {
            let context = open::<()>();
            let connection = context.create_connection(&ConnectionConfig::default()).unwrap();
            to_client.send(connection.address()).unwrap();
            connection.connect(&at_server.recv().unwrap(), &ConnectConfig::default()).unwrap();
            let mut service = service();
            // Relaxed: the flag orders no other data.
            while !stop.load(Ordering::Relaxed) {
                if service.poll(&context, |(), _| ()) == 0 {
                    context.wait(Duration::from_millis(1));
                }
            }
        }
    });
    let driver = Driver::new(open());
    let caller = driver.create_client(&ConnectionConfig::default()).unwrap();
    to_server.send(caller.address()).unwrap();
    caller.connect(&at_client.recv().unwrap(), &ConnectConfig::default()).unwrap();
    client(driver, caller);
    stop.store(true, Ordering::Relaxed);
    server.join().unwrap();
}

/// Some calls one after the other, some concurrently.
async fn calls(client: Client) {
    for number in 0..100 {
        assert_eq!(client.call::<Double>(number).await, Ok(2 * number));
    }
    let answers = join_all((0..2000).map(|number| client.call::<Double>(number))).await;
    for (answer, number) in answers.iter().zip(0..) {
        assert_eq!(*answer, Ok(2 * number));
    }
}

#[test]
fn driver_runs_a_future() {
    with_server(|driver, client| {
        driver.run_until(calls(client.clone()));
        // Another thread wakes the future while the driver sleeps on the device.
        let (sender, receiver) = futures::channel::oneshot::channel();
        let other = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            sender.send(21).unwrap();
        });
        let answer = driver.run_until(async { client.call::<Double>(receiver.await.unwrap()).await });
        assert_eq!(answer, Ok(42));
        other.join().unwrap();
    });
}

#[test]
fn tokio_runs_the_driver() {
    for stall in [Duration::ZERO, Duration::from_micros(200)] {
        with_server(|driver, client| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let local = tokio::task::LocalSet::new();
            local.spawn_local(async move { driver.run(stall).await });
            runtime.block_on(local.run_until(async move {
                let tasks: Vec<_> = (0..4).map(|_| tokio::task::spawn_local(calls(client.clone()))).collect();
                for task in tasks {
                    task.await.unwrap();
                }
            }));
        });
    }
}

#[test]
fn local_pool_runs_the_driver_and_stalls_when_idle() {
    with_server(|driver, client| {
        let mut pool = LocalPool::new();
        let driver = Rc::new(driver);
        let polling = driver.clone();
        pool.spawner().spawn_local(async move { polling.run(Duration::ZERO).await }).unwrap();
        for _ in 0..10 {
            pool.run_until(calls(client.clone()));
            // Returns only if no task is ready to run. An idle driver is not.
            pool.run_until_stalled();
        }
        assert_eq!(driver.counters().calls, 10 * 2100);
    });
}

/// Both sides on one context: each calls the other.
#[test]
fn one_context_can_call_and_serve() {
    let driver = Driver::new(open());
    let config = ring(1024, 8);
    let (here, there) = (driver.create_client(&config).unwrap(), driver.create_client(&config).unwrap());
    here.connect(&there.address(), &ConnectConfig::default()).unwrap();
    there.connect(&here.address(), &ConnectConfig::default()).unwrap();
    let mut service = service::<CallToken>();
    // Both stay connected until the last one is done.
    let both = futures::future::join(calls(here.clone()), calls(there.clone()));
    driver.run_serving(both, &mut service);
    assert_eq!(service.counters().answered, 4200);
}
