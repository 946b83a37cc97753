//! The job's secret: where it comes from and what is proved with it.
//!
//! The secret itself never crosses a connection, is never printed, and is never passed in arguments.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::environment;
use super::error::{Error, Result};
use super::random::random_bytes;

/// The shortest secret that is accepted: a proof made from a guessable secret can be guessed offline.
pub const MIN_SECRET: usize = 16;
/// The longest secret that is accepted.
pub const MAX_SECRET: usize = 4096;

/// What the ranks of one job know and nobody else does.
///
/// `Debug` does not show it.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Takes the secret as given; between [`MIN_SECRET`] and [`MAX_SECRET`] bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = bytes.into();
        if !(MIN_SECRET..=MAX_SECRET).contains(&bytes.len()) {
            return Err(Error::Configuration(format!(
                "the secret has {} bytes; it must have {MIN_SECRET} to {MAX_SECRET}: make one with `head -c 32 /dev/urandom | base64`",
                bytes.len()
            )));
        }
        Ok(Secret(bytes))
    }

    /// A fresh secret from the system's random numbers.
    pub fn random() -> Result<Self> {
        Ok(Secret(random_bytes::<32>()?.to_vec()))
    }

    /// Reads the secret that the environment names: `CROSSTIE_SECRET_FILE`, a file, or `CROSSTIE_SECRET`, the secret itself. The
    /// error says how to make one.
    pub fn from_env() -> Result<Self> {
        environment::secret(&environment::Variables::of_process())
    }

    /// Reads the secret from a file, less one trailing line end.
    ///
    /// Refused: a file that others may read or write (any permission for group or world), one that belongs to
    /// neither this user nor root, and anything but a regular file.
    pub fn from_file(path: &Path) -> Result<Self> {
        let doing = || format!("secret file {}", path.display());
        let failed = |error: std::io::Error| Error::io(doing(), &error);
        // O_NONBLOCK: a FIFO in that place must be refused, not waited for.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(path)
            .map_err(failed)?;
        let facts = file.metadata().map_err(failed)?;
        if !facts.is_file() {
            return Err(Error::Configuration(format!("{} is not a regular file", doing())));
        }
        if facts.mode() & 0o077 != 0 {
            return Err(Error::Configuration(format!(
                "{} is open to others (mode {:03o}): run `chmod 600 {}`",
                doing(),
                facts.mode() & 0o777,
                path.display()
            )));
        }
        let me = rustix::process::geteuid().as_raw();
        if facts.uid() != me && facts.uid() != 0 {
            return Err(Error::Configuration(format!(
                "{} belongs to uid {}, not to uid {me}: use a file of your own",
                doing(),
                facts.uid()
            )));
        }
        let mut bytes = Vec::new();
        file.take(MAX_SECRET as u64 + 2).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.ends_with(b"\n") {
            bytes.pop();
            if bytes.ends_with(b"\r") {
                bytes.pop();
            }
        }
        Secret::new(bytes)
    }

    /// A secret of its own for one purpose: proofs made with it are worth nothing for another.
    #[must_use]
    pub fn derive(&self, purpose: &str) -> Secret {
        let mut keyed = self.keyed("crosstie bootstrap 1 purpose");
        keyed.update(purpose.as_bytes());
        Secret(keyed.finish().to_vec())
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// A keyed hash that starts with a label, so that no proof can stand in for another.
    pub(super) fn keyed(&self, label: &str) -> Keyed {
        let mut keyed = Keyed::new(&self.0);
        keyed.update(label.as_bytes());
        keyed.update(&[0]);
        keyed
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

/// The length of every proof and tag.
pub(super) const TAG: usize = 32;

/// HMAC-SHA256 under some key.
#[derive(Clone)]
pub(super) struct Keyed(Hmac<Sha256>);

impl Keyed {
    pub(super) fn new(key: &[u8]) -> Self {
        Keyed(Hmac::new_from_slice(key).expect("HMAC takes keys of any length"))
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn finish(self) -> [u8; TAG] {
        self.0.finalize().into_bytes().into()
    }

    /// Compares in constant time.
    pub(super) fn matches(self, tag: &[u8; TAG]) -> bool {
        self.0.verify_slice(tag).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A file of its own for one test, removed at the end.
    struct Scratch(std::path::PathBuf);

    impl Scratch {
        fn new(name: &str, content: &[u8], mode: u32) -> Self {
            let path = std::env::temp_dir().join(format!("crosstie-secret-{}-{name}", std::process::id()));
            std::fs::write(&path, content).expect("scratch file");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("scratch mode");
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            std::fs::remove_file(&self.0).expect("remove scratch file");
        }
    }

    #[test]
    fn a_private_file_is_read_without_its_line_end() {
        let file = Scratch::new("private", b"0123456789abcdef\n", 0o600);
        assert_eq!(Secret::from_file(&file.0).expect("accepted").as_bytes(), b"0123456789abcdef");
    }

    #[test]
    fn a_file_open_to_others_is_refused() {
        for mode in [0o640, 0o604, 0o620, 0o601] {
            let file = Scratch::new(&format!("open{mode:o}"), b"0123456789abcdef", mode);
            let error = Secret::from_file(&file.0).expect_err("refused");
            assert!(matches!(&error, Error::Configuration(text) if text.contains("chmod 600")), "{error}");
        }
    }

    #[test]
    fn lengths_are_limited() {
        assert!(Secret::new(vec![7; MIN_SECRET - 1]).is_err());
        assert!(Secret::new(vec![7; MIN_SECRET]).is_ok());
        assert!(Secret::new(vec![7; MAX_SECRET]).is_ok());
        assert!(Secret::new(vec![7; MAX_SECRET + 1]).is_err());
        let file = Scratch::new("long", &vec![b'x'; MAX_SECRET * 3], 0o600);
        assert!(Secret::from_file(&file.0).is_err());
        assert!(Secret::from_file(Path::new("/dev/zero")).is_err());
    }

    #[test]
    fn debug_hides_it() {
        let secret = Secret::new("correct horse battery staple").expect("long enough");
        assert_eq!(format!("{secret:?}"), "Secret(hidden)");
    }
}
