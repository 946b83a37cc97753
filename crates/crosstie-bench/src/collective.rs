//! Collective operations between the sides of a benchmark: barrier, gather, exchange.

use crosstie::bootstrap::Bootstrap;

use crate::error::Error;

/// The sides of a benchmark. Each operation also carries the error of a side that failed, so that all sides stop.
pub(crate) struct Collective<'a> {
    job: &'a mut dyn Bootstrap,
}

impl<'a> Collective<'a> {
    pub(crate) fn new(job: &'a mut dyn Bootstrap) -> Collective<'a> {
        Collective { job }
    }

    pub(crate) fn rank(&self) -> usize {
        self.job.rank() as usize
    }

    pub(crate) fn is_leader(&self) -> bool {
        self.job.rank() == 0
    }

    /// Waits for all sides. Every side gets the results of all, in the order of ranks.
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

    /// Waits for the other one of two sides and returns its result.
    pub(crate) fn exchange(&mut self, own: Result<Vec<u8>, Error>) -> Result<Vec<u8>, Error> {
        let other = usize::from(self.is_leader());
        self.gather(own)?.get_mut(other).map(std::mem::take).ok_or(Error::Protocol)
    }

    /// Waits for all sides. Returns this side's own value if all sides succeeded.
    pub(crate) fn agree<T>(&mut self, own: Result<T, Error>) -> Result<T, Error> {
        let (value, outcome) = match own {
            Ok(value) => (Some(value), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.barrier(outcome)?;
        value.ok_or(Error::Protocol)
    }

    /// Waits for all sides.
    pub(crate) fn barrier(&mut self, own: Result<(), Error>) -> Result<(), Error> {
        self.gather(own.map(|()| Vec::new())).map(drop)
    }
}
