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
        let read = |blob: &Vec<u8>| match blob.as_slice() {
            [0, result @ ..] => Ok(result.to_vec()),
            [1, text @ ..] => Err(Error::Peer(String::from_utf8_lossy(text).into_owned())),
            _ => Err(Error::Protocol),
        };
        blobs.iter().map(read).collect()
    }

    /// Waits for all ranks.
    pub(crate) fn barrier(&mut self, own: Result<(), Error>) -> Result<(), Error> {
        self.gather(own.map(|()| Vec::new())).map(drop)
    }

    /// Waits for all ranks. Every rank gets the values of all, in the order of ranks.
    pub(crate) fn gather_values<T: Serialize + DeserializeOwned>(
        &mut self,
        own: &T,
    ) -> Result<Vec<T>, Error> {
        let json =
            serde_json::to_vec(own).map_err(|source| Error::Os { what: "JSON", source: source.into() });
        let all = self.gather(json)?;
        all.iter().map(|json| serde_json::from_slice(json).map_err(|_| Error::Protocol)).collect()
    }

    /// Waits for all ranks. Returns what all have done together, in the time of the slowest.
    pub(crate) fn total(&mut self, own: Result<Option<Throughput>, Error>) -> Result<Throughput, Error> {
        let own = own.map(|own| own.map_or([0; 2], |own| [own.operations, own.time.as_nanos() as u64]));
        let mut total = Throughput { operations: 0, time: Duration::ZERO };
        for words in self.gather(own.map(|words| words.map(u64::to_le_bytes).concat()))? {
            let (words, []) = words.as_chunks::<8>() else { return Err(Error::Protocol) };
            let [operations, ns] = *words else { return Err(Error::Protocol) };
            total.operations += u64::from_le_bytes(operations);
            total.time = total.time.max(Duration::from_nanos(u64::from_le_bytes(ns)));
        }
        Ok(total)
    }

    /// Waits for all ranks. Returns this rank's own value, and what all ranks tell the others.
    pub(crate) fn share<T>(&mut self, own: Result<(T, Vec<u8>), Error>) -> Result<(T, Vec<Vec<u8>>), Error> {
        let (value, blob) = match own {
            Ok((value, blob)) => (Some(value), Ok(blob)),
            Err(error) => (None, Err(error)),
        };
        let blobs = self.gather(blob)?;
        Ok((value.ok_or(Error::Protocol)?, blobs))
    }

    /// Connects this end with that of the other one of two ranks.
    pub(crate) fn connect<T: Connect>(&mut self, opened: Result<T, Error>) -> Result<T, Error> {
        let other = usize::from(self.is_leader());
        let (mut end, addresses) = self.share(opened.map(|end| {
            let address = end.address();
            (end, address)
        }))?;
        let connected = addresses.get(other).ok_or(Error::Protocol).and_then(|address| end.connect(address));
        self.barrier(connected)?;
        Ok(end)
    }
}
