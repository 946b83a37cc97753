//! Builds the file system of a guest: network and Soft-RoCE tools, the command, and process 1 (`init.sh`).

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::initramfs::Initramfs;
use super::kernel::Kernel;
use crate::error::{Error, with_path};
use crate::process;

/// The Debian packages that the guests are made of and that boot them.
pub(crate) const PACKAGES: &[&str] = &[
    "qemu-system-x86",
    "busybox-static",
    "iproute2",
    "ibverbs-providers",
    "libibverbs1",
    "kmod",
    "xz-utils",
];

/// The modules to load, in this order, each after its dependencies. rdma_rxe needs a crc32 implementation that is not
/// listed among its dependencies.
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
pub(super) fn build_initramfs(
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

    // Not the shell of busybox, which would run its own applet `ip` instead of the real program.
    for tool in ["dash", "ip", "rdma"] {
        initramfs.copy_program(&find_program(tool).ok_or_else(|| Error::NoSuchFile(tool.into()))?)?;
    }
    initramfs.link("bin/sh", "dash");
    add_soft_roce(&mut initramfs)?;
    for file in files {
        let file = std::path::absolute(file).map_err(with_path(file))?;
        initramfs.copy_program(&file)?;
    }

    let busybox = find_program("busybox").ok_or_else(|| Error::NoSuchFile("busybox".into()))?;
    let applets = process::run_for_output(Command::new(&busybox).arg("--list"))?;
    let (program, arguments) =
        command.split_first().ok_or_else(|| Error::NoSuchFile("(no command)".into()))?;
    let is_applet =
        !program.contains('/') && (program == "sh" || applets.lines().any(|applet| applet == program));
    let program = match find_program(program) {
        Some(path) if program != "sh" => {
            initramfs.copy_program(&path)?;
            path.to_string_lossy().into_owned()
        }
        _ if is_applet => program.clone(),
        _ => return Err(Error::NoSuchFile(program.clone())),
    };
    initramfs.file("etc/command", 0o644, command_script(variables, &program, arguments).as_bytes());

    initramfs.file("bin/busybox", 0o755, &fs::read(&busybox).map_err(with_path(&busybox))?);
    for applet in applets.lines().filter(|applet| !has_program(&initramfs, applet)).collect::<Vec<_>>() {
        initramfs.link(&format!("bin/{applet}"), "busybox");
    }
    Ok(initramfs.finish())
}

/// Adds libibverbs and its provider for rxe, which libibverbs finds by a file in `/etc/libibverbs.d` and loads itself.
fn add_soft_roce(initramfs: &mut Initramfs) -> Result<(), Error> {
    initramfs.copy(Path::new("/etc/libibverbs.d/rxe.driver"))?;
    initramfs.copy_program(&Path::new(LIBRARIES).join("libibverbs.so.1"))?;
    let providers = Path::new(LIBRARIES).join("libibverbs");
    for entry in fs::read_dir(&providers).map_err(with_path(&providers))?.flatten() {
        if entry.file_name().to_string_lossy().starts_with("librxe-") {
            initramfs.copy_program(&entry.path())?;
        }
    }
    Ok(())
}

fn has_program(initramfs: &Initramfs, program: &str) -> bool {
    ["bin", "sbin"].iter().any(|directory| initramfs.has(&format!("{directory}/{program}")))
}

/// Finds a program on this machine: at the given path, or in the directories of PATH, `/usr/sbin` and `/sbin`.
fn find_program(program: &str) -> Option<PathBuf> {
    let is_program = |path: &PathBuf| {
        fs::metadata(path)
            .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    if program.contains('/') {
        return std::path::absolute(program).ok().filter(is_program);
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let directories = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    directories.map(|directory| directory.join(program)).find(is_program)
}

/// Returns the shell script that sets the variables and executes the command.
fn command_script(variables: &[String], program: &str, arguments: &[String]) -> String {
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
    fn every_argument_reaches_the_command_unchanged() {
        let script =
            command_script(&["SEED=1 2".into()], "/bin/a b", &["it's".into(), "$PEER".into(), String::new()]);
        assert_eq!(script, "export SEED='1 2'\nexec '/bin/a b' 'it'\\''s' '$PEER' ''\n");
    }

    #[test]
    fn programs_are_found_by_name_and_by_path() {
        assert!(find_program("sh").is_some());
        assert_eq!(find_program("/bin/sh"), Some("/bin/sh".into()));
        assert_eq!(find_program("/etc/passwd"), None);
        assert_eq!(find_program("no-such-program"), None);
    }
}
