//! Sending small messages together in one packet. When they do: `crosstie_protocol::group::message`, `combined.rs`.

use crosstie_protocol::group::message::{COMBINED_MAX, SendRefusal, encode_prefix};
use crosstie_protocol::group::{HEADER_SIZE, MemberId};

use super::channel::Parts;
use super::engine::Engine;

impl Engine {
    /// Puts a small message into a packet with others, if the receiver is behind. Returns `false` if it travels alone: a packet that
    /// has collected messages was posted before it.
    #[inline]
    pub(super) fn send_combined(
        &mut self,
        id: u16,
        to: MemberId,
        parts: &Parts<'_>,
        offset: usize,
    ) -> Result<bool, SendRefusal> {
        let Some(channel) = &mut self.channels[usize::from(id)] else { return Ok(false) };
        let sender = &mut channel.protocol.sender;
        let len = parts.len();
        if offset == 0 && len <= COMBINED_MAX && self.combines {
            let Some(place) = sender.combine(to, HEADER_SIZE as u32, len as u32)? else {
                self.post_open_packet(id, to);
                return Ok(false);
            };
            let at = place.offset as usize;
            let prefix = encode_prefix(len, parts.flags);
            let kept = channel.send_memory.write(at, &prefix);
            if kept.and_then(|()| parts.copy_to(0, len, &channel.send_memory, at + prefix.len())).is_err() {
                self.counters.unsent += 1;
            }
            if place.close {
                self.post_open_packet(id, to);
            }
            return Ok(true);
        }
        self.post_open_packet(id, to);
        Ok(false)
    }

    /// Posts the packet that collects messages to this member, if there is one.
    #[inline]
    fn post_open_packet(&mut self, id: u16, to: MemberId) {
        let now = self.now();
        let Some(channel) = &mut self.channels[usize::from(id)] else { return };
        if let Some(packet) = channel.protocol.sender.close_packet(to, now) {
            let header = channel.protocol.data_header(&packet).encode();
            if self.post_from_buffer(id, &packet, &header).is_err() {
                self.put_back(id, &packet);
            }
        }
    }

    /// While messages to this member are being combined: takes acknowledgements, after which they need not wait for others.
    #[inline]
    pub(super) fn poll_before_send(&mut self, id: u16, to: MemberId) {
        let Some(channel) = &self.channels[usize::from(id)] else { return };
        let is_behind = channel.protocol.sender.in_flight(to) >= channel.options.combine_from;
        if !is_behind || !self.combines {
            return;
        }
        let is_lossy = channel.is_lossy;
        self.poll_acks(is_lossy);
    }

    #[inline(never)]
    fn poll_acks(&mut self, is_lossy: bool) {
        if is_lossy {
            // A deadline that starts at an old reading of the clock would end too early.
            if self.is_ready() {
                self.read_clock();
                self.progress();
            }
        } else {
            let count = self.poll_packets();
            if count > 0 {
                self.serve(count);
            }
        }
    }

    /// Posts packets that collect messages. For the group's thread, while the application uses the engine: it may have stopped to.
    pub(super) fn post_open_packets(&mut self) {
        let now = self.now();
        let has_work = |id: &u16| {
            let channel = self.channels[usize::from(*id)].as_ref();
            channel.is_some_and(|channel| channel.protocol.sender.has_work(now))
        };
        if self.open.iter().any(has_work) {
            self.serve_channels(false);
        }
    }
}
