//! Checks the dependencies: their licences are allowed by `deny.toml`, they come from crates.io, and the default build needs
//! Rust alone.
//!
//! `cargo deny check` reads the same file and checks more, above all security advisories. It is not used here because
//! building it takes longer than all other checks together.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::error::{Error, with_path};
use crate::process::run_for_output;
use crate::workspace;

/// The only allowed source of crates.
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Crates that build C code. None of them may be in the default build.
const C_BUILD_TOOLS: &[&str] = &["bindgen", "cc", "clang-sys", "cmake", "pkg-config"];

/// Returns one line of text for each violation.
pub(super) fn find_violations() -> Result<Vec<String>, Error> {
    let path = workspace::root().join("deny.toml");
    let allowed = allowed(&fs::read_to_string(&path).map_err(with_path(&path))?);
    let mut violations = check_packages(&metadata()?, &allowed)?;
    let tree = default_build_tree()?;
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    for name in names.filter(|name| C_BUILD_TOOLS.contains(name)) {
        violations.push(format!("{name} is in the default build, which must not need a C compiler"));
    }
    violations.sort();
    violations.dedup();
    Ok(violations)
}

fn metadata() -> Result<Value, Error> {
    let mut command = cargo();
    command.args([
        "metadata",
        "--format-version=1",
        "--all-features",
        "--filter-platform=x86_64-unknown-linux-gnu",
    ]);
    serde_json::from_str(&run_for_output(&mut command)?)
        .map_err(|error| unexpected_output(&error.to_string()))
}

fn default_build_tree() -> Result<String, Error> {
    run_for_output(cargo().args([
        "tree",
        "--workspace",
        "--edges=normal,build,dev",
        "--prefix=none",
        "--format={p}",
    ]))
}

fn cargo() -> Command {
    let mut command = Command::new(workspace::cargo());
    command.current_dir(workspace::root());
    command
}

fn unexpected_output(what: &str) -> Error {
    Error::UnexpectedOutput { command: "cargo metadata".into(), what: what.into() }
}

/// Checks the source and licence of every package that is not a part of this workspace.
fn check_packages(metadata: &Value, allowed: &[String]) -> Result<Vec<String>, Error> {
    let packages = metadata["packages"].as_array().ok_or_else(|| unexpected_output("no packages"))?;
    let mut violations = Vec::new();
    for package in packages {
        let text = |field: &str| package[field].as_str();
        let Some(source) = text("source") else { continue };
        let crate_name = format!("{} {}", text("name").unwrap_or("?"), text("version").unwrap_or("?"));
        if source != CRATES_IO {
            violations.push(format!("{crate_name} comes from {source}, not from crates.io"));
        }
        match text("license") {
            Some(licence) if is_permitted(licence, allowed) => {}
            Some(licence) => violations
                .push(format!("{crate_name} has the licence {licence}, which deny.toml does not allow")),
            None => violations.push(format!("{crate_name} states no licence")),
        }
    }
    Ok(violations)
}

/// Returns the strings of `allow = [ … ]` in deny.toml.
fn allowed(deny: &str) -> Vec<String> {
    let Some((_, rest)) = deny.split_once("\nallow = [") else { return Vec::new() };
    let list = rest.split_once(']').map_or(rest, |(list, _)| list);
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Whether the allowed licences satisfy an SPDX expression (or its old form with `/` for OR).
fn is_permitted(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<_> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    let permitted = or_expression(&mut rest, allowed);
    rest.is_empty() && permitted == Some(true)
}

/// Parses `and_expression (OR and_expression)*`.
fn or_expression(words: &mut &[&str], allowed: &[String]) -> Option<bool> {
    let mut permitted = and_expression(words, allowed)?;
    while let ["OR", rest @ ..] = words {
        *words = rest;
        permitted |= and_expression(words, allowed)?;
    }
    Some(permitted)
}

/// Parses `term (AND term)*`.
fn and_expression(words: &mut &[&str], allowed: &[String]) -> Option<bool> {
    let mut permitted = term(words, allowed)?;
    while let ["AND", rest @ ..] = words {
        *words = rest;
        permitted &= term(words, allowed)?;
    }
    Some(permitted)
}

/// Parses `( or_expression )` or `licence [WITH exception]`.
fn term(words: &mut &[&str], allowed: &[String]) -> Option<bool> {
    match *words {
        ["(", rest @ ..] => {
            *words = rest;
            let permitted = or_expression(words, allowed)?;
            let [")", rest @ ..] = *words else { return None };
            *words = rest;
            Some(permitted)
        }
        [licence, "WITH", exception, rest @ ..] => {
            *words = rest;
            Some(allowed.contains(&format!("{licence} WITH {exception}")))
        }
        [licence, rest @ ..] => {
            *words = rest;
            Some(allowed.iter().any(|allowed| allowed == licence))
        }
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example_list() -> Vec<String> {
        allowed(
            "[licenses]\nallow = [\n    \"MIT\",\n    \"Unicode-3.0\",\n    \"Apache-2.0 WITH LLVM-exception\",\n]\nx = [\"GPL-3.0\"]\n",
        )
    }

    #[test]
    fn allowed_licences_are_read_from_deny_toml() {
        assert_eq!(example_list(), ["MIT", "Unicode-3.0", "Apache-2.0 WITH LLVM-exception"]);
    }

    #[test]
    fn spdx_expressions_are_evaluated() {
        for yes in [
            "MIT",
            "MIT/Apache-2.0",
            "(MIT OR GPL-3.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR Apache-2.0",
        ] {
            assert!(is_permitted(yes, &example_list()), "{yes}");
        }
        for no in
            ["GPL-3.0", "MIT AND GPL-3.0", "(GPL-3.0 OR Zlib) AND MIT", "Apache-2.0", "", "(MIT", "MIT MIT"]
        {
            assert!(!is_permitted(no, &example_list()), "{no}");
        }
    }

    #[test]
    fn dependencies_that_are_not_allowed_are_named() {
        let metadata = serde_json::json!({ "packages": [
            { "name": "ours", "version": "0.1.0", "source": null, "license": null },
            { "name": "fine", "version": "1.0.0", "source": CRATES_IO, "license": "MIT" },
            { "name": "copyleft", "version": "2.0.0", "source": CRATES_IO, "license": "GPL-3.0" },
            { "name": "unlicensed", "version": "3.0.0", "source": "git+https://example.org/x", "license": null },
        ]});
        let found = check_packages(&metadata, &example_list()).unwrap();
        assert_eq!(found.len(), 3);
        assert!(found[0].starts_with("copyleft 2.0.0 has the licence GPL-3.0"));
        assert!(found[1].starts_with("unlicensed 3.0.0 comes from git+"));
        assert!(found[2].starts_with("unlicensed 3.0.0 states no licence"));
    }
}
