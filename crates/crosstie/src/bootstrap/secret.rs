//! The job's secret: where it is read from, and the HMACs that are computed with it.
//!
//! The secret itself is never sent over a network connection, printed, or passed as a program argument.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::error::{Error, Result};
use super::random::random_bytes;
use super::variables::Variables;

const SECRET: &str = "CROSSTIE_SECRET";
pub(super) const SECRET_FILE: &str = "CROSSTIE_SECRET_FILE";

/// The shortest secret that is accepted, in bytes. A shorter one could be found by trying all values against a recorded
/// handshake.
pub const MIN_SECRET: usize = 16;
/// The longest secret that is accepted, in bytes.
pub const MAX_SECRET: usize = 4096;

/// The secret that all ranks of one job share. `Debug` does not print it.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Uses `bytes` as the secret: [`MIN_SECRET`] to [`MAX_SECRET`] of them.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = bytes.into();
        if !(MIN_SECRET..=MAX_SECRET).contains(&bytes.len()) {
            return Err(Error::Configuration(format!(
                "the secret has {} bytes, but must have {MIN_SECRET} to {MAX_SECRET}: create one with `head -c 32 /dev/urandom | base64`",
                bytes.len()
            )));
        }
        Ok(Secret(bytes))
    }

    /// Creates a random secret.
    pub fn random() -> Result<Self> {
        Ok(Secret(random_bytes::<32>()?.to_vec()))
    }

    /// Reads the secret from the environment: `CROSSTIE_SECRET_FILE` names a file, `CROSSTIE_SECRET` is the secret itself.
    /// The error says how to create one.
    pub fn from_env() -> Result<Self> {
        Secret::from_variables(&Variables::of_process())
    }

    pub(super) fn from_variables(variables: &Variables) -> Result<Self> {
        match (variables.get(SECRET_FILE), variables.get(SECRET)) {
            (Some(_), Some(_)) => Err(Error::Configuration(format!(
                "both {SECRET_FILE} and {SECRET} are set: keep {SECRET_FILE} and unset {SECRET}"
            ))),
            (Some(path), None) => Secret::from_file(Path::new(path)),
            (None, Some(secret)) => Secret::new(secret.as_encoded_bytes()),
            (None, None) => Err(Error::Configuration(format!(
                "the job has no secret: run `(umask 077; head -c 32 /dev/urandom | base64 > FILE)`, copy FILE to every rank's \
                 machine, and set {SECRET_FILE} to its path"
            ))),
        }
    }

    /// Reads the secret from a file, without a line end at its end.
    ///
    /// The file must be a regular file, belong to this user or root, and give no permissions to group and others.
    pub fn from_file(path: &Path) -> Result<Self> {
        let doing = || format!("secret file {}", path.display());
        let failed = |error: std::io::Error| Error::io(doing(), &error);
        // O_NONBLOCK: opening a FIFO at this path must not block; it is rejected below.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(path)
            .map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(Error::Configuration(format!(
                "{} is not a regular file: name a file that holds the secret",
                doing()
            )));
        }
        if metadata.mode() & 0o077 != 0 {
            return Err(Error::Configuration(format!(
                "{} is accessible to other users (mode {:03o}): run `chmod 600 {}`",
                doing(),
                metadata.mode() & 0o777,
                path.display()
            )));
        }
        let me = rustix::process::geteuid().as_raw();
        if metadata.uid() != me && metadata.uid() != 0 {
            return Err(Error::Configuration(format!(
                "{} belongs to uid {}, but this process runs as uid {me}: use a file that you own",
                doing(),
                metadata.uid()
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

    /// Derives a secret for one purpose. A proof made with it is not valid for any other purpose.
    #[must_use]
    pub fn derive(&self, purpose: &str) -> Secret {
        let mut hmac = self.hmac("crosstie bootstrap 1 purpose");
        hmac.update(purpose.as_bytes());
        Secret(hmac.finish().to_vec())
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Starts an HMAC under the secret with a label, so that a proof for one label is not valid for another.
    pub(crate) fn hmac(&self, label: &str) -> HmacSha256 {
        let mut hmac = HmacSha256::new(&self.0);
        hmac.update(label.as_bytes());
        hmac.update(&[0]);
        hmac
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

/// The length of every proof and tag, in bytes.
pub(crate) const TAG_BYTES: usize = 32;

/// An HMAC-SHA256 computation under one key.
#[derive(Clone)]
pub(crate) struct HmacSha256(Hmac<Sha256>);

impl HmacSha256 {
    pub(crate) fn new(key: &[u8]) -> Self {
        HmacSha256(Hmac::new_from_slice(key).expect("HMAC takes keys of any length"))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> [u8; TAG_BYTES] {
        self.0.finalize().into_bytes().into()
    }

    /// Compares with `tag` in constant time.
    pub(crate) fn verify(self, tag: &[u8; TAG_BYTES]) -> bool {
        self.0.verify_slice(tag).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A temporary file, removed when it is dropped.
    struct TemporaryFile(std::path::PathBuf);

    impl TemporaryFile {
        fn new(name: &str, content: &[u8], mode: u32) -> Self {
            let path = std::env::temp_dir().join(format!("crosstie-secret-{}-{name}", std::process::id()));
            std::fs::write(&path, content).expect("temporary file");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("file mode");
            TemporaryFile(path)
        }
    }

    impl Drop for TemporaryFile {
        fn drop(&mut self) {
            std::fs::remove_file(&self.0).expect("remove temporary file");
        }
    }

    #[test]
    fn private_file_is_read_without_its_line_end() {
        let file = TemporaryFile::new("private", b"0123456789abcdef\n", 0o600);
        assert_eq!(Secret::from_file(&file.0).expect("accepted").as_bytes(), b"0123456789abcdef");
    }

    #[test]
    fn file_accessible_to_others_is_rejected() {
        for mode in [0o640, 0o604, 0o620, 0o601] {
            let file = TemporaryFile::new(&format!("open{mode:o}"), b"0123456789abcdef", mode);
            let error = Secret::from_file(&file.0).expect_err("rejected");
            assert!(matches!(&error, Error::Configuration(text) if text.contains("chmod 600")), "{error}");
        }
    }

    #[test]
    fn lengths_are_limited() {
        assert!(Secret::new(vec![7; MIN_SECRET - 1]).is_err());
        assert!(Secret::new(vec![7; MIN_SECRET]).is_ok());
        assert!(Secret::new(vec![7; MAX_SECRET]).is_ok());
        assert!(Secret::new(vec![7; MAX_SECRET + 1]).is_err());
        let file = TemporaryFile::new("long", &vec![b'x'; MAX_SECRET * 3], 0o600);
        assert!(Secret::from_file(&file.0).is_err());
        assert!(Secret::from_file(Path::new("/dev/zero")).is_err());
    }

    #[test]
    fn debug_does_not_print_the_secret() {
        let secret = Secret::new("correct horse battery staple").expect("long enough");
        assert_eq!(format!("{secret:?}"), "Secret(hidden)");
    }
}
