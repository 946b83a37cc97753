//! The programs that jobs run: the test programs of the workspace and the program `crosstie`, as `cargo test` builds them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::build::{Artifact, build};
use crate::error::{Error, with_path};
use crate::process;
use crate::workspace;

/// How long the build may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(3600);
/// Test programs without libtest that take a part of a test's name.
const HAS_OWN_MAIN: &[&str] = &["conformance", "copyrpc_peers", "endpoint_peers", "plugin", "stopped_peers"];

/// A test program that cargo has built.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) package: String,
    /// The name of the test program; of unit tests, the name of the library.
    pub(crate) name: String,
    /// Whether it has the unit tests of a library.
    pub(crate) is_unit: bool,
    pub(crate) path: PathBuf,
    /// Where cargo runs it.
    pub(crate) directory: PathBuf,
}

impl Program {
    /// The names of its tests.
    pub(crate) fn tests(&self) -> Result<Vec<String>, Error> {
        let mut command = Command::new(&self.path);
        let listed = process::run_for_output(command.arg("--list").current_dir(&self.directory))?;
        let names = listed.lines().map(|line| line.strip_suffix(": test").unwrap_or(line));
        Ok(names.filter(|name| !name.is_empty() && !name.contains(' ')).map(str::to_owned).collect())
    }

    /// Its arguments for one test; for a program that takes no names of tests, `test` is empty.
    pub(crate) fn arguments_for(&self, test: &str) -> Vec<String> {
        match test {
            "" => Vec::new(),
            // The programs with a main function of their own take a part of the name, and know no --exact.
            _ if HAS_OWN_MAIN.contains(&self.name.as_str()) => vec![test.to_owned()],
            _ => vec!["--exact".into(), test.to_owned(), "--nocapture".into()],
        }
    }
}

/// All programs.
pub(crate) struct Programs {
    tests: Vec<Program>,
    /// The program `crosstie`.
    pub(crate) crosstie: PathBuf,
}

impl Programs {
    /// Builds all of them, as the step `test` does.
    pub(crate) fn build() -> Result<Programs, Error> {
        let built = build(&["test", "--workspace", "--no-run"], BUILD_TIMEOUT)?;
        let is_crosstie = |artifact: &&Artifact| {
            artifact.is("bin") && artifact.target.name == "crosstie" && !artifact.profile.test
        };
        let crosstie = built.iter().find(is_crosstie).and_then(|artifact| artifact.executable.clone());
        let crosstie = crosstie.ok_or_else(|| unexpected("it built no program crosstie"))?;
        Ok(Programs { tests: built.iter().filter_map(test_program).collect(), crosstie })
    }

    /// The test program of a package with this name.
    pub(crate) fn find(&self, package: &str, name: &str) -> Result<&Program, Error> {
        let is_it =
            |program: &&Program| program.package == package && program.name == name && !program.is_unit;
        self.tests
            .iter()
            .find(is_it)
            .ok_or_else(|| unexpected(&format!("it built no test {name} of {package}")))
    }

    /// The unit tests of all libraries whose name `is_wanted`.
    pub(crate) fn unit_tests(
        &self,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<(Program, String)>, Error> {
        let mut found = Vec::new();
        for program in self.tests.iter().filter(|program| program.is_unit) {
            let tests = program.tests()?.into_iter().filter(|test| is_wanted(test));
            found.extend(tests.map(|test| (program.clone(), test)));
        }
        Ok(found)
    }
}

fn unexpected(what: &str) -> Error {
    Error::UnexpectedOutput { command: "cargo test --workspace --no-run".into(), what: what.into() }
}

/// The test program that cargo has built, without its tests.
fn test_program(built: &Artifact) -> Option<Program> {
    let directory = built.manifest_path.parent()?.to_owned();
    Some(Program {
        package: directory.file_name()?.to_str()?.to_owned(),
        name: built.target.name.clone(),
        is_unit: built.is("lib"),
        path: built.executable.clone().filter(|_| built.profile.test)?,
        directory,
    })
}

/// The names of all property tests of the workspace: functions with `#[test]` that take arguments.
pub(crate) fn property_tests() -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    visit(&workspace::root().join("crates"), &mut |text| {
        let mut is_test = false;
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if let Some(function) = line.strip_prefix("fn ").filter(|_| is_test)
                && let Some((name, arguments)) = function.split_once('(')
                && !arguments.starts_with(')')
            {
                names.push(name.to_owned());
            }
            is_test = line == "#[test]" || (is_test && (line.starts_with("//") || line.starts_with("#[")));
        }
    })?;
    Ok(names)
}

/// Passes the text of each Rust file below `directory` to `see`, in the order of the paths.
fn visit(directory: &Path, see: &mut impl FnMut(&str)) -> Result<(), Error> {
    let mut paths: Vec<PathBuf> = fs::read_dir(directory)
        .map_err(with_path(directory))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()
        .map_err(with_path(directory))?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            visit(&path, see)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            see(&fs::read_to_string(&path).map_err(with_path(&path))?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn property_tests_are_found_in_the_sources() {
        let names = property_tests().unwrap();
        assert!(names.len() >= 40, "{names:?}");
        assert!(
            names.iter().any(|name| name == "each_message_is_delivered_once_with_its_size_to_its_request")
        );
        assert!(!names.iter().any(|name| name == "property_tests_are_found_in_the_sources"));
    }

    #[test]
    fn test_program_is_read_from_the_message_of_cargo() {
        let message = r#"{"reason": "compiler-artifact", "manifest_path": "/r/crates/crosstie-kv/Cargo.toml", "filenames": [],
            "target": {"kind": ["test"], "name": "nodes"}, "profile": {"test": true}, "executable": "/t/nodes-1"}"#;
        let program = test_program(&Artifact::parse(message).unwrap()).unwrap();
        assert_eq!((program.package.as_str(), program.name.as_str()), ("crosstie-kv", "nodes"));
        assert_eq!(program.directory, Path::new("/r/crates/crosstie-kv"));
        assert!(!program.is_unit);
    }
}
