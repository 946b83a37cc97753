//! Serving requests for byte strings and about the node: from clients and from other daemons of the node.

use super::bytes_server::{BYTES_PER_TURN, execute, response_limit, route, status_response};
use super::shard_server::ShardServer;
use super::transport::Transport;
use crate::wire::{BytesRequest, BytesResponse, Status};

impl ShardServer {
    /// Serves byte-string requests for one turn. Returns how many messages there were.
    pub(super) fn serve_bytes(&mut self, transport: &mut impl Transport) -> usize {
        let count = self.serve_bytes_clients(transport) + self.serve_bytes_daemons(transport);
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
            let ShardServer { id: here, shard_map, backend, shard, bytes: server, activity, .. } = self;
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
                Ok((owner, op))
                    if owner.rank != here.rank
                        && backend.connection_owner(owner.rank, shard_map.daemons()) == here.daemon =>
                {
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

    fn serve_bytes_daemons(&mut self, transport: &mut impl Transport) -> usize {
        let (mut count, mut bytes_left) = (0, BYTES_PER_TURN);
        while bytes_left > 0
            && let Some(mut message) = self.bytes.recv_forwarded()
        {
            count += 1;
            bytes_left = bytes_left.saturating_sub(message.bytes.len().max(64));
            if message.is_response {
                transport.reply_buffer(message.request_id, message.bytes);
                continue;
            }
            self.activity.served += 1;
            let response = match BytesRequest::decode(&message.bytes) {
                Ok(request) => execute(&mut self.shard, &mut self.bytes.info, &request.op),
                Err(_) => BytesResponse::new(Status::Malformed),
            };
            if response.encode(&mut message.bytes).is_err() {
                message.bytes.extend_from_slice(&status_response(Status::Malformed));
            }
            self.bytes.return_response(message.daemon, message.request_id, message.bytes);
        }
        count
    }
}
