//! Calls between processes and threads of a node: `ipc`, `delegation` and `flux`. Both sides of a call with 32 bytes each way, in one
//! thread.

use super::{assert_limit, callgrind};

const CALLS: u32 = 3200;

type Message = [u64; 4];

/// Server and client of a service. The closure makes [`CALLS`] calls with so many in flight at a time, until all have their responses.
macro_rules! pair {
    ($service:ident) => {{
        use crosstie::$service::{Client, Config, Server};
        let name = format!("instructions-{}", std::process::id());
        let mut server = Server::<Message, Message>::create(&name, &Config::default()).unwrap();
        let mut client = Client::<Message, Message, u64>::connect(&name).unwrap();
        Box::new(move |depth: usize| {
            let mut made = 0;
            while made < u64::from(CALLS) || client.in_flight() > 0 {
                while made < u64::from(CALLS) && client.in_flight() < depth {
                    client.call(&[made; 4], made).unwrap();
                    made += 1;
                }
                server.poll();
                while let Some(request) = server.recv() {
                    let words = *request.message();
                    request.reply(&words).unwrap();
                }
                client.poll(|token, response| assert_eq!(*response, [token; 4])).unwrap();
            }
        })
    }};
}

fn flux_pair() -> Box<dyn FnMut(usize)> {
    use crosstie::flux::{Config, Node, network};
    let mut nodes: Vec<Node<Message, Message, u64>> = network(2, &Config::default()).unwrap();
    let (mut callee, mut caller) = (nodes.pop().unwrap(), nodes.pop().unwrap());
    Box::new(move |depth| {
        let mut made = 0;
        while made < u64::from(CALLS) || caller.in_flight() > 0 {
            while made < u64::from(CALLS) && caller.in_flight() < depth {
                caller.call(1, [made; 4], made).unwrap();
                made += 1;
            }
            while let Some((_, request, ticket)) = callee.try_recv() {
                callee.reply(ticket, request).unwrap();
            }
            caller.poll(|token, response| assert_eq!(response, [token; 4]));
        }
    })
}

/// Most instructions of a call, one at a time and 32 at a time.
const LIMITS: [(&str, [u64; 2]); 3] = [("ipc", [340, 196]), ("delegation", [400, 267]), ("flux", [394, 217])];

#[test]
fn calls_stay_within_their_instruction_budget() {
    const NAME: &str = "node::calls_stay_within_their_instruction_budget";
    let Some(task) = callgrind::task() else {
        for (service, limits) in LIMITS {
            for (depth, limit) in [1, 32].into_iter().zip(limits) {
                assert_limit(NAME, &format!("{service}, {depth} at a time"), CALLS, limit);
            }
        }
        return;
    };
    let mut pair: Box<dyn FnMut(usize)> = match task.split(',').next() {
        Some("ipc") => pair!(ipc),
        Some("delegation") => pair!(delegation),
        _ => flux_pair(),
    };
    let depth = if task.contains("32") { 32 } else { 1 };
    pair(depth);
    callgrind::measure(&mut || pair(depth));
}
