//! Collective operations between ranks that also carry errors.

use crosstie::bootstrap::Bootstrap;

use super::Error;

/// Waits for all ranks. Every rank gets the results of all, in the order of ranks. If one rank has failed, all get its error.
pub(super) fn gather(job: &mut dyn Bootstrap, own: Result<Vec<u8>, Error>) -> Result<Vec<Vec<u8>>, Error> {
    let blob = match &own {
        Ok(blob) => [&[0], blob.as_slice()].concat(),
        Err(error) => [&[1], error.to_string().as_bytes()].concat(),
    };
    let blobs = job.all_gather(&blob)?;
    own?;
    let read = |(rank, blob): (u32, &Vec<u8>)| match blob.as_slice() {
        [0, result @ ..] => Ok(result.to_vec()),
        [1, text @ ..] => Err(Error::Peer { rank, what: String::from_utf8_lossy(text).into_owned() }),
        _ => Err(Error::Protocol),
    };
    (0..).zip(&blobs).map(read).collect()
}

/// Waits for all ranks. Returns this rank's own value if all ranks succeeded.
pub(super) fn agree<T>(job: &mut dyn Bootstrap, own: Result<T, Error>) -> Result<T, Error> {
    let (value, outcome) = match own {
        Ok(value) => (Some(value), Ok(Vec::new())),
        Err(error) => (None, Err(error)),
    };
    gather(job, outcome)?;
    value.ok_or(Error::Protocol)
}

/// Sends the bytes of all ranks to rank 0, in pieces that the job can carry. The other ranks get empty results.
pub(super) fn gather_to_rank_zero(job: &mut dyn Bootstrap, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
    const PIECE: usize = 1 << 19;
    let lens = gather(job, Ok((bytes.len() as u64).to_le_bytes().to_vec()))?;
    let len =
        |blob: &Vec<u8>| blob.as_slice().try_into().map(u64::from_le_bytes).map_err(|_| Error::Protocol);
    let lens: Vec<u64> = lens.iter().map(len).collect::<Result<_, _>>()?;
    let pieces = lens.iter().max().map_or(0, |most| most.div_ceil(PIECE as u64));
    let mut all = vec![Vec::new(); job.size() as usize];
    let mut own_pieces = bytes.chunks(PIECE);
    for _ in 0..pieces {
        let mut blobs = vec![Vec::new(); job.size() as usize];
        blobs[0] = own_pieces.next().unwrap_or_default().to_vec();
        for (all, piece) in all.iter_mut().zip(job.exchange(&blobs)?) {
            all.extend_from_slice(&piece);
        }
    }
    Ok(all)
}
