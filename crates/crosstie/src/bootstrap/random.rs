//! Random bytes from the operating system, for nonces and secrets.

use super::error::{Error, Result};

/// Returns `N` random bytes from the kernel's generator (`getrandom`), which is fit for secrets.
pub fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::io("reading random bytes from the kernel", &errno.into())),
        }
    }
    Ok(bytes)
}
