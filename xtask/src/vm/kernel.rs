//! The guest's kernel: downloads Debian's kernel package and unpacks it under the target directory. It installs nothing on
//! this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use super::modules::Dependencies;
use crate::error::{Error, with_path};
use crate::packages;
use crate::process::run_for_output;

/// The metapackage that depends on the package of the current kernel.
const METAPACKAGE: &str = "linux-image-amd64";

const XZ_MAGIC: &[u8] = b"\xfd7zXZ\0";

/// An unpacked kernel package.
pub(super) struct Kernel {
    directory: PathBuf,
    release: String,
}

impl Kernel {
    /// Returns the kernel under `cache`. Downloads it first when it is not there.
    pub(super) fn fetch(cache: &Path) -> Result<Kernel, Error> {
        fs::create_dir_all(cache).map_err(with_path(cache))?;
        let directory = cache.join("kernel");
        if !directory.exists() {
            // Unpacked in another directory and then renamed, so that the directory is always complete.
            let partial = cache.join(format!("kernel.partial-{}", process::id()));
            download(&partial)?;
            if fs::rename(&partial, &directory).is_err() {
                // Another run created it at the same time.
                fs::remove_dir_all(&partial).map_err(with_path(&partial))?;
            }
        }
        let release = release(&directory)?;
        Ok(Kernel { directory, release })
    }

    /// Returns the path of the kernel image to boot.
    pub(super) fn image(&self) -> PathBuf {
        let uncompressed = self.directory.join("vmlinux");
        if uncompressed.exists() { uncompressed } else { compressed_image(&self.directory, &self.release) }
    }

    /// Returns the contents of the named modules and of their dependencies, in loading order.
    pub(super) fn modules(&self, names: &[&str]) -> Result<Vec<Vec<u8>>, Error> {
        let modules = self.directory.join("lib/modules").join(&self.release);
        let text = |file| fs::read_to_string(modules.join(file)).map_err(with_path(modules.join(file)));
        let dependencies = Dependencies::parse(&text("modules.dep")?, &text("modules.builtin")?);
        let order = dependencies
            .load_order(names)
            .map_err(|name| Error::Kernel { path: modules.clone(), what: format!("has no module {name}") })?;
        order.iter().map(|path| read_module(&modules.join(path))).collect()
    }
}

fn download(directory: &Path) -> Result<(), Error> {
    fs::create_dir_all(directory).map_err(with_path(directory))?;
    let package = match kernel_package() {
        Err(_) if packages::can_install() => packages::update_package_lists().and_then(|()| kernel_package()),
        found => found,
    }?;
    eprintln!("xtask: fetching {package} (about 70 MB) for the guests");
    // Without the option, apt as root downloads as another user, who cannot write into this directory.
    let fetch = || {
        let mut command = Command::new("apt-get");
        command.args(["-q", "-o", "APT::Sandbox::User=root", "download", &package]).current_dir(directory);
        run_for_output(&mut command)
    };
    match fetch() {
        // Package lists that are out of date name versions that the archive no longer has.
        Err(_) if packages::can_install() => packages::update_package_lists().and_then(|()| fetch()),
        fetched => fetched,
    }?;
    let archive = find_entry(directory, |name| name.ends_with(".deb"))?;
    run_for_output(Command::new("dpkg-deb").arg("-x").args([&archive, &directory.to_path_buf()]))?;
    fs::remove_file(&archive).map_err(with_path(&archive))?;
    let release = release(directory)?;
    run_for_output(Command::new("/usr/sbin/depmod").arg("-b").arg(directory).arg(&release))?;
    extract_image(directory, &release)
}

/// Returns the name of the kernel package that the metapackage depends on.
fn kernel_package() -> Result<String, Error> {
    let listing = run_for_output(Command::new("apt-cache").args(["depends", METAPACKAGE]))?;
    let names = listing.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let mut images = names.filter(|name| name.starts_with("linux-image-"));
    images.next().map(str::to_owned).ok_or(Error::NoKernelPackage(METAPACKAGE))
}

/// Decompresses the kernel image. QEMU boots the result directly (PVH), and the guest need not decompress it, which takes six
/// of ten seconds under emulation. A kernel that is not compressed with xz is booted as it is.
fn extract_image(directory: &Path, release: &str) -> Result<(), Error> {
    let path = compressed_image(directory, release);
    let image = fs::read(&path).map_err(with_path(&path))?;
    let Some(payload) = payload(&image).filter(|payload| payload.starts_with(XZ_MAGIC)) else {
        return Ok(());
    };
    let compressed = directory.join("vmlinux.xz");
    fs::write(&compressed, payload).map_err(with_path(&compressed))?;
    run_for_output(Command::new("xz").args(["-d"]).arg(&compressed))?;
    Ok(())
}

/// Returns the compressed kernel inside a bzImage, as the x86 boot protocol defines it: it starts `payload_offset` bytes
/// after the boot sector and the `setup_sects` sectors. `payload_length` includes four bytes that are not part of the xz
/// data: the uncompressed size.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    let setup_bytes = (usize::from(*image.get(0x1f1)?) + 1) * 512;
    let start = setup_bytes.checked_add(word(0x248)?)?;
    image.get(start..start.checked_add(word(0x24c)?)?.checked_sub(4)?)
}

fn compressed_image(directory: &Path, release: &str) -> PathBuf {
    directory.join(format!("boot/vmlinuz-{release}"))
}

fn release(directory: &Path) -> Result<String, Error> {
    let modules = find_entry(&directory.join("lib/modules"), |_| true)?;
    Ok(modules.file_name().unwrap_or_default().to_string_lossy().into_owned())
}

/// Returns the first entry of a directory whose name matches.
fn find_entry(directory: &Path, matches: impl Fn(&str) -> bool) -> Result<PathBuf, Error> {
    let entries = fs::read_dir(directory).map_err(with_path(directory))?;
    let mut found = entries.flatten().filter(|entry| matches(&entry.file_name().to_string_lossy()));
    let missing = || Error::Kernel {
        path: directory.into(),
        what: "does not have the content of a kernel package".into(),
    };
    found.next().map(|entry| entry.path()).ok_or_else(missing)
}

/// Reads a module, and decompresses it when the package has it compressed.
fn read_module(path: &Path) -> Result<Vec<u8>, Error> {
    if path.extension().is_some_and(|extension| extension == "xz") {
        let xz = Command::new("xz").arg("-dc").arg(path).output().map_err(with_path(path))?;
        if !xz.status.success() {
            let stderr = String::from_utf8_lossy(&xz.stderr).trim().to_owned();
            let command = format!("xz -dc {}", path.display());
            return Err(Error::Program { command, status: xz.status.to_string(), stderr });
        }
        return Ok(xz.stdout);
    }
    fs::read(path).map_err(with_path(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_is_found_by_the_boot_protocol() {
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
