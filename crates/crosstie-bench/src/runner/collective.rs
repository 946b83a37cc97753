//! Collective operations between the ranks of a benchmark.

use std::time::Duration;

use crosstie::bootstrap::Bootstrap;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Error;
use crate::limits::Throughput;

/// The ranks of a benchmark. Each operation also carries the error of a rank that failed, so that all ranks stop.
pub(crate) struct Collective<'a> {
    pub(crate) job: &'a mut dyn Bootstrap,
}

/// An end of a connection between two ranks.
pub(crate) trait Connect {
    /// What the other end needs to connect.
    fn address(&self) -> Vec<u8>;
    /// Connects to the end with this address.
    fn connect(&mut self, address: &[u8]) -> Result<(), Error>;
}

impl Collective<'_> {
    pub(crate) fn rank(&self) -> usize {
        self.job.rank() as usize
    }

    pub(crate) fn is_leader(&self) -> bool {
        self.job.rank() == 0
    }

    /// Waits for all ranks. Every rank gets the results of all, in the order of ranks.
    pub(crate) fn gather(&mut self, own: Result<Vec<u8>, Error>) -> Result<Vec<Vec<u8>>, Error> {
        let blob = match &own {
            Ok(blob) => [&[0], blob.as_slice()].concat(),
            Err(error) => [&[1], error.to_string().as_bytes()].concat(),
        };
        let blobs = self.job.all_gather(&blob)?;
        own?;
        let read = |(rank, blob): (u32, &Vec<u8>)| match blob.as_slice() {
            [0, result @ ..] => Ok(result.to_vec()),
            [1, text @ ..] => Err(Error::Rank { rank, what: String::from_utf8_lossy(text).into_owned() }),
            _ => Err(Error::Protocol),
        };
        (0..).zip(&blobs).map(read).collect()
    }

    /// Waits for all ranks. Every rank gets the values of all, in the order of ranks.
    pub(crate) fn gather_values<T: Serialize + DeserializeOwned>(
        &mut self,
        own: Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        let all = self.gather(own.and_then(|own| Ok(serde_json::to_vec(&own)?)))?;
        all.iter().map(|json| Ok(serde_json::from_slice(json)?)).collect()
    }

    /// Waits for all ranks. Returns this rank's own value if all ranks succeeded.
    pub(crate) fn agree<T>(&mut self, own: Result<T, Error>) -> Result<T, Error> {
        let (value, outcome) = match own {
            Ok(value) => (Some(value), Ok(Vec::new())),
            Err(error) => (None, Err(error)),
        };
        self.gather(outcome)?;
        value.ok_or(Error::Protocol)
    }

    /// Waits for all ranks. Returns what all have done together, in the time of the slowest.
    pub(crate) fn total(&mut self, own: Result<Option<Throughput>, Error>) -> Result<Throughput, Error> {
        let mut total = Throughput { operations: 0, time: Duration::ZERO };
        for one in self.gather_values(own)?.into_iter().flatten() {
            total.operations += one.operations;
            total.time = total.time.max(one.time);
        }
        Ok(total)
    }

    /// Connects this end with that of the other one of two ranks.
    pub(crate) fn connect<T: Connect>(&mut self, opened: Result<T, Error>) -> Result<T, Error> {
        let other = usize::from(self.is_leader());
        let (opened, address) = match opened.map(|end| (end.address(), end)) {
            Ok((address, end)) => (Some(end), Ok(address)),
            Err(error) => (None, Err(error)),
        };
        let addresses = self.gather(address)?;
        let (mut end, address) = opened.zip(addresses.get(other)).ok_or(Error::Protocol)?;
        let connected = end.connect(address);
        self.agree(connected.map(|()| end))
    }

    /// Sends the bytes of all ranks to rank 0, in pieces that the job can carry. The other ranks get empty results.
    pub(crate) fn gather_to_leader(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        const PIECE: usize = 1 << 19;
        let lens = self.gather_values(Ok(bytes.len()))?;
        let pieces = lens.iter().max().map_or(0, |most| most.div_ceil(PIECE));
        let mut all = vec![Vec::new(); lens.len()];
        let mut own_pieces = bytes.chunks(PIECE);
        for _ in 0..pieces {
            let mut blobs = vec![Vec::new(); lens.len()];
            blobs[0] = own_pieces.next().unwrap_or_default().to_vec();
            for (all, piece) in all.iter_mut().zip(self.job.exchange(&blobs)?) {
                all.extend_from_slice(&piece);
            }
        }
        Ok(all)
    }
}
