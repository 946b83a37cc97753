//! What this repository depends on: licences and sources by `deny.toml`, and nothing that needs more than Rust in the
//! default build.
//!
//! `cargo deny check` reads the same file and checks more (advisories above all), for those who have it; building
//! it takes longer than all the rest of the checks.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::error::{Error, at};
use crate::process::output;
use crate::workspace;

/// The one place that crates come from.
const SOURCE: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Build tools for C: none of them belongs into the default build.
const NEEDS_C: &[&str] = &["bindgen", "cc", "clang-sys", "cmake", "pkg-config"];

/// Returns one complaint for each dependency that does not belong.
pub(super) fn complaints() -> Result<Vec<String>, Error> {
    let path = workspace::root().join("deny.toml");
    let allowed = allowed(&fs::read_to_string(&path).map_err(at(&path))?);
    let mut found = of_metadata(&metadata()?, &allowed)?;
    let tree = default_build()?;
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    for name in names.filter(|name| NEEDS_C.contains(name)) {
        found.push(format!("{name} is in the default build, which must need Rust alone"));
    }
    found.sort();
    found.dedup();
    Ok(found)
}

fn metadata() -> Result<Value, Error> {
    let mut command = cargo();
    command.args([
        "metadata",
        "--format-version=1",
        "--all-features",
        "--filter-platform=x86_64-unknown-linux-gnu",
    ]);
    serde_json::from_str(&output(&mut command)?).map_err(|error| answer(&error.to_string()))
}

fn default_build() -> Result<String, Error> {
    output(cargo().args(["tree", "--workspace", "--edges=normal,build,dev", "--prefix=none", "--format={p}"]))
}

fn cargo() -> Command {
    let mut command = Command::new(workspace::cargo());
    command.current_dir(workspace::root());
    command
}

fn answer(what: &str) -> Error {
    Error::Answer { command: "cargo metadata".into(), what: what.into() }
}

fn of_metadata(metadata: &Value, allowed: &[String]) -> Result<Vec<String>, Error> {
    let packages = metadata["packages"].as_array().ok_or_else(|| answer("no packages"))?;
    let mut found = Vec::new();
    for package in packages {
        let text = |field: &str| package[field].as_str();
        let Some(source) = text("source") else { continue };
        let crate_name = format!("{} {}", text("name").unwrap_or("?"), text("version").unwrap_or("?"));
        if source != SOURCE {
            found.push(format!("{crate_name} comes from {source}, not from crates.io"));
        }
        match text("license") {
            Some(licence) if permits(licence, allowed) => {}
            Some(licence) => {
                found.push(format!("{crate_name} has the licence {licence}, which deny.toml does not allow"))
            }
            None => found.push(format!("{crate_name} states no licence")),
        }
    }
    Ok(found)
}

/// The strings of `allow = [ … ]` in deny.toml.
fn allowed(deny: &str) -> Vec<String> {
    let Some((_, rest)) = deny.split_once("\nallow = [") else { return Vec::new() };
    let list = rest.split_once(']').map_or(rest, |(list, _)| list);
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Whether the allowed licences satisfy an SPDX expression (or its old form with `/` for OR).
fn permits(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<_> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    let permitted = either(&mut rest, allowed);
    rest.is_empty() && permitted == Some(true)
}

/// `both (OR both)*`
fn either(words: &mut &[&str], allowed: &[String]) -> Option<bool> {
    let mut permitted = both(words, allowed)?;
    while let ["OR", rest @ ..] = words {
        *words = rest;
        permitted |= both(words, allowed)?;
    }
    Some(permitted)
}

/// `one (AND one)*`
fn both(words: &mut &[&str], allowed: &[String]) -> Option<bool> {
    let mut permitted = one(words, allowed)?;
    while let ["AND", rest @ ..] = words {
        *words = rest;
        permitted &= one(words, allowed)?;
    }
    Some(permitted)
}

/// `( either )`, or a licence, `WITH` an exception or without
fn one(words: &mut &[&str], allowed: &[String]) -> Option<bool> {
    match *words {
        ["(", rest @ ..] => {
            *words = rest;
            let permitted = either(words, allowed)?;
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

    fn some() -> Vec<String> {
        allowed(
            "[licenses]\nallow = [\n    \"MIT\",\n    \"Unicode-3.0\",\n    \"Apache-2.0 WITH LLVM-exception\",\n]\nx = [\"GPL-3.0\"]\n",
        )
    }

    #[test]
    fn the_list_is_read_from_deny_toml() {
        assert_eq!(some(), ["MIT", "Unicode-3.0", "Apache-2.0 WITH LLVM-exception"]);
    }

    #[test]
    fn expressions_are_permitted_as_spdx_means_them() {
        for yes in [
            "MIT",
            "MIT/Apache-2.0",
            "(MIT OR GPL-3.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR Apache-2.0",
        ] {
            assert!(permits(yes, &some()), "{yes}");
        }
        for no in
            ["GPL-3.0", "MIT AND GPL-3.0", "(GPL-3.0 OR Zlib) AND MIT", "Apache-2.0", "", "(MIT", "MIT MIT"]
        {
            assert!(!permits(no, &some()), "{no}");
        }
    }

    #[test]
    fn strangers_among_the_dependencies_are_named() {
        let metadata = serde_json::json!({ "packages": [
            { "name": "ours", "version": "0.1.0", "source": null, "license": null },
            { "name": "fine", "version": "1.0.0", "source": SOURCE, "license": "MIT" },
            { "name": "copyleft", "version": "2.0.0", "source": SOURCE, "license": "GPL-3.0" },
            { "name": "silent", "version": "3.0.0", "source": "git+https://example.org/x", "license": null },
        ]});
        let found = of_metadata(&metadata, &some()).unwrap();
        assert_eq!(found.len(), 3);
        assert!(found[0].starts_with("copyleft 2.0.0 has the licence GPL-3.0"));
        assert!(found[1].starts_with("silent 3.0.0 comes from git+"));
        assert!(found[2].starts_with("silent 3.0.0 states no licence"));
    }
}
