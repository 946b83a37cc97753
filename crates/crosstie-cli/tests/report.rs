//! `crosstie report`: the page, exit statuses and error texts.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

const RESULT: &str = r#"{
    "bench": "kv", "device": "software", "backend": "BACKEND", "ops": 3000, "seconds": 0.003, "ops_per_s": 1e6,
    "p50_ns": 900, "p99_ns": 1100, "p999_ns": 1200, "max_ns": 1300, "latency": [[900, 2900], [1300, 100]],
    "errors": 0, "node_gone": 0, "interrupted": false, "nodes": 2, "daemons": 1, "clients": 1, "processes": false,
    "queue_depth": 1, "loop": "closed", "read_ratio": 0.5, "keys": 1000, "zipf": 0, "value_bytes": 8, "seed": 1,
    "launcher": "local", "counters": {"batches": 10}
}"#;

/// A temporary directory that is removed at the end of the test.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("crosstie-report-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        Directory(path)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, text).expect("a file");
        path.display().to_string()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("{}: {error}", self.0.display());
        }
    }
}

fn report(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_crosstie"));
    command.arg("report").args(arguments).output().expect("the program starts")
}

/// Checks that the command exits with `status` and one line on standard error. Returns that line.
fn refused(arguments: &[&str], status: i32) -> String {
    let output = report(arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn several_files_make_one_page() {
    let directory = Directory::new("several");
    let one = directory.file("one.json", &RESULT.replace("BACKEND", "meta"));
    let more = directory.file("more.json", &format!("[{}]", RESULT.replace("BACKEND", "delegation")));
    let page = directory.0.join("page.html").display().to_string();
    let output = report(&[&one, &more, "-o", &page]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains(
            "Delegation / Meta, 2 nodes, 1 daemon, 1 client, depth 1: no difference seen (ratio 1.00)"
        ),
        "{text}"
    );
    assert!(text.contains(&page), "{text}");
    let html = fs::read_to_string(&page).expect("the page");
    assert!(html.starts_with("<!DOCTYPE html>") && html.ends_with("</html>\n"));
}

#[test]
fn invalid_command_line_exits_with_status_2() {
    assert!(refused(&["-o", "page.html"], 2).contains("FILE.json"));
    assert!(refused(&["one.json"], 2).contains("--output"));
    refused(&["one.json", "-o", "page.html", "--colour"], 2);
}

#[test]
fn unreadable_or_unwritable_file_is_named_with_status_1() {
    let directory = Directory::new("refused");
    let page = directory.0.join("page.html").display().to_string();
    let good = directory.file("good.json", &RESULT.replace("BACKEND", "meta"));
    let text = refused(&["/no/such/file.json", "-o", &page], 1);
    assert!(text.contains("/no/such/file.json"), "{text}");
    let wrong = directory.file("wrong.json", &RESULT.replace("BACKEND", "meta").replace("3000", "-3"));
    let text = refused(&[&good, &wrong, "-o", &page], 1);
    assert!(text.contains("wrong.json: ops: "), "{text}");
    let none = directory.file("none.json", "");
    assert!(refused(&[&none, "-o", &page], 1).contains("none.json"));
    assert!(!PathBuf::from(&page).exists(), "a page was written although a file is invalid");
    let text = refused(&[&good, "-o", "/no/such/directory/page.html"], 1);
    assert!(text.contains("/no/such/directory/page.html"), "{text}");
}

#[test]
fn report_does_not_overwrite_its_input() {
    let directory = Directory::new("itself");
    let text = RESULT.replace("BACKEND", "meta");
    let figures = directory.file("figures.json", &text);
    let other_name = format!("{}/./figures.json", directory.0.display());
    assert!(refused(&[&figures, "-o", &other_name], 2).contains("another name"));
    assert_eq!(fs::read_to_string(&figures).expect("still there"), text);
}

#[test]
fn legend_has_only_measured_backends() {
    let directory = Directory::new("legend");
    let figures = directory.file("one.json", &RESULT.replace("BACKEND", "delegation"));
    let page = directory.0.join("page.html").display().to_string();
    assert!(report(&[&figures, "-o", &page]).status.success());
    let html = fs::read_to_string(&page).expect("the page");
    let legend = html.split("class=\"legend\">").nth(1).and_then(|rest| rest.split("</div>").next());
    let legend = legend.expect("a legend");
    assert!(legend.contains("Delegation") && !legend.contains("Meta"), "{legend}");
}
