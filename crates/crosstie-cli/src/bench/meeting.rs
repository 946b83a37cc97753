//! How the two sides of a benchmark keep step.

use crosstie::bootstrap::Bootstrap;

use crate::error::Error;

/// Two sides that meet between slices. Each tells how it fared; when one has failed, both stop.
pub(crate) struct Meeting<'a> {
    job: &'a mut dyn Bootstrap,
}

impl<'a> Meeting<'a> {
    pub(crate) fn new(job: &'a mut dyn Bootstrap) -> Meeting<'a> {
        Meeting { job }
    }

    pub(crate) fn leads(&self) -> bool {
        self.job.rank() == 0
    }

    /// Waits for the other side and exchanges results.
    pub(crate) fn exchange(&mut self, mine: Result<Vec<u8>, Error>) -> Result<Vec<u8>, Error> {
        let blob = match &mine {
            Ok(blob) => [&[0], blob.as_slice()].concat(),
            Err(error) => [&[1], error.to_string().as_bytes()].concat(),
        };
        let mut blobs = self.job.all_gather(&blob)?;
        mine?;
        let other = usize::from(self.leads());
        match blobs.get_mut(other).map(std::mem::take).as_deref() {
            Some([0, theirs @ ..]) => Ok(theirs.to_vec()),
            Some([1, text @ ..]) => Err(Error::Peer(String::from_utf8_lossy(text).into_owned())),
            _ => Err(Error::Protocol),
        }
    }

    /// Waits for the other side.
    pub(crate) fn keep_step(&mut self, mine: Result<(), Error>) -> Result<(), Error> {
        self.exchange(mine.map(|()| Vec::new())).map(drop)
    }
}
