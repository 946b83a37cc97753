//! An initramfs: an archive in cpio's "newc" format, which the kernel unpacks at boot as its file system.
//!
//! The layout is that of Debian with merged `/usr`: `/bin`, `/sbin`, `/lib` and `/lib64` are links into it, so a path
//! under one of them is the same file in the guest as on this machine. The archive is not compressed: under emulation,
//! decompression would cost the guest more time than it saves.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::error::{Error, with_path};
use crate::process;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

/// An initramfs that is being built.
#[derive(Default)]
pub(super) struct Initramfs {
    bytes: Vec<u8>,
    present: BTreeSet<String>,
    inode: u32,
}

impl Initramfs {
    /// Creates an initramfs that has directories only.
    pub(super) fn new() -> Self {
        let mut initramfs = Initramfs::default();
        for directory in ["bin", "sbin", "lib", "lib64"] {
            initramfs.directory(&format!("usr/{directory}"));
            initramfs.entry(directory, LINK | 0o777, format!("usr/{directory}").as_bytes());
        }
        for directory in ["dev", "etc", "proc", "root", "run", "sys", "var/tmp"] {
            initramfs.directory(directory);
        }
        initramfs.entry("tmp", DIRECTORY | 0o1777, &[]);
        initramfs
    }

    /// Adds a file with the given permissions and content. When the path exists already, nothing changes.
    pub(super) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) {
        self.entry(path, REGULAR | permissions, content);
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, to: &str) {
        self.entry(path, LINK | 0o777, to.as_bytes());
    }

    /// Adds a file of this machine at the same path.
    pub(super) fn copy(&mut self, path: &Path) -> Result<(), Error> {
        let permissions = fs::metadata(path).map_err(with_path(path))?.permissions().mode() & 0o7777;
        self.file(&path.to_string_lossy(), permissions, &fs::read(path).map_err(with_path(path))?);
        Ok(())
    }

    /// Adds a program or library of this machine with everything that it needs: the libraries that `ldd` lists, or for
    /// a script its interpreter with its libraries.
    pub(super) fn copy_program(&mut self, path: &Path) -> Result<(), Error> {
        self.copy(path)?;
        let content = fs::read(path).map_err(with_path(path))?;
        if let Some(interpreter) = interpreter(&content) {
            return self.copy_program(Path::new(&interpreter));
        }
        for library in libraries(path, &content)? {
            self.copy(Path::new(&library))?;
        }
        Ok(())
    }

    /// Whether the path exists already.
    pub(super) fn has(&self, path: &str) -> bool {
        self.present.contains(&archive_path(path))
    }

    /// Returns the complete archive.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.append("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn directory(&mut self, path: &str) {
        self.entry(path, DIRECTORY | 0o755, &[]);
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        let path = archive_path(path);
        if let Some((parent, _)) = path.rsplit_once('/')
            && !self.present.contains(parent)
        {
            self.directory(parent);
        }
        if self.present.insert(path.clone()) {
            self.append(&path, mode, content);
        }
    }

    fn append(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.inode += 1;
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        let size = u32::try_from(content.len()).expect("cpio files are under 4 GiB");
        // inode, mode, uid, gid, links, time, size, device (2), special device (2), name with NUL, checksum
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// Returns the path inside the archive: relative, and under `usr` where Debian has a link into it.
fn archive_path(path: &str) -> String {
    let path = path.trim_matches('/');
    let merged = ["bin/", "sbin/", "lib/", "lib64/"].iter().any(|start| path.starts_with(start));
    if merged { format!("usr/{path}") } else { path.to_owned() }
}

/// Returns the interpreter that the first line of a script names.
fn interpreter(content: &[u8]) -> Option<String> {
    let line = content.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    std::str::from_utf8(line).ok()?.split_whitespace().next().map(str::to_owned)
}

/// Returns the paths of the libraries that an ELF file is linked with, and of the dynamic loader.
fn libraries(path: &Path, content: &[u8]) -> Result<Vec<String>, Error> {
    if !content.starts_with(b"\x7fELF") {
        return Ok(Vec::new());
    }
    match process::run_for_output(Command::new("ldd").arg(path)) {
        Ok(listing) => {
            parse_ldd(&listing).map_err(|library| Error::NoSuchLibrary { program: path.into(), library })
        }
        // ldd prints this for a statically linked program.
        Err(Error::Program { stderr, .. }) if stderr.contains("not a dynamic executable") => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Returns the paths in the output of `ldd`, or the name of a library that it did not find.
fn parse_ldd(listing: &str) -> Result<Vec<String>, String> {
    let mut paths = Vec::new();
    for line in listing.lines().map(str::trim) {
        if let Some((name, _)) = line.split_once(" => not found") {
            return Err(name.to_owned());
        }
        let path = line.split_once(" => ").map_or(line, |(_, path)| path);
        if path.starts_with('/') {
            paths.push(path.split(" (").next().unwrap_or(path).to_owned());
        }
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses an archive: (name, mode, content) of each entry, the trailer last.
    fn parse_archive(archive: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        let mut offset = 0;
        while offset < archive.len() {
            assert_eq!(&archive[offset..offset + 6], b"070701");
            let field = |n: usize| {
                let digits = std::str::from_utf8(&archive[offset + 6 + 8 * n..offset + 14 + 8 * n]).unwrap();
                u32::from_str_radix(digits, 16).unwrap() as usize
            };
            let name = &archive[offset + 110..offset + 110 + field(11) - 1];
            let start = (offset + 110 + field(11)).next_multiple_of(4);
            let content = archive[start..start + field(6)].to_vec();
            entries.push((String::from_utf8(name.to_vec()).unwrap(), field(1) as u32, content));
            offset = (start + field(6)).next_multiple_of(4);
        }
        entries
    }

    #[test]
    fn directories_precede_their_files_and_paths_are_merged_into_usr() {
        let mut initramfs = Initramfs::default();
        initramfs.file("/lib/x/library.so", 0o755, b"12345");
        initramfs.file("/usr/lib/x/library.so", 0o755, b"again");
        initramfs.link("bin/sh", "dash");
        assert!(initramfs.has("/lib/x/library.so"));
        let entries = parse_archive(&initramfs.finish());
        let names: Vec<_> = entries.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(
            names,
            ["usr", "usr/lib", "usr/lib/x", "usr/lib/x/library.so", "usr/bin", "usr/bin/sh", "TRAILER!!!"]
        );
        assert_eq!(entries[3], ("usr/lib/x/library.so".into(), 0o100_755, b"12345".to_vec()));
        assert_eq!(entries[5], ("usr/bin/sh".into(), 0o120_777, b"dash".to_vec()));
        assert_eq!(entries[0].1, 0o040_755);
    }

    #[test]
    fn library_paths_are_read_from_ldd_output() {
        let listing = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                       \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let paths = parse_ldd(listing).unwrap();
        assert_eq!(paths, ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]);
        assert_eq!(parse_ldd("\tlibmpi.so.40 => not found\n").unwrap_err(), "libmpi.so.40");
        assert!(parse_ldd("\tstatically linked\n").unwrap().is_empty());
    }

    #[test]
    fn interpreter_is_read_from_the_first_line_of_a_script() {
        assert_eq!(interpreter(b"#! /usr/bin/env bash\n").as_deref(), Some("/usr/bin/env"));
        assert_eq!(interpreter(b"\x7fELF"), None);
    }
}
