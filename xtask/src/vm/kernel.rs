//! The guest's kernel: Debian's package, downloaded and unpacked under the target directory. Nothing is
//! installed on this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use super::modules::Dependencies;
use crate::error::{Error, at};
use crate::packages;
use crate::process::output;

/// The package that always depends on the current kernel.
const METAPACKAGE: &str = "linux-image-amd64";

const XZ_MAGIC: &[u8] = b"\xfd7zXZ\0";

/// An unpacked kernel package.
pub(super) struct Kernel {
    directory: PathBuf,
    release: String,
}

impl Kernel {
    /// The kernel under `cache`, fetched there first if need be.
    pub(super) fn fetch(cache: &Path) -> Result<Kernel, Error> {
        fs::create_dir_all(cache).map_err(at(cache))?;
        let directory = cache.join("kernel");
        if !directory.exists() {
            // Complete or not there at all: made elsewhere and moved.
            let partial = cache.join(format!("kernel.partial-{}", process::id()));
            unpack(&partial)?;
            if fs::rename(&partial, &directory).is_err() {
                // Another run was faster.
                fs::remove_dir_all(&partial).map_err(at(&partial))?;
            }
        }
        let release = release(&directory)?;
        Ok(Kernel { directory, release })
    }

    /// The file to boot.
    pub(super) fn image(&self) -> PathBuf {
        let plain = self.directory.join("vmlinux");
        if plain.exists() { plain } else { compressed(&self.directory, &self.release) }
    }

    /// The contents of the named modules and all that they need, in an order that loads.
    pub(super) fn modules(&self, names: &[&str]) -> Result<Vec<Vec<u8>>, Error> {
        let modules = self.directory.join("lib/modules").join(&self.release);
        let text = |file| fs::read_to_string(modules.join(file)).map_err(at(modules.join(file)));
        let dependencies = Dependencies::parse(&text("modules.dep")?, &text("modules.builtin")?);
        let order = dependencies
            .load_order(names)
            .map_err(|name| Error::Kernel { path: modules.clone(), what: format!("has no module {name}") })?;
        order.iter().map(|path| plain_module(&modules.join(path))).collect()
    }
}

fn unpack(directory: &Path) -> Result<(), Error> {
    fs::create_dir_all(directory).map_err(at(directory))?;
    let package = match package() {
        Err(_) if packages::may_install() => packages::update().and_then(|()| package()),
        found => found,
    }?;
    eprintln!("xtask: fetching {package} (about 70 MB) for the guests");
    // As root, apt would download as a user who may not write here.
    let download = || {
        let mut command = Command::new("apt-get");
        command.args(["-q", "-o", "APT::Sandbox::User=root", "download", &package]).current_dir(directory);
        output(&mut command)
    };
    match download() {
        // Lists out of date name versions that the archive no longer has.
        Err(_) if packages::may_install() => packages::update().and_then(|()| download()),
        done => done,
    }?;
    let archive = entry(directory, |name| name.ends_with(".deb"))?;
    output(Command::new("dpkg-deb").arg("-x").args([&archive, &directory.to_path_buf()]))?;
    fs::remove_file(&archive).map_err(at(&archive))?;
    let release = release(directory)?;
    output(Command::new("/usr/sbin/depmod").arg("-b").arg(directory).arg(&release))?;
    extract_image(directory, &release)
}

/// The package behind the metapackage.
fn package() -> Result<String, Error> {
    let listing = output(Command::new("apt-cache").args(["depends", METAPACKAGE]))?;
    let names = listing.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let mut images = names.filter(|name| name.starts_with("linux-image-"));
    images.next().map(str::to_owned).ok_or(Error::NoKernelPackage(METAPACKAGE))
}

/// Takes the plain kernel out of the compressed one. QEMU boots it directly (PVH), which saves the guest the
/// unpacking: six seconds of ten under emulation. A kernel packed in another way boots as it is.
fn extract_image(directory: &Path, release: &str) -> Result<(), Error> {
    let path = compressed(directory, release);
    let image = fs::read(&path).map_err(at(&path))?;
    let Some(payload) = payload(&image).filter(|payload| payload.starts_with(XZ_MAGIC)) else {
        return Ok(());
    };
    let packed = directory.join("vmlinux.xz");
    fs::write(&packed, payload).map_err(at(&packed))?;
    output(Command::new("xz").args(["-d"]).arg(&packed))?;
    Ok(())
}

/// The compressed kernel inside a bzImage, by the x86 boot protocol: `setup_sects` sectors and the boot sector,
/// then `payload_offset` and `payload_length`. The length includes four bytes that are not the archive's: its unpacked size.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    let protected = (usize::from(*image.get(0x1f1)?) + 1) * 512;
    let start = protected.checked_add(word(0x248)?)?;
    image.get(start..start.checked_add(word(0x24c)?)?.checked_sub(4)?)
}

fn compressed(directory: &Path, release: &str) -> PathBuf {
    directory.join(format!("boot/vmlinuz-{release}"))
}

fn release(directory: &Path) -> Result<String, Error> {
    let modules = entry(&directory.join("lib/modules"), |_| true)?;
    Ok(modules.file_name().unwrap_or_default().to_string_lossy().into_owned())
}

/// The one entry of a directory with a fitting name.
fn entry(directory: &Path, fits: impl Fn(&str) -> bool) -> Result<PathBuf, Error> {
    let entries = fs::read_dir(directory).map_err(at(directory))?;
    let mut found = entries.flatten().filter(|entry| fits(&entry.file_name().to_string_lossy()));
    let missing =
        || Error::Kernel { path: directory.into(), what: "is not what the package unpacks to".into() };
    found.next().map(|entry| entry.path()).ok_or_else(missing)
}

/// A module as the kernel loads it, unpacked where the package has it packed.
fn plain_module(path: &Path) -> Result<Vec<u8>, Error> {
    if path.extension().is_some_and(|extension| extension == "xz") {
        let done = Command::new("xz").arg("-dc").arg(path).output().map_err(at(path))?;
        if !done.status.success() {
            let stderr = String::from_utf8_lossy(&done.stderr).trim().to_owned();
            let command = format!("xz -dc {}", path.display());
            return Err(Error::Program { command, status: done.status.to_string(), stderr });
        }
        return Ok(done.stdout);
    }
    fs::read(path).map_err(at(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_found_by_the_boot_protocol() {
        let mut image = vec![0; 2048];
        image[0x1f1] = 1;
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&12_u32.to_le_bytes());
        image[1040..1052].copy_from_slice(b"\xfd7zXZ\0..SIZE");
        assert_eq!(payload(&image), Some(&b"\xfd7zXZ\0.."[..]));
        assert_eq!(payload(&image[..1045]), None);
        assert_eq!(payload(b"MZ"), None);
    }
}
