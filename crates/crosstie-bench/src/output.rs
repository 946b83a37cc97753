//! Standard output, files, and JSON as scripts read it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write, stdout};
use std::path::{Path, PathBuf};

use crate::error::Error;

/// How many names of a temporary file are tried. A process that was killed may have left one behind.
const MAX_NAMES: u32 = 100;

/// One JSON object on one line.
pub fn json(value: &impl serde::Serialize) -> Result<String, Error> {
    let text = serde_json::to_string(value);
    text.map(|text| text + "\n").map_err(|source| Error::Os { what: "JSON", source: source.into() })
}

/// NAME plus an extension; an extension `json` or `html` of NAME is replaced.
pub(crate) fn output_path(name: &Path, ending: &str) -> PathBuf {
    match name.extension().and_then(OsStr::to_str) {
        Some("json" | "html") => name.with_extension(ending),
        _ => {
            let mut whole = name.as_os_str().to_owned();
            whole.push(".");
            whole.push(ending);
            whole.into()
        }
    }
}

/// Writes to standard output. A reader that has closed it is an error, not a panic.
pub fn print(text: &str) -> Result<(), Error> {
    let written = stdout().write_all(text.as_bytes()).and_then(|()| stdout().flush());
    written.map_err(|source| Error::Os { what: "standard output", source })
}

/// Writes a file as a whole: if it fails, for instance because the disk is full, a file that was there is unchanged, and there is no
/// new one.
///
/// The text goes to a temporary file in the same directory, which then gets the name. A device or a pipe is written directly.
pub fn write_file(path: &Path, text: &str) -> Result<(), Error> {
    write_whole(path, text.as_bytes()).map_err(|source| Error::File { path: path.to_owned(), source })
}

/// Checks that [`write_file`] can create its files, and leaves no file behind.
pub fn check_writable(path: &Path) -> Result<(), Error> {
    let tried = Target::open(path).and_then(|target| match target {
        Target::InPlace(_) => Ok(()),
        Target::Temporary { temporary, .. } => fs::remove_file(temporary),
    });
    tried.map_err(|source| Error::File { path: path.to_owned(), source })
}

fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match Target::open(path)? {
        Target::InPlace(mut file) => file.write_all(bytes),
        Target::Temporary { mut file, temporary, path } => {
            // Some file systems find out only in `sync_all` that there is no space.
            let written = file.write_all(bytes).and_then(|()| file.sync_all());
            let renamed = written.and_then(|()| fs::rename(&temporary, path));
            if renamed.is_err() {
                // Its error would hide the first one.
                fs::remove_file(&temporary).ok();
            }
            renamed
        }
    }
}

/// Where the bytes go.
enum Target {
    /// A device, a pipe, or a file that has no name any more.
    InPlace(File),
    /// A new file, which gets the name `path` when it is complete.
    Temporary { file: File, temporary: PathBuf, path: PathBuf },
}

impl Target {
    fn open(path: &Path) -> io::Result<Target> {
        // Replacing a file needs no right to write to it. But a user who may not write to a file shall not replace it.
        let (path, permissions) = match File::options().append(true).open(path) {
            Ok(file) => {
                let metadata = file.metadata()?;
                match path.canonicalize() {
                    Ok(path) if metadata.is_file() => (path, Some(metadata.permissions())),
                    _ => return Ok(Target::InPlace(file)),
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => (new_file(path), None),
            Err(error) => return Err(error),
        };
        let (file, temporary) = create_beside(&path)?;
        if let Some(permissions) = permissions {
            // Not every file system has permissions.
            file.set_permissions(permissions).ok();
        }
        Ok(Target::Temporary { file, temporary, path })
    }
}

/// The file that is created by writing to `path`, which does not exist: `path` itself, or what it links to.
fn new_file(path: &Path) -> PathBuf {
    let linked = fs::read_link(path).ok().zip(path.parent());
    linked.map_or(path.to_owned(), |(to, directory)| directory.join(to))
}

/// Creates a file with a new name in the directory of `path`.
fn create_beside(path: &Path) -> io::Result<(File, PathBuf)> {
    let name = |number| path.with_file_name(format!(".crosstie-{}-{number}.partial", std::process::id()));
    let mut tried = Err(ErrorKind::AlreadyExists.into());
    for number in 0..MAX_NAMES {
        let temporary = name(number);
        tried = File::options().write(true).create_new(true).open(&temporary).map(|file| (file, temporary));
        if !matches!(&tried, Err(error) if error.kind() == ErrorKind::AlreadyExists) {
            break;
        }
    }
    tried
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// Runs the test in a new directory. Checks that only `files` are there at the end.
    fn in_directory(name: &str, files: &[&str], test: impl FnOnce(&Path)) {
        let directory = std::env::temp_dir().join(format!("crosstie-output-{name}-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        test(&directory);
        let entries = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(names, files);
    }

    #[test]
    fn write_file_creates_and_replaces_and_keeps_permissions() {
        in_directory("replace", &["file"], |directory| {
            let file = directory.join("file");
            check_writable(&file).unwrap();
            assert!(!file.exists());
            write_file(&file, "first").unwrap();
            fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
            check_writable(&file).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), "first");
            write_file(&file, "second").unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), "second");
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        });
    }

    #[test]
    fn write_file_keeps_links_and_files_of_others() {
        let other = format!(".crosstie-{}-0.partial", std::process::id());
        in_directory("link", &[&other, "file", "link"], |directory| {
            fs::write(directory.join(&other), "other").unwrap();
            symlink("file", directory.join("link")).unwrap();
            for text in ["first", "second"] {
                write_file(&directory.join("link"), text).unwrap();
                assert_eq!(fs::read_to_string(directory.join("file")).unwrap(), text);
            }
            assert!(directory.join("link").is_symlink());
            assert_eq!(fs::read_to_string(directory.join(&other)).unwrap(), "other");
        });
    }

    #[test]
    fn failed_write_names_the_file_and_leaves_nothing() {
        in_directory("failed", &["directory"], |directory| {
            fs::create_dir(directory.join("directory")).unwrap();
            for path in [directory.join("directory"), directory.join("none/file"), "/dev/full".into()] {
                let error = write_file(&path, "text").unwrap_err().to_string();
                assert!(error.starts_with(&format!("{}: ", path.display())), "{error}");
                assert_eq!(check_writable(&path).is_ok(), path == Path::new("/dev/full"));
            }
        });
    }
}
