//! Serving clients' requests for byte strings and about the node.

use super::bytes_server::{execute, response_limit, route, status_response};
use super::shard_server::ShardServer;
use super::transport::Transport;
use crate::wire::Status;

impl ShardServer {
    /// Serves byte-string requests for one turn. Returns how many messages there were.
    pub(super) fn serve_bytes(&mut self, transport: &mut impl Transport) -> usize {
        let count = self.serve_bytes_clients(transport);
        self.bytes.idle_turns = if count > 0 { 0 } else { self.bytes.idle_turns.saturating_add(1) };
        count
    }

    /// Requests are read where they arrived and responses are written where clients read them: there is no copy in between.
    fn serve_bytes_clients(&mut self, transport: &mut impl Transport) -> usize {
        if !self.bytes.begin_turn() {
            return 0;
        }
        let mut count = 0;
        while self.bytes.turn_bytes_left > 0 {
            let ShardServer { id: here, shard_map, shard, bytes: server, activity, .. } = self;
            let Some(received) = server.server.recv() else {
                server.has_more = false;
                break;
            };
            count += 1;
            let bytes = received.message();
            server.turn_bytes_left = server.turn_bytes_left.saturating_sub(bytes.len());
            let sent = match route(*here, shard_map, bytes) {
                Ok((owner, op)) if owner == *here => {
                    activity.served += 1;
                    let response = execute(shard, &mut server.info, &op);
                    server.turn_bytes_left = server.turn_bytes_left.saturating_sub(response.value.len());
                    let replied = match response.encode_header() {
                        Ok(header) => received.reply_parts(&[&header, response.value]),
                        Err(_) => received.reply(&status_response(Status::Malformed)),
                    };
                    server.undelivered += u64::from(replied.is_err());
                    continue;
                }
                Ok((owner, op)) if owner.rank != here.rank && owner.daemon == here.daemon => {
                    transport.call_bytes(owner.rank, bytes, response_limit(&op), received.defer(), activity)
                }
                other => Err((received.defer(), other.err().unwrap_or(Status::Misrouted))),
            };
            if let Err((ticket, status)) = sent {
                server.reply_status(ticket, status);
            }
        }
        count
    }
}
