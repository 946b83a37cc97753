//! What is inside a guest: the tools of the network and of Soft-RoCE, the command, and process 1.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::initramfs::Initramfs;
use super::kernel::Kernel;
use crate::error::{Error, at};
use crate::process;

/// What the guests are made of and what boots them.
pub(crate) const PACKAGES: &[&str] = &[
    "qemu-system-x86",
    "busybox-static",
    "iproute2",
    "ibverbs-providers",
    "libibverbs1",
    "kmod",
    "xz-utils",
];

/// Loaded in this order, each after what it needs. rxe asks for a crc32 that nothing in it names.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "virtio_net",
    "dummy",
    "crc32_generic",
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
];

const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// Builds the initramfs that every guest of a run boots.
pub(super) fn initramfs(
    kernel: &Kernel,
    files: &[PathBuf],
    variables: &[String],
    command: &[String],
) -> Result<Vec<u8>, Error> {
    let mut initramfs = Initramfs::new();
    initramfs.file("init", 0o755, include_bytes!("init.sh"));
    for (number, module) in kernel.modules(MODULES)?.iter().enumerate() {
        initramfs.file(&format!("lib/guest/{number:02}.ko"), 0o644, module);
    }
    initramfs.file("etc/passwd", 0o644, b"root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n");
    initramfs.file("etc/group", 0o644, b"root:x:0:\nnogroup:x:65534:\n");
    initramfs.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n::1 localhost\n");

    // busybox's own shell would take its own `ip` before the real one.
    for tool in ["dash", "ip", "rdma"] {
        initramfs.copy_program(&on_path(tool).ok_or_else(|| Error::NoSuchFile(tool.into()))?)?;
    }
    initramfs.link("bin/sh", "dash");
    soft_roce(&mut initramfs)?;
    for file in files {
        let file = std::path::absolute(file).map_err(at(file))?;
        initramfs.copy_program(&file)?;
    }

    let busybox = on_path("busybox").ok_or_else(|| Error::NoSuchFile("busybox".into()))?;
    let applets = process::output(Command::new(&busybox).arg("--list"))?;
    let (program, arguments) =
        command.split_first().ok_or_else(|| Error::NoSuchFile("(no command)".into()))?;
    let in_guest =
        !program.contains('/') && (program == "sh" || applets.lines().any(|applet| applet == program));
    let program = match on_path(program) {
        Some(path) if program != "sh" => {
            initramfs.copy_program(&path)?;
            path.to_string_lossy().into_owned()
        }
        _ if in_guest => program.clone(),
        _ => return Err(Error::NoSuchFile(program.clone())),
    };
    initramfs.file("etc/command", 0o644, script(variables, &program, arguments).as_bytes());

    initramfs.file("bin/busybox", 0o755, &fs::read(&busybox).map_err(at(&busybox))?);
    for applet in applets.lines().filter(|applet| !initramfs_has(&initramfs, applet)).collect::<Vec<_>>() {
        initramfs.link(&format!("bin/{applet}"), "busybox");
    }
    Ok(initramfs.finish())
}

/// libibverbs with its provider for rxe, which it finds by a file in `/etc/libibverbs.d` and loads by itself.
fn soft_roce(initramfs: &mut Initramfs) -> Result<(), Error> {
    initramfs.copy(Path::new("/etc/libibverbs.d/rxe.driver"))?;
    initramfs.copy_program(&Path::new(LIBRARIES).join("libibverbs.so.1"))?;
    let providers = Path::new(LIBRARIES).join("libibverbs");
    for entry in fs::read_dir(&providers).map_err(at(&providers))?.flatten() {
        if entry.file_name().to_string_lossy().starts_with("librxe-") {
            initramfs.copy_program(&entry.path())?;
        }
    }
    Ok(())
}

fn initramfs_has(initramfs: &Initramfs, program: &str) -> bool {
    ["bin", "sbin"].iter().any(|directory| initramfs.has(&format!("{directory}/{program}")))
}

/// Where a program is on this machine: at its path, or on PATH and in the directories for root's programs.
fn on_path(program: &str) -> Option<PathBuf> {
    let is_program = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|of| of.is_file() && of.permissions().mode() & 0o111 != 0)
    };
    if program.contains('/') {
        return std::path::absolute(program).ok().filter(is_program);
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let directories = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    directories.map(|directory| directory.join(program)).find(is_program)
}

/// The shell script that becomes the command.
fn script(variables: &[String], program: &str, arguments: &[String]) -> String {
    let mut script = String::new();
    for variable in variables {
        let (name, value) = variable.split_once('=').unwrap_or((variable, ""));
        script += &format!("export {name}={}\n", quoted(value));
    }
    script += &format!("exec {}", quoted(program));
    for argument in arguments {
        script += &format!(" {}", quoted(argument));
    }
    script + "\n"
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_reaches_the_command_as_it_is() {
        let script =
            script(&["SEED=1 2".into()], "/bin/a b", &["it's".into(), "$PEER".into(), String::new()]);
        assert_eq!(script, "export SEED='1 2'\nexec '/bin/a b' 'it'\\''s' '$PEER' ''\n");
    }

    #[test]
    fn programs_are_found_on_the_path_or_by_their_path() {
        assert!(on_path("sh").is_some());
        assert_eq!(on_path("/bin/sh"), Some("/bin/sh".into()));
        assert_eq!(on_path("/etc/passwd"), None);
        assert_eq!(on_path("no-such-program"), None);
    }
}
